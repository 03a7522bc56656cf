"""Whole objects of a segment in the memory of a device, by every way that reaches it: the same
bytes, outcomes and errors. ``test_objects.py`` does this for memory of the host."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.device import drivers
from kvstore.errors import InvalidRangeError, SegmentGoneError, UnavailableError
from kvstore.memory.header import HEADER_BYTES, extent_bytes
from kvstore.native import slow
from kvstore.native.kinds import CORRUPT, STALE
from kvstore.transport.device import DeviceTransport
from kvstore.transport.tcp import TcpTransport
from tests.conformance.peer import Peer
from tests.conformance.test_objects import MIB, DeviceWay, Way, reads, values, writes
from tests.fake_device import FakeDriver

POOLED = "fake:0"


class SameDeviceWay(DeviceWay):
    """The memory of the transfers' buffers is of the device that holds the segment."""

    def __init__(self) -> None:
        super().__init__(DeviceTransport(8 * MIB))
        self.fake.name = POOLED
        drivers.use(POOLED, self.fake)

    def close(self) -> None:
        super().close()
        drivers.use(POOLED, None)


WAYS: dict[str, Callable[[], Way]] = {
    "same-device": SameDeviceWay,
    "other-device": lambda: DeviceWay(DeviceTransport(8 * MIB)),
    "host": lambda: Way(DeviceTransport(8 * MIB)),
    "tcp-compiled": lambda: Way.compiled(TcpTransport),
    "tcp-slow": lambda: Way(TcpTransport(), slow),
    "tcp-device": lambda: DeviceWay(TcpTransport()),
}


@pytest.fixture(scope="module")
def shared_peer() -> Iterator[Peer]:
    peer = Peer(f"device-objects-{os.getpid()}", 64 * MIB, device=POOLED)
    yield peer
    peer.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer(f"victim-{os.getpid()}", 64 * MIB, device=POOLED)
    yield peer
    peer.close()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    way = WAYS[request.param]()
    yield way
    way.close()


@contextmanager
def memory_of(peer: Peer) -> Iterator[mmap.mmap]:
    """The memory of the peer's device."""
    for each in Path(f"/proc/{peer.pid}/fd").iterdir():
        if "kvstore-fake-device" in os.readlink(each):
            with each.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                yield memory
            return
    raise AssertionError("the peer has none")


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [([0], 1), ([1, 0, 4096], 1), ([300_000, 5, 9 * MIB], 7), ([10] * 500, 1)],
    ids=["empty", "few", "odd", "many"],
)
def test_what_one_way_writes_every_other_reads(
    shared_peer: Peer, way: Way, first: str, sizes: list[int], parts: int
) -> None:
    segment, some = shared_peer.info, values(sizes)
    writer = WAYS[first]()
    writer.carry(writes(segment, some, parts=parts))
    writer.close()
    if isinstance(way, SameDeviceWay):
        drivers.use(POOLED, way.fake)
    for verify in (True, False):
        transfer, targets = reads(segment, sizes, parts=parts, verify=verify)
        way.carry(transfer)
        assert transfer.outcomes == [b"descriptor"] * len(sizes)
        assert targets == some


def test_outcomes(shared_peer: Peer, way: Way) -> None:
    segment, sizes = shared_peer.info, [5_000] * 4
    way.carry(writes(segment, values(sizes)))
    extent = extent_bytes(5_000)
    with memory_of(shared_peer) as memory:
        memory[MIB + extent + HEADER_BYTES + 4_999] ^= 1  # payload of the second
        memory[MIB + 2 * extent + 70] ^= 1  # header of the third
        memory[MIB + 3 * extent : MIB + 3 * extent + 64] = bytes(64)  # the fourth is wiped
    for verify in (True, False):
        transfer, _ = reads(segment, sizes, verify=verify)
        way.carry(transfer)
        second = CORRUPT if verify else b"descriptor"
        assert transfer.outcomes == [b"descriptor", second, STALE, STALE]
    transfer, _ = reads(segment, sizes, version=2)
    way.carry(transfer)
    assert transfer.outcomes == [STALE] * 4


def test_bad_ranges(shared_peer: Peer, way: Way) -> None:
    segment = shared_peer.info
    for start in (0, 4095, segment.size - HEADER_BYTES - 99):
        with pytest.raises(InvalidRangeError):
            way.carry(writes(segment, values([100]), start=start))
        with pytest.raises(InvalidRangeError):
            way.carry(reads(segment, [100], start=start)[0])


def test_a_fence_ends_it(peer: Peer, way: Way) -> None:
    before = peer.info
    way.carry(writes(before, values([100])))
    after = peer.ask("bump")
    for transfer in (writes(before, values([200])), reads(before, [100])[0]):
        with pytest.raises(SegmentGoneError):
            way.carry(transfer)
    way.transport.forget(before)
    transfer, targets = reads(after, [100])
    way.carry(transfer)
    assert transfer.outcomes == [b"descriptor"]
    assert targets == values([100])


def test_a_dead_node_gives_no_bytes(peer: Peer, way: Way) -> None:
    segment = peer.info
    way.carry(writes(segment, values([100])))
    peer.kill()
    for transfer in (writes(segment, values([100])), reads(segment, [100])[0]):
        with pytest.raises(UnavailableError):
            way.carry(transfer)
    assert peer.entry.exists()


@pytest.mark.slow
def test_a_fake_that_is_not_eager(peer: Peer) -> None:
    """Copies run late and in a random order, so each missing wait is a wrong byte."""
    sizes = [100, 70_000, 3, 2 * MIB, 8_000]
    for seed in range(5):
        fake = FakeDriver(POOLED, seed=seed)
        drivers.use(POOLED, fake)
        transport = DeviceTransport(MIB)
        host = Way(transport)
        host.carry(writes(peer.info, values(sizes), parts=3, version=seed + 1))
        assert fake.is_idle
        transfer, targets = reads(peer.info, sizes, parts=3, version=seed + 1)
        host.carry(transfer)
        assert fake.is_idle
        assert targets == values(sizes)
        transport.close()
        drivers.use(POOLED, None)
