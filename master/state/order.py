"""Keeps records in the order of their tickets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from kvstore.master.state.records import ObjectRecord

RUN_MAX = 1_024
"""Records in one list: an insertion or removal in its middle moves 8 KiB at most."""


class TicketOrder:
    """Consecutive sorted lists of records. No two tickets are equal, and a ticket does not change
    while its record is in the order.

    This replaces a ``SortedKeyList``, which stays interpreted where this class is compiled. Nearly
    every new ticket is later than all others, which saves 0.3 of 0.46 microseconds. A list that
    got short is not joined with the next: there is about one list per ``RUN_MAX`` records added
    since the oldest record, and a search among the lists is logarithmic.
    """

    def __init__(self) -> None:
        self._runs: list[list[ObjectRecord]] = []
        self._lasts: list[int] = []
        """The last ticket of each list."""
        self._count = 0

    def add(self, record: ObjectRecord) -> None:
        """Adds a record: O(1) if its ticket is the latest, else O(log n)."""
        ticket, runs, lasts = record.ticket, self._runs, self._lasts
        self._count += 1
        if not lasts or ticket > lasts[-1]:
            if lasts and len(runs[-1]) < RUN_MAX:
                runs[-1].append(record)
                lasts[-1] = ticket
            else:
                runs.append([record])
                lasts.append(ticket)
            return
        at = bisect_left(lasts, ticket)
        run = runs[at]
        run.insert(_place(run, ticket), record)
        if len(run) > RUN_MAX:
            later = run[RUN_MAX // 2 :]
            del run[RUN_MAX // 2 :]
            runs.insert(at + 1, later)
            lasts.insert(at, run[-1].ticket)

    def remove(self, record: ObjectRecord) -> None:
        """Removes a record that is in the order. O(log n)."""
        ticket, runs, lasts = record.ticket, self._runs, self._lasts
        at = bisect_left(lasts, ticket)
        run = runs[at]
        place = _place(run, ticket)
        assert run[place] is record, "it is not in this order"
        del run[place]
        self._count -= 1
        if not run:
            del runs[at]
            del lasts[at]
        elif place == len(run):
            lasts[at] = run[-1].ticket

    def first(self) -> ObjectRecord | None:
        return self._runs[0][0] if self._runs else None

    def after(self, ticket: int) -> Iterator[ObjectRecord]:
        """The records with later tickets, as long as none is added or removed."""
        at = bisect_right(self._lasts, ticket)
        for number in range(at, len(self._runs)):
            run = self._runs[number]
            for place in range(_place(run, ticket + 1) if number == at else 0, len(run)):
                yield run[place]

    def __iter__(self) -> Iterator[ObjectRecord]:
        return self.after(-1)

    def __len__(self) -> int:
        return self._count


def _place(run: list[ObjectRecord], ticket: int) -> int:
    """The index of the first record whose ticket is not earlier than this one."""
    low, high = 0, len(run)
    while low < high:
        middle = (low + high) >> 1
        if run[middle].ticket < ticket:
            low = middle + 1
        else:
            high = middle
    return low
