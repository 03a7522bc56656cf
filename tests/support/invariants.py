"""What must always hold in ``MasterState`` and each of its parts; and extents that no object owns.

Reads private attributes. ``check_invariants`` takes a part; O(objects) for the whole state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import singledispatch
from typing import Any

from kvstore.limits import Namespace
from kvstore.master.role import ElectionStateMachine
from kvstore.master.state import (
    background_jobs,
    candidates,
    eviction,
    inventory,
    leases,
    missing_objects,
    repair_queue,
)
from kvstore.master.state.allocator import Allocator
from kvstore.master.state.background_jobs import BackgroundJobs
from kvstore.master.state.background_sweep import BackgroundSweeper
from kvstore.master.state.candidates import CandidateQueue, EvictionCandidates, SweepCursor
from kvstore.master.state.disk_index import Disk, DiskIndex
from kvstore.master.state.disk_tier import COUNTED_BYTES_MIN, DiskTier
from kvstore.master.state.eviction import SortedRecordQueue
from kvstore.master.state.expiry_index import NO_END_MS, ExpiryIndex
from kvstore.master.state.forest import Forest
from kvstore.master.state.grant_manager import GrantManager
from kvstore.master.state.grants import (
    AllocationGrant,
    BringGrant,
    CopyGrant,
    DiskGrant,
    DiskWriteGrant,
    PendingGrants,
    PutGrant,
)
from kvstore.master.state.inventory import IntervalSet
from kvstore.master.state.inventory_loading import InventoryLoader
from kvstore.master.state.leases import ReaderLeases
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.membership import Membership
from kvstore.master.state.memory_pool import MemoryPool
from kvstore.master.state.missing_objects import MissingObjects
from kvstore.master.state.pins import PinTable, bytes_held
from kvstore.master.state.put_queue import WaitingPuts
from kvstore.master.state.queries import QueryHandler
from kvstore.master.state.reclaim import SpaceReclaimer
from kvstore.master.state.records import (
    MountedSegment,
    Name,
    ObjectRecord,
    StaleExtents,
)
from kvstore.master.state.repair_queue import RepairQueue
from kvstore.master.state.tenant import Tenant
from kvstore.master.state.tenants import TenantAccounting
from kvstore.master.state.traffic import Recent, TrafficRecorder
from kvstore.master.state.views.chains import ChainQueries
from kvstore.memory.header import extent_bytes

Range = tuple[MountedSegment, int, int]
"""Segment, offset and length."""


@singledispatch
def check_invariants(part: object, *more: Any) -> None:
    """Asserts everything that must always hold in this part."""
    raise TypeError(f"nothing is known of {part!r}")


def _check_due(part: BackgroundJobs, job: int, is_due: bool) -> None:
    """Asserts that the part has noted whether this job is due."""
    assert bool(part.due & job) == is_due, f"job {job} is due: {is_due}, and was not said so"


def granted_ranges(pending: PendingGrants) -> Iterator[Range]:
    """All extents that are granted or in quarantine."""
    for put in pending:
        for segment, offset in put.extents:
            yield segment, offset, put.length
    for residue, _ in _quarantined(pending):
        for segment, offset in residue.extents:
            yield segment, offset, segment.extent_bytes(residue.size)


def _quarantined(pending: PendingGrants) -> list[tuple[StaleExtents, Tenant | None]]:
    return [(residue, owner) for _, residue, owner in pending._quarantine.values()]


def removed_ranges(reclaim: SpaceReclaimer) -> Iterator[Range]:
    """All extents of ended objects that are not free."""
    unwiped = reclaim._unwiped.values()
    ended = [wiping for wiping in unwiped if wiping.ended and not wiping.released]
    for wiping in (*reclaim._by_end, *ended):
        for offset, length in zip(wiping.offsets, wiping.lengths, strict=True):
            yield wiping.segment, offset, length
    for segment, waiting in reclaim._unzeroed.items():
        for offset, length in waiting:
            yield segment, offset, length


def _gaps(returning: InventoryLoader) -> list[Range]:
    """Bytes that are neither claimed nor free."""
    inventories = returning._inventories.items()
    return [(segment, *gap) for segment, each in inventories for gap in each.gaps()]


def holes(allocator: Allocator) -> list[tuple[int, int]]:
    """Free extents as (start, length), by start."""
    return sorted(allocator._start_to_length.items())


@check_invariants.register
def _(it: Allocator) -> None:
    free = holes(it)
    assert sum(length for _, length in free) == it.free_bytes
    assert max((length for _, length in free), default=0) == it.largest_free
    assert sorted((length, start) for start, length in free) == list(it._by_size)
    assert it._end_to_start == {start + length: start for start, length in free}
    reached = it.start - 1
    for start, length in free:
        assert length > 0
        assert start > reached, "free extents touch or overlap"
        reached = start + length
    assert reached <= it.end


@check_invariants.register
def _(it: SortedRecordQueue) -> None:
    positions = [record.position for record in it.after(candidates._DETACHED)]
    assert positions == sorted(set(positions))
    assert it._lasts == [run[-1].position for run in it._runs]
    assert all(0 < len(run) <= eviction.RUN_MAX for run in it._runs)


@check_invariants.register
def _(it: CandidateQueue) -> None:
    check_invariants(it._detached)
    check_invariants(it._deferred)
    records = list(it.after(candidates._DETACHED))
    positions = [record.position for record in records]
    assert positions == sorted(set(positions)), "positions out of order or twice"
    assert len(records) == len(it)
    ordered = [each for each in records if 0 < each.position < candidates._RETAINED]
    assert ordered == list(it._policy.after(0)), "the policy has others"
    assert (it._policy.first() is None) == (not ordered)
    hinted = [*it._over.after(candidates._OVER), *it._demoted.after(candidates._DEMOTED)]
    assert all(record.hint <= 0 for record in hinted)


def _all_of(it: EvictionCandidates) -> list[ObjectRecord]:
    return it.after(SweepCursor(), len(it) + 1)


@check_invariants.register
def _(it: EvictionCandidates) -> None:
    for number, queue in it.queues.items():
        check_invariants(queue)
        records = queue.after(candidates._DETACHED)
        assert all(record.queue == number for record in records)
    assert len(_all_of(it)) == len(it)


@check_invariants.register
def _(it: ExpiryIndex) -> None:
    ends = {record: end for shard in filter(None, it._shards) for record, end in shard.items()}
    assert len(ends) == it._count
    assert sum(map(len, it._buckets.values())) == it._count
    assert all(record in it._buckets[end] for record, end in ends.items())
    assert sorted(it._times) == sorted(it._buckets)
    assert it.next_ms <= min(ends.values(), default=NO_END_MS)


@check_invariants.register
def _(it: IntervalSet) -> None:
    assert it._firsts == [starts[0] for starts in it._starts]
    reached = -1
    for starts, stops in zip(it._starts, it._stops, strict=True):
        assert 0 < len(starts) == len(stops) <= inventory.RUN_MAX
        for start, stop in zip(starts, stops, strict=True):
            assert reached <= start < stop
            reached = stop


@check_invariants.register
def _(it: PendingGrants) -> None:
    deadlines = [put.deadline_ms for put in it]
    assert deadlines == sorted(deadlines)


@check_invariants.register
def _(it: Forest, unsettled: Collection[ObjectRecord] = ()) -> None:
    """``unsettled``: records that may have no reason to stay any more."""
    children: dict[ObjectRecord, int] = {}
    assert it.objects == sum(table.objects for table in it.namespaces.values())
    check_invariants(it.missing)
    for table in it.namespaces.values():
        name = table.name
        records = list(table)
        assert it.namespaces.tables.get(name) is table
        assert table.records == len(records)
        assert records or table.copies.count
        assert table.objects == sum(record.segment is not None for record in records)
        assert table.size == sum(r.size for r in records if r.segment is not None)
        for record in records:
            assert record.namespace == name
            assert table.get(record.key) is record
            kept = record.segment or record.writer or record.children
            assert kept or record in unsettled, "a record without reason"
            if record.parent is not None:
                assert record.parent.namespace == name
                assert table.get(record.parent.key) is record.parent, "a lost parent"
                children[record.parent] = children.get(record.parent, 0) + 1
    detached = -(it.breaks + it.mends)
    whole: dict[ObjectRecord | None, bool] = {None: True}
    for record in it.records():
        assert record.children == children.get(record, 0)
        walked: list[ObjectRecord] = []
        at: ObjectRecord | None = record
        while at is not None and at not in whole:
            walked.append(at)
            assert len(walked) <= it.namespaces.tables[record.namespace].records, (
                "a ring of parents"
            )
            at = at.parent
        for seen in reversed(walked):
            whole[seen] = whole[seen.parent] and seen.complete
        if record.checked in (it.breaks, detached):
            assert whole[record] == (record.checked == it.breaks), "remembered wrongly"


@check_invariants.register
def _(it: MissingObjects) -> None:
    assert all(gone in it._departed.values() for gone in it._by_memory.values())
    assert len(it._departed) <= missing_objects.NODES_MAX
    for gone in it._departed.values():
        assert gone.missing >= 0
        assert not (gone.missing and gone.is_quiesced)


@check_invariants.register
def _(it: PinTable) -> None:
    check_invariants(it.ends)
    assert not it.unsettled or it._jobs.due & background_jobs.EXPIRE
    pins = {record: pin for shard in filter(None, it._shards) for record, pin in shard.items()}
    below: dict[int, int] = {}
    for pin in pins.values():
        if pin.above is not None:
            below[id(pin.above)] = below.get(id(pin.above), 0) + 1
    ending = set(map(id, it._ending))
    held: dict[Namespace, tuple[int, int]] = {}
    for record, pin in pins.items():
        assert pin.record is record
        assert not pin.dropped
        assert pin.below == below.get(id(pin), 0)
        assert pin.below or it.ends.expiry_of(record) or id(pin) in ending, "held by no pin"
        if pin.objects:
            objects, size = held.get(record.namespace, (0, 0))
            held[record.namespace] = objects + 1, size + pin.size
        else:
            assert not pin.size
        if not it.unsettled:
            assert pin.objects == record.complete
            assert pin.size == (bytes_held(record) if record.complete else 0)
    assert it._held == held
    assert it._count_all == len(pins)
    counted = [pin for pin in pins.values() if pin.objects]
    assert (it.objects, it.size) == (len(counted), sum(pin.size for pin in counted))


@check_invariants.register
def _(it: ReaderLeases) -> None:
    counts: dict[ObjectRecord, int] = {}
    for group in (*it._groups.values(), *it._ending):
        for record in group.records:
            counts[record] = counts.get(record, 0) + 1
    assert all(record.readers == count for record, count in counts.items())
    assert sum(counts.values()) == it._leased <= leases.LEASED_MAX
    for record in it._common.forest.records():
        assert record.readers == counts.get(record, 0), "counted, and in no group"
        assert record.kept_until_ms <= record.lease_until_ms
    ends = [group.until_ms for group in it._groups.values()]
    assert ends == sorted(ends)
    _check_due(it._common.jobs, background_jobs.RELEASE, bool(it._ending))


@check_invariants.register
def _(it: TrafficRecorder) -> None:
    check_invariants(it.known)
    check_invariants(it.heads)
    for space in it.known.all():
        check_invariants(space.tips)
        for rows in (space.putters, space.askers):
            check_invariants(rows)
            for row in rows.all():
                assert row.namespace == space.name
                assert row.first_ms <= row.last_ms
                assert row.found <= row.keys
                assert row.none + row.partly <= row.questions


@check_invariants.register
def _(it: Recent) -> None:  # type: ignore[type-arg]
    assert max(len(it.recent), len(it.older)) <= it._rows_min
    assert not it.recent.keys() & it.older.keys()


@check_invariants.register
def _(it: SpaceReclaimer) -> None:
    of_names: set[tuple[Name, int]] = set()
    for wiping in it._unwiped.values():
        assert not wiping.wiped
        assert all(removal.unfinished_wipes > 0 for removal in wiping.removals)
        of_names.update((name, wiping.wipe_seq) for name in wiping.names)
    assert of_names == {
        (name, wiping.wipe_seq) for name, wipings in it._unwiped_of.items() for wiping in wipings
    }
    assert it._zeroing.items() <= {(g.segment, g.wipe_seq) for g in it._unwiped.values()}
    assert all(segment.alive and waiting for segment, waiting in it._unzeroed.items())
    unclean = {order for wipings in it._unclean.values() for order in wipings}
    assert unclean == {g.wipe_seq for g in it._unwiped.values() if g.released}


@check_invariants.register
def _(it: Membership) -> None:
    for name, node in it.nodes.items():
        assert node.name == name
        assert all(s.alive and s.node is node for s in it.segments[name])
        assert node.session is None or it._by_session[node.session] is node
    assert it.segments.keys() == it.nodes.keys()
    assert it._holders == {
        segment.offer.uuid: segment.node for each in it.segments.values() for segment in each
    }
    assert not any((it.lost, it.mounted, it.effects)), "changes that nothing has taken note of"
    assert all(it.nodes.get(node.name) is node for node in it._by_session.values())


@check_invariants.register
def _(it: MemoryPool, others: Iterable[tuple[MountedSegment, int, int]]) -> None:
    """``others``: extents that no object owns, as (segment, offset, length)."""
    _check_due(it._jobs, background_jobs.DELETE_UNUSED, bool(it.maybe_unused))
    check_invariants(it.forest, it.maybe_unused)
    check_invariants(it.pins)
    check_invariants(it.lifetimes)
    used: dict[int, list[tuple[int, int]]] = {key: [] for key in it.segments}
    leaves: dict[int, set[ObjectRecord]] = {}
    for record in it.forest.records():
        for segment, offset in record.extents():
            if segment.alive:
                used[segment.segment_id].append((offset, extent_bytes(record.size)))
        if record.segment is not None and not record.children:
            leaves.setdefault(id(record.segment), set()).add(record)
        if record.queue:
            assert record.segment is not None, "a candidate without bytes"
            assert not record.children, "a candidate with children"
    for segment, offset, length in others:
        if segment.alive:
            used[segment.segment_id].append((offset, length))
    for segment in it.segments.values():
        check_invariants(segment.allocator)
        check_invariants(it.candidates[segment])
        assert set(_all_of(it.candidates[segment])) == leaves.get(id(segment), set()), "candidates"
        ranges = sorted(used[segment.segment_id] + holes(segment.allocator))
        reached = segment.allocator.start
        for offset, length in ranges:
            assert offset == reached, f"{segment}: bytes lost or given twice at {reached}"
            reached += length
        assert reached == segment.allocator.end, "bytes lost at the end of the segment"
    assert it.capacity_max == max((s.capacity for s in it.segments.values()), default=0)


@check_invariants.register
def _(
    it: TenantAccounting,
    records: Iterable[ObjectRecord],
    pending: PendingGrants,
    waiting: Sequence[Tenant],
) -> None:
    size: dict[str, int] = {}
    objects: dict[str, int] = {}
    puts: dict[str, int] = {}
    held: dict[tuple[str, int], int] = {}
    for record in records:
        name = it.of_record(record).name
        objects[name] = objects.get(name, 0) + (record.segment is not None)
        for segment, _ in record.extents():
            if segment.alive:
                length = extent_bytes(record.size)
                size[name] = size.get(name, 0) + length
                place = record.namespace, segment.segment_id
                held[place] = held.get(place, 0) + length
    for put in pending:
        if isinstance(put, PutGrant | AllocationGrant):
            owner = it.owner(put)
            assert owner is not None
            name = owner.name
            puts[name] = puts.get(name, 0) + 1
            for segment, _ in put.extents:
                if segment.alive:
                    size[name] = size.get(name, 0) + put.length
                    if isinstance(put, PutGrant):
                        place = put.record.namespace, segment.segment_id
                        held[place] = held.get(place, 0) + put.length
    for residue, owner in _quarantined(pending):
        for segment, _ in residue.extents:
            if segment.alive and owner is not None:
                name, length = owner.name, extent_bytes(residue.size)
                size[name] = size.get(name, 0) + length
    for tenant in it._numbered:
        assert tenant.size == size.pop(tenant.name, 0), f"bytes of {tenant}"
        assert tenant.size == sum(tenant.bytes_on.values())
        assert tenant.bytes_on.keys() <= it._segments.keys()
        assert tenant.objects == objects.pop(tenant.name, 0), f"objects of {tenant}"
        assert tenant.pending == puts.pop(tenant.name, 0), f"puts of {tenant}"
        assert tenant.waiting == sum(each is tenant for each in waiting)
        assert tenant.pinned_bytes >= 0
        tables = [table for table in it._tables.values() if table.tenant is tenant]
        assert tenant.disk_bytes == sum(table.disk_bytes for table in tables)
    assert not any((*size.values(), *objects.values(), *puts.values())), "of no tenant"
    for table in it._tables.values():
        if not it._to_move:
            assert table.tenant is it.match(table.name)
        for number, length in table.held.items():
            if number in it._segments:
                assert length == held.pop((table.name, number), 0)
    assert not held, "bytes in no table"


@check_invariants.register
def _(it: RepairQueue) -> None:
    rules = it.rules
    assert 0 <= it.copies <= rules.copies_max, "more copies than allowed"
    assert it.copied_bytes <= rules.bytes_max or it.copies == 1, "more bytes than allowed"
    assert (
        it._queued
        == sum(map(len, it._queues.values()))
        <= repair_queue.QUEUE_MAX + rules.copies_max
    )
    assert all(it._queues.values())


@check_invariants.register
def _(it: GrantManager) -> None:
    check_invariants(it._pending)
    copies = [put for put in it._pending if isinstance(put, CopyGrant | DiskGrant)]
    known = [put for puts in it.copies.values() for put in puts]
    assert sorted(p.token for p in copies) == sorted(p.token for p in known), "a lost copy"
    assert all(it.copies.values())
    repairs = [put for put in copies if isinstance(put, CopyGrant) and put.repairs]
    assert it._repairs.copies == len(repairs)
    assert it._repairs.copied_bytes == sum(put.size for put in repairs)
    assert all(len(put.extents) == 1 and not put.missing for put in repairs)
    puts = [put for put in it._pending if isinstance(put, PutGrant | BringGrant)]
    writers = {put.token: put.record for put in puts}
    for record in it._common.forest.records():
        assert not record.writer or writers.pop(record.writer) is record, "a lost writer"
    assert not writers, "a put whose record does not know it"


@check_invariants.register
def _(it: BackgroundSweeper) -> None:
    _check_due(it._jobs, background_jobs.EVICT, bool(it._pressed))
    _check_due(it._jobs, background_jobs.MOVE, it._pool.tenants.moving)
    _check_due(it._jobs, background_jobs.SWEEP, it._sweeps_more())


@check_invariants.register
def _(it: QueryHandler) -> None:
    assert not it._waiting or it._may_wait or it._jobs.due & background_jobs.ANSWER


@check_invariants.register
def _(it: ChainQueries) -> None:
    _check_due(it._jobs, background_jobs.DRAW, bool(it._queries))


@check_invariants.register
def _(it: InventoryLoader) -> None:
    _check_due(it._common.jobs, background_jobs.CLAIM, it._has_claims())
    mounted = [s for segments in it._common.membership.segments.values() for s in segments]
    assert {s for s in mounted if not s.inventory_complete} == it._inventories.keys()
    assert {
        wiping.segment for wiping in it._common.reclaim.held_removals()
    } == it._inventories.keys()


@check_invariants.register
def _(it: WaitingPuts) -> None:
    assert len(it._queue) <= it._common.rules.waiting_puts_max
    assert it._queue or not it._jobs.due & background_jobs.SERVE


@check_invariants.register
def _(it: DiskIndex, pending: PendingGrants, others: Iterable[Range]) -> None:
    """``others``: extents that no copy owns."""
    used: dict[MountedSegment, list[tuple[int, int]]] = {d.segment: [] for d in it.disks.values()}
    objects: Counter[Disk] = Counter()
    size: Counter[Disk] = Counter()
    for namespace, table in it._namespaces.tables.items():
        assert len(list(table.copies)) == table.copies.count
        assert table.disk_bytes == sum(c.disk.segment.extent_bytes(c.size) for c in table.copies)
        for copy in table.copies:
            assert copy.namespace == namespace
            assert it.holds(copy)
            disk = copy.disk
            objects[disk] += 1
            size[disk] += copy.size
            places = sum(each is copy for queue in disk.queues.values() for each in queue)
            assert places == copy.voids + (not copy.in_memory), "places in the queue"
            if disk.segment.alive:
                used[disk.segment].append((copy.offset, disk.segment.extent_bytes(copy.size)))
    for segment, offset, length in others:
        if segment in used:
            used[segment].append((offset, length))
    writes = [put for put in pending if isinstance(put, DiskWriteGrant)]
    for disk in it.disks.values():
        assert (disk.objects, disk.payload_bytes) == (objects[disk], size[disk])
        counted = [max(p.length, COUNTED_BYTES_MIN) for p in writes if p.disk is disk]
        assert disk.writing_bytes == sum(counted), "bytes on their way to a disk"
        check_invariants(disk.segment.allocator)
        ranges = used[disk.segment]
        if not disk.failures:  # extents that could not be written are lost
            reached = disk.segment.allocator.start
            for offset, length in sorted(ranges + holes(disk.segment.allocator)):
                assert offset == reached, f"bytes lost or given twice at {reached} of a disk"
                reached += length
            assert reached == disk.segment.allocator.end


@check_invariants.register
def _(it: DiskTier) -> None:
    bringing: Counter[Disk] = Counter()
    copies = {copy for table in it._forest.namespaces.values() for copy in table.copies}
    for copy in copies | set(it._to_bring):
        if copy.brought_by:
            bringing[copy.disk] += copy.size
    for disk in it._index.disks.values():
        assert disk.bringing_bytes >= bringing[disk]
    for record in it._forest.records():
        found = it._index.get(record.namespace, record.key)
        if found is not None and record.complete:
            assert (found.epoch, found.counter) == (record.epoch, record.counter), "two versions"
            assert found.in_memory
    for copy in copies:
        if copy.in_memory and copy.disk.segment.alive:
            known = it._forest.get(copy.namespace, copy.key)
            assert known is not None
            assert known.segment is not None, "not in memory"
    _check_due(it._common.jobs, background_jobs.BRING, bool(it._to_bring))


@check_invariants.register
def _(it: MasterState) -> None:
    check_invariants(it.membership)
    check_invariants(it.reclaim)
    ranges = [*granted_ranges(it.pending), *removed_ranges(it.reclaim), *_gaps(it.returning)]
    check_invariants(it.pool, [each for each in ranges if not each[0].is_disk])
    check_invariants(it.common.disks, it.pending, ranges)
    check_invariants(it.tier)
    held: Counter[MountedSegment] = Counter()
    for segment, _, length in (*granted_ranges(it.pending), *removed_ranges(it.reclaim)):
        held[segment] += length
    disks = [disk.segment for disk in it.common.disks.disks.values()]
    for segment in (*it.pool.segments.values(), *disks):
        counted = segment.pending_bytes, segment.quarantined_bytes, segment.reclaim_bytes
        assert min(counted) >= 0
        assert sum(counted) == held[segment]
    if not it.has_work:
        lost = [record for record in it.forest.records() if record.lost]
        assert not lost, "lost, and in no event yet"
    check_invariants(it.granting)
    check_invariants(it.repairs)
    _check_due(it.common.jobs, background_jobs.SCAN, it.repairs.scanning)
    check_invariants(it.sweeping)
    check_invariants(it.leases)
    check_invariants(it.asking)
    check_invariants(it.chains)
    check_invariants(it.returning)
    check_invariants(it.traffic)
    check_invariants(it.waiting)
    if isinstance(it.pool.tenants, TenantAccounting):
        _check_tenants(it, it.pool.tenants)
    mounted = [s for segments in it.membership.segments.values() for s in segments]
    assert {id(s) for s in mounted} == {id(s) for s in (*it.pool.segments.values(), *disks)}


def _check_tenants(it: MasterState, tenants: TenantAccounting) -> None:
    waiting = [put.tenant for put in it.common.waiting if put.tenant is not None]
    check_invariants(tenants, it.forest.records(), it.pending, waiting)
    used = sum(s.capacity - s.allocator.free_bytes for s in it.pool.segments.values())
    gone = sum(s.reclaim_bytes for s in it.pool.segments.values())
    gone += sum(
        extent_bytes(residue.size)
        * sum(segment.alive and not segment.is_disk for segment, _ in residue.extents)
        for residue, owner in _quarantined(it.pending)
        if owner is None
    )
    copies = sum(
        put.length * sum(segment.alive for segment, _ in put.extents)
        for put in it.pending
        if isinstance(put, CopyGrant | BringGrant)
    )
    gaps = sum(length for s, _, length in _gaps(it.returning) if s.alive and not s.is_disk)
    held = sum(tenant.size for tenant in tenants)
    assert held + copies + gone + gaps == used, "bytes of tenants"
    if not it.has_work:
        for found in it.pool.candidates.values():
            assert not any(map(found.is_misplaced, _all_of(found))), (
                "in the queue of another tenant"
            )
        assert set(it.pool.candidates) == set(it.pool.segments.values())
    for tenant in tenants:
        pinned = sum(
            size
            for namespace, (_, size) in it.pool.pins.all_pinned().items()
            if tenants.of(namespace) is tenant
        )
        assert tenant.pinned_bytes == pinned, f"pins of {tenant}"


@check_invariants.register
def _(it: ElectionStateMachine) -> None:
    assert not it.is_leading or (it._lease_id and it.until and it.epoch)
    assert it.leader is None or not it.until
    assert it._lease_id not in it._stale
    assert len(it._stale) <= 1, "each is revoked before the next one is granted"
