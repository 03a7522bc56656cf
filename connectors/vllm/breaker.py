"""A circuit breaker: a store that does not answer is not asked for a while.

    closed ──(``failures_max`` in a row)──► open ──(``open_s`` over)──► a probe ──► closed, or open

Pure: the time is an argument. One thread at a time, except for ``is_open``.
"""

from __future__ import annotations


class Breaker:
    """See the module."""

    def __init__(self, *, failures_max: int = 3, open_s: float = 1.0, open_max_s: float = 10.0):
        """
        Args:
            open_s: how long it stays open the first time; doubles with each probe that fails.
            open_max_s: and at most.
        """
        self._failures_max = failures_max
        self._open_s = open_s
        self._open_max_s = open_max_s
        self._failures = 0
        self._open_for_s = open_s
        self._until = 0.0
        self.opened = 0
        """How often."""

    def is_open(self, now: float) -> bool:
        """Whether nothing should be asked now. Once its time is over, whoever asks is the probe."""
        return self._failures >= self._failures_max and now < self._until

    def succeeded(self) -> None:
        self._failures = 0
        self._open_for_s = self._open_s

    def failed(self, now: float) -> bool:
        """Returns whether this has opened it."""
        was_closed = self._failures < self._failures_max
        self._failures += 1
        if self._failures < self._failures_max:
            return False
        self._until = now + self._open_for_s
        self._open_for_s = min(self._open_for_s * 2, self._open_max_s)
        self.opened += 1
        return was_closed
