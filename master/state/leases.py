"""Leases that clients can release early, by random numbers that the clients choose.

A client passes a number with each leasing call, and again when it has finished reading. Other
clients do not know it, so a client can release only its own leases. Unknown numbers (released late
or twice) are ignored.

``readers`` of a record counts releasable leases. Its lease ends when the last one is released, but
not before ``kept_until_ms``, which holds for readers that cannot release.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from kvstore.master.state.background_jobs import RELEASE
from kvstore.master.state.records import ObjectRecord
from kvstore.master.state.state_context import StateContext

LEASED_MAX: Final = 1 << 18
"""Objects under numbers of all clients, 8 bytes each; further leases only expire."""

RELEASED_PER_STEP: Final = 1_024
"""Objects whose leases one step ends: 1 to 2 ms, if evictions had skipped all of them."""


class LeaseGroup:
    __slots__ = ("records", "until_ms")

    def __init__(self) -> None:
        self.until_ms = 0
        self.records: list[ObjectRecord] = []
        """An object occurs once per lease."""


class ReaderLeases:
    def __init__(self, common: StateContext) -> None:
        self._common = common
        self._groups: OrderedDict[int, LeaseGroup] = OrderedDict()
        """By number, in the order of their ends."""
        self._ending: deque[LeaseGroup] = deque()
        """Released or expired groups that some records still count."""
        self._leased = 0

    def lease(
        self, now_ms: int, number: int, records: Sequence[ObjectRecord], until_ms: int
    ) -> None:
        """Lease complete objects. ``number`` 0: the lease only expires."""
        oldest = next(iter(self._groups), 0)
        if oldest and self._groups[oldest].until_ms <= now_ms:
            self._end(oldest)  # a call adds at most one group
        if not number or self._leased + len(records) > LEASED_MAX:
            for record in records:
                record.keep_until(until_ms)
            return
        group = self._groups.pop(number, None) or LeaseGroup()
        self._groups[number] = group
        group.until_ms = until_ms
        group.records.extend(records)
        self._leased += len(records)
        for record in records:
            record.readers += 1
            record.lease_until_ms = max(record.lease_until_ms, until_ms)

    def release(self, now_ms: int, numbers: Sequence[int]) -> None:
        """End the leases under these numbers, some of them in later steps."""
        for number in numbers:
            if number in self._groups:
                self._end(number)
        self.end_some(now_ms)

    def _end(self, number: int) -> None:
        self._ending.append(self._groups.pop(number))
        self._common.jobs.due |= RELEASE

    def end_some(self, now_ms: int) -> None:
        """Process a slice of the ended groups."""
        remaining = RELEASED_PER_STEP
        pool, ending = self._common.pool, self._ending
        has_freed = False
        while ending and remaining:
            records = ending[0].records
            while records and remaining:
                remaining -= 1
                self._leased -= 1
                record = records.pop()
                record.readers -= 1
                if not record.readers and record.lease_until_ms > now_ms:
                    record.lease_until_ms = max(now_ms, record.kept_until_ms)
                    if record.queue:
                        pool.lease_ended(record)
                        has_freed = True
            if not records:
                ending.popleft()
        self._common.jobs.note(RELEASE, bool(ending))
        if has_freed:
            self._common.space_freed()
