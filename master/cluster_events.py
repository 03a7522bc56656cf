"""The last cluster events (joins, elections, corrupt memory ...), for the dashboard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

NOTICES_MAX: Final = 1_000
"""Maximum number of events kept: those of a busy day."""

PAGE: Final = 100
"""Events in one reply, which takes 0.3 ms of the loop."""

TEXT_MAX: Final = 256
"""Maximum length of a field in characters; longer ones are truncated."""


class ClusterEventLog:
    """The last events, numbered from 1. Used only by the loop's thread."""

    def __init__(self, wall_clock_ms: Callable[[], int]) -> None:
        self._wall_clock_ms = wall_clock_ms
        self._run = wall_clock_ms()
        self._number = 0
        self._kept: deque[tuple[int, str, dict[str, str | int]]] = deque(maxlen=NOTICES_MAX)
        """Time, event and fields; the last one has the number ``_number``."""

    def add(self, event: str, fields: Mapping[str, str | int]) -> None:
        self._number += 1
        short = {
            name: value[:TEXT_MAX] if isinstance(value, str) else value
            for name, value in fields.items()
        }
        self._kept.append((self._wall_clock_ms(), event, short))

    def after(self, number: int) -> dict[str, object]:
        """Return the first ``PAGE`` events after this number.

        Returns:
            ``run``, which differs after each start of the master; ``last``, the number of the last
            event returned, or of all if there is none; ``is_all``, whether none is left;
            ``events``: number, time in milliseconds since 1970, event and fields of each.
        """
        first = self._number - len(self._kept) + 1
        begin = max(first, number + 1)
        found = islice(self._kept, begin - first, begin - first + PAGE)
        events = [(begin + index, *event) for index, event in enumerate(found)]
        last = events[-1][0] if events else self._number
        return {
            "run": self._run,
            "last": last,
            "is_all": last == self._number,
            "notices": events,
        }
