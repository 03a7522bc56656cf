"""Handles messages from nodes and reports about nodes, and notifies the other parts of mounted and
lost segments. ``Membership`` decides which nodes are joined."""

from __future__ import annotations

from kvstore import calls
from kvstore.calls import DrainStep
from kvstore.errors import ProtocolError, UnavailableError
from kvstore.master.state import liveness
from kvstore.master.state.background_sweep import BackgroundSweeper
from kvstore.master.state.disk_tier import DiskTier
from kvstore.master.state.effects import LogClusterEvent, SendToNode, SupersedeEpoch
from kvstore.master.state.inventory_loading import InventoryLoader
from kvstore.master.state.membership import describe
from kvstore.master.state.queries import JOINING_MS
from kvstore.master.state.records import MountedSegment
from kvstore.master.state.removal_watermarks import RemovalWatermarks
from kvstore.master.state.replication import ReplicationPlanner, not_draining
from kvstore.master.state.state_context import StateContext

WATCH_MS = 1_000
"""Interval of the check that nodes execute wipe requests and send their claims."""


class NodeMessageHandler:
    def __init__(
        self,
        common: StateContext,
        watermarks: RemovalWatermarks,
        inventories: InventoryLoader,
        replication: ReplicationPlanner,
        sweeper: BackgroundSweeper,
        tier: DiskTier,
    ) -> None:
        self._common = common
        self._membership = common.membership
        self._watermarks = watermarks
        self._inventories = inventories
        self._replication = replication
        self._sweeper = sweeper
        self._tier = tier
        self._watched_ms = common.started_ms

    def on_node_join(
        self, now_ms: int, session: int, join: calls.NodeJoin, certified: str = ""
    ) -> calls.MasterAccepted:
        """Handle the first message of a node's stream. ``certified``: see ``SegmentInfo``. Errors
        as ``Membership.join``; there is no session then.

        A node that knows a later master is rejected: its claims of versions above our epoch would
        be rejected and wiped. It joins our next term, which starts above that epoch.
        """
        common = self._common
        self._membership.check(join)
        if join.highest_epoch > common.epoch:
            self._check_epoch(join.name, join.highest_epoch)
            fields: dict[str, str | int] = {"node": join.name, "epoch": join.highest_epoch}
            common.effect(LogClusterEvent("epoch_rejected", fields))
        accepted = self._membership.join(now_ms, session, join, self._begin_join, certified)
        if not join.resume_epoch:
            watermark = max(offer.removal_watermark for offer in join.segments)
            self._watermarks.node_joined(session, join.name, watermark)
        self._apply_membership_changes(now_ms)
        for segment in self._membership.segments[join.name]:
            common.effects += common.reclaim.send_again(segment)
        self._common.space_freed()
        return accepted

    def _begin_join(self, segments: list[MountedSegment]) -> None:
        memory = [segment for segment in segments if not segment.is_disk]
        self._common.pool.prepare(memory)  # without memory for them, only this join is refused
        self._common.changing = True

    def on_node_message(self, now_ms: int, session: int, message: calls.NodeMessage) -> None:
        """Handle a later message; messages of ended sessions are ignored."""
        common = self._common
        node = self._membership.node_of_session(session)
        if node is None:
            return
        if self._membership.state_of(node, now_ms) != liveness.ALIVE:
            self._common.space_freed()  # after silence, puts may use it again
        self._membership.on_heartbeat(now_ms, node)
        common.changing = True
        match message:
            case calls.NodeHeartbeat(
                number, shm_entry_missing, clock_ms, read_bytes, written_bytes
            ):
                node.ahead_ms = clock_ms - now_ms
                node.read_bytes, node.written_bytes = read_bytes, written_bytes
                self._membership.on_shm_entry_report(node, is_missing=shm_entry_missing)
                self._apply_membership_changes(now_ms)
                repair = self._replication.has_work_for(node, now_ms)
                common.effect(SendToNode(session, calls.MasterHeartbeat(number, repair)))
            case calls.NodeWipeDone(wipe_seq):
                segment = common.reclaim.segment_of(wipe_seq)
                if segment is not None and segment.node is node:
                    common.effects += common.reclaim.wiped(wipe_seq)
                    common.effects += common.reclaim.request_zeroing(now_ms)
                    self._common.space_freed()
            case calls.NodeCopied():
                self._tier.copied(now_ms, node.name, message)
                self._common.space_freed()
            case calls.NodeClaims():
                if max(message.epochs, default=0) > common.epoch:  # its join did not report it
                    later = [epoch for epoch in message.epochs if common.is_later(epoch)]
                    self._check_epoch(node.name, max(later, default=0))
                self._inventories.node_claims(now_ms, node, message)
            case calls.NodeLeave():
                self._membership.leave(node)
                self._apply_membership_changes(now_ms, left=True)
            case calls.NodeJoin():
                raise ProtocolError("a second join on one stream")

    def stream_broken(self, session: int) -> None:
        self._common.changing = True
        self._membership.stream_broken(session)
        self._apply_membership_changes(0)  # no node dies, so the time does not matter

    def segments_of_session(self, session: int) -> list[calls.SegmentInfo]:
        """Return the segments of the session's node; none if it has ended."""
        node = self._membership.node_of_session(session)
        segments = [] if node is None else self._membership.segments[node.name]
        return [describe(segment) for segment in segments if not segment.is_disk]

    def on_connectivity_result(self, session: int, error: str) -> None:
        """Record the result of a connectivity probe. ``error``: the error, or empty."""
        node = self._membership.node_of_session(session)
        if node is not None:
            self._membership.on_connectivity_result(node, error)
            self._apply_membership_changes(0)  # no node dies, so the time does not matter

    def _check_epoch(self, node: str, epoch: int) -> None:
        """Raise UnavailableError if the node has joined a later master, of this epoch."""
        common = self._common
        if common.is_later(epoch):
            common.effect(SupersedeEpoch(epoch))
            raise _later_epoch_error(f"node {node}", epoch, common.epoch)

    def client_joined(self, now_ms: int, join: calls.Join) -> None:
        """Raise UnavailableError if the client knows a later master and has to wait: a client ends
        no term, the nodes of that master do once they join."""
        common = self._common
        is_new = now_ms - common.started_ms < JOINING_MS
        if is_new and join.highest_epoch > common.epoch:
            raise _later_epoch_error(f"client {join.client}", join.highest_epoch, common.epoch)

    def report_failure(self, now_ms: int, request: calls.ReportFailure) -> calls.ReportFailureReply:
        common = self._common
        common.changing = True
        is_ours = request.epoch == common.epoch
        source = common.traffic.caller.source
        for segment_id in request.segment_ids if is_ours else ():
            segment = common.pool.segments.get(segment_id)
            if segment is not None:
                self._membership.reported(now_ms, segment.node, request, source)
                common.counters["reported_failures"] += 1
        self._membership.expire_nodes(now_ms)
        self._apply_membership_changes(now_ms)
        nodes = self._membership.nodes.values()
        states = [self._membership.state_of(node, now_ms) for node in nodes]
        return calls.ReportFailureReply(states.count(liveness.SUSPECT))

    def drain(self, now_ms: int, request: calls.Drain) -> calls.DrainReply:
        """Raise InvalidArgumentError if the node is unknown, or leaves without draining."""
        common, members = self._common, self._membership
        if request.step is DrainStep.LEAVE and request.node not in members.nodes:
            return calls.DrainReply(common.epoch, 0, 0)  # it has left
        node = members.get_node(request.node)
        common.changing = True
        if request.step is DrainStep.LEAVE:
            if not node.draining:
                raise not_draining(node)
            members.dismiss(node)
        else:
            if not node.draining:
                node.drained_from = common.newest_granted
            members.drain(node, draining=request.step is DrainStep.BEGIN)
            self._common.space_freed()  # after an undo, puts may use it again
        segments = {s for s in members.segments.get(node.name, ()) if not s.is_disk}
        self._apply_membership_changes(now_ms)
        used = sum(segment.capacity - segment.allocator.free_bytes for segment in segments)
        pending = sum(any(s in segments for s, _ in put.extents) for put in common.pending)
        return calls.DrainReply(common.epoch, used, pending, node.drained_from)

    def tick(self, now_ms: int) -> None:
        self._membership.expire_nodes(now_ms)
        if now_ms - self._watched_ms >= WATCH_MS:
            self._watched_ms = now_ms
            self._fence_idle(now_ms)
        self._common.forest.missing.tick(now_ms, self._membership.nodes)
        self._apply_membership_changes(now_ms)

    def _fence_idle(self, now_ms: int) -> None:
        """Declare nodes dead that only send heartbeats: removals would wait for them."""
        patience_ms = self._common.rules.node_patience_ms
        overdue = {segment.node: "untold" for segment in self._inventories.late(now_ms)}
        for segment in self._common.reclaim.unanswered(now_ms, patience_ms):
            overdue.setdefault(segment.node, "unwiped")
        for node, reason in overdue.items():
            self._membership.declare_dead(node, reason)

    def _apply_membership_changes(self, now_ms: int, *, left: bool = False) -> None:
        """Notify the other parts of changes. ``left``: the node left by itself."""
        members = self._membership
        self._common.effects += members.effects
        for segment in members.lost:
            self._segment_lost(now_ms, segment, left=left)
        for segment in members.mounted:
            if segment.is_disk:
                self._tier.segment_mounted(now_ms, segment)
                self._inventories.segment_mounted(segment)
            else:
                self._common.pool.mount(segment)
                self._inventories.segment_mounted(segment)
                self._common.forest.missing.segment_mounted(segment)
        if members.lost or members.mounted:
            ready_ms = max(
                (s.usable_at_ms for s in members.mounted if s.inventory_complete), default=0
            )
            self._replication.nodes_changed(now_ms, ready_ms)
        for changes in (members.effects, members.lost, members.mounted):
            changes.clear()

    def _segment_lost(self, now_ms: int, segment: MountedSegment, *, left: bool) -> None:
        common = self._common
        if segment.is_disk:
            self._tier.segment_died(segment)
        else:
            common.pool.unmount(segment)
            common.forest.missing.segment_died(now_ms, segment)
            self._sweeper.segment_died(segment)
        self._watermarks.segment_died(segment)
        if not left:
            segment.died_ms = now_ms
        self._inventories.segment_died(segment)
        common.effects += common.reclaim.segment_died(segment)
        if not left and not segment.is_disk:
            readers_ms = now_ms + common.rules.lease_ms
            common.reclaim.wait_for_readers(segment, common.newest_stored, readers_ms)


def _later_epoch_error(subject: str, epoch: int, own: int) -> UnavailableError:
    return UnavailableError(
        f"{subject} last joined a master with epoch {epoch}; this master has epoch {own} and "
        "starts a higher one when a node reports it",
        advice="Join again. The clock of a master's host was set back.",
        epoch=epoch,
    )
