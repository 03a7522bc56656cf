"""Disks: the limit for gets from them.

The limit is a file without any store: 16 threads read extents of the size of an object straight
into the caller's memory, without the page cache. Nothing is looked up, leased or verified.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.bench.processes import Children, Servers
from kvstore.bench.session import GET, PUT, StoreDriver, Work
from kvstore.bench.timing import fill_randomly, require
from kvstore.memory.disk_file import THREADS

DISK_PARTS: Final = 4
"""Size of the disk, in sizes of the pool."""


@contextlib.contextmanager
def bare_file(pool_bytes: int) -> Iterator[Servers]:
    """Reserve a file in the directory of the children, as that of a node's disk."""
    with Children() as children:
        path = children.directory / "bare"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, DISK_PARTS * pool_bytes)
        yield Servers({"tcp": str(path)}, {})


def disk_flags(directory: Path, pool_bytes: int) -> tuple[str, ...]:
    """Return the flags of a node with a disk in this directory."""
    size = f"--disk-size={DISK_PARTS * pool_bytes}"
    return f"--disk={directory}", size, "--disk-writes-per-day=0"


def empty_directory(children: Children) -> Path:
    directory = children.directory / "disk"
    directory.mkdir()
    return directory


class BareFileDriver(StoreDriver):
    def __init__(self, address: str, mode: str, memory_bytes: int) -> None:
        """``address``: the path of the file."""
        del mode
        self._maps = [mmap.mmap(-1, memory_bytes) for _ in range(2)]  # aligned to pages
        self.source, self.target = (np.frombuffer(mapped, np.uint8) for mapped in self._maps)
        fill_randomly(self.source)
        self.target[:] = 1
        self._fd = os.open(address, os.O_RDWR | os.O_DIRECT)
        self._threads = ThreadPoolExecutor(THREADS)
        self._offsets: dict[str, int] = {}
        self._end = 0

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        assert op in (PUT, GET), op
        for batch in batches:
            for key in batch:
                if key not in self._offsets:
                    self._offsets[key], self._end = self._end, self._end + size
        transfer: Callable[[int, list[memoryview], int], int]
        transfer = os.pwritev if op == PUT else os.preadv
        memory = memoryview(self._maps[0 if op == PUT else 1])

        def copy(index: int, key: str) -> int:
            part = memory[index * size : (index + 1) * size]
            return transfer(self._fd, [part], self._offsets[key])

        def call(number: int) -> int:
            batch = batches[number % len(batches)]
            return sum(self._threads.map(copy, range(len(batch)), batch))

        expected = len(batches[0]) * size
        return Work(call, lambda moved: require(moved == expected, "was not moved"))

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._offsets.pop(key, None)
        if not self._offsets:
            self._end = 0

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)
