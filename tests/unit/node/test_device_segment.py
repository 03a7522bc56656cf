"""A segment in the memory of a device: what is on the device, what is in ``/dev/shm``, and when."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.calls import SegmentInfo
from kvstore.device import drivers
from kvstore.errors import (
    ConfigError,
    DeviceError,
    NodeUnreachableError,
)
from kvstore.limits import Key, Namespace
from kvstore.memory import medium as medium_module
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES, Header, SegmentOwner, pack_into
from kvstore.node import device_segment, inventory
from kvstore.node.device_segment import DeviceSegment
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import SHM_DIRECTORY, host_id
from kvstore.transport.common import RangeCopy
from kvstore.transport.device import LOCK, DeviceTransport
from tests.support.fake_device import FakeDriver

MIB = 1 << 20
POOLED = "fake:0"


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    fake = FakeDriver(POOLED, seed=5)
    drivers.use(POOLED, fake)
    yield fake
    drivers.use(POOLED, None)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-device-{os.getpid()}"
    yield name
    entry(name).unlink(missing_ok=True)


@pytest.fixture
def segment(fake: FakeDriver, name: str) -> Iterator[DeviceSegment]:
    segment = DeviceSegment.on(POOLED, name, 4 * MIB + 5)
    yield segment
    segment.close()
    assert fake.is_idle
    assert not fake.memory, "the memory was not freed"
    assert not entry(name).exists()


def entry(name: str) -> Path:
    return Path(SHM_DIRECTORY, f"kvstore.{name}")


def soon() -> float:
    return uptime() + 30


def info(segment: DeviceSegment) -> SegmentInfo:
    return SegmentInfo(
        segment_id=1, node=segment.node, host=host_id(), size=segment.size, uuid=segment.uuid,
        shm_name="", address="", token=segment.token, seed=segment.seed,
        generation=segment.generation, device=segment.location,
    )  # fmt: skip


def put(segment: DeviceSegment, offset: int, counter: int, size: int = 100) -> None:
    head = bytearray(HEADER_BYTES)
    header = Header(
        Namespace("space"), Key(b"k%d" % counter), None, size, 1, counter, 0, b"descriptor"
    )
    pack_into(head, header, segment.seed, offset)
    assert segment.ranges is not None
    segment.ranges.write([(offset, memoryview(head))], soon())


def test_only_the_superblock_is_on_the_host(segment: DeviceSegment, name: str) -> None:
    assert segment.size == 4 * MIB
    assert entry(name).stat().st_size == SUPERBLOCK_BYTES
    assert segment.fd == -1
    assert segment.owner.on_device
    segment.keep_owner(SegmentOwner("cluster"))
    assert segment.owner == SegmentOwner("cluster", on_device=True)
    assert segment.generation == 1
    segment.bump_generation()
    segment.keep_epoch(7)
    assert (segment.generation, segment.epoch) == (2, 7)


def test_headers_are_found_and_wiped_on_the_device(
    segment: DeviceSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medium_module, "SCAN_BYTES", 64 << 10)
    offsets = [SUPERBLOCK_BYTES, 200 << 10, segment.size - HEADER_BYTES - 1024]
    for counter, offset in enumerate(offsets):
        put(segment, offset, counter)
    put(segment, segment.size - HEADER_BYTES, 9)  # its payload would end behind the segment
    assert [offset for offset, _ in segment.scan()] == offsets
    outside = [0, -1024, segment.size]
    assert segment.wipe(outside, [1] * 3, [0] * 3) == 0
    assert segment.wipe(offsets, [1, 2, 1], [0, 1, 5]) == 1, "only of the given version"
    assert [offset for offset, _ in inventory.build_inventory(segment)] == [offsets[2], offsets[1]]
    assert segment.wipe([], [], []) == 0


def test_a_start_that_fails_leaves_nothing(
    fake: FakeDriver, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError):
        DeviceSegment.on(POOLED, name, MIB - 1)

    def refuse(*_: object) -> int:
        raise DeviceError("no")

    for method in ("export", "allocate"):
        monkeypatch.setattr(fake, method, refuse)
        with pytest.raises(DeviceError):
            DeviceSegment.on(POOLED, name, MIB)
        assert not fake.memory
        assert not entry(name).exists()
    with pytest.raises(DeviceError, match="is no device"):
        DeviceSegment.on("tpu:0", name, MIB)
    assert not entry(name).exists()


def test_the_memory_is_freed_when_no_process_has_it_open(
    fake: FakeDriver, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = DeviceSegment.on(POOLED, name, MIB)
    monkeypatch.setattr(device_segment, "OPEN_S", 30.0)
    opener = os.open(entry(name), os.O_RDWR)
    fcntl.fcntl(opener, fcntl.F_OFD_SETLK, LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    order: list[str] = []
    freed = fake.free

    def free(address: int) -> None:
        order.append("freed")
        freed(address)

    def leave() -> None:
        while segment.generation:
            pass
        order.append("left")
        os.close(opener)

    monkeypatch.setattr(fake, "free", free)
    thread = threading.Thread(target=leave)
    thread.start()
    segment.close()
    thread.join()
    assert order == ["left", "freed"]
    segment.close()


def test_a_device_that_has_failed_is_not_used_again(
    segment: DeviceSegment, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are then reached by tcp."""
    monkeypatch.setattr("kvstore.device.device.COPIES_WAIT_S", 0.05)
    transport = DeviceTransport(MIB)
    assert transport.can_reach(info(segment))
    fake.is_stuck = True
    with pytest.raises(NodeUnreachableError) as caught:
        transport.read(info(segment), [RangeCopy(MIB, memoryview(bytearray(9)))], uptime() + 0.05)
    assert caught.value.fields["quiesced"] == 0
    assert not transport.can_reach(info(segment))
    transport.close()
    fake.is_stuck = False
    fake.finish()
    for address in list(fake.memory):  # what the failed transport has kept
        if address != segment._base:
            fake.close(address)


# --- memory that a program uses where it is -------------------------------------------------------
