"""Segments of this host whose memory a device's driver has page-locked.

Locking all of a large segment takes seconds, and the system may refuse it. So memory is locked in
windows, each when its first copy is made. The bytes of a window that is not locked go through the
ring (``kvstore.device.staging_ring``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.device.driver import DeviceDriver
from kvstore.memory.process_memory import address_of

WINDOW_BYTES: Final = 256 << 20
"""Small enough that the call that meets a window first does not wait long for its pages."""


class LockedSegment:
    """One mapped segment."""

    def __init__(self, memory: memoryview, is_mounted: Callable[[], bool]) -> None:
        self.memory = memory
        """Keeps the segment mapped for as long as parts of it are locked."""
        self.base = address_of(memory)
        self.is_mounted = is_mounted
        self.windows: dict[int, bool] = {}
        """Whether each window could be locked, by its number."""
        self.users = 0
        self.locking = threading.Lock()


class PageLocks:
    """See the module. Threads: any."""

    def __init__(self, driver: DeviceDriver) -> None:
        self._driver = driver
        self._segments: dict[int, LockedSegment] = {}
        """Segments by the ``id`` of their mapped memory, which an entry here keeps alive."""
        self._changing = threading.Lock()
        self._is_closed = False
        self._is_kept = False

    @contextmanager
    def of(self, memory: memoryview, is_mounted: Callable[[], bool]) -> Iterator[LockedSegment]:
        """The segment of this memory. Its windows stay locked until the block is left.

        Args:
            memory: all of it, the same object for each mapping.
            is_mounted: see ``Transport.mount_checker``; once it says no, ``sweep`` unlocks the
                memory.
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
        """Locks the windows of a range; False: one of them could not be locked, now or for good."""
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
        """Unlocks segments that are gone, as soon as no copy uses them."""
        self._unlock(lambda segment: not segment.is_mounted())

    def keep(self) -> None:
        """Called when copies may run for ever: from now on nothing is unlocked."""
        with self._changing:
            self._is_kept = True

    def close(self) -> None:
        """Unlocks all segments; one in use is unlocked when its last user leaves. Idempotent."""
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
