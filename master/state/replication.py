"""Copies from node to node: of objects on a draining node, and of objects that lack replicas.

A client (``kvstore.client.drain``, or ``kvstore.client.repair`` in a node) asks what to copy
(``start_moves``), copies it, and ends the put. A moved object gets a new version at its new place;
a copy for repair is one more replica of the same version. ``draining`` and ``repairing`` choose the
objects.
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
"""Objects that one request for copies looks at: 1 to 2 ms."""

REPAIR_ANCESTORS = 16
"""Blocks above an object that are looked at for missing replicas before it is copied itself: a
chain with a hole is of no use. A pass finds the rest."""

TARGETS_MS = 1_000
"""How long the list of segments with room for copies is used, unless a copy begins before."""

NODES_CHANGED_MS = 1_000
"""The time from a node's coming or going to the search for missing replicas."""


class ReplicationPlanner:
    """See the module."""

    def __init__(self, common: StateContext, granting: GrantManager, repairs: RepairQueue) -> None:
        self._common = common
        self._forest = common.forest
        self._pool = common.pool
        self._granting = granting
        self._repairs = repairs
        self._targets: tuple[int, list[MountedSegment]] = NEVER_MS, []
        """When segments with room for copies were last searched, and the found ones, the emptiest
        first."""
        self._told_short = 0
        """Objects with missing replicas, as last logged; ``_told_repaired``: the repaired ones."""
        self._told_repaired = 0

    def start_moves(
        self, now_ms: int, request: calls.StartMoves
    ) -> calls.StartMovesReply | DeferredReply:
        """Grants space for the objects of the named node that the caller is to copy now.

        Raises:
            InvalidArgumentError: there is no such node, or it is not being drained.
        """
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
        goes_to: dict[ObjectRecord, MountedSegment] = {}
        left = left_bytes = waits = 0
        alive = common.membership.alive_segments(now_ms)
        room_comes = not all(segment.usable(now_ms) for segment in alive)  # after a restart
        evicted = common.counters["evicted_objects"]
        for record, was_found in page.records.items():
            if not record.complete:
                continue  # evicted on another node, to make room for an earlier object
            room = self._allocate_move_target(now_ms, record, goes_to, request)
            if isinstance(room, AllocationFailure):
                if room.may_retry or room_comes:
                    waits += was_found
                else:
                    left += was_found
                    left_bytes += record.size * was_found
                continue
            client, missing = request.client_number, repair_queue.missing(record)
            puts.append(self._granting.copy(now_ms, record, room, client, missing=missing))
            goes_to[record] = room[0][0]
        self._granting.release_copies([put for put in puts if not self._granting.unexpired(put)])
        puts = [put for put in puts if self._granting.unexpired(put)]
        next_cursor = page.next_cursor
        if not puts and next_cursor == request.cursor:
            next_cursor += 1  # there is no room for the beginning of a long chain
            if room_comes:
                waits += 1  # the tip of that chain
            else:
                left += 1
        return self._started(
            now_ms,
            puts,
            common.placements([put.record for put in puts], now_ms),
            next_cursor=next_cursor,
            skipped=page.skipped + waits,
            left=left,
            left_bytes=left_bytes,
            evicted=common.counters["evicted_objects"] - evicted,
        )

    def _allocate_move_target(
        self,
        now_ms: int,
        record: ObjectRecord,
        goes_to: dict[ObjectRecord, MountedSegment],
        request: calls.StartMoves,
    ) -> list[Extent] | AllocationFailure:
        """Allocates extents to move the object to, beside its parent if possible. Evicts only
        objects that were used less recently, and only those that the request allows."""
        parent = record.parent
        near = None
        if parent is not None and parent.complete:
            near = goes_to.get(parent) or next(s for s, _ in parent.extents() if s.alive)
        replicas = sum(segment.alive for segment, _ in record.extents())
        victims = EvictionConstraint(record.last_used_ms, request.evict_up_to)
        taken = self._granting.reserve(
            now_ms, [record.size], replicas, near=near, victims=victims, avoid=request.avoid
        )
        return taken if isinstance(taken, AllocationFailure) else taken[0]

    def _started(
        self,
        now_ms: int,
        puts: list[CopyGrant],
        sources: Placements,
        *,
        next_cursor: int = 0,
        skipped: int = 0,
        left: int = 0,
        left_bytes: int = 0,
        evicted: int = 0,
        keeps_version: bool = False,
    ) -> calls.StartMovesReply | DeferredReply:
        """The answer with these grants, which is sent once the granted extents are wiped."""
        records = [put.record for put in puts]
        grants = self._granting.reply(bytes([PutOutcome.WRITE]) * len(puts), puts)
        reply = calls.StartMovesReply(
            next_cursor=next_cursor,
            skipped=skipped,
            remaining=left,
            remaining_bytes=left_bytes,
            evicted=evicted,
            namespaces=[record.namespace for record in records],
            keys=[record.key for record in records],
            sources=sources,
            grants=grants,
            keeps_version=keeps_version,
        )
        unwiped = self._common.pending_wipes(grants.segments)
        return self._common.reply_when_wiped(now_ms, [], reply, unwiped) if unwiped else reply

    # --- repairing: when ----------------------------------------------------------------------

    def nodes_changed(self, now_ms: int, ready_ms: int) -> None:
        """Called when nodes came or went: from ``ready_ms`` on, replicas may be missing, or there
        may be room for them."""
        self._targets = NEVER_MS, []
        if self._pool.has_replicas:
            self._repairs.changed(max(now_ms + NODES_CHANGED_MS, ready_ms))

    def note_stored(self, record: ObjectRecord) -> None:
        """Called when ``record`` was stored, perhaps on fewer nodes than were asked for. Does
        nothing if it is on all nodes: the coming of another one begins a pass."""
        lacks = repair_queue.missing(record)
        if lacks and repair_queue.desired_replicas(record) - lacks < len(
            self._common.membership.nodes
        ):
            self._repairs.note(record)

    def has_work_for(self, node: JoinedNode, now_ms: int) -> bool:
        """Whether the node should ask for objects to copy."""
        return (
            self._repairs.has_work_for(node.name)
            and self._repairs.may_begin(now_ms)
            and bool(self._space_for_copies(now_ms))
        )

    def tick(self, now_ms: int) -> None:
        """Begins a pass over all objects, if one is due."""
        self._repairs.plan_next(now_ms)
        if self._repairs.is_due(now_ms):
            self._repairs.begin_pass()
            self._common.jobs.due |= SCAN

    def scan(self, now_ms: int) -> None:
        """Runs a slice of the pass. At its end, logs how many objects lack replicas."""
        common, repairs = self._common, self._repairs
        if not repairs.scan(self._forest, now_ms, len(common.membership.nodes)):
            return
        common.jobs.note(SCAN, False)
        short, repaired = repairs.found, common.counters["repaired_objects"]
        self._pool.short_objects = short
        if (short, repaired) != (self._told_short, self._told_repaired):
            done = repaired - self._told_repaired
            self._told_short, self._told_repaired = short, repaired
            common.effect(LogClusterEvent("replicas_missing", {"objects": short, "repaired": done}))

    def _space_for_copies(self, now_ms: int) -> list[MountedSegment]:
        """Segments that can take copies, the emptiest first. None while puts wait for room, or
        while a node is suspect: it may be back in a moment with the missing replicas."""
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

    # --- repairing: what ----------------------------------------------------------------------

    def _start_repairs(
        self, now_ms: int, node: JoinedNode, request: calls.StartMoves
    ) -> calls.StartMovesReply | DeferredReply:
        """Grants space for copies for repair; for none if the bounds are reached."""
        repairs = self._repairs
        pending_max = self._common.rules.pending_puts_max // 2
        self._targets = NEVER_MS, []  # search again
        avoid = set(request.avoid)
        usable = [s for s in self._space_for_copies(now_ms) if s.offer.uuid not in avoid]
        roomy = dict.fromkeys(usable)
        self._common.changing = True
        puts: list[CopyGrant] = []
        size = steps = 0
        while roomy and len(puts) < request.limit and steps < REPAIR_STEPS:
            record = repairs.next(node.name)
            if record is None:
                break
            for each in self._chain_to_repair(record):
                steps += 1
                if (
                    len(puts) >= request.limit
                    or (puts and size + each.size > request.bytes_max)
                    or not repairs.may_begin(now_ms, each.size)
                    or len(self._common.pending) >= pending_max
                ):
                    repairs.enqueue(record)
                    roomy = {}
                    break
                put = self._grant_repair(now_ms, node, each, roomy, request.client_number)
                if put is not None:
                    puts.append(put)
                    size += each.size
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
        return self._started(now_ms, puts, sources, keeps_version=True)

    def _chain_to_repair(self, record: ObjectRecord) -> list[ObjectRecord]:
        """``record`` and its near ancestors that lack replicas, too, topmost first; or nothing."""
        is_there = self._forest.get(record.namespace, record.key) is record
        if not is_there or not repair_queue.missing(record):
            return []
        line = [record]
        copies = self._granting.copies
        above = record.parent
        for _ in range(REPAIR_ANCESTORS):
            if above is None:
                break
            if repair_queue.missing(above) and (above.namespace, above.key) not in copies:
                line.append(above)
            above = above.parent
        return line[::-1]

    def _grant_repair(
        self,
        now_ms: int,
        node: JoinedNode,
        record: ObjectRecord,
        roomy: dict[MountedSegment, None],
        client_number: int,
    ) -> CopyGrant | None:
        """Grants space for one more replica of the object, if this node can copy it now."""
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
        if parent is not None and parent.more:  # place it beside a further replica of its parent
            near = next((s for s, _ in parent.extents() if s in roomy and s.node is not node), None)
        extent = self._pool.space_for_copy(record, roomy, near)
        if extent is None:
            self._repairs.note_deferred = True
            return None
        put = self._granting.copy(now_ms, record, [extent], client_number, repairs=True)
        self._pool.note_copied(record)
        self._repairs.begun(put.size)
        return put

    # --- repairing: what became of it ---------------------------------------------------------

    def add_replica(self, now_ms: int, put: CopyGrant) -> bool:
        """Makes a finished copy a replica of its object. Returns False if no replica is missing any
        more, or if the node of the copy has one by now."""
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
        """Adds an extent on memory that has come back as a replica of a complete object. Returns
        whether it was added: it is a missing replica, or one that this master did not know. If the
        object was copied meanwhile, a replica that is not missing is one too many."""
        if _extent_on(extent[0].node, record) is not None:
            return False
        uuid = extent[0].offer.uuid
        gone = [each for each in record.extents() if not each[0].alive]
        instead_of = next((each for each in gone if each[0].offer.uuid == uuid), None)
        if instead_of is None:
            instead_of = repair_queue.find_repairable_placeholder(
                record, now_ms - self._common.rules.lease_ms
            )
        if instead_of is None and (
            repair_queue.was_copied(record) or len(record.more) + 1 >= REPLICAS_MAX
        ):
            return False
        self._pool.add_replica(record, extent, instead_of)
        self._pool.count_unrequested_bytes(record)
        return True


def not_draining(node: JoinedNode) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"node {node.name} is not being drained", advice=f"kvstore drain {node.name}"
    )


def _extent_on(node: JoinedNode, record: ObjectRecord) -> Extent | None:
    for extent in record.extents():
        if extent[0].alive and extent[0].node is node:
            return extent
    return None
