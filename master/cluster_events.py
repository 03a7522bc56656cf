"""The last notices of a master (nodes that join and die, elections, bad memory ...), for the
dashboard; the log has them as well."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

NOTICES_MAX: Final = 1_000
"""Notices that are kept: those of a busy day."""

PAGE: Final = 100
"""Notices in one answer, which takes 0.3 ms of the loop."""

TEXT_MAX: Final = 256
"""Characters of one field; the rest is cut off."""


class ClusterEventLog:
    """The last notices, numbered from 1. Only the loop's thread uses it."""

    def __init__(self, wall_clock_ms: Callable[[], int]) -> None:
        self._wall_clock_ms = wall_clock_ms
        self._run = wall_clock_ms()
        self._number = 0
        self._kept: deque[tuple[int, str, dict[str, str | int]]] = deque(maxlen=NOTICES_MAX)
        """Time, event and fields of the last ones; the very last one has the number ``_number``."""

    def add(self, event: str, fields: Mapping[str, str | int]) -> None:
        self._number += 1
        short = {
            name: value[:TEXT_MAX] if isinstance(value, str) else value
            for name, value in fields.items()
        }
        self._kept.append((self._wall_clock_ms(), event, short))

    def after(self, number: int) -> dict[str, object]:
        """The first ``PAGE`` notices that are kept and come after this number.

        Returns:
            ``run``, which differs after each start of the master; ``last``, the number of the last
            notice in this answer, or of all if it has none; ``is_all``, whether none is left;
            ``notices``: number, time in milliseconds since 1970, event and fields of each.
        """
        first = self._number - len(self._kept) + 1
        begin = max(first, number + 1)
        found = islice(self._kept, begin - first, begin - first + PAGE)
        notices = [(begin + index, *each) for index, each in enumerate(found)]
        last = notices[-1][0] if notices else self._number
        return {
            "run": self._run,
            "last": last,
            "is_all": last == self._number,
            "notices": notices,
        }
