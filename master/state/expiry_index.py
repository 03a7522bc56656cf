"""Index of the times at which pins end or objects expire.

Records without such a time cost nothing. Times are rounded up to ``STEP_MS``; records that expire
together share a bucket.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from kvstore.master.state.records import TABLE_SHARDS, ObjectRecord

STEP_MS: Final = 64
"""Maximum delay of an expiry. At 200,000 puts a second a bucket has 13,000 records."""

NO_END_MS: Final = 1 << 62


class ExpiryIndex:
    """Records by expiry. Every operation is O(1), except O(log buckets) to find the next bucket."""

    def __init__(self) -> None:
        self._shards: list[dict[ObjectRecord, int]] = [{} for _ in range(TABLE_SHARDS)]
        self._buckets: dict[int, dict[ObjectRecord, None]] = {}
        self._times: list[int] = []
        self._count = 0
        self.next_ms = NO_END_MS
        """Lower bound of all expiries."""

    def expiry_of(self, record: ObjectRecord) -> int:
        """Return the expiry of the record; 0: none."""
        return self._shards[hash(record) % TABLE_SHARDS].get(record, 0) if self._count else 0

    def ended(self, record: ObjectRecord, now_ms: int) -> bool:
        return 0 < self.expiry_of(record) <= now_ms

    def set(self, record: ObjectRecord, end_ms: int) -> None:
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
        """Remove and return an expired record, or None; the last added (maybe a child) first."""
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
