"""Memory and forest together: gives objects their bytes, and takes the bytes away.

``MemoryPool`` keeps consistent: an object's extents, its eviction queue, the counts of its
namespace and tenant, and the forest."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from kvstore.calls.tenants import TenantRule
from kvstore.limits import REPLICAS_MAX
from kvstore.master.state import repair_queue, turnover
from kvstore.master.state.background_jobs import DELETE_UNUSED, SWEEP, BackgroundJobs
from kvstore.master.state.candidates import EvictionCandidates, SweepCursor
from kvstore.master.state.eviction import NewPolicy
from kvstore.master.state.expiry_index import ExpiryIndex
from kvstore.master.state.forest import Forest
from kvstore.master.state.pins import PinTable
from kvstore.master.state.records import (
    HITS_MAX,
    Extent,
    MountedSegment,
    ObjectRecord,
    StaleExtents,
)
from kvstore.master.state.tenant import Tenant
from kvstore.master.state.tenants import open_tenancy
from kvstore.master.state.traffic import TrafficRecorder
from kvstore.master.state.turnover import TurnoverClock
from kvstore.memory.header import extent_bytes
from kvstore.runtime.histograms import Histogram

SETTLE_STEPS = 1_000
"""Records of lost blocks that are deleted in one step, along one chain: 1 to 2 ms."""

_SIZES_MAX = 4_096
"""Sizes whose integer objects are shared among records: most objects have one of few sizes."""


class MemoryPool:
    """All mounted segments and the objects on them."""

    def __init__(
        self,
        jobs: BackgroundJobs,
        new_policy: NewPolicy,
        tenants: Sequence[TenantRule] | None = None,
    ) -> None:
        """``tenants``: their rules; None: nothing is counted by tenant, and no quota holds."""
        self._jobs = jobs
        self._new_policy = new_policy
        self.segments: dict[int, MountedSegment] = {}
        """Living segments, by id."""
        self.candidates: dict[MountedSegment, EvictionCandidates] = {}
        """The objects that could be evicted: leaves, by the segment of their first replica. A dead
        segment has its candidates until they are swept."""
        self.capacity_max = 0
        """Capacity of the largest living segment."""
        self._turnover = TurnoverClock()
        """That of a pool without tenants."""
        self._turnover_step = 1
        self._policies = {1: new_policy(1)}
        """By the number of the tenant: one without candidates, which is told of uses."""
        self.learns_uses = self._policies[1].learns_uses
        self.counters: Counter[str] = Counter()
        self.eviction_ages_ms = Histogram()
        """For how long each evicted object had not been used."""
        self.forest = Forest(self.counters)
        self.traffic = TrafficRecorder()
        self.pins = PinTable(jobs)
        self.tenants = open_tenancy(tenants, self.forest.namespaces, self.segments)
        self.forest.tenants = self.pins.tenants = self.tenants
        self.lifetimes = ExpiryIndex()
        """The ends of objects with a TTL."""
        self.maybe_unused: deque[ObjectRecord] = deque()
        """Records at which ``delete_if_unused`` must continue after a long chain."""
        self._sizes: dict[int, int] = {}
        nowhere = repair_queue.placeholder_segment()
        missing: Extent = nowhere, 0
        self._copied: Extent = nowhere, repair_queue.COPIED
        self._missing = tuple((missing,) * count for count in range(REPLICAS_MAX))
        """By the number of missing replicas: what stands for them in ``more``, shared by all."""
        self.has_replicas = False
        """Whether any object ever had, or should have had, more than one replica."""
        self.short_objects = 0
        """Objects that lack replicas: the count of the last pass over all objects, corrected by
        each change since, except for the death of nodes."""

    def tenant_of(self, namespace: str) -> Tenant | None:
        """The tenant of this namespace; None: the master has none."""
        return self.tenants.of(namespace)

    def is_stored(self, record: ObjectRecord, now_ms: int) -> bool:
        """Whether the object is complete and not expired."""
        return record.complete and not self.lifetimes.ended(record, now_ms)

    # --- objects ------------------------------------------------------------------------------

    def link(self, record: ObjectRecord, parent: ObjectRecord | None, lease_until_ms: int) -> None:
        """Does ``Forest.link``, and removes the parent, which has a child now, from the candidates.

        ``lease_until_ms``: the end of the longest lease of a descendant of ``record``, which also
        protects the previous parent.
        """
        before = self.forest.link(record, parent)
        self.pins.linked(record)
        if parent is not None and parent.queue:
            self._candidates_of(parent).discard(parent)
        if before is not None:
            if record.children:
                before.keep_until(lease_until_ms)
            self.delete_if_unused(before)

    def store(
        self,
        record: ObjectRecord,
        extents: list[Extent],
        size: int,
        version: tuple[int, int],
        now_ms: int,
        missing: int = 0,
    ) -> None:
        """Gives ``record``, which has no bytes yet, these extents. The caller calls
        ``delete_if_unused`` afterwards. ``missing``: the number of replicas that it lacks."""
        assert record.segment is None
        assert not record.queue
        record.segment, record.offset = extents[0]
        record.more = tuple(extents[1:]) if len(extents) > 1 else ()
        if missing:
            self.short_objects += 1
            lacks = self._missing[missing]
            record.more = (*record.more, *lacks) if record.more else lacks
        if record.more:
            self.has_replicas = True
        record.epoch, record.counter = version
        record.last_used_ms = now_ms
        record.hits = record.hint = 0
        if len(self._sizes) >= _SIZES_MAX:
            self._sizes.clear()
        self.forest.mark_complete(record, self._sizes.setdefault(size, size))
        self.pins.stored(record)
        length = extent_bytes(size)
        self.tenants.count_extents(record, extents, length)
        tenant = self.tenants.of_record(record)
        clock = self._turnover if tenant is None else tenant.turnover
        clock.add(length * len(extents), self._turnover_step, now_ms)

    def turnover_ms(self, namespace: str, now_ms: int) -> int | None:
        """The time in which puts fill what the namespace's tenant holds and the free memory; None:
        they have not yet."""
        size = sum(segment.allocator.free_bytes for segment in self.segments.values())
        tenant = self.tenant_of(namespace)
        if tenant is None:
            size, clock = sum(s.capacity for s in self.segments.values()), self._turnover
        else:
            size, clock = size + tenant.size, tenant.turnover
        return clock.turnover_ms(size, self._turnover_step, now_ms)

    def add_replica(
        self, record: ObjectRecord, extent: Extent, instead_of: Extent | None = None
    ) -> None:
        """Adds a replica to a complete object; ``instead_of``: the missing one that it replaces."""
        self.has_replicas = True
        self.tenants.count_extents(record, [extent], extent_bytes(record.size))
        lacked = repair_queue.missing(record)
        if instead_of is None:
            record.more = (*record.more, extent)
            self.pins.stored(record)
            return
        if (record.segment, record.offset) == instead_of:
            self.demote(record, ())  # puts the missing one behind those that are alive
        more = list(record.more)
        more[more.index(instead_of)] = extent
        record.more = tuple(more)
        self.pins.stored(record)
        if lacked == 1:
            self._count_replica_restored()

    def note_copied(self, record: ObjectRecord) -> None:
        """Notes that a copy begins: if its node dies, that memory may hold a complete copy."""
        if self._copied not in record.more:
            record.more = (*record.more, self._copied)

    def _count_replica_restored(self) -> None:
        self.short_objects = max(0, self.short_objects - 1)

    def space_for_copy(
        self, record: ObjectRecord, roomy: Iterable[MountedSegment], near: MountedSegment | None
    ) -> Extent | None:
        """Allocates an extent for one more replica, on a node that has none: on ``near``, or on the
        first of ``roomy`` with enough space. Evicts nothing, and leaves a 16th of it free."""
        length = extent_bytes(record.size)
        if not self.may_have_copy(record):
            return None
        nodes = [segment.node for segment, _ in record.extents() if segment.alive]
        for segment in roomy if near is None else (near, *roomy):
            allocator = segment.allocator
            if (
                segment.node not in nodes
                and allocator.largest_free >= length
                and allocator.free_bytes - length >= segment.capacity >> repair_queue.SPARE_SHIFT
            ):
                offset = allocator.allocate(length)
                assert offset is not None
                return segment, offset
        return None

    def may_have_copy(self, record: ObjectRecord) -> bool:
        """Whether one more replica stays within the bound of its tenant."""
        return self.tenants.may_grow(record, extent_bytes(record.size))

    def take_extents(self, record: ObjectRecord, *, replaced: bool = False) -> None:
        """Takes the bytes from a record; its extents stay allocated. ``replaced``: the record gets
        other bytes at once, and keeps its pin and its TTL."""
        if not replaced:
            self.pins.drop(record)
            self.lifetimes.drop(record)
        if record.more and repair_queue.missing(record):
            self._count_replica_restored()
        if record.queue:
            self._candidates_of(record).discard(record)
        self.tenants.count_extents(record, record.extents(), -extent_bytes(record.size))
        if self.forest.drop_bytes(record):
            self._jobs.due |= SWEEP

    def delete_if_unused(
        self, record: ObjectRecord, *, detached: bool | None = None
    ) -> ObjectRecord | None:
        """Called when ``record`` has lost a child, or another reason to stay. Deletes the record if
        nothing needs it any more, and then does the same for its parent. A complete record without
        children becomes a candidate for eviction instead.

        A parent inherits the recency of a deleted child, because it was used with it, and its
        lease and the time that it is retained, because these protected the whole chain.

        Args:
            detached: how to mark a new candidate; None: find out whether a root leads to it. The
                mark may become wrong later, when an ancestor is stored or lost. So ``Evictor``
                checks it again before it evicts, and ``sweep_detached`` after each loss.

        Returns:
            The new candidate, if there is one.
        """
        at: ObjectRecord | None = record
        steps = 0
        while at is not None and not at.children:
            if at.complete:
                if at.queue:
                    return None
                if at.more:
                    self._move_to_living_segment(at)
                if detached is None:
                    detached = not self.forest.is_reachable(at)
                self._candidates_of(at).add(at, detached=detached)
                return at
            if steps == SETTLE_STEPS:
                self._delete_later(at)
                return None
            steps += 1
            if at.segment is not None:
                self.take_extents(at)
            if at.writer:
                return None
            used_ms, lease_until_ms, hits = at.last_used_ms, at.lease_until_ms, at.hits & HITS_MAX
            hint = at.hint
            at = self.forest.forget(at)
            if at is not None:
                at.last_used_ms = max(at.last_used_ms, used_ms)
                at.keep_until(lease_until_ms)
                at.hits = max(at.hits, hits)
                if hint > 0:
                    at.hint = max(at.hint, hint)
        return None

    def _delete_later(self, record: ObjectRecord) -> None:
        self.maybe_unused.append(record)
        self._jobs.due |= DELETE_UNUSED

    def continue_deleting(self, steps: int) -> None:
        """Continues with ``maybe_unused``, for about ``steps`` records."""
        steps_max = self.forest.steps + steps
        while self.maybe_unused and self.forest.steps < steps_max:
            record = self.maybe_unused.popleft()
            if self.forest.get(record.namespace, record.key) is record:
                self.delete_if_unused(record)
        self._jobs.note(DELETE_UNUSED, bool(self.maybe_unused))

    def remove(self, record: ObjectRecord, steps_max: int) -> None:
        """Removes an object, whose extents stay allocated. Once ``forest.steps`` has reached
        ``steps_max``, ``continue_deleting`` deletes the unused records."""
        detached = self.marked_detached(record)
        self.take_extents(record)
        if self.forest.steps < steps_max:
            self.delete_if_unused(record, detached=detached)
        else:
            self._delete_later(record)

    def evict(self, record: ObjectRecord, now_ms: int) -> ObjectRecord | None:
        """Evicts a candidate, whose extents stay allocated: the caller frees them and has their
        headers wiped. Returns the parent of the record if that has become a candidate."""
        detached, size = self.marked_detached(record), record.size
        self._candidates_of(record).discard(record, evicted=True)
        self.take_extents(record)
        self.counters["evicted_objects"] += 1
        self.counters["evicted_bytes"] += size
        head = record.key if record.parent is None else None
        self.traffic.record_eviction(now_ms, record.namespace, now_ms - record.last_used_ms, head)
        self.eviction_ages_ms.add(max(0, now_ms - record.last_used_ms))
        return self.delete_if_unused(record, detached=detached)

    def lease_ended(self, record: ObjectRecord) -> None:
        """Called when a lease or a pin of a record ended early."""
        if record.queue:
            self._candidates_of(record).lease_ended(record)

    def used(self, record: ObjectRecord, now_ms: int) -> None:
        """Called before a use, if ``learns_uses``."""
        tenant = self.tenants.of_record(record)
        number = 1 if tenant is None else tenant.number
        policy = self._policies.get(number)
        if policy is None:
            policy = self._policies[number] = self._new_policy(number)
        policy.used(record, now_ms)

    def hint(self, record: ObjectRecord, hint: int) -> None:
        """Replaces the hint of an object (``eviction_hints``)."""
        if record.queue:
            self._candidates_of(record).hint(record, hint)
        else:
            record.hint = hint

    def marked_detached(self, record: ObjectRecord) -> bool:
        return bool(record.queue) and self._candidates_of(record).is_detached(record)

    def free(self, extents: Iterable[Extent], length: int) -> None:
        """Frees extents of ``length`` bytes, except those on dead segments."""
        for segment, offset in extents:
            if segment.alive:
                segment.allocator.free(offset, length)

    def free_stale(self, stale: StaleExtents) -> None:
        """Frees stale extents, except those on dead segments."""
        for segment, offset in stale.extents:
            if segment.alive:
                segment.allocator.free(offset, segment.extent_bytes(stale.size))

    def _move_to_living_segment(self, record: ObjectRecord) -> None:
        """Moves the first living replica to the front: a record is a candidate on its segment.
        Replicas on dead segments remain, and count as missing."""
        if record.segment is not None and record.segment.alive:
            return
        first, *more = sorted(record.extents(), key=lambda extent: not extent[0].alive)
        (record.segment, record.offset), record.more = first, tuple(more)

    def demote(self, record: ObjectRecord, segments: Collection[MountedSegment]) -> None:
        """Moves the record's replicas on these segments to the end: clients read them last."""
        detached, is_candidate = self.marked_detached(record), bool(record.queue)
        if is_candidate:
            self._candidates_of(record).discard(record)
        first, *more = sorted(record.extents(), key=lambda extent: extent[0] in segments)
        (record.segment, record.offset), record.more = first, tuple(more)
        self._move_to_living_segment(record)
        if is_candidate:
            self._candidates_of(record).add(record, detached=detached)

    def _candidates_of(self, record: ObjectRecord) -> EvictionCandidates:
        assert record.segment is not None
        return self.candidates[record.segment]

    # --- segments -----------------------------------------------------------------------------

    def prepare(self, segments: list[MountedSegment]) -> None:
        """Make the candidates of segments to ``mount``. An exception changes nothing."""
        candidates = [
            EvictionCandidates(self._new_policy, self.tenants, self.counters) for _ in segments
        ]
        self.candidates.update(zip(segments, candidates, strict=True))

    def mount(self, segment: MountedSegment) -> None:
        self.segments[segment.segment_id] = segment
        self._capacity_changed()

    def _capacity_changed(self) -> None:
        capacities = [segment.capacity for segment in self.segments.values()]
        self.capacity_max = max(capacities, default=0)
        self._turnover_step = max(1, sum(capacities) // turnover.STEPS)

    def unmount(self, segment: MountedSegment) -> None:
        """Removes a dead segment at once. ``sweep_dead`` then deletes the records in slices."""
        segment.alive = False
        del self.segments[segment.segment_id]
        self._capacity_changed()
        self.forest.breaks += 1
        self._jobs.due |= SWEEP
        self.pins.segment_died()
        self.tenants.segment_died(segment.segment_id)

    def sweep_dead(self, segment: MountedSegment, steps: int) -> bool:
        """Deletes candidates of a dead segment, or moves them to that of a living replica: about
        ``steps`` records. Returns whether the segment has candidates left."""
        steps_max = self.forest.steps + steps
        candidates = self.candidates[segment]
        for record in candidates.after(SweepCursor(), steps):
            if not record.queue:
                continue  # already deleted with an earlier record
            if self.forest.steps >= steps_max:
                break
            if record.complete:
                detached = candidates.is_detached(record)
                candidates.discard(record)
                self._move_to_living_segment(record)
                self._candidates_of(record).add(record, detached=detached)
            else:
                self.delete_if_unused(record, detached=False)
        if len(candidates):
            return True
        del self.candidates[segment]
        return False

    def sweep_detached(
        self, segment: MountedSegment, cursor: SweepCursor, steps: int
    ) -> SweepCursor | None:
        """Corrects the marks of candidates: leaves without a root are evicted first. Moves those
        whose namespace belongs to another tenant now into its queue.

        Checks the candidates after the cursor, about ``steps`` records in all. Returns where to
        continue, or None at the end.
        """
        if not segment.alive:
            return None
        candidates = self.candidates[segment]
        steps_max = self.forest.steps + steps
        records = candidates.after(cursor, steps)
        for record in records:
            cursor = SweepCursor(record.queue, record.position)
            detached = not self.forest.is_reachable(record)
            if detached != candidates.is_detached(record) or candidates.is_misplaced(record):
                candidates.discard(record)
                candidates.add(record, detached=detached)
            if self.forest.steps >= steps_max:
                return cursor
        return cursor if len(records) == steps else None
