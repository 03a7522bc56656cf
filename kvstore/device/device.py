"""One device of a client: copies, waits with a deadline, and page-locked memory.

A copy is queued only after the host has seen the end of the work before it. So no copy waits in a
device queue behind an engine's work, beyond any deadline; and once a call has waited for its own
copies, none of its work remains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.device.copies import CopyList, split_at_windows
from kvstore.device.driver import DeviceDriver, Direction, Event
from kvstore.device.page_locks import WINDOW_BYTES, LockedSegment, PageLocks
from kvstore.device.staging_ring import StagingRing
from kvstore.errors import ClosedError, DeadlineExceededError, DeviceError
from kvstore.runtime.cancellation import current
from kvstore.runtime.clock import uptime

log = logging.getLogger("kvstore.device")

GROUP_BYTES: Final = 32 << 20
"""Bytes copied between checks of deadline, cancellation and generation."""

COPIES_WAIT_S: Final = 5.0
"""Extra time for copies after the deadline; a group takes 1.3 ms at 25 GB/s."""

NAP_MIN_S: Final = 20e-6
NAP_MAX_S: Final = 500e-6


class Device:
    """One device of a client. Threads: any, for all but ``close``."""

    def __init__(self, driver: DeviceDriver, *, ring_bytes: int) -> None:
        """``ring_bytes``: page-locked memory for bytes that cannot be copied in place."""
        self.name: Final = driver.name
        self.driver: Final = driver
        self.ring: Final = StagingRing(driver, ring_bytes)
        self.locks: Final = PageLocks(driver)
        self._failed = False
        self._is_closed = False

    @property
    def has_failed(self) -> bool:
        """Whether copies did not end in time and may still be running."""
        return self._failed

    def wait(self, events: Iterable[Event], deadline: float) -> None:
        """Wait for all these events.

        Raises:
            DeadlineExceededError: not by the deadline; no memory was touched.
            ClosedError: the call was cancelled, or the client is closed.
            DeviceError: the device has failed.
        """
        if self._failed:
            raise self._failure()
        for event in {id(candidate): candidate for candidate in events}.values():
            if not self._wait(event, deadline, stoppable=True):
                raise DeadlineExceededError(
                    f"the work before the copy had not ended on {self.name} by the deadline",
                    quiesced=1,
                )

    def copy(self, way: Direction, copies: CopyList, locked: LockedSegment | None = None) -> Event:
        """Queue copies to wait for. ``locked``: the other side; None: ring or device memory."""
        if self._failed:
            raise self._failure()
        if locked is not None:
            copies = split_at_windows(copies, locked.base, WINDOW_BYTES)
        device, other, sizes = copies
        to, source = (other, device) if way is Direction.SAVE else (device, other)
        return self.driver.copy(way, to, source, sizes)

    def copy_ordinary(self, way: Direction, copies: CopyList) -> Event:
        """As ``copy``; the other side is not page-locked."""
        if self._failed:
            raise self._failure()
        device, other, sizes = copies
        if way is Direction.SAVE:
            return self.driver.copy_ordinary(way, other, device, sizes)
        return self.driver.copy_ordinary(way, device, other, sizes)

    def wait_for_copies(self, event: Event, deadline: float) -> None:
        """Wait until copies have ended. Unless this raises, they touch no memory afterwards.

        Raises:
            DeviceError: they did not end for seconds after the deadline. This client does not use
                the device again, and keeps its page-locked memory.
        """
        if self._failed:
            raise self._failure()
        if not self._wait(event, deadline + COPIES_WAIT_S, stoppable=False):
            self._failed = True
            self.locks.keep()
            log.error("device_failed device=%s reason=copies_do_not_end", self.name)
            raise self._failure()

    @contextmanager
    def slot(self, deadline: float) -> Iterator[memoryview]:
        """Yield a slot of the ring. Its copies have ended when the block is left, unless the device
        has failed; then the slot is kept.

        Raises:
            As ``StagingRing.take``.
        """
        slot = self.ring.take(deadline)
        try:
            yield slot
        finally:
            if not self._failed:
                self.ring.give(slot)

    def close(self) -> None:
        """Release unused page-locked memory. Calls in ``wait`` fail. Idempotent."""
        self._is_closed = True
        self.locks.close()
        self.ring.close()

    def _wait(self, event: Event, deadline: float, *, stoppable: bool) -> bool:
        stop = current() if stoppable else None
        nap = NAP_MIN_S
        while not self.driver.is_done(event):
            if stop is not None:
                stop.check()
            if stoppable and self._is_closed:
                raise ClosedError("the client is closed", quiesced=1)
            if uptime() >= deadline:
                return False
            time.sleep(nap)
            nap = min(2 * nap, NAP_MAX_S)
        return True

    def _failure(self) -> DeviceError:
        return DeviceError(
            f"{self.name} did not finish copies; this client does not use it any more",
            advice="Check the kernel's log for errors of the device, and restart the process.",
            device=self.name,
            quiesced=0,
        )
