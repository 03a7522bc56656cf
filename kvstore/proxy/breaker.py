"""When an instance that keeps failing is left alone, and when it is tried again.

    closed ──N failures in a row──► open ──open_ms pass──► half open ──one request──► closed or open

Health checks ask an instance whether it is well; a breaker looks at what it does.
"""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "half_open", "open"]


class Breaker:
    """Of one instance. Times are milliseconds of any clock that does not go back."""

    def __init__(self, *, failures_max: int, open_ms: int) -> None:
        self._failures_max = failures_max
        self._open_ms = open_ms
        self._failures = 0
        self._open_until_ms: int | None = None
        self._probing = False

    def state(self, now_ms: int) -> BreakerState:
        if self._open_until_ms is None:
            return "closed"
        return "open" if now_ms < self._open_until_ms else "half_open"

    def allows(self, now_ms: int) -> bool:
        """Whether a request may be sent now: half open, one at a time."""
        state = self.state(now_ms)
        return state == "closed" or (state == "half_open" and not self._probing)

    def begin(self, now_ms: int) -> bool:
        """A request is sent; whether it is the one that tries whether the instance works."""
        assert self.allows(now_ms), "a breaker is asked before a request is sent"
        self._probing = self.state(now_ms) == "half_open"
        return self._probing

    def succeeded(self) -> None:
        self._failures = 0
        self._open_until_ms = None
        self._probing = False

    def failed(self, now_ms: int) -> None:
        """Opens it when that was one too many. Late failures, of requests that were sent before it
        opened, do not keep it open longer."""
        self._failures += 1
        again = self.state(now_ms) == "half_open"
        if again or (self._open_until_ms is None and self._failures >= self._failures_max):
            self._open_until_ms = now_ms + self._open_ms
            self._probing = False

    def abandoned(self) -> None:
        """The trying request ended without a verdict (its client left): the next one tries."""
        self._probing = False
