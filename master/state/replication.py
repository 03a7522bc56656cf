"""Plans copies between nodes: of objects on a draining node, and of under-replicated objects.

A client (``kvstore.client.drain``, or ``kvstore.client.repair`` in a node) requests objects
(``start_moves``), copies them and ends the puts. A moved object gets a new version; a repair copy
is a further replica of the same version. ``drain_scan`` and ``repair_queue`` choose the objects.
"""

from __future__ import annotations

from kvstore import calls
from kvstore.calls import Placements, PutOutcome
from kvstore.errors import InvalidArgumentError
from kvstore.limits import REPLICAS_MAX
from kvstore.master.state import drain_scan, liveness, repair_queue
from kvstore.master.state.background_jobs import SCAN
from kvstore.master.state.effects import DeferredReply, LogClusterEvent
from kvstore.master.state.evictor import AllocationFailure, EvictionConstraint
from kvstore.master.state.grant_manager import GrantManager
from kvstore.master.state.grants import CopyGrant
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.records import NEVER_MS, Extent, MountedSegment, ObjectRecord
from kvstore.master.state.repair_queue import SPARE_SHIFT, RepairQueue
from kvstore.master.state.state_context import StateContext

REPAIR_STEPS = 512
"""Objects that one repair request examines: 1 to 2 ms."""

REPAIR_ANCESTORS = 16
"""Ancestors to repair before an object: a chain with a hole is useless. A pass finds the rest."""

TARGETS_MS = 1_000
"""Time for which the list of copy targets is used, unless a copy begins earlier."""

NODES_CHANGED_MS = 1_000
"""Delay between a change of the nodes and the search for missing replicas."""


