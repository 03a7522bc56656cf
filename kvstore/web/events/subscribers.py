"""The subscribers, each of which has one of a limited number of long-lived connections.

On a quiet store nothing tells a subscriber that reads from one that does not: what it is sent fits
into the buffers of both kernels for hours. So nobody keeps a place for good. When all places are
taken, a subscriber's connection may be cut for a newcomer; it can connect again and resume.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

TENURE_S: Final = 30.0
"""How long a place is safe from newcomers whose crowd would have at least as many places."""


class Subscriber(NamedTuple):
    """One subscriber."""

    crowd: str
    """Whose places count together: its identity, or without one the address of its host."""
    since: float
    cut: Callable[[], None]


class Subscribers:
    """The places for one kind of connection. Use it in one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._next = 0
        self._places: dict[int, Subscriber] = {}
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, crowd: str, cut: Callable[[], None]) -> int | None:
        """The number of a place for a newcomer; None: there is none.

        Args:
            crowd: the newcomer's, as that of a ``Subscriber``.
            cut: ends the newcomer's connection; called when its place is given to another
                subscriber, which counts as ``leave``.
        """
        if len(self._places) >= self._most:
            given_up = self._one_that_gives_way(crowd)
            if given_up is None:
                return None
            self._places.pop(given_up).cut()
        self._next += 1
        self._places[self._next] = Subscriber(crowd, time.monotonic(), cut)
        return self._next

    def leave(self, number: int) -> None:
        """Idempotent."""
        self._places.pop(number, None)

    def _one_that_gives_way(self, newcomer: str) -> int | None:
        """The oldest subscriber whose crowd has more places than the newcomer's would have, or at
        least as many as the newcomer's has now, if its ``TENURE_S`` are over."""
        count = Counter(each.crowd for each in self._places.values())
        now = time.monotonic()
        for number, (crowd, since, _) in self._places.items():
            if count[crowd] > count[newcomer] + 1:
                return number
            if count[crowd] >= count[newcomer] and now - since >= TENURE_S:
                return number
        return None
