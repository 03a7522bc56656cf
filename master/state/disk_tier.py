"""Moves objects between the memory of a node and its disks.

    evicted ahead of need ──► written behind, after its ancestors ──► evicted: the copy stays
    query of a copy on a disk ──► brought into memory of the same node ──► answered as any other

The master orders both (``MasterCopy``), only the node touches its disks. Neither delays a put: one
that needs memory at once evicts objects without copies. A query waits for at most ``bring_ms_max``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore import calls
from kvstore.calls import CopyOutcome
from kvstore.errors import BusyError, InvalidArgumentError
from kvstore.limits import Key, Namespace
from kvstore.master.state.background_jobs import ANSWER, BRING, DISK
from kvstore.master.state.background_sweep import BackgroundSweeper
from kvstore.master.state.disk_index import Disk, DiskCopy, stale_extents
from kvstore.master.state.effects import LogClusterEvent, SendToNode
from kvstore.master.state.evictor import AllocationFailure
from kvstore.master.state.grant_manager import GrantManager
from kvstore.master.state.grants import BringGrant, DiskGrant, DiskWriteGrant
from kvstore.master.state.records import (
    HITS_MAX,
    Extent,
    MountedSegment,
    NamespaceTable,
    ObjectRecord,
    StaleExtents,
)
from kvstore.master.state.space_allocation import EVICT, KEEP, STOP
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.tenant import Tenant

PAYLOAD_BYTES_MIN: Final = 4_096
"""Smaller objects are not written to disks, where an extent takes at least 8 KiB."""

ROWS_PER_COPY: Final = 256
"""Objects of one order: 1 to 2 ms."""

PATH_STEPS: Final = 4_096
"""Ancestors of an object that one search passes for those without a copy: 1 ms."""

WRITE_MS: Final = 2_000
"""For how long an object that is being written is not evicted."""

WRITING_SHIFT: Final = 4
WRITING_BYTES_MAX: Final = 256 << 20
"""Bytes on their way to one disk: a sixteenth of the node's memory, at most so many."""

COUNTED_BYTES_MIN: Final = 64 << 10
"""Smaller objects count as much in ``Disk.writing_bytes``, which also bounds their number."""

BRINGING_SHIFT: Final = 2
"""Bytes on their way to memory: at most a quarter of the node's."""

BROUGHT_MS: Final = 100
"""For how long a brought object is protected for the query that waits for it."""

VICTIMS_PER_STEP: Final = 64
SECOND_CHANCES: Final = 1_024

FAILED_WITHIN_MS: Final = 60_000
"""A disk with three errors within this time is not used any more."""

ADMISSION: Final = ((0.5, 0), (0.25, 1), (0.1, 2), (0.02, 3))
"""While the budget is above the first number: the uses after its put that an object must have had
to be written. Objects that are over count as unused, and are not written below the first one."""


class BringWait:
    """A query that waits for copies on their way to memory."""

    def __init__(self, reply_id: int, deadline_ms: int) -> None:
        self.reply_id = reply_id
        self.deadline_ms = deadline_ms
        self.copies = 0
        """Those that have not arrived."""
        self.coming: Sequence[DiskCopy] = ()


