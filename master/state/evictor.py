"""Evicts for one allocation, within the bounds of one step of the loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.calls import Version
from kvstore.master.state.candidates import MOVES_PER_STEP, CandidateQueue, EvictionCandidates
from kvstore.master.state.memory_pool import MemoryPool
from kvstore.master.state.pins import bytes_held
from kvstore.master.state.records import MountedSegment, ObjectRecord, StaleExtents
from kvstore.master.state.tenant import GUARANTEE, Tenant
from kvstore.master.state.tenants import TenantAccounting
from kvstore.memory.header import extent_bytes

EVICTIONS_PER_STEP = 128
"""Objects that an allocation evicts in one step of the loop (1 to 2 ms). If it must evict more, it
continues in the next step."""

SPARED_MS = 1_000
"""For how long an object that a drain must not evict is deferred, for puts as well: these wait, or
evict another one. The next search by a drain meets the object only after that time."""

_MOVES_PER_SEARCH = 64
"""Candidates that one search for a victim puts into another queue: their chains may have become
complete since they were marked as detached, or their namespaces belong to another tenant."""

_ANCESTORS_PER_SEARCH = 256
"""Blocks of a chain, from the leaf upward, that are checked for bytes on the requested segments."""


class EvictionConstraint(NamedTuple):
    """What an allocation may evict."""

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
    """Evicts the candidate with the lowest weight of all its segments first."""

    def __init__(
        self,
        pool: MemoryPool,
        segments: list[MountedSegment],
        now_ms: int,
        victims: EvictionConstraint | None = None,
    ) -> None:
        self._pool = pool
        self._now_ms = now_ms
        self._victims = victims
        self.cause: Tenant | None = None
        """The tenant whose puts the evictions count for; None: those of no tenant."""
        self._moves = MOVES_PER_STEP
        """Records that ``CandidateQueue.peek`` may still move to their present position."""
        self._budget = EVICTIONS_PER_STEP
        self.evicted: list[StaleExtents] = []
        self._weights: dict[MountedSegment, int] = {}
        """The weight of each head."""
        if victims is not None and not victims.up_to.epoch:
            segments = []
        self._heads = {segment: self._find_head(segment) for segment in segments}
        """The next victim of each segment; None: there is none, or it must be looked up again."""

    @property
    def has_more_victims(self) -> bool:
        """Whether another step may find a victim, after ``next`` found none."""
        candidates = self._pool.candidates
        return not self._budget or any(candidates[s].unfinished for s in self._heads)

    def shortage(self, missing: int) -> AllocationFailure:
        """The failure of an allocation for which ``next`` found no victim."""
        return AllocationFailure(missing, self.has_more_victims)

    def evict(self, victim: ObjectRecord) -> ObjectRecord | None:
        """Does ``MemoryPool.evict``."""
        return self._pool.evict(victim, self._now_ms)

    def head(self, segment: MountedSegment) -> ObjectRecord | None:
        """The next victim of this segment."""
        if self._heads[segment] is None:
            self._heads[segment] = self._find_head(segment)
        return self._heads[segment]

    def forget(self, segment: MountedSegment) -> None:
        """Lets ``head`` look up the next victim of this segment again."""
        self._heads[segment] = None

    def next(self, order: list[MountedSegment]) -> list[tuple[MountedSegment, int]] | None:
        """Evicts the next victim of these segments, or one elsewhere for which ``_keeps_bytes_on``
        is true, and frees its extents. Returns the freed lengths by segment, or None if every
        candidate is leased or the budget is spent."""
        heads = self._heads
        if not self._budget or not heads:
            return None
        while True:
            segments = [segment for segment in order if heads[segment] is not None]
            if not segments:
                wanted = set(order)
                segments = [
                    segment
                    for segment, head in heads.items()
                    if head is not None and _keeps_bytes_on(wanted, head)
                ]
                if not segments:
                    return None
            first = min(segments, key=self._weights.__getitem__)
            victim = heads[first]
            assert victim is not None
            if self._may_evict(victim):
                break
            heads[first] = self._find_head(first)
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
            heads[segment] = self._find_head(segment)
        return freed

    def _may_evict(self, victim: ObjectRecord) -> bool:
        """Whether a head may still be evicted after others were."""
        del victim
        return True

    def _queues(self, candidates: EvictionCandidates) -> Iterable[CandidateQueue]:
        """The queues that may lose a candidate."""
        return candidates.queues.values()

    def _find_head(self, segment: MountedSegment) -> ObjectRecord | None:
        """Finds the candidate with the lowest weight that may be evicted. O(tenants)."""
        candidates = self._pool.candidates[segment]
        found: ObjectRecord | None = None
        lowest = 0
        unfinished = False
        for queue in self._queues(candidates):
            if not len(queue):
                continue
            head = self._first_of(candidates, queue)
            unfinished = unfinished or queue.unfinished
            if head is None:
                continue
            weight = queue.weight(head)
            if (found is None or weight < lowest) and self._may_evict(head):
                found, lowest = head, weight
        candidates.unfinished = unfinished
        self._weights[segment] = lowest
        return found

    def _first_of(
        self, candidates: EvictionCandidates, queue: CandidateQueue
    ) -> ObjectRecord | None:
        """Finds the first candidate of one queue, after those that do not belong to the front, or
        to the queue, were moved."""
        for _ in range(_MOVES_PER_SEARCH):
            head = self._peek(queue)
            if head is None:
                return None
            detached = queue.is_detached(head)
            if candidates.is_misplaced(head):
                candidates.discard(head)
                candidates.add(head, detached=detached)
            elif detached and self._pool.forest.is_reachable(head):
                candidates.discard(head)
                candidates.add(head)
            else:
                victims = self._victims
                may = victims is None or head.last_used_ms < victims.used_before_ms or detached
                return head if may else None
        queue.unfinished = True
        return None

    def _peek(self, queue: CandidateQueue) -> ObjectRecord | None:
        ends = self._pool.pins.ends
        spared = None if self._victims is None else self._victims.up_to
        while True:
            head = queue.peek(self._now_ms, self._moves)
            self._moves -= queue.moved
            if head is None:
                return None
            until_ms = ends.expiry_of(head)
            if spared is not None and (head.epoch, head.counter) > spared:
                until_ms = max(until_ms, self._now_ms + SPARED_MS)
            if until_ms <= self._now_ms:
                return head
            if self._moves <= 0:
                queue.unfinished = True
                return None
            self._moves -= 1
            queue.defer(head, until_ms)


class QuotaEvictor(Evictor):
    """Evicts only what the guarantees of tenants allow: objects of ``owner``, and those of tenants
    that hold their guarantee even without them."""

    def __init__(
        self,
        pool: MemoryPool,
        segments: list[MountedSegment],
        now_ms: int,
        victims: EvictionConstraint | None,
        owner: Tenant | None,
        *,
        own_only: bool = False,
    ) -> None:
        assert pool.tenants is not None
        self._tenants: TenantAccounting = pool.tenants
        self._owner = owner
        self._own_only = own_only
        self._is_guaranteed = False
        """Whether a guarantee has kept an object of another tenant."""
        super().__init__(pool, segments, now_ms, victims)
        self.cause = owner

    def shortage(self, missing: int) -> AllocationFailure:
        quota = GUARANTEE if self._is_guaranteed and self._owner is not None else ""
        return AllocationFailure(missing, self.has_more_victims, quota)

    def evict(self, victim: ObjectRecord) -> ObjectRecord | None:
        tenant = self._tenants.of_record(victim)
        if tenant is self.cause:
            tenant.evicted_by_own += 1
        else:
            tenant.evicted_by_others += 1
        parent = super().evict(victim)
        assert tenant is self._owner or tenant.size >= tenant.guarantee, "below its guarantee"
        return parent

    def _may_evict(self, victim: ObjectRecord) -> bool:
        tenant = self._tenants.of_record(victim)
        if tenant is self._owner:
            return True
        if tenant.size - bytes_held(victim) >= tenant.guarantee:
            return True
        self._is_guaranteed = True
        return False

    def _queues(self, candidates: EvictionCandidates) -> Iterable[CandidateQueue]:
        owner = self._owner
        if self._own_only:
            own = None if owner is None else candidates.queues.get(owner.number)
            return [] if own is None else [own]
        queues: list[CandidateQueue] = []
        for queue in candidates.queues.values():
            tenant = queue.tenant
            assert tenant is not None
            if tenant is owner or not 0 < tenant.guarantee or tenant.size > tenant.guarantee:
                queues.append(queue)
            elif len(queue):
                self._is_guaranteed = True
        return queues


def _keeps_bytes_on(segments: set[MountedSegment], leaf: ObjectRecord) -> bool:
    """Whether a replica of the leaf, or of one of its nearest ancestors, is on ``segments``."""
    at: ObjectRecord | None = leaf
    for _ in range(_ANCESTORS_PER_SEARCH):
        if at is None:
            break
        if any(segment in segments for segment, _ in at.extents()):
            return True
        at = at.parent
    return False
