"""Nothing is lost when processes are killed and started again, and nothing wrong comes back."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvstore import PutOutcome
from kvstore.memory import header as layout
from kvstore.transport import tcp_client
from tests.support.cluster import NODE, Cluster, Node
from tests.support.processes import Server, flags_of
from tests.support.wait import until
from tests.support.workload import at_work, content, getter, putter

STORED = PutOutcome.STORED
SIZE = 20_000
KEYS = [f"key-{number}" for number in range(200)]
CHAIN = [f"block-{number}" for number in range(40)]


def fill(cluster: Cluster, replicas: int = 1) -> None:
    client = cluster.client()
    client.put_many([(key, content(key, SIZE)) for key in KEYS], replicas=replicas)
    client.put_chain(CHAIN, [content(key, SIZE) for key in CHAIN], namespace="chain")


def check(cluster: Cluster, *, gone: frozenset[str] = frozenset()) -> None:
    """A client that knows nothing finds everything, but what is ``gone``, byte for byte."""
    client = cluster.client()
    values = client.get_many(KEYS)
    wrong = [k for k, v in zip(KEYS, values, strict=True) if v not in (None, content(k, SIZE))]
    missing = {key for key, value in zip(KEYS, values, strict=True) if value is None}
    assert not wrong
    assert missing == gone
    assert client.match_prefix(CHAIN, namespace="chain") == len(CHAIN)
    assert client.get(CHAIN[-1], namespace="chain") == content(CHAIN[-1], SIZE)


def objects(cluster: Cluster) -> int:
    return sum(namespace.objects for namespace in cluster.status().namespaces)


def kill_master(cluster: Cluster) -> None:
    cluster.master_server.kill()


def says(server: Server, event: str) -> None:
    """Waits until it has logged that."""
    until(lambda: event in server.errors)


def restarted(cluster: Cluster, node: Node, **settings: str) -> Node:
    """The same node, started again, once the master knows all that it holds."""
    again = cluster.node(name=node.name, **settings)
    says(again, "inventory_reported")
    return again


def counter(cluster: Cluster, name: str) -> int:
    return dict(cluster.status().counters).get(name, 0)


# --- the master --------------------------------------------------------------------------------


def test_clients_at_work_over_a_restart_lose_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start(2)
    fill(cluster)
    # On a busy machine a node may move no byte for a second, which is a miss, and nothing is lost.
    monkeypatch.setattr(tcp_client, "STALL_S", 10.0)
    patient = {"timeout_ms": 15_000}
    reading = getter(cluster.client(**patient), KEYS)
    writing = putter(cluster.client(**patient), "w", wait_ms=5_000)
    with at_work(reading, longest_s=14) as reader, at_work(writing, longest_s=14) as writer:
        for _ in range(2):
            reader.wait_for("right", more=20)
            kill_master(cluster)
            cluster.master()
            writer.wait_for("stored", more=3)
            reader.wait_for("right", more=len(KEYS))
    assert set(reader.counts) == {"right"}
    check(cluster)


# --- nodes -------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset] ^= 0x10


def test_bytes_that_changed_while_the_node_was_down_are_never_returned(cluster: Cluster) -> None:
    cluster.start()
    fill(cluster)
    node = cluster.nodes[0]
    node.kill()
    with node.entry.open("rb") as file:
        raw = memoryview(file.read())
    superblock = layout.unpack_superblock(raw)
    assert superblock is not None
    bad: set[str] = set()
    for offset, header in layout.scan(raw, superblock.seed):
        if header.key.decode() in KEYS[:20]:
            in_payload = len(bad) % 2
            flip(node.entry, offset + in_payload * layout.HEADER_BYTES + 64 + len(bad))
            bad.add(header.key.decode())
    assert len(bad) == 20
    again = restarted(cluster, node)
    check(cluster, gone=frozenset(bad))
    assert again.errors.count("corrupt_object_wiped") == 10, "the others have no header"


@pytest.mark.parametrize("damage", ["size", "superblock", "format"])
def test_memory_that_is_no_use_is_refused_or_discarded(cluster: Cluster, damage: str) -> None:
    cluster.start()
    fill(cluster)
    node = cluster.nodes[0]
    node.kill()
    settings = {"master": cluster.address, "name": node.name, "memory": "32MiB"}
    why = "the checksum of its superblock is wrong"
    if damage == "size":
        settings["memory"] = "16MiB"
        why = "it has 32 MiB, and 16 MiB were asked for"
    elif damage == "superblock":
        flip(node.entry, 40)
    else:
        flip(node.entry, 24)
        why = "its format is version"
    refused = cluster.launch(NODE, settings)
    assert refused.wait() == 1
    assert why in refused.errors
    assert "--discard" in refused.errors
    assert node.entry.exists(), "nothing was thrown away"
    flags = [*flags_of(settings), "--discard", "--no-keep"]
    server = Node(NODE, flags, log=cluster.directory / "discard.log")
    server.name = node.name
    try:
        cluster.ready(server)
        until(lambda: objects(cluster) == 0)
        assert cluster.client().get(KEYS[0]) is None
        assert server.terminate() == 0
    finally:
        server.close()
