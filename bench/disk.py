"""Disks: the limit for gets from them, and calls while one is written.

The limit is a file without any store: 16 threads read extents of the size of an object straight
into the caller's memory, without the page cache. Nothing is looked up, leased or verified.

``python -m bench.disk ADDRESS`` is the other client of ``LoadedDriver``. It begins at a byte of its
standard input, and pauses at the next one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.bench.kvstore_driver import KVStoreDriver
from kvstore.bench.processes import Children, Servers
from kvstore.bench.session import BATCH, GET, PUT, StoreDriver, Work
from kvstore.bench.timing import fill_randomly, require
from kvstore.memory.disk_file import THREADS
from kvstore.runtime import interpreter

DISK_PARTS: Final = 4
"""Size of the disk, in sizes of the pool."""
LOAD_BYTES: Final = 500_000_000
"""Bytes a second that ``LoadedDriver``'s other client puts."""
LOAD_SIZE: Final = 1 << 20
"""Bytes of each of its objects."""


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


class LoadedDriver(KVStoreDriver):
    """Makes the calls while another client puts ``LOAD_BYTES`` a second into a full memory."""

    def __init__(self, address: str, mode: str, memory_bytes: int) -> None:
        super().__init__(address, mode, memory_bytes)
        command = interpreter.command("-m", "bench.disk", address)
        self._load = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._is_loaded = False

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        if not self._is_loaded:
            self._switch()
        return super().work(op, batches, size)

    def remove(self, keys: Sequence[str]) -> None:
        self._switch()
        super().remove(keys)

    def close(self) -> None:
        with self._load:
            assert self._load.stdin is not None
            self._load.stdin.close()
        super().close()

    def _switch(self) -> None:
        """Begin or end the load; return when memory is full, or when nothing is put."""
        assert self._load.stdin is not None
        assert self._load.stdout is not None
        self._load.stdin.write(b"1")
        require(self._load.stdout.read(1) == b"1", "was not put by the other client")
        self._is_loaded = not self._is_loaded


def put_load(address: str) -> None:
    driver = KVStoreDriver(address, "shm", BATCH * LOAD_SIZE)
    filling = driver.plain.status().size // (BATCH * LOAD_SIZE) + 1
    number = 0

    def put() -> None:
        nonlocal number
        number += 1
        keys = [f"{os.getpid()}-{number}-{index}" for index in range(BATCH)]
        driver.put_all(keys, LOAD_SIZE)

    while os.read(0, 1):
        for _ in range(filling):
            put()
        os.write(1, b"1")
        due = time.monotonic()
        while not select.select([0], [], [], max(0.0, due - time.monotonic()))[0]:
            put()
            due += BATCH * LOAD_SIZE / LOAD_BYTES
        if os.read(0, 1):
            os.write(1, b"1")
    driver.close()


if __name__ == "__main__":
    put_load(*sys.argv[1:])
