"""``BusyPollGauge`` decides whether to poll before sleeping.

Polling for a reply saves a wake-up if the peer runs on another core. With more runnable threads
than cores it is expensive: after a yield the kernel runs another process for a whole time slice, 3
to 20 ms. Polling pauses after such a loss, for longer after each, and does not resume while the
host has more runnable threads than cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

HIT, MISS, PREEMPTED = 1, 0, -1
"""Outcomes of polling, also in ``native/sockets.h``: the event came while polling; not in time;
another process used the core for ``PREEMPTED_S``."""

PREEMPTED_S = 1e-3
"""Shorter than a time slice of the kernel, longer than the reply time of a peer on the same
core."""

PAUSE_MIN_S = 0.02
PAUSE_MAX_S = 2.0

MISSES_MAX = 4
"""After this many consecutive misses the next attempt comes 2**MISSES_MAX waits later, so at worst
one call of 17 is slow. With 10, a client that had put a few large batches did not poll for the next
thousand calls. Relative to Mooncake, a put of 1 MiB over tcp went from 1.44 to 1.65, one of 64 x 4
KiB stayed (1.27, 1.28); with eight clients on two cores no difference can be seen."""


def is_crowded() -> bool:
    """Return whether the host has more runnable threads than cores. Takes 15 us."""
    try:
        with open("/proc/loadavg", "rb", buffering=0) as file:
            runnable = int(file.read(128).split()[3].split(b"/")[0])
    except (OSError, LookupError, ValueError):
        return False
    return runnable > (os.cpu_count() or 1)


def polling_outcome(before: float, now: float, until: float) -> int:
    """Return the outcome of a poll at ``before`` that found nothing; ``HIT``: poll again.

    Args:
        now: the time after a yield; an event by then does not count if it is late.
        until: the end of polling.
    """
    if now - before >= PREEMPTED_S:
        return PREEMPTED
    return HIT if now < until else MISS


class BusyPollGauge:
    """Records outcomes of polling at one call site. Not synchronized: a lost record is harmless."""

    __slots__ = ("_calm_at", "_clock", "_is_crowded", "_misses", "_pause_s", "_resume_at", "_skips")

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        is_crowded: Callable[[], bool] = is_crowded,
    ) -> None:
        self._clock = clock
        self._is_crowded = is_crowded
        self._misses = 0
        self._skips = 0
        self._pause_s = PAUSE_MIN_S
        self._calm_at = 0.0
        """Losses after this time do not lengthen the pause."""
        self._resume_at: float | None = 0.0
        """The end of the pause; None: none."""

    def should_poll(self) -> bool:
        """Return whether to poll; call it once before each wait."""
        if self._skips:
            self._skips -= 1
            return False
        if self._resume_at is not None:
            now = self._clock()
            if now < self._resume_at:
                return False
            if self._is_crowded():
                self._resume_at = now + PAUSE_MIN_S
                return False
            self._resume_at = None
            self._calm_at = now + self._pause_s
        return True

    def record(self, outcome: int) -> None:
        """Record the outcome of polling: ``HIT``, ``MISS`` or ``PREEMPTED``."""
        if outcome == HIT:
            self._misses = 0
        elif outcome == MISS:
            self._misses = min(self._misses + 1, MISSES_MAX)
            self._skips = 1 << self._misses
        else:
            now = self._clock()
            is_again = now < self._calm_at
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S) if is_again else PAUSE_MIN_S
            self._resume_at = now + self._pause_s
