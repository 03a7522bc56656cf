"""The eviction candidates of a segment: complete leaves of the forest, a queue per tenant.

Evicting a candidate never breaks a chain. Detached records, to which no path leads from a root, are
first; then those whose clients said that they are over or not needed soon; then the others, ordered
by an ``EvictionPolicy``; then the retained ones, least recently used first. A policy that learns
hints orders all but the detached ones. A leased record that comes first is *deferred*: no search
passes it again before the end of its lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final, NamedTuple, final

from kvstore.master.state import eviction_hints
from kvstore.master.state.eviction import (
    POSITION_BITS,
    EvictionPolicy,
    LruPolicy,
    NewPolicy,
    SortedRecordQueue,
)
from kvstore.master.state.records import ObjectRecord
from kvstore.master.state.tenant import Tenant
from kvstore.master.state.tenants import UnlimitedTenancy

MOVES_PER_STEP = 512
"""Records that one step of the loop moves to their present position, on all segments: 2 to 4 ms."""

_DETACHED: Final = -(1 << 203)
"""Added to the positions of detached records."""

_OVER: Final = -(1 << 202)
_DEMOTED: Final = -(1 << 201)
_RETAINED: Final = 1 << POSITION_BITS
"""Added to those of records with a hint."""

_DEFERRED: Final = 1 << (POSITION_BITS + 1)
"""Added to those of deferred records, which are sorted by the end of the lease."""

_SEQUENCE_BITS: Final = 50


class SweepCursor(NamedTuple):
    """The last candidate that a sweep has seen."""

    queue: int = 0
    position: int = _DETACHED


@final
class CandidateQueue:
    """The candidates of one segment and tenant."""

    def __init__(
        self, policy: EvictionPolicy, tenant: Tenant | None, counters: Counter[str]
    ) -> None:
        self.tenant = tenant
        self._counters = counters
        self._policy = policy
        self._learns_hints = policy.learns_hints
        self._detached = SortedRecordQueue()
        self._over = LruPolicy(base=_OVER)
        self._demoted = LruPolicy(base=_DEMOTED)
        self._retained = LruPolicy(base=_RETAINED)
        self._deferred = SortedRecordQueue()
        self._sequence = 0
        self._count = 0
        self.unfinished = False
        """Whether the last ``peek`` reached its limit before it found a candidate."""
        self.moved = 0
        """Records that the last ``peek`` moved to their present position."""
        self._now_ms = 0
        """Of the last ``peek``."""

    def add(self, record: ObjectRecord, *, detached: bool = False) -> None:
        self._count += 1
        self._insert(record, detached=detached)

    def discard(self, record: ObjectRecord, *, evicted: bool = False) -> None:
        self._count -= 1
        if evicted and record.hint > 0:
            self._counters["retained_unused"] += 1
        self._remove(record, evicted=evicted)

    def is_detached(self, record: ObjectRecord) -> bool:
        """Whether this candidate was added as detached."""
        position = record.position
        return position < _OVER or (position >= _DEFERRED and bool(position & 1))

    def is_retained(self, record: ObjectRecord) -> bool:
        """Whether a client still expects the next use of this candidate."""
        return record.hint > self._now_ms and record.position < _DEFERRED

    def value(self, record: ObjectRecord) -> tuple[int, int, int]:
        """The value of keeping this candidate, which ``peek`` has returned: the order of its hint
        and the policy's rank count within a tenant; the age of the tenant's oldest candidate,
        whatever is said of it, between tenants."""
        position = record.position
        if position < _OVER:
            return 0, 0, -1
        order = 1 + (position >= _DEMOTED) + (position >= 0) + (position >= _RETAINED)
        rank = self._policy_at(position).rank(record)
        return order, rank, 0 if self.tenant is None else self._oldest_ms()

    def _oldest_ms(self) -> int:
        policies: list[EvictionPolicy] = [self._over, self._demoted, self._policy, self._retained]
        return min([policy.oldest_ms() for policy in policies])

    def hint(self, record: ObjectRecord, hint: int) -> None:
        """Replace the hint of this candidate."""
        if self.is_detached(record) or record.position >= _DEFERRED:
            record.hint = hint
        else:
            self._remove(record)
            record.hint = hint
            self._insert(record, detached=False)

    def peek(self, now_ms: int, moves: int = MOVES_PER_STEP) -> ObjectRecord | None:
        """The next record to evict, which is not leased and stays a candidate; None if all are
        leased, or the search is ``unfinished`` after ``moves``."""
        self.unfinished = False
        self.moved = 0
        self._now_ms = now_ms
        while True:
            record = self._deferred.first()
            is_due = record is not None and _deferred_until_ms(record) <= now_ms
            if not is_due:
                record = self._retained.first()
                is_due = record is not None and eviction_hints.has_ended(record, now_ms)
                if record is not None and is_due and record.hint:
                    self._counters["retained_unused"] += 1
            if not is_due:
                record = (
                    self._detached.first()
                    or self._over.first()
                    or self._demoted.first()
                    or self._policy.first()
                    or self._retained.first()
                )
            if record is None:
                return None
            if record.lease_until_ms > now_ms:
                self.defer(record, record.lease_until_ms)
            elif is_due:
                self._reinsert(record)
            elif record.position < _OVER or not self._hit(record):
                return record
            self.moved += 1
            if self.moved > moves:
                self.unfinished = True
                return None

    def defer(self, record: ObjectRecord, until_ms: int) -> None:
        """Keep ``peek`` from returning this candidate before ``until_ms``."""
        detached = self.is_detached(record)
        self._remove(record)
        self._sequence += 1
        record.position = _DEFERRED + (until_ms << _SEQUENCE_BITS | self._sequence << 1 | detached)
        self._deferred.add(record)

    def lease_ended(self, record: ObjectRecord) -> None:
        """Called when the lease of this candidate has ended early, and with it a deferral."""
        if record.position >= _DEFERRED:
            self._reinsert(record)

    def next_lease_end_ms(self) -> int | None:
        """When the first deferred candidate becomes evictable; None: none is deferred."""
        first = self._deferred.first()
        return None if first is None else _deferred_until_ms(first)

    def __len__(self) -> int:
        return self._count

    def after(self, position: int) -> Iterator[ObjectRecord]:
        """Yield the candidates with later positions, as long as none is added or removed."""
        return chain(
            self._detached.after(position),
            self._over.after(position),
            self._demoted.after(position),
            self._policy.after(position),
            self._retained.after(position),
            self._deferred.after(position),
        )

    def _reinsert(self, record: ObjectRecord) -> None:
        detached = self.is_detached(record)
        self._remove(record)
        self._insert(record, detached=detached)

    def _insert(self, record: ObjectRecord, *, detached: bool) -> None:
        if detached:
            self._sequence += 1
            record.position = _DETACHED + self._sequence
            self._detached.add(record)
            return
        hint = 0 if self._learns_hints else record.hint
        if hint and eviction_hints.has_ended(record, self._now_ms):
            hint = record.hint = 0
        if not hint:
            self._policy.insert(record)
        elif hint > 0:
            self._retained.insert(record)
        else:
            (self._over if eviction_hints.is_over(record) else self._demoted).insert(record)

    def _hit(self, record: ObjectRecord) -> bool:
        """Move the first candidate if it was used since it got its position."""
        if record.position < 0:
            if not eviction_hints.has_ended(record, self._now_ms):
                return False
            self._reinsert(record)
            return True
        return self._policy_at(record.position).hit(record)

    def _policy_at(self, position: int) -> EvictionPolicy:
        if position >= 0:
            return self._retained if position >= _RETAINED else self._policy
        return self._demoted if position >= _DEMOTED else self._over

    def _remove(self, record: ObjectRecord, *, evicted: bool = False) -> None:
        position = record.position
        if position < _OVER:
            self._detached.remove(record)
        elif position >= _DEFERRED:
            self._deferred.remove(record)
        else:
            self._policy_at(position).remove(record, evicted=evicted)


@final
class EvictionCandidates:
    """The queues of one segment. They know of each other only ``CandidateQueue.value``."""

    def __init__(
        self, new_policy: NewPolicy, tenants: UnlimitedTenancy, counters: Counter[str]
    ) -> None:
        self._counters = counters
        self._new_policy = new_policy
        self._tenants = tenants
        self.queues = {1: CandidateQueue(new_policy(1), tenants.unnamed, counters)}
        """By the number of the tenant; 1: of the unnamed one, and of all if there are none."""
        self.unfinished = False
        """Whether the last search for a victim reached its limit before it found one."""

    def add(self, record: ObjectRecord, *, detached: bool = False) -> None:
        """Make a record a candidate of its tenant. ``detached``: no path from a root leads to it,
        so it is evicted first."""
        assert not record.queue, "already a candidate"
        tenant = self._tenants.of_record(record)
        record.queue = 1 if tenant is None else tenant.number
        queue = self.queues.get(record.queue)
        if queue is None:
            queue = self.queues[record.queue] = CandidateQueue(
                self._new_policy(record.queue), tenant, self._counters
            )
        queue.add(record, detached=detached)

    def discard(self, record: ObjectRecord, *, evicted: bool = False) -> None:
        self.queues[record.queue].discard(record, evicted=evicted)
        record.queue = 0

    def is_detached(self, record: ObjectRecord) -> bool:
        return self.queues[record.queue].is_detached(record)

    def hint(self, record: ObjectRecord, hint: int) -> None:
        """Replace the hint of a candidate."""
        self.queues[record.queue].hint(record, hint)

    def defer(self, record: ObjectRecord, until_ms: int) -> None:
        """Keep a candidate from being evicted before ``until_ms``."""
        self.queues[record.queue].defer(record, until_ms)

    def is_misplaced(self, record: ObjectRecord) -> bool:
        """Whether a candidate is still in the queue of the tenant that it had before."""
        return self._tenants.is_misplaced(record)

    def lease_ended(self, record: ObjectRecord) -> None:
        self.queues[record.queue].lease_ended(record)

    def next_lease_end_ms(self, after_ms: int) -> int | None:
        """When the first deferred candidate becomes evictable, if that is after ``after_ms``."""
        ends = [queue.next_lease_end_ms() for queue in self.queues.values()]
        return min([ms for ms in ends if ms is not None and ms > after_ms], default=None)

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def after(self, cursor: SweepCursor, count: int) -> list[ObjectRecord]:
        """List up to ``count`` candidates after the cursor. So a sweep continues where it stopped,
        whichever candidates came and went meanwhile."""
        found: list[ObjectRecord] = []
        for number in sorted(self.queues):
            if number >= cursor.queue and len(found) < count:
                first = cursor.position if number == cursor.queue else _DETACHED
                found += islice(self.queues[number].after(first), count - len(found))
        return found


def _deferred_until_ms(record: ObjectRecord) -> int:
    return record.position - _DEFERRED >> _SEQUENCE_BITS
