"""Checks of the directories of ``--disk``: space, speed without the page cache, and wear."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstore.console.diagnostics.findings import Finding, of_row, ok
from kvstore.memory.disk_file import THREADS
from kvstore.runtime.formatting import size_text

PIECE_BYTES: Final = 1 << 20
PIECES: Final = 128
MEASURED_S: Final = 2.0
"""Timeout of the measurement, after which the rest of the file is left out."""

RATED_YEARS: Final = 5
"""Warranty of most drives, for which their writes a day are stated."""

READ_MIN: Final = 500_000_000
"""Bytes a second below which loading is slower than computing for most models."""


def disks(directories: str, size: int, writes_per_day: float) -> Iterator[Finding]:
    """Check each directory of ``--disk``; see the settings of a node."""
    for directory in filter(None, directories.split(",")):
        try:
            yield from _check(directory, size, writes_per_day)
        except OSError as error:
            yield of_row("disk_not_writable", directory=directory, reason=error.strerror)


def _check(directory: str, size: int, writes_per_day: float) -> Iterator[Finding]:
    room = os.statvfs(directory)
    # The file of a node that ran before is allocated, and is used again.
    owned = sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory) if entry.is_file())
    free = room.f_bavail * room.f_frsize + owned
    if free < size:
        has, wants = size_text(free), size_text(size)
        yield of_row("disk_small", directory=directory, has=has, wants=wants)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="kvstore-doctor-") as file:
        try:
            fd = os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            yield of_row("disk_cached", directory=directory)
            return
        try:
            written, read = _measure(fd)
        finally:
            os.close(fd)
    speed = f"{directory}: {size_text(written)}/s written, {size_text(read)}/s read"
    if read < READ_MIN:
        yield of_row("disk_slow", speed=speed)
        return
    a_day = writes_per_day * size / (room.f_blocks * room.f_frsize)
    wear = ""
    if a_day:
        wear = (
            f"; up to {a_day:.2g} drive writes a day: a drive rated for 1 a day over {RATED_YEARS}"
            f" years lasts {RATED_YEARS / a_day:.1f} years"
        )
    yield ok(f"{speed}{wear}")


def _measure(fd: int) -> tuple[int, int]:
    """Write and read a file; return the bytes per second of both."""
    os.posix_fallocate(fd, 0, PIECES * PIECE_BYTES)
    with mmap.mmap(-1, THREADS * PIECE_BYTES) as memory, ThreadPoolExecutor(THREADS) as threads:
        view = memoryview(memory)
        view[:] = os.urandom(PIECE_BYTES) * THREADS

        def rate(transfer: Callable[[int, list[memoryview], int], int]) -> int:
            start = time.monotonic()

            def copy(thread: int) -> int:
                piece = view[thread * PIECE_BYTES : (thread + 1) * PIECE_BYTES]
                done = 0
                for index in range(thread, PIECES, THREADS):
                    if time.monotonic() - start > MEASURED_S:
                        break
                    done += transfer(fd, [piece], index * PIECE_BYTES)
                return done

            copied = sum(threads.map(copy, range(THREADS)))
            return int(copied / (time.monotonic() - start))

        rates = rate(os.pwritev), rate(os.preadv)
        view.release()
    return rates
