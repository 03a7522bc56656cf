"""Memory and forest together: gives objects their bytes, and takes the bytes away.

``MemoryPool`` keeps these in step: an object's extents, its place in the eviction order, the counts
of its namespace, and the forest. Puts, the length of leases, the streams of nodes and calls are the
business of other parts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from kvstore.calls import Version
from kvstore.calls.tenants import TenantRule
from kvstore.limits import REPLICAS_MAX
from kvstore.master.state import repair_queue
from kvstore.master.state.background_jobs import SETTLE, SWEEP, BackgroundJobs
from kvstore.master.state.expiry_index import ExpiryIndex
from kvstore.master.state.forest import Forest
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.pins import PinTable, bytes_held
from kvstore.master.state.records import (
    MOVES_PER_STEP,
    EvictionPolicy,
    Extent,
    MountedSegment,
    ObjectRecord,
    StaleExtents,
)
from kvstore.master.state.tenant import GUARANTEE, LIMIT, Tenant
from kvstore.master.state.tenant_lru import PerTenantLru
from kvstore.master.state.tenants import TenantAccounting, open_tenancy
from kvstore.master.state.traffic import TrafficRecorder
from kvstore.memory.header import extent_bytes
from kvstore.runtime.histograms import Histogram

EVICTIONS_PER_STEP = 128
"""Objects that an allocation evicts in one step of the loop (1 to 2 ms). If it must evict more, it
goes on in the next step."""

SETTLE_STEPS = 1_000
"""Records of lost blocks that are deleted in one step, along one chain: 1 to 2 ms."""

_REMARKS_PER_LOOK = 64
"""Candidates marked as detached that one search for a victim checks: their chains may have become
whole since they were marked."""

SPARED_MS = 1_000
"""For how long an object that a drain must not evict is passed over, by puts as well: these wait,
or evict another one. The next search by a drain meets the object only after that time."""

_ANCESTORS_PER_LOOK = 256
"""Blocks of a chain that are checked for bytes where room is needed, from the leaf upward."""

_SIZES_MAX = 4_096
"""Sizes whose integer objects are shared among records: most objects have one of few sizes."""


class EvictionConstraint(NamedTuple):
    """What an allocation may evict."""

    used_before_ms: int
    """Only objects that were last used before this time, or that no root leads to."""
    up_to: Version
    """Only objects of this version or an earlier one; none at all if its epoch is 0."""


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """An allocation that found no room. Nothing of it was taken."""

    missing_bytes: int
    may_retry: bool = False
    """Whether the search ended because the budget of the step was spent: try again at once."""
    quota: str = ""
    """The quota that refuses it: LIMIT of its tenant, GUARANTEE of others; empty: none does."""
    is_permanent: bool = False
    """Whether it is more than its tenant may ever hold."""


class MemoryPool:
    """All mounted segments and the objects on them."""

    def __init__(self, jobs: BackgroundJobs, tenants: Sequence[TenantRule] | None = None) -> None:
        """``tenants``: their rules; None: nothing is counted by tenant, and no quota holds."""
        self._jobs = jobs
        self.segments: dict[int, MountedSegment] = {}
        """Living segments, by id."""
        self.capacity_max = 0
        """Capacity of the largest living segment."""
        self.counters: Counter[str] = Counter()
        self.eviction_ages_ms = Histogram()
        """For how long each evicted object had not been used."""
        self.forest = Forest(self.counters)
        self.traffic = TrafficRecorder()
        self.pins = PinTable(jobs)
        self.tenants = open_tenancy(tenants, self.forest.namespaces, self.segments)
        self.forest.tenants = self.pins.tenants = self.tenants
        self.lifetimes = ExpiryIndex()
        """When the objects that were put with a time to live are gone."""
        self.unsettled: deque[ObjectRecord] = deque()
        """Records at which ``delete_if_unused`` must continue, because the path upward was long."""
        self._sizes: dict[int, int] = {}
        nowhere = repair_queue.placeholder_segment()
        missing: Extent = nowhere, 0
        self._copied: Extent = nowhere, repair_queue.COPIED
        self._missing = tuple((missing,) * count for count in range(REPLICAS_MAX))
        """For each number of missing replicas, the tuple that stands for them in ``more``. All
        records share these tuples."""
        self.has_replicas = False
        """Whether any object ever had, or should have had, more than one replica."""
        self.short_objects = 0
        """Objects with fewer replicas than they should have: the count of the last pass over all
        objects, corrected by each change since, except for the death of nodes."""

    def tenant_of(self, namespace: str) -> Tenant | None:
        """The tenant of this namespace; None: the master has none."""
        return self.tenants.of(namespace)

    def is_stored(self, record: ObjectRecord, now_ms: int) -> bool:
        """Whether the object is complete, and its lifetime is not over."""
        return record.complete and not self.lifetimes.ended(record, now_ms)

    # --- objects ------------------------------------------------------------------------------

    def link(self, record: ObjectRecord, parent: ObjectRecord | None, lease_until_ms: int) -> None:
        """Does ``Forest.link``, and takes the parent, which has a child now, out of the candidates.

        ``lease_until_ms``: the end of the longest lease that a descendant of ``record`` may have.
        It protects the previous parent, too.
        """
        before = self.forest.link(record, parent)
        self.pins.linked(record)
        if parent is not None and parent.ticket:
            self._policy_of(parent).discard(parent)
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
        ``delete_if_unused`` afterwards.

        ``missing``: how many replicas it lacks.
        """
        assert record.segment is None
        assert record.ticket == 0
        record.segment, record.offset = extents[0]
        record.more = tuple(extents[1:]) if len(extents) > 1 else ()
        if missing:
            self.short_objects += 1
            signs = self._missing[missing]
            record.more = (*record.more, *signs) if record.more else signs
        if record.more:
            self.has_replicas = True
        record.epoch, record.counter = version
        record.last_used_ms = now_ms
        if len(self._sizes) >= _SIZES_MAX:
            self._sizes.clear()
        self.forest.mark_complete(record, self._sizes.setdefault(size, size))
        self.pins.stored(record)
        self.tenants.count_extents(record, extents, extent_bytes(size))

    def add_replica(
        self, record: ObjectRecord, extent: Extent, instead_of: Extent | None = None
    ) -> None:
        """Notes a further copy of a complete object; ``instead_of``: the missing replica that it
        replaces."""
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
        """Called when a copy begins: if its target node dies, that memory may hold a whole copy."""
        if self._copied not in record.more:
            record.more = (*record.more, self._copied)

    def _count_replica_restored(self) -> None:
        self.short_objects = max(0, self.short_objects - 1)

    def space_for_copy(
        self, record: ObjectRecord, roomy: Iterable[MountedSegment], near: MountedSegment | None
    ) -> Extent | None:
        """Allocates an extent for one more replica, on a node that has none yet: on ``near``, or on
        the first of ``roomy`` with enough room. Evicts nothing, and leaves a 16th of the segment
        free."""
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

    def count_unrequested_bytes(self, record: ObjectRecord) -> None:
        """Called when the record got bytes that no put asked for: its tenant may hold them, even
        above its bound."""
        self.tenants.allow_unrequested(record)

    def take_extents(self, record: ObjectRecord, *, replaced: bool = False) -> None:
        """Takes the bytes from a record, whose extents are still allocated.

        ``replaced``: the record gets other bytes at once, and keeps its pin and its lifetime.
        """
        end_ms = 0
        if not replaced:
            end_ms = self.lifetimes.expiry_of(record)
            self.pins.drop(record)
            self.lifetimes.drop(record)
        if record.more and repair_queue.missing(record):
            self._count_replica_restored()
        if record.ticket:
            self._policy_of(record).discard(record)
        self.tenants.count_extents(record, record.extents(), -extent_bytes(record.size))
        if self.forest.drop_bytes(record, end_ms):
            self._jobs.due |= SWEEP

    def delete_if_unused(
        self, record: ObjectRecord, *, detached: bool | None = None
    ) -> ObjectRecord | None:
        """Called when ``record`` has lost a child, or another reason to stay. Deletes the record if
        nothing needs it any more, and then does the same for its parent. A complete record without
        children becomes a candidate for eviction instead.

        A parent inherits the recency of a deleted child, because it was used with it, and its
        lease, because that protected the whole chain.

        Args:
            detached: how to mark a new candidate; None: find out whether a root leads to it. The
                mark may become wrong later, when an ancestor is stored or lost. So ``_Eviction``
                checks it again before it evicts, and ``sweep_detached`` after each loss.

        Returns:
            The new candidate, if there is one.
        """
        at: ObjectRecord | None = record
        steps = 0
        while at is not None and not at.children:
            if at.complete:
                if at.ticket:
                    return None
                if at.more:
                    self._move_to_living_segment(at)
                if detached is None:
                    detached = not self.forest.is_reachable(at)
                self._policy_of(at).add(at, detached=detached)
                return at
            if steps == SETTLE_STEPS:
                self._delete_later(at)
                return None
            steps += 1
            if at.segment is not None:
                self.take_extents(at)
            if at.writer:
                return None
            used_ms, lease_until_ms = at.last_used_ms, at.lease_until_ms
            at = self.forest.forget(at)
            if at is not None:
                at.last_used_ms = max(at.last_used_ms, used_ms)
                at.keep_until(lease_until_ms)
        return None

    def _delete_later(self, record: ObjectRecord) -> None:
        self.unsettled.append(record)
        self._jobs.due |= SETTLE

    def continue_deleting(self, steps: int) -> None:
        """Continues with ``unsettled``, for about ``steps`` records."""
        steps_max = self.forest.steps + steps
        while self.unsettled and self.forest.steps < steps_max:
            record = self.unsettled.popleft()
            if self.forest.get(record.namespace, record.key) is record:
                self.delete_if_unused(record)
        self._jobs.note(SETTLE, bool(self.unsettled))

    def remove(self, record: ObjectRecord, steps_max: int) -> None:
        """Hides a removed object from all lookups. Its extents are still allocated.

        ``steps_max``: once ``forest.steps`` has reached it, settling is left to
            ``continue_deleting``.
        """
        detached = self.marked_detached(record)
        self.take_extents(record)
        if self.forest.steps < steps_max:
            self.delete_if_unused(record, detached=detached)
        else:
            self._delete_later(record)

    def evict_ahead(
        self, segment: MountedSegment, count: int, now_ms: int
    ) -> tuple[list[StaleExtents], bool]:
        """Evicts up to ``count`` objects, until the reserve of a full segment is free or being
        wiped. Returns their residues, which are still allocated, and whether more must go."""
        evicted: list[StaleExtents] = []
        eviction = self._eviction([segment], now_ms)
        reserve, allocator = segment.reserve_bytes, segment.allocator
        while len(evicted) < count:
            missing = reserve - allocator.free_bytes - segment.wiping_bytes
            head = eviction.head(segment)
            if head is None or missing <= 0 or extent_bytes(head.size) > reserve:
                segment.takers.clear()
                return evicted, False
            eviction.forget(segment)
            eviction.cause = TenantAccounting.main_consumer(segment, extent_bytes(head.size))
            evicted.append(StaleExtents.of(head))
            eviction.evict(head)
            for other, _ in evicted[-1].extents:
                other.wiping_bytes += extent_bytes(evicted[-1].size)
        return evicted, True

    def evict(self, record: ObjectRecord, now_ms: int) -> ObjectRecord | None:
        """Evicts a candidate, whose extents stay allocated: the caller frees them and has their
        headers wiped. Returns the parent of the record if that has become a candidate."""
        detached, size = self.marked_detached(record), record.size
        self.take_extents(record)
        self.counters["evicted_objects"] += 1
        self.counters["evicted_bytes"] += size
        head = record.key if record.parent is None else None
        self.traffic.record_eviction(now_ms, record.namespace, now_ms - record.last_used_ms, head)
        self.eviction_ages_ms.add(max(0, now_ms - record.last_used_ms))
        return self.delete_if_unused(record, detached=detached)

    def lease_ended(self, record: ObjectRecord) -> None:
        """Called when a lease or a pin of a candidate ended early."""
        self._policy_of(record).lease_ended(record)

    def marked_detached(self, record: ObjectRecord) -> bool:
        return bool(record.ticket) and self._policy_of(record).detached(record)

    def free(self, extents: Iterable[Extent], length: int) -> None:
        """Frees extents of ``length`` bytes, except those on dead segments."""
        for segment, offset in extents:
            if segment.alive:
                segment.allocator.free(offset, length)

    def _move_to_living_segment(self, record: ObjectRecord) -> None:
        """Moves the first living replica to the front, because a record is a candidate on the
        segment of its first replica. Replicas on dead segments stay in the list, and count as
        missing."""
        if record.segment is not None and record.segment.alive:
            return
        extents = sorted(record.extents(), key=lambda extent: not extent[0].alive)
        record.segment, record.offset = extents[0]
        record.more = tuple(extents[1:])

    def demote(self, record: ObjectRecord, segments: Collection[MountedSegment]) -> None:
        """Moves the record's replicas on these segments to the end: clients read them last."""
        detached, is_candidate = self.marked_detached(record), bool(record.ticket)
        if is_candidate:
            self._policy_of(record).discard(record)
        extents = sorted(record.extents(), key=lambda extent: extent[0] in segments)
        record.segment, record.offset = extents[0]
        record.more = tuple(extents[1:])
        self._move_to_living_segment(record)
        if is_candidate:
            self._policy_of(record).add(record, detached=detached)

    @staticmethod
    def _policy_of(record: ObjectRecord) -> EvictionPolicy:
        assert record.segment is not None
        return record.segment.candidates

    # --- segments -----------------------------------------------------------------------------

    def mount(self, segment: MountedSegment) -> None:
        self.segments[segment.segment_id] = segment
        self.capacity_max = max(self.capacity_max, segment.capacity)

    def unmount(self, segment: MountedSegment) -> None:
        """Hides a dead segment and its objects at once. ``sweep_dead`` then deletes the records in
        steps."""
        segment.alive = False
        del self.segments[segment.segment_id]
        self.capacity_max = max((s.capacity for s in self.segments.values()), default=0)
        self.forest.breaks += 1
        self._jobs.due |= SWEEP
        self.pins.segment_died()
        self.tenants.segment_died(segment.segment_id)

    def sweep_dead(self, segment: MountedSegment, steps: int) -> bool:
        """Deletes candidates of a dead segment, or moves them to that of a living replica: about
        ``steps`` records. Returns whether the segment has candidates left."""
        steps_max = self.forest.steps + steps
        for record in segment.candidates.after(0, steps):
            if not record.ticket:
                continue  # already deleted with an earlier record
            if self.forest.steps >= steps_max:
                break
            if record.complete:
                detached = segment.candidates.detached(record)
                segment.candidates.discard(record)
                self._move_to_living_segment(record)
                self._policy_of(record).add(record, detached=detached)
            else:
                self.delete_if_unused(record, detached=False)
        return len(segment.candidates) > 0

    def sweep_detached(self, segment: MountedSegment, ticket: int, steps: int) -> int | None:
        """Corrects the marks of candidates: leaves without a root are evicted first. Puts those
        whose namespace has moved to another tenant into its order.

        Checks the candidates after ``ticket``, about ``steps`` records in all. Returns the ticket
        after which to continue, or None at the end.
        """
        if not segment.alive:
            return None
        candidates = segment.candidates
        steps_max = self.forest.steps + steps
        records = candidates.after(ticket, steps)
        for record in records:
            ticket = record.ticket
            detached = not self.forest.is_reachable(record)
            if detached != candidates.detached(record) or self.tenants.is_misplaced(record):
                candidates.discard(record)
                candidates.add(record, detached=detached)
            if self.forest.steps >= steps_max:
                return ticket
        return ticket if len(records) == steps else None

    # --- room ---------------------------------------------------------------------------------

    def allocate(
        self,
        sizes: Sequence[int],
        *,
        replicas: int,
        usable: list[MountedSegment],
        near: MountedSegment | None,
        host: str,
        now_ms: int,
        victims: EvictionConstraint | None = None,
        owner: Tenant | None = None,
        everywhere: Sequence[MountedSegment] = (),
    ) -> tuple[list[list[Extent]] | AllocationFailure, list[StaleExtents]]:
        """Allocates extents for payloads of ``sizes`` bytes, all or none. Evicts unleased objects
        if it must, and also returns the residues of these: their bytes are free in the allocator,
        but no client may write there before the caller has had their headers wiped.

        Args:
            sizes: at least one.
            replicas: the number of distinct nodes for each payload; fewer if fewer have a segment
                that could hold the largest payload.
            usable: the segments to choose from, and to evict from.
            near: the first choice, if it is one of the usable segments.
            host: the host whose segments are the second choice.
            now_ms: leases that end later protect their objects.
            victims: what may be evicted; None: anything.
            owner: the tenant whose bound holds, and who may lose its own objects; None: copies.
            everywhere: segments from which objects of ``owner`` may go so that it keeps its bound.
        """
        lengths = [extent_bytes(size) for size in sizes]
        longest, total = max(lengths), sum(lengths)
        roomy = [segment for segment in usable if segment.capacity >= longest]
        if not roomy:
            return AllocationFailure(total * replicas), []
        near = near if near in roomy else None
        if replicas > 1:
            replicas = min(replicas, len({segment.node for segment in roomy}))
        own: list[StaleExtents] = []
        if owner is not None:
            short, own = self.keep_bound(owner, total * replicas, everywhere, now_ms)
            if short is not None:
                return short, own
        together = self._allocate_together(lengths, replicas, roomy, near, host)
        if together is not None:
            return together, own
        capacities: Counter[JoinedNode] = Counter()
        for segment in roomy:
            capacities[segment.node] += segment.capacity
        room = sum(min(capacity, total) for capacity in capacities.values())
        if room < total * replicas:  # it can never fit, so nothing is evicted for it
            return AllocationFailure(total * replicas - room), own
        order = list(_preferred(roomy, near=near, host=host))
        missing = total * replicas - sum(segment.allocator.free_bytes for segment in order)
        eviction = self._eviction(usable, now_ms, victims, owner)
        eviction.evicted = own
        while missing > 0:
            freed = eviction.next(order)
            if freed is None:
                return eviction.shortage(missing), eviction.evicted
            missing -= sum(length for segment, length in freed if segment.capacity >= longest)
        together = self._allocate_together(lengths, replicas, roomy, near, host)
        if together is None:
            return self._allocate_apart(lengths, replicas, order, eviction), eviction.evicted
        return together, eviction.evicted

    def keep_bound(
        self, owner: Tenant, wanted: int, segments: Sequence[MountedSegment], now_ms: int
    ) -> tuple[AllocationFailure | None, list[StaleExtents]]:
        """Evicts the tenant's own objects, the least recently used first, until it may take
        ``wanted`` bytes more. Returns also what was evicted, as ``allocate`` does."""
        missing = owner.bytes_to_evict(wanted)
        if missing <= 0:
            return None, []
        if wanted > owner.limit_bytes:
            return AllocationFailure(missing, quota=LIMIT, is_permanent=True), []
        eviction = _QuotaEviction(self, list(segments), now_ms, None, owner, own_only=True)
        order = list(segments)
        while missing > 0:
            if eviction.next(order) is None:
                return AllocationFailure(
                    missing, eviction.has_more_victims, LIMIT
                ), eviction.evicted
            missing = owner.bytes_to_evict(wanted)
        return None, eviction.evicted

    def _eviction(
        self,
        segments: list[MountedSegment],
        now_ms: int,
        victims: EvictionConstraint | None = None,
        owner: Tenant | None = None,
    ) -> _Eviction:
        if isinstance(self.tenants, TenantAccounting):
            return _QuotaEviction(self, segments, now_ms, victims, owner)
        return _Eviction(self, segments, now_ms, victims)

    def _allocate_together(
        self,
        lengths: list[int],
        replicas: int,
        usable: list[MountedSegment],
        near: MountedSegment | None,
        host: str,
    ) -> list[list[Extent]] | None:
        """Allocates one free range per replica for the whole batch, so that one node serves the
        batch. Returns None, and takes nothing, if there is no such range."""
        total = sum(lengths)
        runs: list[Extent] = []
        for _ in range(replicas):
            order = _preferred(usable, near=near, host=host)
            run = self._allocate_free(_without(order, runs), total)
            if run is None:
                self.free(runs, total)
                return None
            runs.append(run)
        taken: list[list[Extent]] = []
        at = 0
        for length in lengths:
            taken.append([(segment, offset + at) for segment, offset in runs])
            at += length
        return taken

    def _allocate_apart(
        self, lengths: list[int], replicas: int, order: list[MountedSegment], eviction: _Eviction
    ) -> list[list[Extent]] | AllocationFailure:
        """Allocates payload by payload. Evicts further where the free pieces are too small."""
        taken: list[list[Extent]] = []
        for length in lengths:
            extents: list[Extent] = []
            taken.append(extents)
            while len(extents) < replicas:
                allowed = _without(order, extents) if extents else order
                extent = self._allocate_free(allowed, length)
                while extent is None:
                    freed = eviction.next(allowed)
                    if freed is None:
                        largest = max(segment.allocator.largest_free for segment in allowed)
                        for done, its_length in zip(taken, lengths, strict=False):
                            self.free(done, its_length)
                        return eviction.shortage(length - largest)
                    emptied = [segment for segment, _ in freed if segment in allowed]
                    extent = self._allocate_free(emptied, length)
                extents.append(extent)
        return taken

    @staticmethod
    def _allocate_free(order: Iterable[MountedSegment], length: int) -> Extent | None:
        for segment in order:
            if segment.allocator.largest_free >= length:
                offset = segment.allocator.allocate(length)
                assert offset is not None
                return segment, offset
        return None


