"""A device made of the host's memory, for tests: wrong order is a wrong byte.

Each stream is a queue of steps: one copy of a batch, or a kernel of the test. A step runs only when
somebody looks at an event, one per look, of a stream chosen at random; copies of one batch run in
random order. So a copy that nobody waited for has mostly not happened when its bytes are read, and
reads what was written later. The fake refuses what a driver refuses: host memory that is not
page-locked, and copies across the border of two locked ranges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore.device.driver import Direction, Event, Numbers
from kvstore.device.drivers import add_kind
from kvstore.errors import DeviceError
from kvstore.memory.process_memory import address_of

if TYPE_CHECKING:
    import torch

COMPUTE = 0
"""The stream on which the test's kernels run."""


def add() -> None:
    """Makes ``fake:0`` and so on known in this process: memory of the host that takes a device's
    part in tests of real processes. Who names such memory names a descriptor of any process, so
    kvstore itself must not know the kind."""
    add_kind("fake", lambda number: FakeDriver(f"fake:{number}", eager=True))


class _Event:
    def __init__(self) -> None:
        self.is_done = False


class FakeDriver:
    """Implements ``Driver``. Threads: any."""

    def __init__(
        self, name: str = "cuda:0", *, seed: int = 0, lock_max: int = 1 << 62, eager: bool = False
    ) -> None:
        """
        Args:
            seed: of the order of steps.
            lock_max: the most bytes that ``lock`` locks.
            eager: run every step at once, for tests of something else.
        """
        self.name = name
        self._random = random.Random(seed)
        self._lock_max = lock_max
        self._eager = eager
        self._running = threading.RLock()
        self._streams: dict[int | Direction, deque[list[Callable[[], None]]]] = {}
        self.locked: dict[int, int] = {}
        """Sizes of locked ranges of the host, by address."""
        self._owned: dict[int, int] = {}
        """Sizes of ``locked_memory`` by address."""
        self.memory: dict[int, int] = {}
        """Sizes of the device's own memory, by address."""
        self._kept: list[object] = []
        self._files: dict[int, tuple[mmap.mmap, int]] = {}
        """Allocated and opened memory by address, with the descriptor behind it."""
        self.is_stuck = False
        """While it is, no step runs."""
        self.held: set[int | Direction] = set()
        """Streams of which no step runs: their first one takes long."""
        self.copied_bytes = 0

    # --- what a test does ---------------------------------------------------------------------

    def array(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """New memory of the device. The test reads and writes it as host memory, in a ``launch`` or
        when nothing runs."""
        array = np.zeros(size, np.uint8)
        self._kept.append(array)
        self.memory[array.ctypes.data] = size
        return array

    def launch(self, kernel: Callable[[], None], stream: int = COMPUTE) -> None:
        """Queues a kernel of the test."""
        self._queue(stream, [kernel])

    def finish(self) -> None:
        """Runs all that is queued."""
        while self._step():
            pass

    def forget(self) -> None:
        """Drops all that is queued, when its memory may be gone."""
        with self._running:
            self._streams.clear()

    @property
    def is_idle(self) -> bool:
        return not any(self._streams.values())

    @property
    def copies_left(self) -> bool:
        """Whether copies are queued."""
        return any(self._streams.get(way) for way in Direction)

    @property
    def locked_own_bytes(self) -> int:
        """Of ``locked_memory`` that was not released."""
        return sum(self._owned.values())

    # --- Driver -------------------------------------------------------------------------------

    def record_event(self, stream: int | None = None) -> Event:
        return self._mark(COMPUTE if stream is None else stream)

    def is_done(self, event: Event) -> bool:
        if not cast("_Event", event).is_done:
            self._step()
        return cast("_Event", event).is_done

    def copy(self, way: Direction, to: Numbers, source: Numbers, sizes: Numbers) -> Event:
        return self._copy(way, to, source, sizes, [*self.locked.items(), *self._owned.items()])

    def copy_ordinary(self, way: Direction, to: Numbers, source: Numbers, sizes: Numbers) -> Event:
        return self._copy(way, to, source, sizes, [(0, 1 << 62)])

    def lock(self, address: int, size: int) -> bool:
        with self._running:
            if sum(self.locked.values()) + size > self._lock_max:
                return False
            assert not any(
                at < address + size and address < at + length for at, length in self.locked.items()
            ), "locked twice"
            self.locked[address] = size
            return True

    def unlock(self, address: int) -> None:
        with self._running:
            assert not self.copies_left, "unlocked while a copy may use it"
            del self.locked[address]

    def locked_memory(self, size: int) -> memoryview:
        array = np.zeros(size, np.uint8)
        memory = memoryview(array)  # type: ignore[arg-type]
        self._kept.append(array)
        self._owned[array.ctypes.data] = size
        return memory

    def release(self, memory: memoryview) -> None:
        assert not self.copies_left, "released while a copy may use it"
        del self._owned[address_of(memory)]

    def empty(self, size: int) -> torch.Tensor:
        import torch

        tensor = torch.zeros(size, dtype=torch.uint8)
        self._kept.append(tensor)
        self.memory[tensor.data_ptr()] = size
        return tensor

    def tensor_over(self, address: int, size: int, keep: object) -> torch.Tensor:
        import torch

        buffer = (ctypes.c_char * size).from_address(address)
        buffer.keep = keep  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def allocate(self, size: int) -> int:
        fd = os.memfd_create("kvstore-fake-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self._map(fd, size)

    def free(self, address: int) -> None:
        assert self.is_idle, "freed while a copy may use it"
        del self.memory[address]
        _, fd = self._files.pop(address)  # unmapped when nothing refers to it
        os.close(fd)

    def export(self, address: int) -> str:
        return f"{os.getpid()}/{self._files[address][1]}/{self.memory[address]}"

    def open(self, handle: str) -> int:
        try:
            pid, number, size = map(int, handle.split("/"))
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            return self._map(fd, size)
        except (OSError, ValueError) as error:
            raise DeviceError(f"{handle} cannot be opened: {error}", device=self.name) from None

    def close(self, address: int) -> None:
        self.free(address)

    def _map(self, fd: int, size: int) -> int:
        mapped = mmap.mmap(fd, size)
        address = address_of(memoryview(mapped))
        self._files[address] = mapped, fd
        self.memory[address] = size
        return address

    def _copy(
        self,
        way: Direction,
        to: Numbers,
        source: Numbers,
        sizes: Numbers,
        host: list[tuple[int, int]],
    ) -> Event:
        steps: list[Callable[[], None]] = []
        for into, out_of, size in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            assert size > 0
            sides = [self._is_within(each, size, self.memory.items()) for each in (into, out_of)]
            for address, is_device in zip((into, out_of), sides, strict=True):
                if not is_device and not self._is_within(address, size, host):
                    raise DeviceError(
                        f"{size} bytes at {address:#x} are not page-locked in one piece",
                        device=self.name,
                    )
            if not any(sides):
                raise DeviceError("a copy without the device", device=self.name)
            steps.append(partial(self._move, into, out_of, size))
        self._random.shuffle(steps)
        with self._running:
            for step in steps:
                self._queue(way, [step])
            return self._mark(way)

    @staticmethod
    def _is_within(address: int, size: int, ranges: Any) -> bool:
        return any(at <= address and address + size <= at + length for at, length in ranges)

    def _move(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)
        self.copied_bytes += size

    def _mark(self, stream: int | Direction) -> Event:
        event = _Event()

        def passed() -> None:
            event.is_done = True

        self._queue(stream, [passed])
        return event

    def _queue(self, stream: int | Direction, steps: list[Callable[[], None]]) -> None:
        with self._running:
            self._streams.setdefault(stream, deque()).append(steps)
            while self._eager and self._step():
                pass

    def _step(self) -> bool:
        """Runs the next step of one stream; False: nothing is queued, or the device is stuck."""
        with self._running:
            streams = self._streams.items()
            waiting = [queue for name, queue in streams if queue and name not in self.held]
            if not waiting or self.is_stuck:
                return False
            for step in self._random.choice(waiting).popleft():
                step()
            return True
