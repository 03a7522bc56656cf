"""Nodes and their segments: join, resumption, departure, death.

The shell numbers each stream as a *session*. While the node is not dead, a broken stream may be
resumed as another session, and all objects stay known. Otherwise the node fences off all older
grants and joins again. Its segments get new ids, and no space on them is granted until earlier
leases have ended, and allocations, whose owners cannot be fenced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvstore.calls import (
    DescriptorHandle,
    MasterAccepted,
    NodeJoin,
    ReportFailure,
    SegmentInfo,
    SegmentOffer,
)
from kvstore.errors import (
    BusyError,
    DrainedError,
    InvalidArgumentError,
    NodeNameTakenError,
    SegmentUnmountedError,
    UnavailableError,
)
from kvstore.limits import check_cluster, check_protocol
from kvstore.master.state import liveness
from kvstore.master.state.effects import CloseSession, Effect, LogClusterEvent
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.records import MountedSegment
from kvstore.master.state.rules import MasterRules
from kvstore.memory.header import SUPERBLOCK_BYTES

NODES_MAX = 4_096
SEGMENTS_PER_NODE_MAX = 64
GONE_MAX = 65_536
"""Maximum number of unmounted segments that are remembered."""


class Membership:
    """The joined nodes. Calls add changes to ``lost``, ``mounted`` and ``effects``; the caller
    processes the segments in this order and clears all three."""

    def __init__(
        self,
        *,
        epoch: int,
        rules: MasterRules,
        cluster: str,
    ) -> None:
        self.nodes: dict[str, JoinedNode] = {}
        self.segments: dict[str, list[MountedSegment]] = {}
        self.dead_nodes = 0
        """Nodes declared dead that neither left nor were dismissed."""
        self.departed_nodes = 0
        self.lost: list[MountedSegment] = []
        self.mounted: list[MountedSegment] = []
        self.effects: list[Effect] = []
        self._by_session: dict[int, JoinedNode] = {}
        self._holders: dict[bytes, JoinedNode] = {}
        """The node that has mounted each memory (uuid)."""
        self._epoch = epoch
        self._cluster = cluster
        self._rules = rules
        self._next_segment_id = 0
        self._departed: dict[bytes, int] = {}
        """Unmounted memory (uuid), and until when owners of allocations may write to it."""
        self._dismissed: dict[bytes, None] = {}
        self._alive: tuple[int, list[MountedSegment]] | None = None
        """Time and result of the last ``alive_segments``, until something changes."""

    def state_of(self, node: JoinedNode, now_ms: int) -> str:
        return liveness.state_of(node, now_ms, self._rules.liveness)

    def node_of_session(self, session: int) -> JoinedNode | None:
        return self._by_session.get(session)

    def get_node(self, name: str) -> JoinedNode:
        node = self.nodes.get(name)
        if node is None:
            raise InvalidArgumentError(
                f"there is no node {name}", advice="kvstore status lists the nodes."
            )
        return node

    def alive_segments(self, now_ms: int) -> list[MountedSegment]:
        """Return the memory of nodes that are alive, not suspect and not draining."""
        if self._alive is None or self._alive[0] != now_ms:
            segments = [
                segment
                for name, node in self.nodes.items()
                if not node.draining and self.state_of(node, now_ms) == liveness.ALIVE
                for segment in self.segments[name]
                if not segment.is_disk
            ]
            self._alive = now_ms, segments
        return self._alive[1]

    def check(self, join: NodeJoin) -> None:
        """Check that the message is valid and for this cluster. Raise ProtocolError,
        InvalidArgumentError or ClusterMismatchError."""
        check_protocol(join.protocol, "the node")
        check_cluster(self._cluster, join.cluster, f"node {join.name}")
        for offer in join.segments:
            if offer.size <= SUPERBLOCK_BYTES or len(offer.uuid) != 16:
                raise InvalidArgumentError("a segment must have a size and a uuid of 16 bytes")
        if join.segments and all(offer.disk is not None for offer in join.segments):
            raise InvalidArgumentError("a node must offer memory for its disks")
        if not join.name or not 0 < len(join.segments) <= SEGMENTS_PER_NODE_MAX:
            raise InvalidArgumentError(
                f"a node must have a name and 1 to {SEGMENTS_PER_NODE_MAX} segments"
            )
        if len({offer.uuid for offer in join.segments}) < len(join.segments):
            raise InvalidArgumentError("the node offers a segment twice")

    def join(
        self,
        now_ms: int,
        session: int,
        join: NodeJoin,
        changes: Callable[[list[MountedSegment]], None],
        certified: str = "",
    ) -> MasterAccepted:
        """Handle the first message of a stream. ``changes`` is called with the new segments
        before the first change; an exception until then changes nothing. ``certified``: see
        ``SegmentInfo``.

        Raises:
            NodeNameTakenError: another live node has that name.
            SegmentUnmountedError: nothing to resume; the node must fence, then join again.
            DrainedError: nothing to resume; the node must leave.
            UnavailableError: another node has mounted that memory.
            ProtocolError, InvalidArgumentError, BusyError, ClusterMismatchError
        """
        self.check(join)
        uuids = {offer.uuid for offer in join.segments}
        self._alive = None
        known = self.nodes.get(join.name)
        is_same = known is not None and {s.offer.uuid for s in self.segments[known.name]} == uuids
        if join.resume_epoch:
            node = self._resumable(join, known if is_same else None, uuids)
            changes([])
            self._take_over(node, session)
            node.last_heartbeat_ms, node.certified = now_ms, certified
            node.ahead_ms = join.clock_ms - now_ms
            self._log_event("node_resumed", node)
            return self._accepted(node, join)
        for uuid in uuids:
            holder = self._holders.get(uuid, known)
            if holder is not None and holder.name != join.name:
                raise UnavailableError(
                    f"memory of node {join.name} is already mounted by node {holder.name}",
                    advice="A segment belongs to one node. If that one has ended, try again once "
                    "it counts as dead.",
                    node=holder.name,
                )
        if known is None and len(self.nodes) >= NODES_MAX:
            raise BusyError(f"the limit of {NODES_MAX} joined nodes is reached")
        if known is not None and not is_same and self.state_of(known, now_ms) == liveness.ALIVE:
            raise NodeNameTakenError(
                f"a node named {join.name} is alive on {known.location_text}",
                advice="Give this node another --name.",
                node=join.name,
            )
        node = JoinedNode(
            name=join.name,
            host=join.host,
            session=session,
            last_heartbeat_ms=now_ms,
            version=join.version,
            address=next((offer.address for offer in join.segments if offer.address), ""),
            certified=certified,
        )
        node.ahead_ms = join.clock_ms - now_ms
        if known is not None and known.draining:
            node.draining, node.drained_from = True, known.drained_from
        departed = dict(self._departed_of(known, uuids))
        segments = [self._mount_segment(now_ms, node, offer, departed) for offer in join.segments]
        changes(segments)
        if known is not None:
            self.declare_dead(known, "replaced")
        for uuid in uuids:
            self._departed.pop(uuid, None)
            self._dismissed.pop(uuid, None)
            self._holders[uuid] = node
        self.nodes[node.name] = node
        self._by_session[session] = node
        self.segments[node.name] = segments
        self.mounted += segments
        self._log_event("node_joined", node)
        return self._accepted(node, join)

    def _resumable(self, join: NodeJoin, known: JoinedNode | None, uuids: set[bytes]) -> JoinedNode:
        """Return the node with that name and exactly these segments. Raise DrainedError if it was
        dismissed, SegmentUnmountedError if there is no stream to resume."""
        if not self._dismissed.keys().isdisjoint(uuids):
            raise _drained_error(join.name)
        # A delayed join may arrive after a later one: its generations are older. An interrupted
        # inventory (not ``whole``) must start again.
        generations = {offer.uuid: offer.generation for offer in join.segments}
        if (
            known is not None
            and join.resume_epoch == self._epoch
            and all(
                segment.inventory_complete
                and segment.offer.generation == generations[segment.offer.uuid]
                for segment in self.segments[known.name]
            )
        ):
            return known
        raise SegmentUnmountedError(
            f"node {join.name} has no stream to resume here", advice="Join again."
        )

    def _departed_of(
        self, known: JoinedNode | None, uuids: set[bytes]
    ) -> Iterator[tuple[bytes, int]]:
        """Return the entries for ``_departed`` once the known node is declared dead."""
        for uuid in uuids & self._departed.keys():
            yield uuid, self._departed[uuid]
        for segment in () if known is None else self.segments[known.name]:
            yield segment.offer.uuid, segment.allocated_until_ms

    def _mount_segment(
        self, now_ms: int, node: JoinedNode, offer: SegmentOffer, departed: Mapping[bytes, int]
    ) -> MountedSegment:
        self._next_segment_id += 1
        allocated_until_ms = departed.get(offer.uuid)
        if allocated_until_ms is None:
            usable_at_ms = now_ms if offer.fresh else now_ms + self._rules.lease_ms
            allocated_until_ms = 0
        elif offer.fresh:  # its node does not know of the mount, so nothing is fenced
            unfenced_ms = self._rules.put_deadline_ms + self._rules.quarantine_ms
            usable_at_ms = now_ms + max(self._rules.lease_ms, unfenced_ms)
        else:
            usable_at_ms = max(now_ms + self._rules.lease_ms, allocated_until_ms)
        segment = MountedSegment(self._next_segment_id, node, offer, usable_at_ms)
        segment.allocated_until_ms = allocated_until_ms
        return segment

    def on_heartbeat(self, now_ms: int, node: JoinedNode) -> None:
        node.last_heartbeat_ms = now_ms
        self._alive = None

    def reported(
        self, now_ms: int, node: JoinedNode, report: ReportFailure, source: str = ""
    ) -> None:
        """Record that a client cannot use the node. ``source``: see ``FailureReports``."""
        is_news = liveness.record_failure_report(node, report.host, now_ms, source)
        self._alive = None
        if is_news:
            state, client = self.state_of(node, now_ms), report.client
            self._log_event(
                "node_reported", node, by_client=client, state=state, reason=report.reason
            )

    def stream_broken(self, session: int) -> None:
        node = self._by_session.pop(session, None)
        if node is not None:
            node.session = None
            liveness.stream_broken(node)
            self._alive = None
            self._log_event("node_stream_broken", node)

    def on_connectivity_result(self, node: JoinedNode, error: str) -> None:
        if error != node.unreachable:
            if error:
                self._log_event("node_unreachable", node, reason=error)
            else:
                self._log_event("node_reachable", node)
            node.unreachable = error

    def on_shm_entry_report(self, node: JoinedNode, *, is_missing: bool) -> None:
        if is_missing and not node.shm_entry_missing:
            self._log_event("node_shm_entry_missing", node)
        node.shm_entry_missing = is_missing

    def leave(self, node: JoinedNode) -> None:
        if node.session is not None:
            self._by_session.pop(node.session)
            node.session = None
        self.declare_dead(node, "left")

    def drain(self, node: JoinedNode, *, draining: bool) -> None:
        if node.draining != draining:
            node.draining = draining
            self._alive = None
            self._log_event("node_draining" if draining else "node_undrained", node)

    def dismiss(self, node: JoinedNode) -> None:
        """Request the node to leave, and count it as departed."""
        if node.session is not None:
            self._by_session.pop(node.session)
            self.effects.append(CloseSession(node.session, _drained_error(node.name)))
            node.session = None
        for segment in self.segments[node.name]:
            self._dismissed[segment.offer.uuid] = None
        while len(self._dismissed) > GONE_MAX:
            del self._dismissed[next(iter(self._dismissed))]
        self.declare_dead(node, "left")

    def expire_nodes(self, now_ms: int) -> None:
        for node in list(self.nodes.values()):
            if self.state_of(node, now_ms) == liveness.DEAD:
                self.declare_dead(node, "silent" if node.session is not None else "broken")

    def declare_dead(self, node: JoinedNode, reason: str) -> None:
        self._alive = None
        if node.session is not None:
            self._by_session.pop(node.session)
            error = SegmentUnmountedError(
                f"node {node.name} counts as dead ({reason})", node=node.name
            )
            self.effects.append(CloseSession(node.session, error))
            node.session = None
        if reason == "left":
            self.departed_nodes += 1
        else:
            self.dead_nodes += 1
        node.departed = "drained" if node.draining and reason == "left" else reason
        self._log_event("node_left" if reason == "left" else "node_dead", node, why=reason)
        del self.nodes[node.name]
        departed = self.segments.pop(node.name)
        self.lost += departed
        for segment in departed:
            self._departed[segment.offer.uuid] = segment.allocated_until_ms
            del self._holders[segment.offer.uuid]
        while len(self._departed) > GONE_MAX:
            del self._departed[next(iter(self._departed))]

    def _take_over(self, node: JoinedNode, session: int) -> None:
        if node.session is not None:
            self._by_session.pop(node.session)
            error = SegmentUnmountedError("the node has opened another stream", node=node.name)
            self.effects.append(CloseSession(node.session, error))
        node.session = session
        self._by_session[session] = node

    def _accepted(self, node: JoinedNode, join: NodeJoin) -> MasterAccepted:
        ids = {segment.offer.uuid: segment.segment_id for segment in self.segments[node.name]}
        return MasterAccepted(
            epoch=self._epoch,
            heartbeat_ms=self._rules.heartbeat_ms,
            dead_ms=self._rules.liveness.dead_ms,
            segment_ids=[ids[offer.uuid] for offer in join.segments],
            cluster=self._cluster,
        )

    def _log_event(self, event: str, node: JoinedNode, **fields: str | int) -> None:
        memory = [segment for segment in self.segments[node.name] if not segment.is_disk]
        size = sum(segment.offer.size for segment in memory)
        self.effects.append(
            LogClusterEvent(
                event, {"node": node.name, "address": node.location_text, "bytes": size, **fields}
            )
        )


def _drained_error(node: str) -> DrainedError:
    return DrainedError(f"node {node} was drained and must leave", node=node)


def describe(segment: MountedSegment) -> SegmentInfo:
    offer: SegmentOffer = segment.offer
    return SegmentInfo(
        segment_id=segment.segment_id,
        node=segment.node.name,
        host=segment.node.host,
        size=offer.size,
        uuid=offer.uuid,
        shm_name=offer.shm_name,
        address=offer.address,
        token=offer.token,
        seed=offer.seed,
        generation=offer.generation,
        engine=offer.engine,
        data_protocol=offer.data_protocol,
        device=offer.device,
        descriptor_socket=DescriptorHandle(offer.descriptor_socket, 0, bytes(16))
        if offer.descriptor_socket
        else None,
        certified=segment.node.certified,
        takes_capabilities=offer.takes_capabilities,
        encrypts=offer.encrypts,
    )