class _Eviction:
    """Evicts for one allocation, the oldest object of all its segments first, within the budget of
    one step."""

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
        """Whose puts the evictions count for; None: those of no tenant."""
        self._moves = MOVES_PER_STEP
        """Records that ``EvictionPolicy.peek`` may still move to their place in the order."""
        if victims is not None and not victims.up_to.epoch:
            segments = []
        self._heads = {segment: self._head(segment) for segment in segments}
        """The next victim of each segment; None: there is none, or it must be looked up again."""
        self._budget = EVICTIONS_PER_STEP
        self.evicted: list[StaleExtents] = []

    @property
    def has_more_victims(self) -> bool:
        """Whether another step may find a victim, after ``next`` found none."""
        return not self._budget or any(s.candidates.unfinished for s in self._heads)

    def shortage(self, missing: int) -> AllocationFailure:
        """What an allocation lacks, after ``next`` found none."""
        return AllocationFailure(missing, self.has_more_victims)

    def evict(self, victim: ObjectRecord) -> ObjectRecord | None:
        """As ``MemoryPool.evict``."""
        return self._pool.evict(victim, self._now_ms)

    def _may_evict(self, victim: ObjectRecord) -> bool:
        """Whether a head may still be evicted after others were."""
        del victim
        return True

    def head(self, segment: MountedSegment) -> ObjectRecord | None:
        """The next victim of this segment."""
        if self._heads[segment] is None:
            self._heads[segment] = self._head(segment)
        return self._heads[segment]

    def forget(self, segment: MountedSegment) -> None:
        """Lets ``head`` look up the next victim of this segment again."""
        self._heads[segment] = None

    def next(self, order: list[MountedSegment]) -> list[tuple[MountedSegment, int]] | None:
        """Evicts the oldest candidate of these segments, or one elsewhere for which
        ``_keeps_bytes_on`` is true, and frees its extents. Returns the freed lengths by segment, or
        None if every candidate is leased or the budget is spent."""
        heads = self._heads
        if not self._budget or not heads:
            return None
        while True:
            victims = [head for segment in order if (head := heads[segment]) is not None]
            if not victims:
                wanted = set(order)
                victims = [
                    head
                    for head in heads.values()
                    if head is not None and _keeps_bytes_on(wanted, head)
                ]
                if not victims:
                    return None
            victim = min(victims, key=attrgetter("ticket"))
            if self._may_evict(victim):
                break
            assert victim.segment is not None
            heads[victim.segment] = self._head(victim.segment)
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
            heads[segment] = self._head(segment)
        return freed

    def _head(self, segment: MountedSegment) -> ObjectRecord | None:
        candidates = segment.candidates
        return self._allowed(candidates, self._first_of(candidates))

    def _allowed(
        self, candidates: EvictionPolicy, head: ObjectRecord | None
    ) -> ObjectRecord | None:
        victims = self._victims
        if head is None or victims is None or head.last_used_ms < victims.used_before_ms:
            return head
        return head if candidates.detached(head) else None

    def _first_of(self, candidates: EvictionPolicy) -> ObjectRecord | None:
        forest = self._pool.forest
        for _ in range(_REMARKS_PER_LOOK):
            head = self._peek(candidates)
            if head is None or not candidates.detached(head) or not forest.is_reachable(head):
                return head
            candidates.discard(head)  # its chain has become whole since it was marked
            candidates.add(head)
        return self._peek(candidates)

    def _peek(self, candidates: EvictionPolicy) -> ObjectRecord | None:
        ends = self._pool.pins.ends
        spared = None if self._victims is None else self._victims.up_to
        while True:
            head = candidates.peek(self._now_ms, self._moves)
            self._moves -= candidates.moved
            if head is None:
                return None
            held_until_ms = ends.expiry_of(head)
            if spared is not None and (head.epoch, head.counter) > spared:
                held_until_ms = max(held_until_ms, self._now_ms + SPARED_MS)
            if held_until_ms <= self._now_ms:
                return head
            if self._moves <= 0:
                candidates.unfinished = True
                return None
            self._moves -= 1
            candidates.defer(head, held_until_ms)


