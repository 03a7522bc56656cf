"""A segment in the memory of a device: what is on the device, what is in ``/dev/shm``, and when."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.calls import SegmentInfo
from kvstore.clocks import uptime
from kvstore.device import drivers
from kvstore.errors import (
    ConfigError,
    DeviceError,
    LeftOverMemoryError,
    NodeNameTakenError,
    NodeUnreachableError,
    SegmentGoneError,
)
from kvstore.limits import Key, Namespace
from kvstore.memory.entries import SHM_DIRECTORY, free_node_name, left_overs
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES, Header, Owner, pack_into
from kvstore.memory.segment import NodeSegment
from kvstore.network.host import host_id
from kvstore.node import device_segment, inventory
from kvstore.node.device_segment import DeviceSegment
from kvstore.transport.base import Move
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
        generation=segment.generation, device=segment.place,
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
    segment.keep_owner(Owner("cluster"))
    assert segment.owner == Owner("cluster", on_device=True)
    assert segment.generation == 1
    segment.bump_generation()
    segment.keep_epoch(7)
    assert (segment.generation, segment.epoch) == (2, 7)


def test_headers_are_found_and_wiped_on_the_device(
    segment: DeviceSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_segment, "SCAN_BYTES", 64 << 10)
    offsets = [SUPERBLOCK_BYTES, 200 << 10, segment.size - HEADER_BYTES - 1024]
    for counter, offset in enumerate(offsets):
        put(segment, offset, counter)
    put(segment, segment.size - HEADER_BYTES, 9)  # its payload would end behind the segment
    assert [offset for offset, _ in segment.scan()] == offsets
    outside = [0, -1024, segment.size]
    assert segment.wipe(outside, [1] * 3, [0] * 3) == 0
    assert segment.wipe(offsets, [1, 2, 1], [0, 1, 5]) == 1, "only of the given version"
    assert [offset for offset, _ in inventory.take(segment)] == [offsets[2], offsets[1]]
    assert segment.wipe([], [], []) == 0


def test_a_checksum_is_that_of_the_bytes_on_the_device(
    segment: DeviceSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_segment, "SCAN_BYTES", 64 << 10)
    content = bytes(range(251)) * 600
    assert segment.ranges is not None
    segment.ranges.write([(5 << 10, memoryview(content))], soon())
    assert segment.checksum(5 << 10, len(content)) == xxh3_64_intdigest(content)
    assert segment.checksum(5 << 10, 0) == xxh3_64_intdigest(b"")


def test_one_owner_per_name(segment: DeviceSegment, name: str) -> None:
    with pytest.raises(NodeNameTakenError):
        DeviceSegment.on(POOLED, name, MIB)
    with pytest.raises(NodeNameTakenError):
        NodeSegment.create(name, MIB)


def test_a_page_that_was_left_is_no_memory(segment: DeviceSegment, name: str) -> None:
    """What a killed process leaves: nobody attaches it, and every next node may have its name."""
    left = f"{name}-left"
    shutil.copy(entry(name), entry(left))
    try:
        assert NodeSegment.attach(left, MIB, node=name) is None
        assert NodeSegment.attach(left, 4 * MIB, node=name) is None
        assert free_node_name(left, Owner("cluster")) == left
        again = DeviceSegment.on(POOLED, left, MIB)
        again.close()
        shutil.copy(entry(name), entry(left))
        of_host = NodeSegment.create(left, MIB)
        of_host.close()
    finally:
        entry(left).unlink(missing_ok=True)


def test_memory_of_the_host_is_not_thrown_away(fake: FakeDriver, name: str) -> None:
    NodeSegment.create(name, MIB).close(unlink=False)
    with pytest.raises(LeftOverMemoryError):
        DeviceSegment.on(POOLED, name, MIB)
    assert [left.size for left in left_overs() if left.name == name] == [MIB]
    assert not fake.memory
    DeviceSegment.on(POOLED, name, MIB, discard=True).close()
    assert not entry(name).exists()


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


def test_a_process_that_does_not_close_it_is_not_waited_for_long(
    fake: FakeDriver, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = DeviceSegment.on(POOLED, name, MIB)
    monkeypatch.setattr(device_segment, "OPEN_S", 0.1)
    transport = DeviceTransport(MIB)
    assert transport.reaches(info(segment))
    segment.close()
    with pytest.raises(SegmentGoneError):
        transport.read(info(segment), [Move(MIB // 2, memoryview(bytearray(9)))], soon())
    transport.sweep()
    with pytest.raises(NodeUnreachableError):
        transport.read(info(segment), [Move(MIB // 2, memoryview(bytearray(9)))], soon())
    transport.close()
    assert not fake.memory


def test_what_cannot_be_opened_is_not_reached(segment: DeviceSegment, name: str) -> None:
    known = info(segment)
    assert known.device is not None
    place = known.device
    for other in (
        known._replace(device=None),
        known._replace(host="elsewhere"),
        known._replace(uuid=bytes(16)),
        known._replace(size=known.size * 2),
        known._replace(device=place._replace(entry="kvstore.none")),
        known._replace(device=place._replace(entry="../etc/passwd")),
        known._replace(device=place._replace(handle="nonsense")),
        known._replace(device=place._replace(device="tpu:0")),
    ):
        transport = DeviceTransport(MIB)
        assert not transport.reaches(other), other
        transport.close()
    transport = DeviceTransport(MIB)
    assert transport.reaches(known)
    transport.close()
    assert not transport.reaches(known)


def test_a_device_that_has_failed_is_not_used_again(
    segment: DeviceSegment, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are then reached by tcp."""
    monkeypatch.setattr("kvstore.device.device.SETTLE_S", 0.05)
    transport = DeviceTransport(MIB)
    assert transport.reaches(info(segment))
    fake.is_stuck = True
    with pytest.raises(NodeUnreachableError) as caught:
        transport.read(info(segment), [Move(MIB, memoryview(bytearray(9)))], uptime() + 0.05)
    assert caught.value.fields["settled"] == 0
    assert not transport.reaches(info(segment))
    transport.close()
    fake.is_stuck = False
    fake.finish()
    for address in list(fake.memory):  # what the failed transport has kept
        if address != segment._base:
            fake.close(address)


