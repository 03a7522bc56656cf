"""Page locks of a device's driver on mapped segments of this host.

Locking a large segment takes seconds, and the system may refuse it. So memory is locked in windows,
each at its first copy; bytes of other windows go through the ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.device.driver import DeviceDriver
from kvstore.memory.process_memory import address_of

WINDOW_BYTES: Final = 256 << 20
"""Small enough for a call not to wait long for the first lock of a window."""


class LockedSegment:
    def __init__(self, memory: memoryview, is_mounted: Callable[[], bool]) -> None:
        self.memory = memory
        """Keeps the segment mapped while windows are locked."""
        self.base = address_of(memory)
        self.is_mounted = is_mounted
        self.windows: dict[int, bool] = {}
        """Whether each window could be locked, by its number."""
        self.users = 0
        self.locking = threading.Lock()


class PageLocks:
    """The locked segments of one device. Threads: any."""

    def __init__(self, driver: DeviceDriver) -> None:
        self._driver = driver
        self._segments: dict[int, LockedSegment] = {}
        """By the ``id`` of their mapped memory, which an entry here keeps alive."""
        self._changing = threading.Lock()
        self._is_closed = False
        self._is_kept = False

    @contextmanager
    def of(self, memory: memoryview, is_mounted: Callable[[], bool]) -> Iterator[LockedSegment]:
        """Yield the segment of this mapping, whose windows stay locked within the block.

        ``sweep`` unlocks it once ``is_mounted`` (``Transport.mount_checker``) is False.
        """
        with self._changing:
            segment = self._segments.get(id(memory))
            if segment is None:
                segment = self._segments[id(memory)] = LockedSegment(memory, is_mounted)
            segment.users += 1
        try:
            yield segment
        finally:
            with self._changing:
                segment.users -= 1
            if self._is_closed:
                self._unlock(lambda segment: True)

    def lock(self, segment: LockedSegment, offset: int, size: int) -> bool:
        """Lock the windows of a range; False: one of them could not be locked, now or earlier."""
        numbers = range(offset // WINDOW_BYTES, (offset + size - 1) // WINDOW_BYTES + 1)
        return all(
            segment.windows[number] if number in segment.windows else self._lock(segment, number)
            for number in numbers
        )

    def _lock(self, segment: LockedSegment, number: int) -> bool:
        start = number * WINDOW_BYTES
        size = min(WINDOW_BYTES, len(segment.memory) - start)
        with segment.locking:
            if number not in segment.windows and not self._is_closed:
                segment.windows[number] = self._driver.lock(segment.base + start, size)
            return segment.windows.get(number, False)

    def sweep(self) -> None:
        """Unlock departed segments, as soon as no copy uses them."""
        self._unlock(lambda segment: not segment.is_mounted())

    def keep(self) -> None:
        """Keep everything locked from now on, because copies may run forever."""
        with self._changing:
            self._is_kept = True

    def close(self) -> None:
        """Unlock all segments; one in use when its last user leaves. Idempotent."""
        with self._changing:
            self._is_closed = True
        self._unlock(lambda segment: True)

    def _unlock(self, is_due: Callable[[LockedSegment], bool]) -> None:
        with self._changing:
            due = {
                name: each
                for name, each in self._segments.items()
                if not each.users and not self._is_kept and is_due(each)
            }
            for name in due:
                del self._segments[name]
        for segment in due.values():
            for number, is_locked in segment.windows.items():
                if is_locked:
                    self._driver.unlock(segment.base + number * WINDOW_BYTES)
