"""S3-FIFO (Yang et al., SOSP 2023, "FIFO queues are all you need for cache eviction").

New objects enter a small queue. One that was hit twice before it is first moves to the main queue;
others are evicted from there early, so that objects of one use do not displace the rest. Keys
evicted from the small queue are remembered as ghosts: if one is put again, it enters the main
queue. A hit lets an object of the main queue pass once more, three times at most.

Candidates are the leaves of chains, which differs from the paper in three ways:

* The small queue is sorted by version, not by arrival: a parent becomes a candidate when its
  children are evicted, and follows them at once.
* The queue sizes are counted in candidates, not in bytes.
* Hits within ``HIT_GAP_MS`` of the last use are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kvstore.master.state.eviction import NEVER_MS, NewPolicy, SortedRecordQueue
from kvstore.master.state.records import HITS_MAX, ObjectRecord

SMALL_PERCENT = 10
"""The target of the small queue."""

GHOSTS_MIN, GHOSTS_MAX = 1 << 10, 1 << 16
"""Bounds of the number of ghosts, which is that of the candidates. A candidate stands for its
chain, so a few of them need more ghosts."""

_SEQUENCE_BITS = 50
_VERSION_BITS = 64
_MAIN = HITS_MAX + 1
"""The bit of ``hits`` for records of the main queue; it survives a lease."""
_MAIN_POSITION = 1 << 200


class S3FifoPolicy:
    """See the module."""

    learns_uses = True
    learns_hints = False

    def __init__(self, tenant: int = 1) -> None:
        del tenant
        self._small = SortedRecordQueue()
        self._main = SortedRecordQueue()
        self._sequence = 0
        self._ghosts: dict[int, None] = {}
        """Hashes of names, the oldest first."""

    def used(self, record: ObjectRecord, now_ms: int) -> None:
        record.hits += record.hits & HITS_MAX < HITS_MAX

    def insert(self, record: ObjectRecord) -> None:
        ghost = hash((record.namespace, record.key))
        if record.hits < _MAIN and ghost in self._ghosts:
            del self._ghosts[ghost]
            record.hits |= _MAIN
        self._sequence += 1
        if record.hits & _MAIN:
            record.position = _MAIN_POSITION | self._sequence
            self._main.add(record)
        else:
            version = record.epoch << _VERSION_BITS | record.counter
            record.position = version + 1 << _SEQUENCE_BITS | self._sequence
            self._small.add(record)

    def remove(self, record: ObjectRecord, *, evicted: bool) -> None:
        if record.position >= _MAIN_POSITION:
            self._main.remove(record)
            return
        self._small.remove(record)
        if evicted:
            count = len(self._small) + len(self._main)
            ghosts_max = min(max(GHOSTS_MIN, count), GHOSTS_MAX)
            self._ghosts[hash((record.namespace, record.key))] = None
            for _ in range(min(2, len(self._ghosts) - ghosts_max)):
                del self._ghosts[next(iter(self._ghosts))]

    def first(self) -> ObjectRecord | None:
        small, main = len(self._small), len(self._main)
        if not main or small * 100 > (small + main) * SMALL_PERCENT:
            return self._small.first()
        return self._main.first()

    def hit(self, record: ObjectRecord) -> bool:
        hits = record.hits & HITS_MAX
        if record.position >= _MAIN_POSITION:
            if not hits:
                return False
            self._main.remove(record)
            record.hits -= 1
        else:
            if hits < 2:
                return False
            self._small.remove(record)
            record.hits = _MAIN
        self.insert(record)
        return True

    def rank(self, record: ObjectRecord) -> int:
        return max(0, record.last_used_ms)

    def oldest_ms(self) -> int:
        heads = (self._small.first(), self._main.first())
        return min([head.last_used_ms for head in heads if head is not None], default=NEVER_MS)

    def after(self, position: int) -> Iterator[ObjectRecord]:
        return chain(self._small.after(position), self._main.after(position))


def s3_fifo() -> NewPolicy:
    return S3FifoPolicy
