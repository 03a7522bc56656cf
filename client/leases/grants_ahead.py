"""The allocations that a client holds for its next puts (``put_ahead``)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore import calls
from kvstore.calls import PutOutcome, SegmentInfo
from kvstore.limits import Namespace

GRANTS_MAX: Final = 16
"""Allocations that one client holds for as many threads; those of more are given back."""

REPEATED_S: Final = 1.0
"""Maximum time between two puts of a series, after which its allocations are given back."""

SERIES_MIN: Final = 2
"""Objects of one size stored in a row before another one is expected. With 1, a client that finds
every other key stored would write all of its values."""

SPARE_S: Final = 3.0
"""An allocation is not used any more this long before its deadline."""

HELD_MIN_S: Final = SPARE_S + 2 * REPEATED_S
"""With a deadline below this, nothing is put ahead: it could pass before the memory is given back,
and then the node closes the connections of this client."""


class AllocationAhead(NamedTuple):
    """An allocation to which nothing was written."""

    epoch: int
    token: int
    segment: SegmentInfo
    offset: int
    held_s: float
    """For how long the master keeps one, less the margin of the client's clock."""
    until: float
    """Its end, by the client's clock."""


class GrantsAhead:
    """The allocations of one client for its next puts, all of one namespace and size. Threads: any.

    ``ViewManager`` gives back what is not used.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer that interrupts it may put, too
        self._name: tuple[Namespace, int] | None = None
        self._held: deque[AllocationAhead] = deque()
        self._last: tuple[Namespace, int] | None = None
        self._last_at = 0.0
        self._stored = 0
        self.on_hold: Callable[[], object] | None = None
        self.paused_until = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def due_at(self) -> float:
        return self._last_at + REPEATED_S

    def count(self, name: tuple[Namespace, int], outcome: PutOutcome, now: float) -> None:
        """Count a put. One that stored nothing ends a series."""
        if outcome is not PutOutcome.STORED:
            self._stored = 0
        elif name == self._last and now - self._last_at < REPEATED_S:
            self._stored += 1
        else:
            self._stored = 1
        self._last, self._last_at = name, now

    def is_expected(self, name: tuple[Namespace, int], now: float) -> bool:
        """Return whether the next put of this namespace and size continues a series."""
        is_same = name == self._last and now - self._last_at < REPEATED_S
        return is_same and self._stored >= SERIES_MIN and now >= self.paused_until

    def take(self, name: tuple[Namespace, int], now: float) -> AllocationAhead | None:
        """Return the oldest allocation, so that none waits for its deadline."""
        with self._lock:
            if name != self._name or not self._held or self._held[0].until - now < SPARE_S:
                return None
            return self._held.popleft()

    def keep(self, name: tuple[Namespace, int], granted: AllocationAhead) -> list[calls.PutRevoke]:
        """Keep a grant in place of those of other sizes, or near their deadline. Return the calls
        that give those back, or this one if ``GRANTS_MAX`` are held."""
        dropped: list[AllocationAhead] = []
        with self._lock:
            held, spared = self._held, granted.until - granted.held_s + SPARE_S
            while held and (name != self._name or held[0].until < spared):
                dropped.append(held.popleft())
            self._name = name
            (dropped if len(held) >= GRANTS_MAX else held).append(granted)
        if self.on_hold is not None:
            self.on_hold()
        return _revocations(dropped)

    def give_back(self) -> list[calls.PutRevoke]:
        """Take all; return the calls that give them back."""
        with self._lock:
            held, self._held = list(self._held), deque()
        return _revocations(held)


def _revocations(grants: list[AllocationAhead]) -> list[calls.PutRevoke]:
    """Nothing was written to these."""
    return [
        calls.PutRevoke(epoch, [each.token for each in grants if each.epoch == epoch], True)
        for epoch in {granted.epoch for granted in grants}
    ]
