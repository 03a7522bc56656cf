"""Evicts for one allocation, within the bounds of one step of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.calls import Version
from kvstore.master.state.candidates import MOVES_PER_STEP, CandidateQueue, EvictionCandidates
from kvstore.master.state.memory_pool import MemoryPool
from kvstore.master.state.pins import bytes_held
from kvstore.master.state.records import MountedSegment, ObjectRecord, StaleExtents
from kvstore.master.state.tenant import GUARANTEE, LIMIT, Tenant
from kvstore.memory.header import extent_bytes

EVICTIONS_PER_STEP = 128
"""Objects that an allocation evicts in one step of the loop (1 to 2 ms). If it must evict more, it
continues in the next step."""

SPARED_MS = 1_000
"""For how long an object that a drain must not evict is deferred, for puts as well: these wait, or
evict another one. The next search by a drain meets the object only after that time."""

CORRECTION_COUNTS_FOR = 8
"""Moves that a record counts for which is put into another queue: its chain has become complete
since it was marked as detached, or its namespace belongs to another tenant."""

_ANCESTORS_PER_SEARCH = 256
"""Blocks of a chain, from the leaf upward, that are checked for bytes on the requested segments."""


class EvictionConstraint(NamedTuple):
    """The objects that an allocation may evict."""

    used_before_ms: int
    """Only objects that were last used before this time, and detached ones."""
    up_to: Version
    """Only objects of this version or an earlier one; none at all if its epoch is 0."""


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """An allocation that found no space. Nothing of it was taken."""

    missing_bytes: int
    may_retry: bool = False
    """Whether the search ended because the budget of the step was spent: try again at once."""
    quota: str = ""
    """The quota that refuses it: LIMIT of its tenant, GUARANTEE of others; empty: none does."""
    is_permanent: bool = False
    """Whether it is more than its tenant may ever hold."""


class Evictor:
    """The evictions for one allocation: first the candidate with the lowest value of all its
    segments; of tenants other than ``owner``, only what they hold above their guarantee."""

    def __init__(
        self,
        pool: MemoryPool,
        segments: Iterable[MountedSegment],
        now_ms: int,
        victims: EvictionConstraint | None = None,
        owner: Tenant | None = None,
        *,
        own_only: bool = False,
    ) -> None:
        self._pool = pool
        self._now_ms = now_ms
        self._victims = victims
        self._owner = owner
        self._own_only = own_only
        self._quota = ""
        """GUARANTEE: one has kept an object of another tenant."""
        self.cause = owner
        """The tenant whose puts the evictions count for; None: those of no tenant."""
        self._moves = MOVES_PER_STEP
        """Records that the search for victims may still move to their present position."""
        self._budget = EVICTIONS_PER_STEP
        self.evicted: list[StaleExtents] = []
        self._values: dict[MountedSegment, tuple[int, int, int]] = {}
        """The value of each head (``CandidateQueue.value``)."""
        if victims is not None and not victims.up_to.epoch:
            segments = ()
        self._heads = {segment: self.find_head(segment) for segment in segments}
        """The next victim of each segment."""

    def shortage(self, missing: int) -> AllocationFailure:
        """Return the failure of an allocation for which ``next`` found no victim."""
        candidates = self._pool.candidates
        may_retry = not self._budget or any(candidates[s].unfinished for s in self._heads)
        quota = "" if self._owner is None else LIMIT if self._own_only else self._quota
        return AllocationFailure(missing, may_retry, quota)

    def evict(self, victim: ObjectRecord) -> ObjectRecord | None:
        """Evict the victim and count it for its tenant. Return as ``MemoryPool.evict``."""
        tenant = self._tenant_of(victim)
        if tenant is not None and tenant is self.cause:
            tenant.evicted_by_own += 1
        elif tenant is not None:
            tenant.evicted_by_others += 1
        parent = self._pool.evict(victim, self._now_ms)
        if tenant is not self._owner and tenant is not None:
            assert tenant.size >= tenant.guarantee, "below its guarantee"
        return parent

    def next(self, order: Sequence[MountedSegment]) -> list[tuple[MountedSegment, int]] | None:
        """Evict the next victim of these segments, or one elsewhere for which ``_keeps_bytes_on``
        is true, and free its extents. Return the freed lengths by segment, or None if every
        candidate is leased or the budget is spent."""
        heads = self._heads
        if not self._budget or not heads:
            return None
        while True:
            segments = [segment for segment in order if heads[segment] is not None]
            if not segments:
                wanted = set(order)
                segments = [s for s, head in heads.items() if _keeps_bytes_on(wanted, head)]
                if not segments:
                    return None
            first = segments[0] if len(segments) == 1 else self._lowest(segments)
            victim = heads[first]
            assert victim is not None
            if self._may_evict(victim):  # which other evictions may have changed
                break
            heads[first] = self.find_head(first)
        self._budget -= 1
        length = extent_bytes(victim.size)
        freed = [(segment, length) for segment, _ in victim.extents() if segment.alive]
        changed = {victim.segment}
        self.evicted.append(StaleExtents.of(victim))
        parent = self.evict(victim)
        self._pool.free(self.evicted[-1].extents, length)
        if parent is not None:
            changed.add(parent.segment)
        for segment in heads.keys() & changed:
            heads[segment] = self.find_head(segment)
        return freed

    def _lowest(self, segments: Sequence[MountedSegment]) -> MountedSegment:
        """The segment whose head is evicted first. Hints and the policy decide between heads of one
        tenant; recency alone between tenants, so that a hint of one harms no other."""
        values = self._values
        of_tenants: dict[int, MountedSegment] = {}
        for segment in segments:
            head = self._heads[segment]
            assert head is not None
            best = of_tenants.get(head.queue)
            if best is None or values[segment] < values[best]:
                of_tenants[head.queue] = segment
        lowest, *others = of_tenants.values()
        for segment in others:
            if values[segment][2] < values[lowest][2]:
                lowest = segment
        return lowest

    def find_head(self, segment: MountedSegment) -> ObjectRecord | None:
        """Find the head of the tenant with the oldest candidate that may be evicted. O(tenants)."""
        candidates, owner = self._pool.candidates[segment], self._owner
        found: ObjectRecord | None = None
        lowest = 0, 0, 0
        candidates.unfinished = False
        own = [owner.number] if self._own_only and owner is not None else list(candidates.queues)
        for number in own:
            queue = candidates.queues.get(number)
            if queue is None or not len(queue):
                continue
            tenant = queue.tenant
            if tenant not in (None, owner) and 0 < tenant.guarantee >= tenant.size:
                self._quota = GUARANTEE
                continue
            head = self._first_of(candidates, queue)
            candidates.unfinished |= queue.unfinished
            if head is not None:
                value = queue.value(head)
                if (found is None or value[2] < lowest[2]) and self._may_evict(head):
                    found, lowest = head, value
        self._values[segment] = lowest
        return found

    def _tenant_of(self, record: ObjectRecord) -> Tenant | None:
        return self._pool.tenants.of_record(record)

    def _may_evict(self, victim: ObjectRecord) -> bool:
        tenant = self._tenant_of(victim)
        if tenant is self._owner or tenant is None:
            return True
        if tenant.size - bytes_held(victim) >= tenant.guarantee:
            return True
        self._quota = GUARANTEE
        return False

    def _first_of(
        self, candidates: EvictionCandidates, queue: CandidateQueue
    ) -> ObjectRecord | None:
        """Find the first candidate of one queue. Defer pinned ones, and correct those that are
        misplaced or wrongly marked as detached."""
        victims, now_ms, pool = self._victims, self._now_ms, self._pool
        while True:
            head = queue.peek(now_ms, self._moves)
            self._moves -= queue.moved
            if head is None:
                return None
            until_ms = pool.pins.ends.expiry_of(head)
            if victims is not None and (head.epoch, head.counter) > victims.up_to:
                until_ms = max(until_ms, now_ms + SPARED_MS)
            detached = queue.is_detached(head)
            wrong = candidates.is_misplaced(head)
            if detached and until_ms <= now_ms and pool.forest.is_reachable(head):
                detached, wrong = False, True
            if until_ms <= now_ms and not wrong:
                if (
                    victims is None
                    or detached
                    or head.hint < 0
                    or (head.last_used_ms < victims.used_before_ms and not queue.is_retained(head))
                ):
                    return head
                return None
            if self._moves <= 0:
                queue.unfinished = True
                return None
            if until_ms > now_ms:
                self._moves -= 1
                queue.defer(head, until_ms)
            else:
                self._moves -= CORRECTION_COUNTS_FOR
                candidates.discard(head)
                candidates.add(head, detached=detached)


def _keeps_bytes_on(segments: set[MountedSegment], leaf: ObjectRecord | None) -> bool:
    """Return whether ``segments`` have a replica of the leaf or of one of its near ancestors."""
    at = leaf
    for _ in range(_ANCESTORS_PER_SEARCH):
        if at is None:
            break
        if any(segment in segments for segment, _ in at.extents()):
            return True
        at = at.parent
    return False
