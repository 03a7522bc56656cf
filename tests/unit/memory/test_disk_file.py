"""The file on a disk: whatever it holds after a fault, no wrong byte comes back from it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.calls import CopyOutcome, Version
from kvstore.errors import (
    ClusterMismatchError,
    LeftOverMemoryError,
    NodeNameTakenError,
    StartupError,
)
from kvstore.limits import Key, Namespace
from kvstore.memory.disk_file import DiskFile, map_bytes
from kvstore.memory.header import HEADER_BYTES, Header, SegmentOwner, extent_bytes, pack_into
from kvstore.memory.segment import OwnedSegment
from kvstore.node.inventory import HeaderVerifier

MIB = 1 << 20
SIZE = 8 * MIB
NAME = f"test-disk-{os.getpid()}"
PAYLOAD = 20_000
STEP = 32 << 10


@pytest.fixture
def memory() -> Iterator[OwnedSegment]:
    segment = OwnedSegment.create(NAME, 4 * MIB)
    yield segment
    segment.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / f"kvstore.{NAME}")


@pytest.fixture
def disk(path: str) -> Iterator[DiskFile]:
    disk = DiskFile.create(path, NAME, SIZE, owner=SegmentOwner("one"))
    yield disk
    disk.close(unlink=False)


def payload(counter: int) -> bytes:
    return random.Random(counter).randbytes(PAYLOAD)


def put(memory: OwnedSegment, offset: int, counter: int) -> None:
    data = payload(counter)
    key = Key(b"k%d" % counter)
    header = Header(
        Namespace("n"), key, None, PAYLOAD, 1, counter, xxh3_64_intdigest(data), b"bytes"
    )
    memory.memory[offset : offset + HEADER_BYTES] = bytes(HEADER_BYTES)
    start = offset + HEADER_BYTES
    memory.memory[start : start + PAYLOAD] = data
    packed = bytearray(HEADER_BYTES)
    end = pack_into(packed, header, memory.seed, offset)
    mac = memory.sign(offset, header)
    packed[end : end + len(mac)] = mac
    memory.memory[offset:start] = packed


def write(disk: DiskFile, memory: OwnedSegment, counter: int) -> int:
    """The offset on the disk."""
    put(memory, 64 << 10, counter)
    target = 4096 + counter * STEP
    outcome = disk.write_behind(memory, 64 << 10, target, PAYLOAD, Version(1, counter))
    assert outcome is CopyOutcome.DONE
    return target


def bring(disk: DiskFile, memory: OwnedSegment, counter: int) -> bytes | CopyOutcome:
    target, source = 128 << 10, 4096 + counter * STEP
    memory.memory[target : target + extent_bytes(PAYLOAD)] = bytes(extent_bytes(PAYLOAD))
    outcome = disk.bring(memory, source, target, PAYLOAD, Version(1, counter))
    if outcome is not CopyOutcome.DONE:
        return outcome
    [(offset, header)] = [row for row in memory.scan() if row[0] == target]
    assert (header.key, header.counter) == (b"k%d" % counter, counter)
    return bytes(memory.memory[offset + HEADER_BYTES : offset + HEADER_BYTES + PAYLOAD])


def test_reads_and_writes_that_move_a_part_are_continued(
    disk: DiskFile, memory: OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)

        def first_block(
            fd: int, buffers: list[memoryview], offset: int, call: Callable[..., int] = call
        ) -> int:
            calls.append(offset)
            left, some = 4096, []
            for buffer in buffers:
                some.append(buffer[:left])
                left -= len(some[-1])
            return call(fd, some, offset)

        monkeypatch.setattr(os, name, first_block)
    write(disk, memory, 1)
    assert bring(disk, memory, 1) == payload(1)
    assert len(calls) == 2 * -(-extent_bytes(PAYLOAD) // 4096)


def test_an_abandoned_copy_leaves_no_header_in_memory(disk: DiskFile, memory: OwnedSegment) -> None:
    write(disk, memory, 1)
    disk.abandon(128 << 10)
    assert bring(disk, memory, 1) is CopyOutcome.CHANGED
    assert not any(memory.memory[128 << 10 : (128 << 10) + HEADER_BYTES])
    disk.abandon(128 << 10, abandoned=False)
    assert bring(disk, memory, 1) == payload(1)


def test_what_is_written_comes_back_and_is_found_by_the_next_process(
    path: str, memory: OwnedSegment
) -> None:
    memory.header_mac_key = bytes(range(16))
    verifier = HeaderVerifier(memory.header_mac_key)
    memory.header_filter, memory.header_signer = verifier, verifier.sign
    disk = DiskFile.create(path, NAME, SIZE)
    offsets = [write(disk, memory, counter) for counter in range(5)]
    disk.close(unlink=False)
    again = DiskFile.attach(path, NAME, SIZE)
    assert again is not None
    assert sorted(again.offsets()) == offsets
    assert [header.counter for _, header in again.headers(offsets)] == list(range(5))
    assert [bring(again, memory, counter) for counter in range(5)] == [*map(payload, range(5))]
    assert again.wipe(offsets[:2], [1, 1], [0, 7]) == 1, "of another version"
    assert sorted(again.offsets()) == offsets[1:]
    assert bring(again, memory, 0) is CopyOutcome.CHANGED
    again.close()
    assert not Path(path).exists()


def test_what_memory_does_not_hold_any_more_is_not_written(
    disk: DiskFile, memory: OwnedSegment
) -> None:
    put(memory, 64 << 10, 3)
    assert disk.write_behind(memory, 64 << 10, 4096, PAYLOAD, Version(1, 4)) is CopyOutcome.CHANGED
    assert disk.write_behind(memory, 64 << 10, 4096, 9, Version(1, 3)) is CopyOutcome.CHANGED
    memory.header_filter = lambda offset, header, mac: False
    assert disk.write_behind(memory, 64 << 10, 4096, PAYLOAD, Version(1, 3)) is CopyOutcome.CHANGED
    assert disk.offsets() == []


def test_no_wrong_byte_comes_back_from_torn_and_flipped_sectors(
    disk: DiskFile, memory: OwnedSegment, path: str
) -> None:
    dice = random.Random(5)
    write(disk, memory, 0)
    extent = (HEADER_BYTES + PAYLOAD + 4095) & -4096
    intact = Path(path).read_bytes()[4096 : 4096 + extent]
    fd = os.open(path, os.O_WRONLY)
    outcomes: dict[object, int] = {}
    for number in range(1_000):
        sector = dice.randrange(extent // 512) * 512
        torn = bytearray(intact[sector : sector + 512])
        if number % 2:
            torn[dice.randrange(512)] ^= 1 << dice.randrange(8)
        else:
            torn[:] = dice.randbytes(512)
        os.pwrite(fd, torn, 4096 + sector)
        found = bring(disk, memory, 0)
        assert isinstance(found, CopyOutcome) or found == payload(0)
        outcomes[type(found)] = outcomes.get(type(found), 0) + 1
        os.pwrite(fd, intact[sector : sector + 512], 4096 + sector)
    os.close(fd)
    assert outcomes[CopyOutcome] > 700, "the others were behind the header or the payload"
    assert bring(disk, memory, 0) == payload(0)


def test_a_map_that_lies_costs_nothing_but_time(
    disk: DiskFile, memory: OwnedSegment, path: str, tmp_path: Path
) -> None:
    offsets = [write(disk, memory, counter) for counter in range(5)]
    copied = tmp_path / "copied"
    shutil.copy(path, copied)
    with copied.open("r+b") as file:
        for at in range(map_bytes(SIZE)):
            file.seek(SIZE + at)
            value = file.read(1)
            file.seek(SIZE + at)
            file.write(value if value != b"\0" else bytes([1 + at % 254]))
    liar = DiskFile.attach(str(copied), NAME, SIZE)
    assert liar is not None
    assert [offset for offset, _ in liar.scan()] == offsets
    liar.close()


def test_the_hottest_are_recovered_first(disk: DiskFile, memory: OwnedSegment) -> None:
    offsets = [write(disk, memory, counter) for counter in range(4)]
    disk._map[offsets[0] // 8192] -= 2  # an hour earlier
    disk._map[offsets[2] // 8192] -= 2
    assert disk.offsets() == [offsets[1], offsets[3], offsets[0], offsets[2]]


def test_files_that_are_not_this_node_s_are_refused(path: str, tmp_path: Path) -> None:
    disk = DiskFile.create(path, NAME, SIZE, owner=SegmentOwner("one"))
    with pytest.raises(NodeNameTakenError):
        DiskFile.attach(path, NAME, SIZE)
    disk.close(unlink=False)
    with pytest.raises(ClusterMismatchError):
        DiskFile.attach(path, NAME, SIZE, owner=SegmentOwner("two"))
    with pytest.raises(LeftOverMemoryError):
        DiskFile.attach(path, "another", SIZE, owner=SegmentOwner("one"))
    os.truncate(path, SIZE)
    with pytest.raises(StartupError, match="truncated"):
        DiskFile.attach(path, NAME, SIZE)
    Path(path).write_bytes(b"not a superblock" * 1000)
    with pytest.raises(LeftOverMemoryError):
        DiskFile.attach(path, NAME, SIZE)


def test_a_full_file_system_is_named_with_what_is_left(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StartupError, match=r"No space left on device; its file system has .* left"):
        DiskFile.create(path, NAME, SIZE)
    assert not Path(path).exists()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_short_transfer_is_an_error(
    disk: DiskFile, memory: OwnedSegment, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write(disk, memory, 0)
    whole = getattr(os, call)
    monkeypatch.setattr(os, call, lambda fd, buffers, offset: whole(fd, buffers, offset) - 512)
    with pytest.raises(OSError, match="bytes were moved"):
        (bring if call == "preadv" else write)(disk, memory, 0)