# --- memory that a program uses where it is -------------------------------------------------------


def is_held_open(name: str) -> bool:
    """Whether some process holds the lock of those that have the memory open."""
    opener = os.open(entry(name), os.O_RDWR)
    try:
        asked = LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        found = fcntl.fcntl(opener, fcntl.F_OFD_GETLK, asked)
        return bool(LOCK.unpack(found)[0] != fcntl.F_UNLCK)
    finally:
        os.close(opener)


def test_a_closed_transport_holds_nothing_although_a_lease_watches_the_segment(
    segment: DeviceSegment, name: str
) -> None:
    transport = DeviceTransport(MIB)
    assert transport.reaches(info(segment))
    is_mounted = transport.watch(info(segment))
    assert is_mounted is not None
    assert is_mounted()
    assert is_held_open(name)
    transport.close()
    assert not is_held_open(name)
    assert is_mounted()


def test_the_child_of_a_fork_closes_what_is_dropped_and_still_lent(
    fake: FakeDriver, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_segment, "OPEN_S", 0.1)
    segment = DeviceSegment.on(POOLED, name, MIB)
    transport = DeviceTransport(MIB)
    known = info(segment)
    with transport.lent(known, [(MIB // 2, 100)], soon()):
        lent = transport.lend(known, MIB // 2, 100)
    [held] = transport._attached.values()
    assert held is not None
    transport._drop(lambda uuid, attachment: True)
    os.fstat(held._fd)
    transport.abandon()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held._fd)
    assert lent.tensor.numel() == 100
    fake.close(held.ranges.base)
    segment.close()


def test_memory_that_is_lent_while_its_segment_is_dropped_is_closed_in_the_end(
    fake: FakeDriver, name: str
) -> None:
    """The first tensor of a process may take seconds, because torch starts CUDA."""
    segment = DeviceSegment.on(POOLED, name, MIB)
    transport = DeviceTransport(MIB)
    known = info(segment)
    assert transport.reaches(known)
    [held] = transport._attached.values()
    assert held is not None
    opened = held.ranges.base
    with held.lent() as is_open:
        assert is_open
        transport._drop(lambda uuid, attachment: True)
        transport.sweep()
        transport.sweep()
        lent = held.lend(MIB // 2, 100)
    transport.sweep()
    assert opened in fake.memory
    del lent
    transport.sweep()
    assert opened not in fake.memory
    transport.close()
    segment.close()
