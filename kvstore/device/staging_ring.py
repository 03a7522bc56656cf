"""Page-locked memory for bytes that a device cannot copy in place."""

from __future__ import annotations

import threading
import time
from typing import Final

from kvstore.device.driver import DeviceDriver
from kvstore.errors import ClosedError, DeadlineExceededError
from kvstore.runtime.clock import uptime

SLOTS: Final = 8
"""Equal parts of a ring. Each transfer uses one or two, to fill one while the other is emptied."""

RING_BYTES: Final = 64 << 20
"""Page-locked memory per process and GPU; enough for four threads with two slots each."""

CHECK_INTERVAL_S: Final = 0.001
"""Interval in which a waiting call checks for a slot: slots are used for milliseconds."""


class StagingRing:
    """A fixed amount of page-locked memory, allocated at its first use. Threads: any."""

    def __init__(self, driver: DeviceDriver, size: int) -> None:
        """Create a ring of ``size`` bytes, a multiple of ``SLOTS``."""
        self.slot_bytes: Final = size // SLOTS
        self._driver = driver
        self._size = size
        self._memory: memoryview | None = None
        self._free: list[memoryview] = []
        self._changing = threading.Lock()
        self._is_closed = False
        self.taken = 0

    def take(self, deadline: float) -> memoryview:
        """Wait for a free slot, holding none. Raises ClosedError, DeadlineExceededError."""
        while True:
            with self._changing:
                self._prepare()
                if self._free:
                    self.taken += 1
                    return self._free.pop()
            remaining = deadline - uptime()
            if remaining <= 0:
                raise DeadlineExceededError(
                    "no page-locked memory became free by the deadline",
                    advice="Copy fewer tensors at once.",
                    quiesced=1,
                )
            time.sleep(min(remaining, CHECK_INTERVAL_S))

    def give(self, slot: memoryview) -> None:
        """Return a slot that no copy uses."""
        with self._changing:
            self._free.append(slot)
            self.taken -= 1
            if self._is_closed:
                self._release()

    def close(self) -> None:
        """Release the memory once all slots are free. Idempotent."""
        with self._changing:
            self._is_closed = True
            self._release()

    def _release(self) -> None:
        """Release the memory if no slot is used. The caller holds the lock."""
        if self._memory is not None and not self.taken:
            memory, self._memory = self._memory, None
            self._free.clear()
            self._driver.release(memory)

    def _prepare(self) -> None:
        """Allocate the memory at the first call. The caller holds the lock."""
        if self._is_closed:
            raise ClosedError("the client is closed", quiesced=1)
        if self._memory is None:
            memory = self._memory = self._driver.locked_memory(self._size)
            size = self.slot_bytes
            self._free = [memory[at : at + size] for at in range(0, SLOTS * size, size)]
