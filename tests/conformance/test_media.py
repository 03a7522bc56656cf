"""Every medium keeps the contract of ``kvstore.memory.medium``."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.calls import SegmentInfo, Version
from kvstore.device import drivers
from kvstore.errors import ClusterMismatchError, ConfigError, LeftOverMemoryError
from kvstore.limits import Key, Namespace
from kvstore.memory import medium as medium_module
from kvstore.memory.disk_file import DiskFile
from kvstore.memory.header import (
    DISK_ALIGN,
    EXTENT_ALIGN,
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Header,
    SegmentOwner,
    pack_into,
)
from kvstore.memory.medium import Medium
from kvstore.memory.segment import OwnedSegment
from kvstore.node import inventory
from kvstore.node.device_segment import DeviceSegment
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import SHM_DIRECTORY
from kvstore.transport.common import RangeCopy
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_server import DataServer
from tests.support.fake_device import FakeDriver

MIB = 1 << 20
SIZE = 4 * MIB
NAME = f"test-medium-{os.getpid()}"
FAKE = "fake:0"


@dataclass
class Maker:
    """Makes one kind of medium."""

    kind: str
    directory: Path

    @property
    def path(self) -> str:
        return str(self.directory / f"kvstore.{NAME}")

    def create(self, size: int = SIZE, owner: SegmentOwner | None = None) -> Medium:
        if self.kind == "device":
            return DeviceSegment.on(FAKE, NAME, size, owner=owner)
        if self.kind == "file":
            return DiskFile.create(self.path, NAME, size, owner=owner)
        return OwnedSegment.create(NAME, size, owner=owner)

    def attach(self, size: int = SIZE, **options: Any) -> Medium | None:
        if self.kind == "file" and options.pop("discard", False):
            return self.create(size, **options)
        if self.kind == "file":
            return DiskFile.attach(self.path, NAME, size, **options)
        return OwnedSegment.attach(NAME, size, **options)


@pytest.fixture(params=["host", "device", "file"])
def maker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    fake = FakeDriver(FAKE, seed=7)
    drivers.use(FAKE, fake)
    is_file = request.param == "file"
    maker = Maker(request.param, tmp_path if is_file else Path(SHM_DIRECTORY))
    yield maker
    drivers.use(FAKE, None)
    Path(maker.path).unlink(missing_ok=True)
    assert not fake.memory, "memory of the device was not freed"


@pytest.fixture
def medium(maker: Maker) -> Iterator[Medium]:
    medium = maker.create()
    yield medium
    medium.close()


def header(counter: int, payload: bytes) -> Header:
    return Header(
        Namespace("space"), Key(b"k%d" % counter), None, len(payload), 1, counter,
        xxh3_64_intdigest(payload), b"",
    )  # fmt: skip


def write(medium: Medium, offset: int, data: bytes) -> None:
    if medium.ranges is None:
        medium.memory[offset : offset + len(data)] = data
    else:
        medium.ranges.write([(offset, memoryview(data))], uptime() + 30)


def read(medium: Medium, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    if medium.ranges is None:
        buffer[:] = medium.memory[offset : offset + length]
    else:
        medium.ranges.read([(offset, memoryview(buffer))], uptime() + 30)
    return bytes(buffer)


def put(medium: Medium, offset: int, counter: int, payload: bytes = b"payload" * 99) -> None:
    head = bytearray(HEADER_BYTES)
    pack_into(head, header(counter, payload), medium.seed, offset)
    write(medium, offset, (bytes(head) + payload)[: medium.size - offset])
    if isinstance(medium, DiskFile):
        medium.note_use(offset)


def offsets(medium: Medium) -> list[int]:
    return [offset for offset, _ in medium.scan()]


def test_a_new_medium_describes_itself(maker: Maker) -> None:
    owner = SegmentOwner("cluster", ("h:1",))
    medium = maker.create(SIZE + 5, owner)
    offer, traits = medium.make_offer(), medium.traits
    assert (medium.size, medium.node, medium.path) == (SIZE, NAME, maker.path)
    assert (offer.size, offer.uuid, offer.token) == (SIZE, medium.uuid, medium.token)
    assert (offer.seed, offer.generation, offer.fresh) == (medium.seed, 1, True)
    assert (offer.medium, offer.is_opaque) == (traits.name, traits.is_opaque)
    assert bool(offer.shm_name) is not traits.is_opaque, "a client maps it, or knows that it cannot"
    assert medium.owner._replace(on_device=False) == owner
    assert medium.has_entry()
    assert not medium.attached
    assert offsets(medium) == []
    medium.close()
    medium.close()
    assert medium.generation == 0
    assert not Path(maker.path).exists()


@pytest.mark.parametrize("size", [0, MIB - 1])
def test_a_size_below_the_minimum_is_rejected(maker: Maker, size: int) -> None:
    with pytest.raises(ConfigError):
        maker.create(size)
    assert not Path(maker.path).exists()


def test_new_memory_is_cleared_if_the_medium_says_so(medium: Medium) -> None:
    if medium.traits.is_cleared:
        assert read(medium, SUPERBLOCK_BYTES, 64 << 10) == bytes(64 << 10)


def test_ranges_are_read_as_written(medium: Medium) -> None:
    data = os.urandom(MIB + 3)
    write(medium, MIB + 1, data)
    write(medium, MIB + 9, b"later")
    expected = data[:8] + b"later" + data[13:]
    assert read(medium, MIB + 1, len(data)) == expected
    assert medium.checksum(MIB + 1, len(data)) == xxh3_64_intdigest(expected)
    assert medium.checksum(MIB, 0) == xxh3_64_intdigest(b"")


def test_scans_find_valid_headers_alone(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium_module, "SCAN_BYTES", 64 << 10)
    step = DISK_ALIGN if isinstance(medium, DiskFile) else EXTENT_ALIGN
    placed = [SUPERBLOCK_BYTES, 64 << 10, MIB, SIZE - 4 * step]
    for counter, offset in enumerate(placed):
        put(medium, offset, counter)
    put(medium, SIZE - step, 9, bytes(step))  # its payload would end outside
    write(medium, 2 * MIB, read(medium, MIB, HEADER_BYTES))  # copied from another offset
    if isinstance(medium, DiskFile):
        medium.note_use(2 * MIB)
    assert offsets(medium) == placed
    if isinstance(medium, DiskFile):
        return  # only its node writes to it
    medium.header_filter = lambda offset, header, mac: offset == MIB
    assert offsets(medium) == [MIB]


def test_a_wipe_is_of_one_version(medium: Medium) -> None:
    placed = [SUPERBLOCK_BYTES, MIB, 2 * MIB]
    for counter, offset in enumerate(placed):
        put(medium, offset, counter)
    outside = [0, -1024, SIZE, 2**63, MIB + 1024]
    assert medium.wipe(outside, [1] * 5, [0, 0, 0, 0, 1]) == 0
    assert medium.wipe(placed, [1, 1, 2], [0, 7, 2]) == 1
    assert medium.wipe(placed[:1], [1], [0]) == 0, "again"
    assert offsets(medium) == placed[1:]
    assert medium.wipe([], [], []) == 0


def test_zeroing_ignores_what_is_outside(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium_module, "ZERO_STEP", 1000)
    data = os.urandom(5000)
    write(medium, MIB, data)
    before = bytes(medium.memory[:256])
    medium.zero([(0, 100), (SIZE - 10, 11), (SUPERBLOCK_BYTES, 2**40), (2**63, 64)])
    assert bytes(medium.memory[:256]) == before
    medium.zero([(MIB + 100, 4000)])
    assert read(medium, MIB, 5000) == data[:100] + bytes(4000) + data[4100:]
    write(medium, MIB, data)
    medium.zero([(MIB, 4000)], lambda: True)
    assert read(medium, MIB, 5000) == data


def test_records_never_go_back(medium: Medium) -> None:
    medium.keep_removal_watermark(Version(3, 7))
    medium.keep_removal_watermark(Version(3, 6))
    medium.keep_epoch(4)
    medium.keep_epoch(3)
    assert (medium.removal_watermark, medium.epoch) == (Version(3, 7), 4)
    assert medium.bump_generation() == 2
    assert medium.make_offer().generation == 2
    assert medium.make_offer().removal_watermark == Version(3, 7)
    medium.keep_owner(SegmentOwner("other"))
    assert medium.owner.cluster == "other"


def test_what_survives_the_process(maker: Maker) -> None:
    medium = maker.create(owner=SegmentOwner("one"))
    put(medium, MIB, 1)
    put(medium, 2 * MIB, 2)
    medium.keep_removal_watermark(Version(3, 7))
    medium.keep_epoch(4)
    identity, token = (medium.uuid, medium.seed), medium.token
    medium.close(unlink=False)
    if not medium.traits.survives_process:
        assert not Path(maker.path).exists()
        assert maker.attach() is None
        return
    with pytest.raises(LeftOverMemoryError):
        maker.attach(2 * SIZE)
    with pytest.raises(ClusterMismatchError):
        maker.attach(owner=SegmentOwner("two"))
    again = maker.attach(owner=SegmentOwner("one"))
    assert again is not None
    assert again.attached
    assert not again.make_offer().fresh
    assert (again.uuid, again.seed) == identity
    assert again.token != token
    assert again.generation > 1
    assert (again.removal_watermark, again.epoch) == (Version(3, 7), 4)
    write(again, 2 * MIB + HEADER_BYTES, b"torn")
    found = inventory.build_inventory(again)
    assert [offset for offset, _ in found] == [2 * MIB, MIB]
    assert [offset for offset, _ in inventory.verified(again, found)] == [MIB]
    assert offsets(again) == [MIB]
    again.close(unlink=False)
    empty = maker.attach(owner=SegmentOwner("two"), discard=True)
    assert empty is not None
    assert empty.uuid != identity[0]
    assert offsets(empty) == []
    assert (empty.removal_watermark, empty.epoch) == (Version(0, 0), 0)
    empty.close()
    assert maker.attach() is None


def test_the_private_file_decides(maker: Maker) -> None:
    medium = maker.create()
    if not medium.traits.survives_process:
        medium.close()
        return
    key = medium.keep_private().now.key
    medium.keep_epoch(5)
    assert Path(medium.private_path).exists()
    medium.close(unlink=False)
    again = maker.attach(private=True)
    assert again is not None
    assert again.keep_private().now == (again.uuid, key, Version(0, 0), 5)
    uuid = again.uuid
    again.close(unlink=False)
    other = maker.attach(private=False)
    assert other is not None
    assert other.uuid != uuid, "memory of a process with an identity was discarded"
    other.close()
    Path(medium.private_path).unlink(missing_ok=True)


def test_file_descriptors_are_shared_or_refused(medium: Medium) -> None:
    if medium.traits.is_opaque:
        with pytest.raises(OSError, match="cannot be mapped"):
            medium.share()
        assert medium.fd == -1
    else:
        medium.share().close()


def test_a_data_server_serves_it(medium: Medium) -> None:
    server = DataServer([medium], "127.0.0.1")
    server.start()
    transport = TcpTransport()
    offer = medium.make_offer()
    info = SegmentInfo(
        1, NAME, socket.gethostname(), offer.size, offer.uuid, "", f"127.0.0.1:{server.port}",
        offer.token, offer.seed, offer.generation,
    )  # fmt: skip
    try:
        data = os.urandom(3 * MIB)
        transport.write(info, [RangeCopy(MIB, memoryview(data))], uptime() + 30)
        assert read(medium, MIB, len(data)) == data
        buffer = memoryview(bytearray(len(data)))
        transport.read(info, [RangeCopy(MIB, buffer)], uptime() + 30)
        assert buffer == data
    finally:
        transport.close()
        server.stop()