class _QuotaEviction(_Eviction):
    """Evicts what the guarantees of tenants allow: an object of ``owner``, whoever it is, or one of
    a tenant that has its guarantee even without it."""

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
        assert isinstance(pool.tenants, TenantAccounting)
        self._tenants = pool.tenants
        self._owner = owner
        self._own_only = own_only
        self._held_back = False
        """Whether a guarantee has kept an object of another tenant."""
        super().__init__(pool, segments, now_ms, victims)
        self.cause = owner

    def shortage(self, missing: int) -> AllocationFailure:
        quota = GUARANTEE if self._held_back and self._owner is not None else ""
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
        self._held_back = True
        return False

    def _head(self, segment: MountedSegment) -> ObjectRecord | None:
        """The oldest head of the orders that may lose one: O(tenants)."""
        candidates, owner = segment.candidates, self._owner
        if not isinstance(candidates, PerTenantLru):
            raise TypeError("segments of a master with tenants have orders of tenants")
        oldest: ObjectRecord | None = None
        unfinished = False
        own = [owner.number] if self._own_only and owner is not None else list(candidates.orders)
        for number in own:
            order = candidates.orders.get(number)
            if order is None:
                continue
            tenant = self._tenants.numbered(number)
            if tenant is not owner and 0 < tenant.guarantee and tenant.size <= tenant.guarantee:
                self._held_back = True
                continue
            head = self._head_of(candidates, order)
            unfinished = unfinished or order.unfinished
            if head is None or (oldest is not None and oldest.ticket < head.ticket):
                continue
            if self._may_evict(head):
                oldest = head
        candidates.unfinished = unfinished
        return oldest

    def _head_of(self, candidates: PerTenantLru, order: EvictionPolicy) -> ObjectRecord | None:
        """The first of one order, after those were put into another order whose namespace has
        moved to another tenant."""
        for _ in range(_REMARKS_PER_LOOK):
            head = self._allowed(order, self._first_of(order))
            if head is None or not self._tenants.is_misplaced(head):
                return head
            detached = candidates.detached(head)
            candidates.discard(head)
            candidates.add(head, detached=detached)
        order.unfinished = True
        return None


