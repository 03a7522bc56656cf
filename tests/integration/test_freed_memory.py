"""With identities, who is granted memory finds nothing of the object that was there before: by a
capability of its own a tenant reads all of an extent, also if it has written nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, PutOutcome, calls
from kvstore.calls import SegmentInfo
from kvstore.errors import KVStoreError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import Extent
from kvstore.transport.common import RangeCopy
from kvstore.transport.tcp import TcpTransport
from tests.integration.test_capabilities import asked_of
from tests.support.certificates import Identities
from tests.support.cluster import OVER_TCP_NODE, SHORT, Cluster
from tests.support.wait import until

SECRET = b"\xa5" * 1_900_000
SIZE = len(SECRET)
TCP = ("tcp",)
THEIRS = Namespace("a/theirs")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SHORT, identities=Identities(tmp_path)) as cluster:
        cluster.node_module = OVER_TCP_NODE
        cluster.master()
        yield cluster


def thief_of(store: Cluster) -> Client:
    assert store._identities is not None
    auth = store._identities.engine("thief", "a/*")
    return store.client(transports=TCP, auth=auth, name="thief", namespace=THEIRS)


def found_by(thief: Client, size: int = SIZE, *, at_most_ms: int = 10_000) -> bytes:
    """All that the thief reads in an extent of its own, in which it writes nothing."""
    start = calls.PutStart(THEIRS, [Key(b"t")], [size], None, False, 1, False, at_most_ms, "")
    grants = asked_of(thief, start)
    assert isinstance(grants, calls.Grants)
    ended = asked_of(thief, calls.PutEnd(grants.epoch, grants.tokens))
    assert isinstance(ended, calls.PutEndReply)
    assert list(ended.outcomes) == [PutOutcome.STORED]
    found = asked_of(thief, calls.Lookup(THEIRS, [Key(b"t")]))
    assert isinstance(found, calls.LookupReply)
    described = asked_of(thief, calls.DescribeSegments(found.placements.segments))
    assert isinstance(described, calls.DescribeSegmentsReply)
    (segment,), (at,) = described.segments, found.placements.offsets
    return read(segment, Extent(at, size + HEADER_BYTES, found.placements.capabilities))


def read(segment: SegmentInfo, extent: Extent) -> bytes:
    data = bytearray(extent.length)
    transport = TcpTransport()
    try:
        transport.read(
            segment, [RangeCopy(extent.offset, memoryview(data), extent=extent)], uptime() + 5
        )
    finally:
        transport.close()
    return bytes(data)


@pytest.mark.parametrize("device", ["", "fake:0"])
@pytest.mark.parametrize("how", ["evicted", "removed", "replaced"])
def test_of_an_object_that_is_gone(store: Cluster, how: str, device: str) -> None:
    store.node(memory="2MiB", **({"device": device} if device else {}))
    owner = store.client(transports=TCP)
    assert owner.put("secret", SECRET) is PutOutcome.STORED
    assert owner.get("secret") == SECRET
    if how == "removed":
        assert owner.remove("secret")
    elif how == "replaced":
        assert owner.put("secret", b"", overwrite=True) is PutOutcome.STORED
    assert not any(found_by(thief_of(store), SIZE - 100_000))


def test_of_memory_that_a_node_of_before_has_left(store: Cluster) -> None:
    """The node is killed and starts again, with objects and with gaps between them."""
    node = store.node(memory="4MiB")
    owner = store.client(transports=TCP)
    assert owner.put("kept", b"k" * 500_000) is PutOutcome.STORED
    assert owner.put("secret", SECRET) is PutOutcome.STORED
    assert owner.remove("secret")
    node.kill()
    path = node.entry
    assert b"\xa5" * 1000 in path.read_bytes(), "its bytes are there until its lease has ended"
    store.node(memory="4MiB", name=node.name)
    until(lambda: owner.get("kept") == b"k" * 500_000)
    thief = thief_of(store)

    def is_granted() -> bytes:
        try:
            return found_by(thief)
        except KVStoreError:
            return b""

    data = until(is_granted)
    assert not any(data)
    assert owner.get("kept") == b"k" * 500_000
    until(lambda: b"\xa5" * 1000 not in path.read_bytes())
