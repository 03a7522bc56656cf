"""A store with identities, whose nodes require capabilities: all that clients do over tcp works
with them, and who has none gets nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client, PutOutcome, calls
from kvstore.calls import SegmentInfo
from kvstore.errors import (
    CapabilityRefusedError,
    PermissionDeniedError,
)
from kvstore.limits import Key, Namespace
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import Extent
from kvstore.security.certificates import CertificateRequest, inspect
from kvstore.transport.common import RangeCopy
from kvstore.transport.tcp import TcpTransport
from tests.integration.test_drain import drain
from tests.support.certificates import Identities
from tests.support.cluster import OVER_TCP_NODE, SHORT, Cluster, Node
from tests.support.wait import until
from tests.support.workload import content

STORED = PutOutcome.STORED
SIZE = 70_001
TCP = ("tcp",)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    settings = SHORT | {"put_deadline_ms": 20_000, "repair_after_ms": 500}
    with Cluster(tmp_path, settings=settings, identities=Identities(tmp_path)) as cluster:
        cluster.node_module = OVER_TCP_NODE
        cluster.master()
        yield cluster


def segment_of(client: Client, key: str) -> tuple[SegmentInfo, int, bytes]:
    """Where the key's first replica is, for this client."""
    client.lookup([key])
    (placed,) = [
        each for (_, name), each in client._state.context.placements._placed.items()
        if name == key.encode()
    ]  # fmt: skip
    return placed.replicas[0]


def nodes_of(client: Client, key: str) -> set[str]:
    """Where its replicas are."""
    stat = client.stat(key)
    segments = set() if stat is None else set(stat.detail.placements.segments)
    nodes = client.status().nodes
    return {n.name for n in nodes if any(s.segment_id in segments for s in n.segments)}


def dead(store: Cluster, node: Node) -> None:
    node.kill()
    until(lambda: store.state_of(node) == "gone")


@pytest.mark.parametrize("device", ["", "fake:0"])
def test_all_verbs(store: Cluster, device: str) -> None:
    store.node(**({"device": device} if device else {}))
    client, other = store.client(transports=TCP), store.client(transports=TCP, name="other")
    keys = [f"key-{number}" for number in range(8)]
    blocks = [content(key, SIZE) for key in keys]
    assert set(client.put_chain(keys, blocks)) == {STORED}
    assert client.put("empty", b"") is STORED
    assert client.put("one", b"1") is STORED
    assert client.put("one", b"2", overwrite=True) is STORED
    for reader in (client, other):
        assert reader.match_prefix(keys) == len(keys)
        assert reader.get_many(keys) == blocks
        assert reader.get("empty") == b""
        assert reader.get("one", copy=False) == b"2"
        parts = [bytearray(10), bytearray(5)]
        ranges = [[(7, parts[0]), (SIZE - 5, parts[1])]]
        assert reader.get_ranges(["key-3"], ranges) == [SIZE]
        assert parts == [blocks[3][7:17], blocks[3][-5:]]
        buffer = bytearray(SIZE)
        assert reader.get_into("key-1", buffer) == [SIZE]
        assert buffer == blocks[1]
        stat = reader.stat("key-2")
        assert stat is not None
        assert stat.header is not None
        assert stat.header.payload_size == SIZE
    assert client.remove("one")
    assert other.get("one") is None
    assert set(client.stats().transports) == {"tcp"}
    assert "stale_reads" not in client.stats().counters
    assert "failed_transfers" not in client.stats().counters
    assert store.status().nodes[0].unreachable == "", "the master has shown that it is a holder"


@pytest.mark.slow
def test_an_allocation_over_tcp_outlives_its_first_capability(tmp_path: Path) -> None:
    settings = SHORT | {"put_deadline_ms": 1_000}
    with Cluster(tmp_path, settings=settings, identities=Identities(tmp_path)) as store:
        store.start()
        client = store.client(transports=("tcp", "shm"))
        memory = client.allocate(SIZE, kind="numpy")
        assert isinstance(memory, np.ndarray)
        memory[:] = 7
        time.sleep(2.5)  # deadline and slack
        assert client.put("allocated", memory) is STORED
        assert client.stats().transports["tcp"] >= 2
        read = store.client(transports=TCP, name="reader").get("allocated", kind="bytes")
        assert read == bytes([7]) * SIZE


