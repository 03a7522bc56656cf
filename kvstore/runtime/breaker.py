"""A circuit breaker for a peer that keeps failing.

    closed ──failures_max in a row──► open ──open_for──► half open ──next result──► closed or open

Pure: the caller passes the time of a monotonic clock; durations are in its unit.
"""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "half_open", "open"]


class Breaker:
    """The breaker of one peer. Threads: one at a time; any for ``state`` and ``is_open``.

    Before a request, call ``allows`` and ``begin``, so that only one request probes a half-open
    breaker.
    """

    def __init__(self, *, failures_max: int, open_for: float, open_for_max: float = 0) -> None:
        """
        Args:
            open_for: the first open time.
            open_for_max: if greater, each failed probe doubles the open time, up to this.
        """
        self._failures_max = failures_max
        self._open_for_first = open_for
        self._open_for_max = max(open_for, open_for_max)
        self._open_for = open_for
        self._failures = 0
        self._open_until: float | None = None
        self._probing = False

    @classmethod
    def of_a_store(cls) -> Breaker:
        """Return a breaker for calls to a store, in seconds: opens after three failures, for 1 s,
        later up to 10."""
        return cls(failures_max=3, open_for=1.0, open_for_max=10.0)

    def state(self, now: float) -> BreakerState:
        until = self._open_until
        if until is None:
            return "closed"
        return "open" if now < until else "half_open"

    def is_open(self, now: float) -> bool:
        return self.state(now) == "open"

    def allows(self, now: float) -> bool:
        """Return whether a request may be sent. A half-open breaker allows one at a time."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._probing)

    def begin(self, now: float) -> bool:
        """Record a sent request; return whether it is the probe of a half-open breaker."""
        assert self.allows(now), "a breaker is asked before a request is sent"
        self._probing = self.state(now) == "half_open"
        return self._probing

    def succeeded(self) -> None:
        self._failures = 0
        self._open_until = None
        self._open_for = self._open_for_first
        self._probing = False

    def failed(self, now: float) -> bool:
        """Count a failure; return whether it has opened a closed breaker. Failures of requests sent
        before it opened do not prolong the open time."""
        self._failures += 1
        state = self.state(now)
        if state == "half_open" or (state == "closed" and self._failures >= self._failures_max):
            self._open_until = now + self._open_for
            self._open_for = min(self._open_for * 2, self._open_for_max)
            self._probing = False
            return state == "closed"
        return False

    def on_abandoned(self) -> None:
        """Record a probe without a result (its client left): the next request is the probe."""
        self._probing = False
