"""The file of a node on a disk, which survives the host and is read and written without a cache.

    offset 0      superblock, as of any segment
           4096   extents, aligned to ``DISK_ALIGN``, up to the size of the segment
           size   the map: a byte for each 8 KiB, 0 if no extent begins there

The map is written back by the kernel and may be outdated after a power failure, so the header at an
offset decides whether an extent begins there. A byte of the map has the hour of the last use, which
gives the order of recovery. Extents are written without a sync: after a power failure, checksums
decide. Wipes and watermarks are synced before they are reported.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.calls import HEADER_MAC_BYTES, CopyOutcome, DiskLimits, SegmentOffer, Version
from kvstore.errors import DeadlineExceededError, StartupError
from kvstore.memory import header as layout
from kvstore.memory.header import DISK_ALIGN, HEADER_BYTES, Header
from kvstore.memory.medium import (
    Medium,
    MediumTraits,
    RangeMedium,
    check_request,
    discard_objects,
    leftover_superblock,
    should_discard,
    write_superblock,
)
from kvstore.memory.shm_entries import open_left, open_locked, unlink_entry
from kvstore.runtime.clock import uptime
from kvstore.runtime.formatting import size_text

log = logging.getLogger("kvstore.node")

FILE: Final = MediumTraits(name="disk", is_opaque=True, survives_process=True, is_cleared=True)

THREADS: Final = 16
"""Reads and writes of one disk at a time."""

MAP_BLOCK: Final = 2 * DISK_ALIGN
"""Extents of at least one payload byte and a header are longer than half of this, and those that
the master places are at least as long: at most one begins in each block."""

HOURS: Final = 127
HEADERS_PER_STEP: Final = 4_096
"""Headers of one step of recovery: 0.1 to 0.2 s."""

HEADERS_PER_CALL: Final = 64
"""Headers that one thread reads in one call. With one each, a header costs 1.6 times as much."""


class DiskFile(RangeMedium):
    """Life cycle: as ``kvstore.memory.segment.OwnedSegment``, at a given path.

    ``write_behind`` and ``bring`` copy between the file and the memory of the node; any thread may
    call them, for different extents.
    """

    traits = FILE

    def __init__(
        self, path: str, fd: int, mapped: mmap.mmap, superblock: layout.Superblock
    ) -> None:
        """Internal: use ``create`` or ``attach``."""
        super().__init__(path=path, fd=fd, mapped=mapped, superblock=superblock)
        self.limits = DiskLimits(0, 0)
        """As offered to the master; set before the node joins."""
        self._extents = _FileRanges(fd)
        self._map_mapped = mmap.mmap(fd, map_bytes(self.size), offset=self.size)
        self._map = memoryview(self._map_mapped)
        self._direct = _open_direct(path)
        self._scratch = threading.local()
        self._bringing = threading.Lock()
        self._abandoned: set[int] = set()
        """Targets in memory of copies that are not wanted any more."""
        self.threads: Final = ThreadPoolExecutor(THREADS, "kvstore-disk")

    @property
    def private_path(self) -> str:
        return f"{self.path}.key"

    def make_offer(self) -> SegmentOffer:
        return super().make_offer()._replace(disk=self.limits)

    @classmethod
    def create(
        cls, path: str, name: str, size: int, *, owner: layout.SegmentOwner | None = None
    ) -> DiskFile:
        """Create the file, with all its blocks.

        Raises:
            ConfigError, NodeNameTakenError: as ``OwnedSegment.create``.
            StartupError: the file cannot be created, or there is no space; no file remains.
        """
        size = check_request(name, size)
        fd = open_locked(path)
        try:
            os.posix_fallocate(fd, 0, size + map_bytes(size))
            mapped = mmap.mmap(fd, layout.SUPERBLOCK_BYTES)
            superblock = write_superblock(mapped, name, size, owner or layout.SegmentOwner())
            os.fsync(fd)
            return cls(path, fd, mapped, superblock)
        except BaseException as error:
            unlink_entry(path)
            os.close(fd)
            if not isinstance(error, OSError):
                raise
            room = os.statvfs(os.path.dirname(path))
            raise StartupError(
                f"{path} of {size_text(size)} cannot be created: {error.strerror}; its file system "
                f"has {size_text(room.f_bavail * room.f_frsize)} left",
                advice="Give a smaller --disk-size, or another directory with --disk.",
                path=path,
            ) from error

    @classmethod
    def attach(
        cls, path: str, name: str, size: int, *, owner: layout.SegmentOwner | None = None,
        adopt: bool = False, private: bool | None = None,
    ) -> DiskFile | None:  # fmt: skip
        """Attach the file of a previous process. Arguments, result and errors:
        ``OwnedSegment.attach``. A file that is shorter than its superblock says is refused. To
        discard a file, ``create`` another one."""
        size = check_request(name, size)
        fd = open_left(path)
        if fd < 0:
            return None
        try:
            superblock = leftover_superblock(fd, path, name, size, None if adopt else owner)
            if superblock is None:
                os.close(fd)
                return None
            if (length := os.fstat(fd).st_size) < size + map_bytes(size):
                raise StartupError(
                    f"{path} was truncated to {length} of {size + map_bytes(size)} bytes",
                    advice="Remove it; the node creates an empty one.",
                    path=path,
                )
            mapped = mmap.mmap(fd, layout.SUPERBLOCK_BYTES)
            if should_discard(name, f"{path}.key", superblock.uuid, private):
                superblock = discard_objects(mapped, superblock)
            segment = cls(path, fd, mapped, superblock)
        except BaseException:
            os.close(fd)
            raise
        segment.attached = True
        segment.bump_generation()
        return segment

    def _persist(self) -> None:
        os.fdatasync(self._fd)  # covers the mapped superblock, too

    def _end_access(self) -> None:
        self.threads.shutdown()
        self._map.release()
        self._map_mapped.close()
        os.close(self._direct)

    # --- copies -----------------------------------------------------------------------------------

    def write_behind(
        self, memory: Medium, source: int, target: int, size: int, version: Version
    ) -> CopyOutcome:
        """Copy an object of the node's memory to ``target``. Raises OSError: the disk failed."""
        extent = memory.memory[source : source + layout.extent_bytes(size)]
        raw = bytes(extent[:HEADER_BYTES])
        header = layout.unpack(raw, memory.seed, source)
        if header is None or not _is_version(header, size, version):
            return CopyOutcome.CHANGED
        if memory.header_filter is not None:
            end = layout.header_mac_offset(header)
            if not memory.header_filter(source, header, raw[end : end + HEADER_MAC_BYTES]):
                return CopyOutcome.CHANGED
        page = self._page()
        page[:HEADER_BYTES] = bytes(HEADER_BYTES)
        layout.pack_into(page, header, self.seed, target)
        self._move(os.pwritev, page, extent, target)
        if bytes(extent[: len(layout.WIPE)]) != raw[: len(layout.WIPE)]:
            return CopyOutcome.CHANGED  # evicted meanwhile
        self.note_use(target)
        return CopyOutcome.DONE

    def bring(
        self, memory: Medium, source: int, target: int, size: int, version: Version
    ) -> CopyOutcome:
        """Copy an object to ``target`` in the node's memory, which nobody else writes to. Raises
        OSError: the disk failed."""
        extent = memory.memory[target : target + layout.extent_bytes(size)]
        page = self._page()
        self._move(os.preadv, page, extent, source)
        header = layout.unpack(page, self.seed, source)
        if header is None or not _is_version(header, size, version):
            return CopyOutcome.CHANGED
        payload = extent[HEADER_BYTES : HEADER_BYTES + size]
        if xxh3_64_intdigest(payload) != header.payload_checksum:
            return CopyOutcome.CORRUPT
        packed = bytearray(HEADER_BYTES)
        end = layout.pack_into(packed, header, memory.seed, target)
        layout.write_header_mac(packed, end, memory.sign(target, header))
        with self._bringing:
            if target in self._abandoned:
                return CopyOutcome.CHANGED
            extent[:HEADER_BYTES] = packed
        self.note_use(source)
        return CopyOutcome.DONE

    def abandon(self, target: int, *, abandoned: bool = True) -> None:
        """Have a running ``bring`` to ``target`` write no header, or any later one."""
        with self._bringing:
            (self._abandoned.add if abandoned else self._abandoned.discard)(target)

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], page: memoryview,
        extent: memoryview, offset: int,
    ) -> None:  # fmt: skip
        """Read or write an extent whose header is in ``page``, and the payload in ``extent``."""
        padding = -len(extent) % DISK_ALIGN
        rest = page[HEADER_BYTES : HEADER_BYTES + padding]
        buffers = [page[:HEADER_BYTES], extent[HEADER_BYTES:], *([rest] if padding else [])]
        while buffers:
            moved = call(self._direct, buffers, offset)
            if not moved:
                raise OSError(errno.EIO, f"no bytes were moved at {offset}")
            offset += moved
            while buffers and moved >= len(buffers[0]):
                moved -= len(buffers.pop(0))
            if moved:
                buffers[0] = buffers[0][moved:]

    def _page(self) -> memoryview:
        """A page of memory for the header, aligned, of this thread."""
        page: memoryview | None = getattr(self._scratch, "page", None)
        if page is None:
            page = self._scratch.page = memoryview(mmap.mmap(-1, DISK_ALIGN))
        return page

    # --- headers ----------------------------------------------------------------------------------

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> int:
        rows = [
            (offset, Version(epoch, counter))
            for offset, epoch, counter in zip(offsets, epochs, counters, strict=True)
            if layout.SUPERBLOCK_BYTES <= offset <= self.size - DISK_ALIGN
        ]
        wiped = sum(self.threads.map(self._wipe_one, rows))
        if rows:
            self._persist()
        return wiped

    def _wipe_one(self, row: tuple[int, Version]) -> bool:
        offset, version = row
        header = self._read_header(offset)
        if header is None or (header.epoch, header.counter) != version:
            return False
        page = self._page()
        page[:] = bytes(DISK_ALIGN)
        os.pwrite(self._direct, page, offset)
        self._map[offset // MAP_BLOCK] = 0
        return True

    def _read_headers(self, offsets: Sequence[int]) -> list[Header | None]:
        return [self._read_header(offset) for offset in offsets]

    def _read_header(self, offset: int) -> Header | None:
        page = self._page()
        if os.preadv(self._direct, [page], offset) != DISK_ALIGN:
            raise OSError(errno.EIO, f"no page at {offset}")
        return layout.unpack(page, self.seed, offset)

    def note_use(self, offset: int) -> None:
        """Record in the map that an extent begins at ``offset``, and was used in this hour."""
        hour = int(time.time() // 3600) % HOURS
        self._map[offset // MAP_BLOCK] = 1 + 2 * hour + (offset % MAP_BLOCK != 0)

    def offsets(self) -> list[int]:
        """List where extents begin by the map, those used most recently first."""
        import numpy as np  # slow to import, and a node without disks does not need it

        uses = np.frombuffer(self._map, np.uint8)
        blocks = np.flatnonzero(uses)
        values = uses[blocks].astype(np.int64) - 1
        ages = (int(time.time() // 3600) - values // 2) % HOURS
        places = blocks * MAP_BLOCK + values % 2 * DISK_ALIGN
        found: list[int] = places[np.argsort(ages, kind="stable")].tolist()
        last = self.size - DISK_ALIGN
        return [offset for offset in found if layout.SUPERBLOCK_BYTES <= offset <= last]

    def headers(self, offsets: Sequence[int]) -> list[tuple[int, Header]]:
        """Read the valid headers at these offsets. Raises OSError."""
        slices = [
            offsets[at : at + HEADERS_PER_CALL] for at in range(0, len(offsets), HEADERS_PER_CALL)
        ]
        found = chain.from_iterable(self.threads.map(self._read_headers, slices))
        return [
            (offset, header)
            for offset, header in zip(offsets, found, strict=True)
            if header is not None and offset + layout.extent_bytes(header.payload_size) <= self.size
        ]

    def scan(self) -> Iterator[tuple[int, Header]]:
        """As ``header.scan``, of the offsets in the map. Only the node writes here, so there is no
        filter."""
        yield from self.headers(sorted(self.offsets()))


def map_bytes(size: int) -> int:
    """The size of the map of a file of ``size`` bytes."""
    return (-(-size // MAP_BLOCK) + mmap.PAGESIZE - 1) & -mmap.PAGESIZE


def _is_version(header: Header, size: int, version: Version) -> bool:
    return (header.epoch, header.counter) == version and header.payload_size == size


def _open_direct(path: str) -> int:
    """Open the file without the page cache, or with it if its file system cannot do without."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log.warning("disk_cached path=%s: its file system has no direct reads and writes", path)
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


class _FileRanges:
    """Implements ``RangeAccess``. A system call is not interrupted at the deadline."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None:
        self._run(os.preadv, ranges, deadline)

    def write(self, ranges: Sequence[tuple[int, memoryview]], deadline: float) -> None:
        self._run(os.pwritev, ranges, deadline)

    def _run(
        self, call: Callable[[int, list[memoryview], int], int],
        ranges: Sequence[tuple[int, memoryview]], deadline: float,
    ) -> None:  # fmt: skip
        for offset, buffer in ranges:
            done = 0
            while done < len(buffer):
                if uptime() > deadline:
                    raise DeadlineExceededError("a file was slower than the deadline")
                moved = call(self._fd, [buffer[done:]], offset + done)
                if not moved:
                    raise OSError("the file is shorter than its segment")
                done += moved
