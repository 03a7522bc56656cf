"""A medium in a plain file, which survives the host. Unoptimised, and no setting selects it yet.

Clients reach it by TCP alone. Superblock, wipes and watermarks are synced, payloads are not: after
a power failure their checksums decide.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.errors import DeadlineExceededError, StartupError
from kvstore.memory import header as layout
from kvstore.memory.medium import (
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

FILE: Final = MediumTraits(
    name="file", is_opaque=True, survives_process=True, survives_host=True, is_cleared=True,
    read_us=200,
)  # fmt: skip


class FileSegment(RangeMedium):
    """Life cycle: as ``kvstore.memory.segment.OwnedSegment``, at a given path."""

    traits = FILE

    def __init__(
        self, path: str, fd: int, mapped: mmap.mmap, superblock: layout.Superblock
    ) -> None:
        """Internal: use ``create`` or ``attach``."""
        super().__init__(path=path, fd=fd, mapped=mapped, superblock=superblock)
        self._extents = _FileRanges(fd)

    @property
    def private_path(self) -> str:
        return f"{self.path}.key"

    @classmethod
    def create(
        cls, path: str, name: str, size: int, *, owner: layout.SegmentOwner | None = None
    ) -> FileSegment:
        """Create the file, with all its blocks.

        Raises:
            ConfigError, NodeNameTakenError: as ``OwnedSegment.create``.
            StartupError: the file cannot be created, or there is no space; no file remains.
        """
        size = check_request(name, size)
        fd = open_locked(path)
        try:
            os.posix_fallocate(fd, 0, size)
            mapped = mmap.mmap(fd, layout.SUPERBLOCK_BYTES)
            superblock = write_superblock(mapped, name, size, owner or layout.SegmentOwner())
            os.fsync(fd)
            return cls(path, fd, mapped, superblock)
        except BaseException as error:
            unlink_entry(path)
            os.close(fd)
            if not isinstance(error, OSError):
                raise
            raise StartupError(
                f"{path} of {size >> 20} MiB cannot be created: {error.strerror}",
                advice="Give a smaller size, or a path on another file system.",
                path=path,
            ) from error

    @classmethod
    def attach(
        cls, path: str, name: str, size: int, *, owner: layout.SegmentOwner | None = None,
        adopt: bool = False, discard: bool = False, private: bool | None = None,
    ) -> FileSegment | None:  # fmt: skip
        """Attach the file of a previous process. Arguments, result and errors:
        ``OwnedSegment.attach``."""
        size = check_request(name, size)
        fd = open_left(path)
        if fd < 0:
            return None
        try:
            superblock = leftover_superblock(
                fd, path, name, size, None if adopt or discard else owner
            )
            if superblock is None:
                os.close(fd)
                return None
            mapped = mmap.mmap(fd, layout.SUPERBLOCK_BYTES)
            if should_discard(name, f"{path}.key", superblock.uuid, private) or discard:
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
