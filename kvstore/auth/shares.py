"""How much of a door one identity may hold, so that one member cannot keep the others out.

A door has a number of places: connections, or calls under way. An identity gets one more while more
places are free than it holds. So one identity alone gets half of them; of n identities that take
all they get each has 1/(n + 1), and as many stay free for the next one. Nothing that is open is cut
for that: a transfer or a call under way would fail. Peers without an identity are not counted: the
bound of the door is theirs.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

from kvstore.errors import BusyError
from kvstore.texts import name_text

log = logging.getLogger("kvstore.auth")

NAMED_MAX: Final = 64
"""Identities whose refusals are counted apart; those of further ones are counted as one."""

OTHERS: Final = ""


class Shares:
    """The places of one door that identities hold. Threads: any."""

    def __init__(self, door: str, places: int) -> None:
        """``door``: for logs, errors and metrics. ``places``: at least 1."""
        self.door: Final = door
        self._places = places
        self._held: Counter[str] = Counter()
        self._taken = 0
        self._refused: Counter[str] = Counter()
        self._changing = threading.Lock()

    def enter(self, who: str) -> None:
        """Takes a place for the identity of this name, until ``leave``.

        Raises:
            BusyError: it holds as many as are free; nothing is taken.
        """
        with self._changing:
            held, free = self._held[who], self._places - self._taken
            if held < free:
                self._held[who] += 1
                self._taken += 1
                return
            if not held:
                del self._held[who]
            named = who if who in self._refused or len(self._refused) < NAMED_MAX else OTHERS
            self._refused[named] += 1
            count = self._refused[named]
        log.warning(
            "share_refused door=%s identity=%s held=%d free=%d count=%d",
            self.door, name_text(who), held, free, count,
        )  # fmt: skip
        raise BusyError(
            f"{self.door}: {who} holds {held} of {self._places} places, and {free} are free",
            advice="An identity may hold as many as it leaves free. Give processes files of their "
            "own.",
        )

    def leave(self, who: str) -> None:
        """Gives back a place that ``enter`` has taken."""
        with self._changing:
            self._taken -= 1
            self._held[who] -= 1
            if not self._held[who]:
                del self._held[who]

    def refused(self) -> dict[str, int]:
        """How often each identity was refused since the start; ``OTHERS``: those without a row."""
        with self._changing:
            return dict(self._refused)

    def check_invariants(self) -> None:
        """Raises AssertionError: a bug of ours."""
        with self._changing:
            assert 0 <= self._taken == self._held.total() <= self._places
            assert all(held > 0 for held in self._held.values())
            assert len(self._refused) <= NAMED_MAX + 1
