"""The time in which puts fill an amount of memory."""

from __future__ import annotations

from collections import deque

STEPS = 32
"""Of the pool's memory, for which the time is kept: the error is at most one of them."""


class TurnoverClock:
    """Measures how fast the objects of one tenant are put."""

    def __init__(self) -> None:
        self._size = 0
        self._times: deque[int] = deque(maxlen=2 * STEPS)
        """When each of the last steps of memory had been put."""

    def add(self, size: int, step: int, now_ms: int) -> None:
        """Count ``size`` bytes put. ``step``: bytes whose time is kept."""
        self._size += size
        if self._size >= step:
            self._size = 0
            self._times.append(now_ms)

    def turnover_ms(self, size: int, step: int, now_ms: int) -> int | None:
        """Return the time in which the last ``size`` bytes were put; None: not so many were."""
        steps = min(max(1, size // step), 2 * STEPS)
        return None if len(self._times) < steps else max(0, now_ms - self._times[-steps])