class ReplicationPlanner:
    def __init__(self, common: StateContext, granting: GrantManager, repairs: RepairQueue) -> None:
        self._common = common
        self._forest = common.forest
        self._pool = common.pool
        self._granting = granting
        self._repairs = repairs
        self._targets: tuple[int, list[MountedSegment]] = NEVER_MS, []
        """Time and result of the last search for segments with space for copies, emptiest first."""
        self._logged_short = 0
        """Last logged numbers of under-replicated and of repaired objects."""
        self._logged_repaired = 0

    def start_moves(
        self, now_ms: int, request: calls.StartMoves
    ) -> calls.StartMovesReply | DeferredReply:
        """Grant space for objects that the caller copies for the named node. Raise
        InvalidArgumentError if it is unknown or not draining."""
        self._forest.begin_step()
        node = self._common.membership.get_node(request.node)
        if request.repair:
            return self._start_repairs(now_ms, node, request)
        if not node.draining:
            raise not_draining(node)
        return self._start_draining(now_ms, node, request)

    # --- draining -----------------------------------------------------------------------------

    def _start_draining(
        self, now_ms: int, node: JoinedNode, request: calls.StartMoves
    ) -> calls.StartMovesReply | DeferredReply:
        common = self._common
        segments = set(common.membership.segments[node.name])
        page = drain_scan.page(
            self._forest, segments, request.cursor, request.limit, request.bytes_max
        )
        common.changing = True
        puts: list[CopyGrant] = []
        destinations: dict[ObjectRecord, MountedSegment] = {}
        remaining = remaining_bytes = deferred = 0
        alive = common.membership.alive_segments(now_ms)
        space_expected = not all(segment.usable(now_ms) for segment in alive)  # after a restart
        evicted = common.counters["evicted_objects"]
        for record, was_found in page.records.items():
            if not record.complete:
                continue  # evicted from another node for an earlier object
            allocated = self._allocate_move_target(now_ms, record, destinations, request)
            if isinstance(allocated, AllocationFailure):
                if allocated.may_retry or space_expected:
                    deferred += was_found
                else:
                    remaining += was_found
                    remaining_bytes += record.size * was_found
                continue
            client, missing = request.client_number, repair_queue.missing(record)
            puts.append(self._granting.copy(now_ms, record, allocated, client, missing=missing))
            destinations[record] = allocated[0][0]
        self._granting.release_copies([put for put in puts if not self._granting.unexpired(put)])
        puts = [put for put in puts if self._granting.unexpired(put)]
        next_cursor = page.next_cursor
        if not puts and next_cursor == request.cursor:
            next_cursor += 1  # no space for the root of a long chain
            if space_expected:
                deferred += 1  # the tip of that chain
            else:
                remaining += 1
        return self._moves_reply(
            now_ms,
            puts,
            common.placements([put.record for put in puts], now_ms),
            next_cursor=next_cursor,
            skipped=page.skipped + deferred,
            remaining=remaining,
            remaining_bytes=remaining_bytes,
            evicted=common.counters["evicted_objects"] - evicted,
        )

    def _allocate_move_target(
        self,
        now_ms: int,
        record: ObjectRecord,
        destinations: dict[ObjectRecord, MountedSegment],
        request: calls.StartMoves,
    ) -> list[Extent] | AllocationFailure:
        """Allocate extents to move the object to, next to its parent if possible. Evict only less
        recently used objects that the request allows."""
        parent = record.parent
        near = None
        if parent is not None and parent.complete:
            near = destinations.get(parent) or next(s for s, _ in parent.extents() if s.alive)
        replicas = sum(segment.alive for segment, _ in record.extents())
        victims = EvictionConstraint(record.last_used_ms, request.evict_up_to)
        allocated = self._granting.reserve(
            now_ms, [record.size], replicas, near=near, victims=victims, avoid=request.avoid
        )
        return allocated if isinstance(allocated, AllocationFailure) else allocated[0]

    def _moves_reply(
        self,
        now_ms: int,
        puts: list[CopyGrant],
        sources: Placements,
        *,
        next_cursor: int = 0,
        skipped: int = 0,
        remaining: int = 0,
        remaining_bytes: int = 0,
        evicted: int = 0,
        keeps_version: bool = False,
    ) -> calls.StartMovesReply | DeferredReply:
        """Reply with these grants once the granted extents are wiped."""
        records = [put.record for put in puts]
        grants = self._granting.reply(bytes([PutOutcome.WRITE]) * len(puts), puts)
        reply = calls.StartMovesReply(
            next_cursor=next_cursor,
            skipped=skipped,
            remaining=remaining,
            remaining_bytes=remaining_bytes,
            evicted=evicted,
            namespaces=[record.namespace for record in records],
            keys=[record.key for record in records],
            sources=sources,
            grants=grants,
            keeps_version=keeps_version,
        )
        unwiped = self._common.pending_wipes(grants.segments)
        return self._common.reply_when_wiped(now_ms, [], reply, unwiped) if unwiped else reply

    # --- repair schedule ----------------------------------------------------------------------

    def nodes_changed(self, now_ms: int, ready_ms: int) -> None:
        """Plan a search for missing replicas after ``ready_ms``, as nodes joined or departed."""
        self._targets = NEVER_MS, []
        if self._pool.has_replicas:
            self._repairs.changed(max(now_ms + NODES_CHANGED_MS, ready_ms))

    def note_stored(self, record: ObjectRecord) -> None:
        """Queue a stored object with fewer replicas than requested, if there are enough nodes."""
        lacks = repair_queue.missing(record)
        if lacks and repair_queue.desired_replicas(record) - lacks < len(
            self._common.membership.nodes
        ):
            self._repairs.note(record)

    def has_work_for(self, node: JoinedNode, now_ms: int) -> bool:
        return (
            self._repairs.has_work_for(node.name)
            and self._repairs.may_begin(now_ms)
            and bool(self._space_for_copies(now_ms))
        )

    def tick(self, now_ms: int) -> None:
        self._repairs.plan_next(now_ms)
        if self._repairs.is_due(now_ms):
            self._repairs.begin_pass()
            self._common.jobs.due |= SCAN

    def scan(self, now_ms: int) -> None:
        """Run a slice of the pass; at its end, log the number of under-replicated objects."""
        common, repairs = self._common, self._repairs
        if not repairs.scan(self._forest, now_ms, len(common.membership.nodes)):
            return
        common.jobs.note(SCAN, False)
        short, repaired = repairs.found, common.counters["repaired_objects"]
        self._pool.short_objects = short
        if (short, repaired) != (self._logged_short, self._logged_repaired):
            done = repaired - self._logged_repaired
            self._logged_short, self._logged_repaired = short, repaired
            common.effect(LogClusterEvent("replicas_missing", {"objects": short, "repaired": done}))

    def _space_for_copies(self, now_ms: int) -> list[MountedSegment]:
        """Return segments that can take copies, the emptiest first. None can while puts wait for
        space, or while a node is suspect and may return with the missing replicas."""
        found_ms, found = self._targets
        if now_ms - found_ms < TARGETS_MS:
            return found
        found = []
        members = self._common.membership
        if not self._common.waiting and all(
            members.state_of(node, now_ms) == liveness.ALIVE for node in members.nodes.values()
        ):
            found = [
                segment
                for segment in members.alive_segments(now_ms)
                if segment.usable(now_ms)
                and segment.allocator.free_bytes > segment.capacity >> SPARE_SHIFT
            ]
            found.sort(key=lambda segment: segment.allocator.free_bytes, reverse=True)
        self._targets = now_ms, found
        return found

    # --- repair grants ------------------------------------------------------------------------

    def _start_repairs(
        self, now_ms: int, node: JoinedNode, request: calls.StartMoves
    ) -> calls.StartMovesReply | DeferredReply:
        repairs = self._repairs
        pending_max = self._common.rules.pending_puts_max // 2
        self._targets = NEVER_MS, []
        avoid = set(request.avoid)
        usable = [s for s in self._space_for_copies(now_ms) if s.offer.uuid not in avoid]
        targets = dict.fromkeys(usable)
        self._common.changing = True
        puts: list[CopyGrant] = []
        size = steps = 0
        while targets and len(puts) < request.limit and steps < REPAIR_STEPS:
            record = repairs.next(node.name)
            if record is None:
                break
            for candidate in self._chain_to_repair(record):
                steps += 1
                if (
                    len(puts) >= request.limit
                    or (puts and size + candidate.size > request.bytes_max)
                    or not repairs.may_begin(now_ms, candidate.size)
                    or len(self._common.pending) >= pending_max
                ):
                    repairs.enqueue(record)
                    targets = {}
                    break
                put = self._grant_repair(now_ms, node, candidate, targets, request.client_number)
                if put is not None:
                    puts.append(put)
                    size += candidate.size
        records = [put.record for put in puts]
        extents = [_extent_on(node, record) for record in records]
        sources = Placements(
            sizes=[record.size for record in records],
            epochs=[record.epoch for record in records],
            counters=[record.counter for record in records],
            replicas=[1] * len(records),
            segments=[extent[0].segment_id for extent in extents if extent is not None],
            offsets=[extent[1] for extent in extents if extent is not None],
        )
        return self._moves_reply(now_ms, puts, sources, keeps_version=True)

    def _chain_to_repair(self, record: ObjectRecord) -> list[ObjectRecord]:
        """Return ``record`` and its near under-replicated ancestors, root first."""
        is_stored = self._forest.get(record.namespace, record.key) is record
        if not is_stored or not repair_queue.missing(record):
            return []
        chain = [record]
        copies = self._granting.copies
        ancestor = record.parent
        for _ in range(REPAIR_ANCESTORS):
            if ancestor is None:
                break
            if repair_queue.missing(ancestor) and (ancestor.namespace, ancestor.key) not in copies:
                chain.append(ancestor)
            ancestor = ancestor.parent
        return chain[::-1]

    def _grant_repair(
        self,
        now_ms: int,
        node: JoinedNode,
        record: ObjectRecord,
        targets: dict[MountedSegment, None],
        client_number: int,
    ) -> CopyGrant | None:
        """Grant space for one more replica of the object, if this node can copy it now."""
        if (
            record.writer
            or (record.namespace, record.key) in self._granting.copies
            or _extent_on(node, record) is None
            or repair_queue.find_repairable_placeholder(record, now_ms - self._repairs.after_ms)
            is None
        ):
            self._repairs.note_deferred = True
            return None
        parent = record.parent
        near = None
        if parent is not None and parent.more:  # next to a further replica of its parent
            near = next(
                (s for s, _ in parent.extents() if s in targets and s.node is not node), None
            )
        extent = self._pool.space_for_copy(record, targets, near)
        if extent is None:
            self._repairs.note_deferred = True
            return None
        put = self._granting.copy(now_ms, record, [extent], client_number, repairs=True)
        self._pool.note_copied(record)
        self._repairs.begun(put.size)
        return put

    # --- finished repairs ---------------------------------------------------------------------

    def add_replica(self, now_ms: int, put: CopyGrant) -> bool:
        """Make a copy a replica. Return False if none is missing, or its node has one."""
        record, (segment, offset) = put.record, put.extents[0]
        instead_of = repair_queue.find_repairable_placeholder(
            record, now_ms - self._repairs.after_ms
        )
        if (
            instead_of is None
            or _extent_on(segment.node, record) is not None
            or not self._pool.may_have_copy(record)
        ):
            return False
        self._pool.add_replica(record, (segment, offset), instead_of)
        segment.node.stored_bytes += put.size
        self._common.counters["repaired_objects"] += 1
        self._common.counters["repaired_bytes"] += put.size
        self._repairs.done += 1
        if repair_queue.missing(record):
            self._repairs.note(record)
        return True

    def claim_replica(self, now_ms: int, record: ObjectRecord, extent: Extent) -> bool:
        """Add an extent of returned memory as a replica of a complete object. Return whether it was
        missing or unknown; it is redundant if the object was copied in the meantime."""
        if _extent_on(extent[0].node, record) is not None:
            return False
        uuid = extent[0].offer.uuid
        dead_extents = [candidate for candidate in record.extents() if not candidate[0].alive]
        instead_of = next(
            (candidate for candidate in dead_extents if candidate[0].offer.uuid == uuid), None
        )
        if instead_of is None:
            instead_of = repair_queue.find_repairable_placeholder(
                record, now_ms - self._common.rules.lease_ms
            )
        if instead_of is None and (
            repair_queue.was_copied(record) or len(record.more) + 1 >= REPLICAS_MAX
        ):
            return False
        self._pool.add_replica(record, extent, instead_of)
        return True


def not_draining(node: JoinedNode) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"node {node.name} is not draining", advice=f"kvstore drain {node.name}"
    )


def _extent_on(node: JoinedNode, record: ObjectRecord) -> Extent | None:
    for extent in record.extents():
        if extent[0].alive and extent[0].node is node:
            return extent
    return None
