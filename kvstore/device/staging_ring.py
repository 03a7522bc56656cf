"""Page-locked memory through which bytes go that a device cannot copy where they are."""

from __future__ import annotations

import threading
import time
from typing import Final

from kvstore.device.driver import DeviceDriver
from kvstore.errors import ClosedError, DeadlineExceededError
from kvstore.runtime.clock import uptime

SLOTS: Final = 8
"""Equal parts of a ring. Each transfer uses one or two, so that one is filled while another is
emptied."""

RING_BYTES: Final = 64 << 20
"""Page-locked memory of a process for each GPU, for bytes that it cannot copy where they are: those
of nodes on other hosts, or of their clients. Four threads that each fill one slot while another is
emptied do not wait."""

LOOK_AGAIN_S: Final = 0.001
"""How often a call that waits for a slot looks for one: a slot is taken for milliseconds."""


class StagingRing:
    """A fixed amount of page-locked memory, allocated at its first use. Threads: any."""

    def __init__(self, driver: DeviceDriver, size: int) -> None:
        """``size``: in bytes, a multiple of ``SLOTS``."""
        self.slot_bytes: Final = size // SLOTS
        self._driver = driver
        self._size = size
        self._memory: memoryview | None = None
        self._free: list[memoryview] = []
        self._changing = threading.Lock()
        self._is_closed = False
        self.taken = 0

    def take(self, deadline: float) -> memoryview:
        """Waits for a free slot. The caller must hold none, or callers could wait for each other.

        Args:
            deadline: a ``uptime()`` value.

        Raises:
            ClosedError, DeadlineExceededError
        """
        while True:
            with self._changing:
                self._prepare()
                if self._free:
                    self.taken += 1
                    return self._free.pop()
            left = deadline - uptime()
            if left <= 0:
                raise DeadlineExceededError(
                    "no page-locked memory became free by the deadline",
                    advice="Move fewer tensors at once.",
                    settled=1,
                )
            time.sleep(min(left, LOOK_AGAIN_S))

    def give(self, slot: memoryview) -> None:
        """Gives a slot back; no copy of it is under way."""
        with self._changing:
            self._free.append(slot)
            self.taken -= 1
            if self._is_closed:
                self._release()

    def close(self) -> None:
        """Releases the memory, when all slots have been given back. Idempotent."""
        with self._changing:
            self._is_closed = True
            self._release()

    def _release(self) -> None:
        """Releases the memory if no slot is taken. The caller holds the lock."""
        if self._memory is not None and not self.taken:
            memory, self._memory = self._memory, None
            self._free.clear()
            self._driver.release(memory)

    def _prepare(self) -> None:
        """Allocates the memory at the first call. The caller holds the lock."""
        if self._is_closed:
            raise ClosedError("the client is closed", settled=1)
        if self._memory is None:
            memory = self._memory = self._driver.locked_memory(self._size)
            size = self.slot_bytes
            self._free = [memory[at : at + size] for at in range(0, SLOTS * size, size)]
