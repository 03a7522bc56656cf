"""Eviction policies: the contract, and LRU.

``EvictionCandidates`` (candidates.py) makes one policy per segment and tenant. It handles what all
policies have in common: detached records, leases, deferral, and the bounds of a step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Protocol

from kvstore.master.state.records import ObjectRecord

RUN_MAX = 1_024
"""Records in one list: an insertion or removal in its middle moves 8 KiB at most."""

POSITION_BITS = 240
"""A policy's positions are above 0 and below ``1 << POSITION_BITS``."""

NEVER_MS = 1 << 60
"""After all times."""

_SEQUENCE_BITS = 50


class EvictionPolicy(Protocol):
    """Orders the eviction candidates of one segment and tenant. Contract:

    * A candidate is inserted, and later removed, once each. Between them, ``record.position``
      belongs to the policy, which sets it in ``insert``. Positions are unique in the policy.
    * A candidate's ``last_used_ms`` may grow at any time without a call: a policy reads it when the
      candidate is ``first``. ``hits`` is the policy's own, and 0 when an object is stored; a parent
      whose last child is evicted inherits up to ``HITS_MAX`` of them.
    * Leases are not its business: a leased candidate is removed, and inserted after the lease.
    * Each verb takes O(log n), and changes no other record.
    """

    learns_uses: bool
    """Whether ``used`` must be called. Else a use costs less."""

    learns_hints: bool
    """Whether it orders records with a hint, too. Else hints come before the policy."""

    def used(self, record: ObjectRecord, now_ms: int) -> None:
        """Learns of a use, before ``last_used_ms`` changes. Called with one policy for all records
        of a tenant, candidates or not, but not within ``HIT_GAP_MS`` of the last use."""
        ...

    def insert(self, record: ObjectRecord) -> None: ...

    def remove(self, record: ObjectRecord, *, evicted: bool) -> None:
        """Removes a candidate. ``evicted``: because it is evicted, and for no other reason."""
        ...

    def first(self) -> ObjectRecord | None:
        """The candidate to evict next, unless ``hit`` moves it. It stays a candidate."""
        ...

    def hit(self, record: ObjectRecord) -> bool:
        """Moves the first candidate to a later position if hits since its last move earn that.
        Returns whether it was moved. Each hit moves a candidate once at most."""
        ...

    def rank(self, record: ObjectRecord) -> int:
        """The value of keeping the first candidate, at least 0. Of those of several segments of a
        tenant, the one with the lowest rank is evicted."""
        ...

    def oldest_ms(self) -> int:
        """When the least recently used candidate was last used, or earlier; without candidates
        ``NEVER_MS``. Of several tenants, that with the oldest candidate evicts."""
        ...

    def after(self, position: int) -> Iterator[ObjectRecord]:
        """Yields the candidates with later positions, sorted, as long as none is added or removed.
        A sweep continues so, whichever candidates came and went meanwhile."""
        ...


NewPolicy = Callable[[int], EvictionPolicy]
"""Makes the policy of one segment for the tenant with this number."""


class LruPolicy:
    """Evicts the least recently used candidate.

    The position is ``time << 50 | sequence``, above ``base``. A use does not move a record: it is
    moved to the position of its last use when it is first."""

    learns_uses = False
    learns_hints = False

    def __init__(self, tenant: int = 1, *, base: int = 0) -> None:
        """``base``: added to positions."""
        del tenant
        self._queue = SortedRecordQueue()
        self._sequence = 0
        self._base = base

    def used(self, record: ObjectRecord, now_ms: int) -> None:
        pass

    def insert(self, record: ObjectRecord) -> None:
        self._sequence += 1
        position = record.last_used_ms + 1 << _SEQUENCE_BITS | self._sequence
        record.position = self._base + position
        self._queue.add(record)

    def remove(self, record: ObjectRecord, *, evicted: bool) -> None:
        del evicted
        self._queue.remove(record)

    def first(self) -> ObjectRecord | None:
        return self._queue.first()

    def last(self) -> ObjectRecord | None:
        return self._queue.last()

    def hit(self, record: ObjectRecord) -> bool:
        if self.rank(record) > record.last_used_ms:
            return False
        self._queue.remove(record)
        self.insert(record)
        return True

    def rank(self, record: ObjectRecord) -> int:
        return record.position - self._base >> _SEQUENCE_BITS

    def oldest_ms(self) -> int:
        record = self._queue.first()
        return NEVER_MS if record is None else self.rank(record)

    def after(self, position: int) -> Iterator[ObjectRecord]:
        return self._queue.after(position)


def lru() -> NewPolicy:
    return LruPolicy


class SortedRecordQueue:
    """Records sorted by position, in consecutive lists. Positions are unique, and do not change in
    the queue.

    It is compiled, unlike ``SortedKeyList``, and faster for records that are added at the end, as
    nearly all are (0.3 of 0.46 microseconds). Short lists are not joined: there is about one list
    per ``RUN_MAX`` records added since the oldest record.
    """

    def __init__(self) -> None:
        self._runs: list[list[ObjectRecord]] = []
        self._lasts: list[int] = []
        """Last position of each list."""

    def add(self, record: ObjectRecord) -> None:
        """Adds a record. O(1) if its position is the last, else O(log n)."""
        position, runs, lasts = record.position, self._runs, self._lasts
        if not lasts or position > lasts[-1]:
            if lasts and len(runs[-1]) < RUN_MAX:
                runs[-1].append(record)
                lasts[-1] = position
            else:
                runs.append([record])
                lasts.append(position)
            return
        at = bisect_left(lasts, position)
        run = runs[at]
        run.insert(_index(run, position), record)
        if len(run) > RUN_MAX:
            later = run[RUN_MAX // 2 :]
            del run[RUN_MAX // 2 :]
            runs.insert(at + 1, later)
            lasts.insert(at, run[-1].position)

    def remove(self, record: ObjectRecord) -> None:
        """Removes a record that is in the queue. O(log n)."""
        position, runs, lasts = record.position, self._runs, self._lasts
        at = bisect_left(lasts, position)
        run = runs[at]
        index = _index(run, position)
        assert run[index] is record, "the record is not in this queue"
        del run[index]
        if not run:
            del runs[at]
            del lasts[at]
        elif index == len(run):
            lasts[at] = run[-1].position

    def first(self) -> ObjectRecord | None:
        return self._runs[0][0] if self._runs else None

    def last(self) -> ObjectRecord | None:
        return self._runs[-1][-1] if self._runs else None

    def after(self, position: int) -> Iterator[ObjectRecord]:
        """Yields the records with later positions, as long as none is added or removed."""
        at = bisect_right(self._lasts, position)
        for number in range(at, len(self._runs)):
            run = self._runs[number]
            for index in range(_index(run, position + 1) if number == at else 0, len(run)):
                yield run[index]


def _index(run: list[ObjectRecord], position: int) -> int:
    """Finds the index of the first record that is not before this position."""
    low, high = 0, len(run)
    while low < high:
        middle = (low + high) >> 1
        if run[middle].position < position:
            low = middle + 1
        else:
            high = middle
    return low
