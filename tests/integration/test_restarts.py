"""Nothing is lost when processes are killed and started again, and nothing wrong comes back."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from kvstore import PutOutcome
from kvstore.memory import header as layout
from kvstore.transport import tcp_client
from tests.support.cluster import NODE, SHORT, Cluster, Node
from tests.support.processes import Server, children_of, flags_of, is_running
from tests.support.traffic import at_work, content, getter, putter
from tests.support.waiting import until

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
    says(again, "inventory_told")
    return again


def counter(cluster: Cluster, name: str) -> int:
    return dict(cluster.status().counters).get(name, 0)


# --- the master --------------------------------------------------------------------------------


def test_a_killed_master_knows_everything_again(cluster: Cluster) -> None:
    cluster.start(2)
    fill(cluster)
    kill_master(cluster)
    cluster.master()
    check(cluster)  # at once: what would be a miss waits for the nodes
    assert counter(cluster, "claimed_objects") == len(KEYS) + len(CHAIN)
    assert counter(cluster, "refused_claims") == 0
    client = cluster.client()
    assert client.put("new", b"x", wait_ms=SHORT["lease_ms"] + 500) is STORED


def test_replicas_are_replicas_again(cluster: Cluster) -> None:
    cluster.start(2)
    fill(cluster, replicas=2)
    kill_master(cluster)
    cluster.master()
    until(lambda: counter(cluster, "claimed_objects") == 2 * len(KEYS) + len(CHAIN))
    stat = cluster.client().stat(KEYS[0])
    assert stat is not None
    assert stat.detail.placements.replicas == [2]
    assert stat.header is not None, "its memory has not been read"
    assert stat.header.epoch < stat.detail.epoch


def test_a_full_cache_comes_back_and_is_evicted_in_its_order(cluster: Cluster) -> None:
    """What was evicted is not there, what was not is."""
    cluster.start(memory="4MiB")
    client = cluster.client()
    keys = [f"k{number}" for number in range(400)]
    for key in keys:
        client.put(key, content(key, SIZE), wait_ms=5_000)
    kept = objects(cluster)
    assert kept < 400
    kill_master(cluster)
    cluster.master()
    until(lambda: objects(cluster) == kept)
    values = cluster.client().get_many(keys)
    assert sum(value is not None for value in values) == kept
    assert all(v in (None, content(k, SIZE)) for k, v in zip(keys, values, strict=True))


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


def test_removed_means_removed_and_replaced_means_replaced(cluster: Cluster) -> None:
    cluster.start()
    fill(cluster)
    client = cluster.client()
    for key in KEYS[:50]:
        client.remove(key)
    client.put(KEYS[60], b"another", overwrite=True)
    client.put(KEYS[61], b"another", overwrite=True)
    client.remove(KEYS[61])
    for kill_node_too in (False, True):
        kill_master(cluster)
        if kill_node_too:
            cluster.nodes[-1].kill()
        cluster.master()
        if kill_node_too:
            restarted(cluster, cluster.nodes[-1])
        asking = cluster.client()
        values = asking.get_many(KEYS)
        assert [i for i in range(50) if values[i] is not None] == []
        assert values[60] == b"another"
        assert values[61] is None
        assert values[62:] == [content(key, SIZE) for key in KEYS[62:]]


def test_a_hundred_thousand_objects_are_served_again_within_seconds(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, settings=SHORT)
    count, batch = 100_000, 2_000
    keys = [f"{number:032}" for number in range(count)]
    try:
        cluster.start(memory="512MiB")
        client = cluster.client(timeout_ms=30_000)
        for at in range(0, count, batch):
            client.put_many([(key, key.encode() * 3) for key in keys[at : at + batch]])
        kill_master(cluster)
        cluster.master()
        started = time.monotonic()
        until(lambda: objects(cluster) == count, within_s=30)
        took_s = time.monotonic() - started
        for at in range(0, count, batch):
            values = client.get_many(keys[at : at + batch])
            assert values == [key.encode() * 3 for key in keys[at : at + batch]]
        assert took_s < 15, "on a machine that others use; 3 s on one that nobody uses"
        cluster.finish()
    finally:
        cluster.close()


# --- nodes -------------------------------------------------------------------------------------


def test_a_killed_node_serves_what_it_held(cluster: Cluster) -> None:
    cluster.start()
    fill(cluster)
    node = cluster.nodes[0]
    node.kill()
    assert node.entry.exists()
    again = restarted(cluster, node)
    check(cluster)
    assert again.terminate() == 0
    assert not node.entry.exists()


def test_a_node_that_was_away_for_long_serves_what_it_held(cluster: Cluster) -> None:
    cluster.start()
    fill(cluster)
    node = cluster.nodes[0]
    node.kill()
    until(lambda: cluster.state_of(node) == "gone")
    restarted(cluster, node)
    check(cluster)


def test_what_was_removed_while_its_node_was_away_stays_removed(cluster: Cluster) -> None:
    cluster.start(1)
    fill(cluster)
    away = cluster.nodes[0]
    away.kill()
    other = cluster.node()
    until(lambda: cluster.state_of(away) == "gone")
    client = cluster.client()
    client.remove(KEYS[0])
    client.put(KEYS[1], b"another", overwrite=True)
    client.remove(KEYS[1])
    restarted(cluster, away)
    check(cluster, gone=frozenset(KEYS[:2]))
    # The master that knew it is gone, too.
    away.kill()
    cluster.nodes[-1].kill()
    until(lambda: cluster.state_of(away) == "gone")
    client.remove(KEYS[2])
    kill_master(cluster)
    cluster.master()
    until(lambda: cluster.state_of(other) == "alive")
    restarted(cluster, away)
    asking = cluster.client()
    assert asking.get_many(KEYS[:3]) == [None] * 3


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


# --- everything --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["master first", "nodes first"])
def test_everything_is_killed_and_started_again(cluster: Cluster, order: str) -> None:
    cluster.start(2)
    fill(cluster)
    nodes = cluster.nodes[:2]
    for server in (*nodes, cluster.master_server):
        assert server is not None
        server.kill()
    if order == "nodes first":
        started = [cluster.launch_node(name=node.name) for node in nodes]
        for node in started:
            says(node, "waiting_for_master")
        cluster.master()
    else:
        cluster.master()
        started = [cluster.launch_node(name=node.name) for node in nodes]
    for node in started:
        says(node, "inventory_told")
    check(cluster)


def test_a_rolling_upgrade_loses_nothing(tmp_path: Path) -> None:
    """Each process is stopped cleanly and started again, one after the other, while all is read."""
    cluster = Cluster(tmp_path, settings=SHORT)
    servers: list[Node] = []

    def start(name: str) -> Node:
        settings = {"master": cluster.address, "name": name, "memory": "32MiB"}
        log = tmp_path / f"rolling-{len(servers)}.log"
        server = Node(NODE, [*flags_of(settings), "--keep"], log=log)
        server.name = name
        servers.append(server)
        cluster.ready(server)
        says(server, "resumed=False")
        return server

    names = [f"rolling-{os.getpid()}-{number}" for number in range(2)]
    try:
        cluster.master()
        nodes = [start(name) for name in names]
        fill(cluster)
        for index, name in enumerate(names):
            assert nodes[index].terminate() == 0
            assert nodes[index].entry.exists()
            nodes[index] = start(name)
            says(nodes[index], "inventory_told")
            check(cluster)
        assert cluster.master_server.terminate() == 0
        cluster.master()
        check(cluster)
        cluster.check()
        for node in nodes:
            assert node.terminate() == 0
    finally:
        for server in servers:
            server.close()
            server.entry.unlink(missing_ok=True)
        cluster.close()


def test_a_killed_master_leaves_the_memory_of_its_own_node(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, settings=SHORT | {"memory": "32MiB"})
    entry = None
    try:
        cluster.master()
        master = cluster.master_server
        entry = Path("/dev/shm/kvstore." + master.line("owns 32 MiB as node (.+)")[1])
        fill(cluster)
        children = children_of(master.pid)
        master.kill()
        until(lambda: not any(map(is_running, children)))
        assert entry.exists()
        cluster.master()
        cluster.master_server.line("owns 32 MiB as node")
        until(lambda: objects(cluster) == len(KEYS) + len(CHAIN))
        check(cluster)
        cluster.finish()
        assert not entry.exists(), "a clean stop removes it"
    finally:
        cluster.close()
        if entry is not None:
            entry.unlink(missing_ok=True)