def _keeps_bytes_on(segments: set[MountedSegment], leaf: ObjectRecord) -> bool:
    """Whether a replica of the leaf, or of one of its nearest ancestors, is on ``segments``."""
    at: ObjectRecord | None = leaf
    for _ in range(_ANCESTORS_PER_LOOK):
        if at is None:
            break
        if any(segment in segments for segment, _ in at.extents()):
            return True
        at = at.parent
    return False


def _without(order: Iterable[MountedSegment], taken: list[Extent]) -> list[MountedSegment]:
    """The segments on nodes that have none of the ``taken`` extents."""
    nodes = [segment.node for segment, _ in taken]
    return [segment for segment in order if segment.node not in nodes]


def _preferred(
    segments: Iterable[MountedSegment], *, near: MountedSegment | None, host: str
) -> Iterator[MountedSegment]:
    """``segments`` in order of preference; ``near`` must be one of them, if given: the parent's
    segment, those on the putter's host, those with most room.

    If one node holds a whole chain, a load of the chain is one request, and the death of the node
    costs one chain instead of tearing a hole in many.
    """
    if near is not None:
        yield near  # it usually has room, and then the caller stops here
    yield from sorted(
        (segment for segment in segments if segment is not near),
        key=lambda segment: (
            segment.node.host != host,
            -segment.allocator.free_bytes,
            segment.segment_id,
        ),
    )
