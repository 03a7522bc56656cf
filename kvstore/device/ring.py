"""Page-locked memory through which bytes go that a device cannot copy where they are."""

from __future__ import annotations

import threading
from typing import Final

from kvstore.clocks import uptime
from kvstore.device.driver import Driver
from kvstore.errors import DeadlineExceededError

SLOTS: Final = 8
"""Equal parts of a ring. Each transfer uses one or two, so that one is filled while another is
emptied."""


class Ring:
    """A fixed amount of page-locked memory, allocated at its first use. Threads: any."""

    def __init__(self, driver: Driver, size: int) -> None:
        """``size``: in bytes, a multiple of ``SLOTS``."""
        self.slot_bytes: Final = size // SLOTS
        self._driver = driver
        self._size = size
        self._memory: memoryview | None = None
        self._free: list[memoryview] = []
        self._changing = threading.Condition()
        self.taken = 0

    def try_take(self) -> memoryview | None:
        """A free slot, or None."""
        with self._changing:
            if self._memory is None:
                self._allocate()
            return self._pop() if self._free else None

    def take(self, deadline: float) -> memoryview:
        """A slot, when one is free. The caller holds none, or others could wait for it for ever.

        Args:
            deadline: a ``uptime()`` value.

        Raises:
            DeadlineExceededError
        """
        with self._changing:
            if self._memory is None:
                self._allocate()
            if not self._changing.wait_for(lambda: self._free, max(0.0, deadline - uptime())):
                raise DeadlineExceededError(
                    "no page-locked memory became free by the deadline",
                    advice="Give the client a larger device_ring.",
                    settled=1,
                )
            return self._pop()

    def give(self, slot: memoryview) -> None:
        """Gives a slot back; no copy of it is under way."""
        with self._changing:
            self._free.append(slot)
            self.taken -= 1
            self._changing.notify()

    def close(self) -> None:
        """Releases the memory, unless a slot has not been given back."""
        with self._changing:
            memory, self._memory = self._memory, None
            self._free.clear()
            if memory is not None and not self.taken:
                self._driver.release(memory)

    def _pop(self) -> memoryview:
        self.taken += 1
        return self._free.pop()

    def _allocate(self) -> None:
        """The caller holds the lock."""
        memory = self._memory = self._driver.locked_memory(self._size)
        size = self.slot_bytes
        self._free = [memory[at : at + size] for at in range(0, SLOTS * size, size)]
