"""The times at which pins end, or at which the lifetimes of objects end.

Only records with such a time are kept here, so that all others cost nothing. Times are rounded up
to ``STEP_MS``: records that end together share a bucket, and a bucket is due as a whole.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from kvstore.master.state.records import TABLE_SHARDS, ObjectRecord

STEP_MS: Final = 64
"""An end is late by less than this. At 200,000 puts a second a bucket has 13,000 records, and its
dictionary grows in less than a millisecond."""

NO_END_MS: Final = 1 << 62
"""Later than any time."""


class ExpiryIndex:
    """Records by their ends. Each operation is O(1), except that finding the next bucket is
    O(log buckets)."""

    def __init__(self) -> None:
        self._shards: list[dict[ObjectRecord, int]] = [{} for _ in range(TABLE_SHARDS)]
        self._buckets: dict[int, dict[ObjectRecord, None]] = {}
        self._times: list[int] = []
        """A heap of the keys of ``_buckets``."""
        self._count = 0
        self.next_ms = NO_END_MS
        """Nothing ends before this time."""

    def expiry_of(self, record: ObjectRecord) -> int:
        """The time at which the record ends; 0: it has no end."""
        return self._shards[hash(record) % TABLE_SHARDS].get(record, 0) if self._count else 0

    def ended(self, record: ObjectRecord, now_ms: int) -> bool:
        return 0 < self.expiry_of(record) <= now_ms

    def set(self, record: ObjectRecord, end_ms: int) -> None:
        """Sets the record's end, in place of an earlier one."""
        self.drop(record)
        end_ms = -(-end_ms // STEP_MS) * STEP_MS
        self._shards[hash(record) % TABLE_SHARDS][record] = end_ms
        bucket = self._buckets.get(end_ms)
        if bucket is None:
            bucket = self._buckets[end_ms] = {}
            heappush(self._times, end_ms)
        bucket[record] = None
        self._count += 1
        self.next_ms = min(self.next_ms, end_ms)

    def drop(self, record: ObjectRecord) -> None:
        """Forgets the record's end, if it has one."""
        if not self._count:
            return
        end_ms = self._shards[hash(record) % TABLE_SHARDS].pop(record, 0)
        if not end_ms:
            return
        self._count -= 1
        del self._buckets[end_ms][record]
        if not self._count:
            self._buckets.clear()
            self._times.clear()
            self.next_ms = NO_END_MS

    def pop_expired(self, now_ms: int) -> ObjectRecord | None:
        """Takes out a record whose end has come; None: there is none. Of one bucket, the record
        added last comes first: it may be a child of the others."""
        while self._times:
            time = self._times[0]
            self.next_ms = time
            if time > now_ms:
                return None
            bucket = self._buckets[time]
            if bucket:
                record, _ = bucket.popitem()
                bucket[record] = None  # ``drop`` removes it
                self.drop(record)
                return record
            heappop(self._times)
            del self._buckets[time]
        return None

    def __len__(self) -> int:
        return self._count