def test_objects_are_moved_and_copied(store: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CLIENT_TRANSPORTS", "tcp")
    monkeypatch.setenv("KVSTORE_AUTH", store._auth("admin"))
    first, second = store.node(), store.node()
    client = store.client(transports=TCP)
    keys = [f"k{number}" for number in range(10)]
    client.put_many([(key, content(key, SIZE)) for key in keys], replicas=2)
    dead(store, first)
    third = store.node()
    until(lambda: all(nodes_of(client, key) == {second.name, third.name} for key in keys))
    fourth = store.node()
    assert drain(store, second).told["moved"] == len(keys)
    until(lambda: all(nodes_of(client, key) == {third.name, fourth.name} for key in keys))
    assert client.get_many(keys) == [content(key, SIZE) for key in keys]


def test_a_capability_that_ended_is_asked_for_again(store: Cluster) -> None:
    """The client believes in a lease for longer than the node, whose clock another one sets."""
    store.node()
    client = store.client(transports=TCP)
    client.put("a", content("a", SIZE))
    client.lookup(["a"])
    placements = client._state.context.placements
    ((name, placed),) = placements._placed.items()
    replica = placed.replicas[0]._replace(capability=bytes(32))
    placements._placed[name] = placed._replace(replicas=(replica,))
    assert client.get("a") == content("a", SIZE)
    assert client.stats().counters["failed_transfers"] == 1
    assert store.status().nodes[0].state == "alive"


def test_another_master_knows_the_holders_anew(store: Cluster) -> None:
    store.node()
    client = store.client(transports=TCP)
    client.put("a", content("a", SIZE))
    store.master_server.kill()
    store.master()
    until(lambda: client.get("a") == content("a", SIZE))
    assert client.put("b", b"b") is STORED
    assert client.get("b") == b"b"


@pytest.mark.parametrize("gives_up", [True, False])
def test_who_has_ended_its_put_does_not_write_there_any_more(
    tmp_path: Path, *, gives_up: bool
) -> None:
    """The extent belongs to the next object although the deadline of the put is far away."""
    settings = SHORT | {"put_deadline_ms": 600_000}
    size = 1_900_000
    with Cluster(tmp_path, settings=settings, identities=Identities(tmp_path)) as store:
        store.node_module = OVER_TCP_NODE
        store.master()
        store.node(memory="2MiB")
        client, liar = store.client(transports=TCP), store.client(transports=TCP, name="liar")
        grants, segment = granted_to(liar, b"l", size)
        (at,) = grants.offsets
        extent = Extent(at, size + 1024, grants.capabilities)
        transport = TcpTransport()

        def write() -> None:
            junk = RangeCopy(at, memoryview(b"j" * 2000), extent=extent)
            transport.write(segment, [junk], uptime() + 5)

        write()
        if gives_up:
            asked_of(liar, calls.PutRevoke(grants.epoch, grants.tokens, True))
        else:
            asked_of(liar, calls.PutEnd(grants.epoch, grants.tokens))
            write()
            assert liar.remove("l")
        assert client.put("a", content("a", size), wait_ms=10_000) is STORED
        with pytest.raises(CapabilityRefusedError):
            write()
        transport.close()
        assert client.get("a") == content("a", size)


def granted_to(client: Client, key: bytes, size: int) -> tuple[calls.Grants, SegmentInfo]:
    """What a client gets that begins to put one object, and where."""
    start = calls.PutStart(
        Namespace("default"), [Key(key)], [size], None, False, 1, False, 5_000, ""
    )
    grants = asked_of(client, start)
    assert isinstance(grants, calls.Grants)
    described = asked_of(client, calls.DescribeSegments(grants.segments))
    assert isinstance(described, calls.DescribeSegmentsReply)
    (segment,) = described.segments
    return grants, segment


def asked_of(client: Client, request: calls.Request) -> calls.Reply:
    """What the master replies to a client that makes its own calls."""
    client.exists("joined")
    return client._stub.call(request, uptime() + 10)


def test_a_renewed_certificate_goes_on_after_the_old_one_is_revoked(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    with Cluster(tmp_path, settings=SHORT, identities=identities) as store:
        store.node_module = OVER_TCP_NODE
        store.master()
        store.node()
        file = identities.engine("e", "default")
        old = store.client(auth=file, transports=TCP)
        old.put("a", content("a", SIZE))
        wanted = CertificateRequest("e", ("engine",), ("default",), ("default",))
        renewed = identities.folder / "renewed.auth"
        identities.replace(renewed, wanted)
        good = store.client(auth=str(renewed), transports=TCP, name="good")
        assert good.get("a") == content("a", SIZE)

        def is_refused() -> bool:
            try:
                old.put("c", b"c")
            except PermissionDeniedError:
                return True
            return False

        assert not is_refused()
        identities.revoke(inspect(file)["number"])
        until(is_refused)
        assert good.get("a") == content("a", SIZE)
        assert good.put("b", b"b") is STORED
        assert "failed_transfers" not in good.stats().counters