class DiskTier:
    """See the module."""

    def __init__(
        self, common: StateContext, granting: GrantManager, sweeping: BackgroundSweeper
    ) -> None:
        self._common = common
        self._index = common.disks
        self._pool = common.pool
        self._forest = common.forest
        self._granting = granting
        self._sweeping = sweeping
        self._to_bring: deque[DiskCopy] = deque()
        self._waits: deque[BringWait] = deque()
        """In the order of their deadlines; those that were answered stay until then."""
        self._waits_of: dict[DiskCopy, list[BringWait]] = {}
        self.arrived: list[int] = []
        """Reply ids of queries that need not wait any longer."""
        granting.disk_grant_ended = self.grant_ended
        sweeping.before_eviction = self.before_eviction

    # --- disks ----------------------------------------------------------------------------------

    def segment_mounted(self, now_ms: int, segment: MountedSegment) -> None:
        disk = self._index.mount(segment, now_ms)
        for other in self._memory_of(disk):
            other.pressed = other.has_disk = True

    def segment_died(self, segment: MountedSegment) -> None:
        self._index.unmount(segment)
        for copy in [each for each in self._to_bring if each.disk.segment is segment]:
            self._not_brought(copy)
        self._to_bring = deque([c for c in self._to_bring if c.disk.segment is not segment])
        self._common.jobs.due |= DISK

    def _memory_of(self, disk: Disk) -> list[MountedSegment]:
        node = disk.segment.node
        return [s for s in self._common.membership.segments.get(node.name, ()) if not s.is_disk]

    def work(self, now_ms: int) -> None:
        """Drop copies of dead disks, and evict from full ones and of tenants above their limit."""
        del now_ms
        self._index.drop_dead(SECOND_CHANCES)
        is_due = self._index.has_dead
        for disk in self._index.disks.values():
            evicted = 0
            while evicted < VICTIMS_PER_STEP and disk.lacks_reserve and self._evict_from(disk):
                evicted += 1
            is_due |= evicted == VICTIMS_PER_STEP
        for tenant in self._pool.tenants:
            is_due |= self._make_room(tenant, 0) == VICTIMS_PER_STEP
        self._common.jobs.note(DISK, is_due)

    def _evict_from(self, disk: Disk, tenant: int = -1) -> bool:
        """Evict the next copy, of this tenant if one is given. Return whether there was one."""
        copy = self._index.next_victim(disk, SECOND_CHANCES, tenant)
        if copy is None:
            return False
        self._forget(copy)
        self._common.counters["disk_evicted_objects"] += 1
        return True

    def _make_room(self, tenant: Tenant, length: int) -> int:
        """Evict some copies of a tenant while ``length`` bytes more would exceed its limit. Return
        their number."""
        evicted = 0
        for disk in self._index.disks.values():
            while (
                tenant.disk_bytes + length > tenant.disk_limit
                and evicted < VICTIMS_PER_STEP
                and self._evict_from(disk, tenant.number)
            ):
                evicted += 1
        return evicted

    def _needs_evictions(self) -> bool:
        if any(disk.lacks_reserve for disk in self._index.disks.values()):
            return True
        return any(tenant.disk_bytes > tenant.disk_limit for tenant in self._pool.tenants)

    def _forget(self, copy: DiskCopy) -> None:
        """Drop a copy, and free its extent once its header is wiped."""
        self._index.drop(copy)
        self._common.wipe_ahead(stale_extents(copy))

    def take(self, namespace: str, key: Key) -> list[StaleExtents]:
        """Drop the copy, if any, of an object that will be removed or replaced. The caller has the
        extent wiped."""
        copy = self._index.get(namespace, key) if self._index.disks else None
        if copy is None:
            return []
        self._index.drop(copy)
        return [stale_extents(copy)]

    def on_failure(self, now_ms: int, disk: Disk) -> None:
        disk.failures.append(now_ms)
        node = disk.segment.node.name
        is_broken = len(disk.failures) == 3 and now_ms - disk.failures[0] <= FAILED_WITHIN_MS
        if is_broken and not disk.is_failed:
            disk.is_failed = True
            self._common.effect(LogClusterEvent("disk_failed", {"node": node}))

    # --- write behind ---------------------------------------------------------------------------

    def before_eviction(self, now_ms: int, record: ObjectRecord) -> int:
        """Begin to write an object that is about to be evicted ahead of need. Return EVICT: it may
        be evicted now; KEEP: after it was written, and its candidate is deferred; STOP: the disk
        takes no more at present."""
        segment = record.segment
        if segment is None or self._has_copy(record):
            return EVICT
        disk = self._roomiest(segment)
        if disk is None or not self._admits(disk, record):
            return EVICT
        limit = min(segment.capacity >> WRITING_SHIFT, WRITING_BYTES_MAX)
        if disk.writing_bytes >= limit or not disk.budget.may_write(now_ms):
            return STOP
        if not self._begin_writes(now_ms, disk, self._path(record)):
            return STOP
        self._pool.candidates[segment].defer(record, now_ms + WRITE_MS)
        return KEEP

    def _has_copy(self, record: ObjectRecord) -> bool:
        copy = self._index.get(record.namespace, record.key)
        version = record.epoch, record.counter
        return copy is not None and (copy.epoch, copy.counter) == version

    def _roomiest(self, segment: MountedSegment) -> Disk | None:
        best: Disk | None = None
        for disk in self._index.of_node(segment.node.name):
            free = disk.segment.allocator.free_bytes
            if disk.usable and (best is None or free > best.segment.allocator.free_bytes):
                best = disk
        return best

    def _admits(self, disk: Disk, record: ObjectRecord) -> bool:
        """Whether the object is worth a write, while the budget is what it is."""
        if record.size < PAYLOAD_BYTES_MIN or self._pool.lifetimes.expiry_of(record):
            return False
        level = disk.budget.level()
        uses = record.hits & HITS_MAX
        is_over = record.hint < 0
        for above, uses_min in ADMISSION:
            if level > above:
                if uses >= uses_min and not (is_over and uses_min):
                    return self._has_room(disk, record)
                break
        self._common.counters["disk_refused_objects"] += 1
        return False

    def _has_room(self, disk: Disk, record: ObjectRecord) -> bool:
        """Whether the tenant may have the object on disks, instead of its oldest ones."""
        tenant = self._pool.tenants.of_record(record)
        if tenant is not None:
            length = disk.segment.extent_bytes(record.size)
            self._make_room(tenant, length)
            if tenant.disk_bytes + length > tenant.disk_limit:
                tenant.refused += 1
                return False
        return True

    def _path(self, record: ObjectRecord) -> list[ObjectRecord]:
        """List the object and its ancestors on the same node without a copy, the root first."""
        node = None if record.segment is None else record.segment.node
        path: list[ObjectRecord] = []
        at: ObjectRecord | None = record
        for _ in range(PATH_STEPS):
            if at is None or (at is not record and self._has_copy(at)):
                break
            segment = at.segment
            if segment is not None and segment.alive and segment.node is node:
                path.append(at)
            at = at.parent
        path.reverse()
        return path[:ROWS_PER_COPY]

    def _begin_writes(self, now_ms: int, disk: Disk, records: Sequence[ObjectRecord]) -> bool:
        """Order the writes of objects for which there is space. Return whether any was begun."""
        puts: dict[MountedSegment, list[DiskGrant]] = {}
        target = disk.segment
        deadline_ms = now_ms + self._common.rules.put_deadline_ms
        begun = False
        for record in records:
            segment = record.segment
            is_copied = (record.namespace, record.key) in self._granting.copies
            if segment is None or is_copied or record.size < PAYLOAD_BYTES_MIN:
                begun |= is_copied
                continue
            offset = target.allocator.allocate(target.extent_bytes(record.size))
            if offset is None:
                break
            put = DiskWriteGrant(
                self._granting.new_token(), record, record.size,
                calls.Version(record.epoch, record.counter), (segment, record.offset),
                (target, offset), deadline_ms, disk,
            )  # fmt: skip
            self._granting.add_copy(put)
            disk.writing_bytes += max(put.length, COUNTED_BYTES_MIN)
            disk.budget.spend(put.length)
            puts.setdefault(segment, []).append(put)
            begun = True
        if self._needs_evictions():
            self._common.jobs.due |= DISK
        for segment, of_segment in puts.items():
            self._order(segment, target, of_segment)
        return begun

    def _order(
        self, source: MountedSegment, target: MountedSegment, puts: Sequence[DiskGrant]
    ) -> None:
        session = source.node.session
        if session is None:
            return  # the grants expire
        order = calls.MasterCopy(
            source.offer.uuid,
            target.offer.uuid,
            [put.token for put in puts],
            [put.source[1] for put in puts],
            [put.extents[0][1] for put in puts],
            [put.size for put in puts],
            [put.copied.epoch for put in puts],
            [put.copied.counter for put in puts],
        )
        last = self._common.effects[-1] if self._common.effects else None
        if isinstance(last, SendToNode) and isinstance(last.message, calls.MasterCopy):
            earlier = last.message
            count = len(earlier.tokens) + len(order.tokens)
            if last.session == session and earlier[:2] == order[:2] and count <= ROWS_PER_COPY:
                self._common.effects.pop()
                pairs = zip(earlier[2:], order[2:], strict=True)
                columns = [[*some, *more] for some, more in pairs]
                order = calls.MasterCopy(*order[:2], *columns)
        self._common.effect(SendToNode(session, order))

    # --- bring ----------------------------------------------------------------------------------

    def bring(self, copies: Sequence[DiskCopy]) -> list[DiskCopy]:
        """Begin to bring these copies into memory, from the first one on. Return those that are
        on their way: not the ones for which there is no room, or that would come too late. A disk
        that is too slow for any of them is given one at a time, until it is faster."""
        coming: list[DiskCopy] = []
        limit_ms = self._common.rules.bring_ms_max
        for copy in copies:
            disk = copy.disk
            if not copy.brought_by:
                capacity = sum([segment.capacity for segment in self._memory_of(disk)])
                waiting = disk.bringing_bytes + copy.size
                rate = disk.bring_bytes_per_ms
                if (
                    not disk.readable
                    or waiting > capacity >> BRINGING_SHIFT
                    or (disk.bringing_bytes and rate and waiting > rate * limit_ms)
                ):
                    self._common.counters["disk_bring_refused_objects"] += 1
                    break
                copy.brought_by = -1
                disk.bringing_bytes += copy.size
                self._to_bring.append(copy)
                self._common.jobs.due |= BRING
            coming.append(copy)
        return coming

    def wait(self, now_ms: int, copies: Sequence[DiskCopy]) -> int:
        """Bring these copies. Return the id of a reply that must wait for them; 0: none is on its
        way."""
        coming = self.bring(copies)
        if not coming:
            return 0
        wait = BringWait(self._common.new_reply_id(), now_ms + self._common.rules.bring_ms_max)
        wait.copies = len(coming)
        wait.coming = coming
        self._waits.append(wait)
        for copy in coming:
            self._waits_of.setdefault(copy, []).append(wait)
        return wait.reply_id

    def prefetch(self, namespace: Namespace, tip: Key) -> bool:
        """Begin to bring the blocks of a chain that are on a disk only. Return whether there are
        any for which there is room."""
        copies: list[DiskCopy] = []
        key: Key | None = tip
        for _ in range(PATH_STEPS):
            copy = None if key is None else self._index.get(namespace, key)
            if copy is None:
                break
            if not copy.in_memory:
                copies.append(copy)
            key = copy.parent
        copies.reverse()
        return bool(self.bring(copies))

    def begin_bringing(self, now_ms: int) -> None:
        """Order the next copies that are to be brought."""
        batch: list[DiskCopy] = []
        while self._to_bring and len(batch) < ROWS_PER_COPY // 4:
            copy = self._to_bring[0]
            if batch and copy.disk is not batch[0].disk:
                break
            self._to_bring.popleft()
            if self._index.holds(copy) and copy.disk.readable:
                batch.append(copy)
            else:
                self._not_brought(copy)
        self._common.jobs.note(BRING, bool(self._to_bring))
        if not batch:
            return
        self._common.changing = True
        disk = batch[0].disk
        if disk.bringing_bytes <= sum([copy.size for copy in batch]):
            disk.note_ordered(now_ms)
        puts = self._grant_brings(now_ms, batch)
        for segment in dict.fromkeys([put.extents[0][0] for put in puts]):
            # The node carries out earlier wipes of this memory first.
            of_segment: list[DiskGrant] = [p for p in puts if p.extents[0][0] is segment]
            self._order(batch[0].disk.segment, segment, of_segment)

    def _grant_brings(self, now_ms: int, batch: list[DiskCopy]) -> list[BringGrant]:
        """Allocate memory for copies of one disk. Those without are not brought."""
        memory = self._memory_of(batch[0].disk)
        puts: list[BringGrant] = []
        deadline_ms = now_ms + self._common.rules.put_deadline_ms
        for index, copy in enumerate(batch):
            found = self._forest.get(copy.namespace, copy.key)
            allocated: list[list[Extent]] | AllocationFailure | None = None
            if found is None or not (found.complete or found.writer):
                try:
                    allocated = self._granting.reserve(
                        now_ms, [copy.size], 1, only=memory,
                        owner=self._pool.tenant_of(copy.namespace),
                    )  # fmt: skip
                except BusyError:
                    allocated = None
            if isinstance(allocated, AllocationFailure) and allocated.may_retry:
                self._to_bring.extendleft(reversed(batch[index:]))
                self._common.jobs.due |= BRING
                break
            if not isinstance(allocated, list):
                self._not_brought(copy)
                continue
            record = self._forest.ensure(copy.namespace, copy.key)
            put = BringGrant(self._granting.new_token(), record, allocated[0][0], deadline_ms, copy)
            record.writer = copy.brought_by = put.token
            self._granting.add_copy(put)
            puts.append(put)
            parent = copy.parent
            parent_record = None if parent is None else self._forest.ensure(copy.namespace, parent)
            try:
                self._common.adopt(now_ms, record, parent_record)
            except InvalidArgumentError:  # they form a cycle
                puts.pop()
                self._granting.release_copies([put])
                self._granting.detach_from_record(put)
        return puts

    def _not_brought(self, copy: DiskCopy) -> None:
        """Count a copy that was to be brought as arrived: queries find it, or miss it."""
        copy.brought_by = 0
        copy.disk.bringing_bytes -= copy.size
        self._resolve(copy)

    def _resolve(self, copy: DiskCopy) -> None:
        for wait in self._waits_of.pop(copy, ()):
            if wait.copies:
                wait.copies -= 1
                if not wait.copies:
                    self._arrive(wait)

    def _arrive(self, wait: BringWait) -> None:
        self.arrived.append(wait.reply_id)
        self._common.jobs.due |= ANSWER

    def expire_waits(self, now_ms: int) -> None:
        """Have the queries answered that have waited for ``bring_ms_max``."""
        while self._waits and self._waits[0].deadline_ms <= now_ms:
            wait = self._waits.popleft()
            if wait.copies:
                wait.copies = 0
                for disk in {copy.disk for copy in wait.coming if copy.brought_by}:
                    disk.note_late(now_ms)
                self._common.counters["disk_bring_timeouts"] += 1
                self._arrive(wait)
        if self._needs_evictions():
            self._common.jobs.due |= DISK
        for segment in self._pool.segments.values():
            if segment.has_disk:  # the rate of writes may have paused the eviction ahead of need
                self._sweeping.note_allocation(segment)

    # --- results --------------------------------------------------------------------------------

    def grant_ended(self, put: DiskGrant) -> None:
        """Called once at the end of each grant, however it ends."""
        if isinstance(put, DiskWriteGrant):
            put.disk.writing_bytes -= max(put.length, COUNTED_BYTES_MIN)
        elif isinstance(put, BringGrant):
            self._not_brought(put.copy)

    def copied(self, now_ms: int, node_name: str, message: calls.NodeCopied) -> None:
        for token, outcome in zip(message.tokens, message.outcomes, strict=True):
            put = self._common.pending.get(token)
            if not isinstance(put, DiskGrant) or put.source[0].node.name != node_name:
                continue
            self._granting.end(put)
            if isinstance(put, BringGrant):
                self._brought(now_ms, put, outcome)
            elif isinstance(put, DiskWriteGrant):
                self._written(now_ms, put, outcome)

    def _written(self, now_ms: int, put: DiskWriteGrant, outcome: int) -> None:
        record, disk = put.record, put.disk
        is_current = (
            self._forest.get(record.namespace, record.key) is record
            and record.complete
            and (record.epoch, record.counter) == put.copied
        )
        if outcome == CopyOutcome.FAILED:
            self.on_failure(now_ms, disk)  # the extent is not used again
        elif outcome != CopyOutcome.DONE or not is_current or self._has_copy(record):
            self._common.wipe_ahead(put.stale_extents(self._common.epoch))
        else:
            parent = record.parent
            copy = DiskCopy(
                disk, put.extents[0][1], record.namespace, record.key,
                None if parent is None else parent.key, record.size, *put.copied,
                record.last_used_ms,
            )  # fmt: skip
            self._index.add(copy, self._forest.namespaces.of(record))
            disk.written_objects += 1
            disk.written_bytes += record.size
        if is_current:
            self._pool.lease_ended(record)
            if record.segment is not None:
                self._sweeping.resume(record.segment)

    def _brought(self, now_ms: int, put: BringGrant, outcome: int) -> None:
        copy, record, disk = put.copy, put.record, put.copy.disk
        segment = put.extents[0][0]
        is_held = self._index.holds(copy)
        if (
            outcome == CopyOutcome.DONE
            and is_held
            and record.writer == put.token
            and record.segment is None
            and segment.alive
        ):
            record.writer = 0
            version = copy.epoch, copy.counter
            self._pool.store(record, put.extents, copy.size, version, now_ms)
            record.hits = copy.hits
            record.keep_until(now_ms + BROUGHT_MS)
            self._common.counters["disk_brought_objects"] += 1
            disk.note_brought(now_ms, copy.size)
            if not record.children:
                self._pool.delete_if_unused(record)
            return
        self._pool.free(put.extents, put.length)
        self._common.wipe([put.stale_extents(self._common.epoch)])
        self._granting.detach_from_record(put)
        if not is_held or outcome == CopyOutcome.DONE:
            return
        if outcome == CopyOutcome.FAILED:
            self._index.drop(copy)  # its extent is not used again
            self.on_failure(now_ms, disk)
        else:
            self._forget(copy)
            fields = {"namespace": copy.namespace, "key": copy.key.hex()}
            event = LogClusterEvent("disk_copy_corrupt", {**fields, "node": disk.segment.node.name})
            self._common.effect(event)

    # --- queries --------------------------------------------------------------------------------

    def following(
        self,
        now_ms: int,
        table: NamespaceTable,
        keys: Sequence[Key],
        first: int,
    ) -> tuple[int, list[DiskCopy]]:
        """Return the number of keys from ``first`` on that are in memory or on a disk, and the
        copies of those that are on a disk only. Memory that has just joined, or whose node is
        draining or suspect, cannot take a copy: its disks do not count. A block in memory may
        follow one that is on a disk only.
        """
        copies: list[DiskCopy] = []
        if not table.copies.count:
            return 0, copies
        alive = self._common.membership.alive_segments(now_ms)
        nodes = {segment.node.name for segment in alive if segment.usable(now_ms)}
        for index in range(first, len(keys)):
            record = table.get(keys[index])
            if record is not None and record.complete:
                continue
            copy: DiskCopy | None = table.copies.get(keys[index])
            if copy is None or not copy.disk.readable or copy.disk.segment.node.name not in nodes:
                return index - first, copies
            copy.used_ms = now_ms
            copies.append(copy)
        return len(keys) - first, copies
