"""What operators ask a master: the state of the cluster, its objects, and draining. Programs that
copy objects ask for moves."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from kvstore.calls.clients import Grants
from kvstore.calls.field_constraints import (
    Avoided,
    KeyPrefix,
    Name,
    NameOrEmpty,
    NamespaceOrEmpty,
    PageRows,
    Size,
)
from kvstore.calls.locations import NO_VERSION, Placements, Version
from kvstore.limits import Key, Namespace


class Status(NamedTuple):
    """The cluster at a glance, a page at a time."""

    cursor: int = 0
    """0 first, then ``next_cursor`` of the answer before."""


class SegmentStatus(NamedTuple):
    """Memory of a node, in bytes."""

    segment_id: int
    size: int
    """Size of a node's segment."""
    used: int
    """Bytes in extents that are not free: objects, grants, quarantine, pending frees."""
    largest_free: int
    """The largest free extent: no larger object fits."""
    shm_name: str
    pending: int = 0
    """Of the used bytes: those granted to puts under way."""
    quarantined: int = 0
    """Of the used bytes: those of abandoned puts, which their writers may still write to."""
    reclaim: int = 0
    """Of the used bytes: those of removed and evicted objects, which readers may still read or
    whose headers are not wiped yet."""
    device: NameOrEmpty = ""
    """Name of its medium (``SegmentOffer.medium``): ``cuda:0``; empty: memory of the host."""
    ready_ms: int = 0
    """How long none of its memory will be granted: leases from before it joined may last."""
    reports: bool = False
    """Whether its objects are still being reported; none of its memory is granted meanwhile."""


class NodeStatus(NamedTuple):
    name: str
    host: str
    state: str
    """alive, draining (alive, and given nothing new), suspect or dead."""
    address: str
    silent_ms: int
    """Time since the master last heard of the node."""
    segments: Sequence[SegmentStatus]
    version: str = ""
    """The release of its program."""
    unreachable: str = ""
    """Why the master could not connect to the node's memory after its join; empty: it could, or
    has not tried yet."""
    shm_entry_missing: bool = False
    """Whether somebody has removed the entry of its memory in /dev/shm: processes that start now
    cannot map it, and what it holds is lost when the node ends."""
    stored_bytes: int = 0
    """Payload bytes of objects that were put, moved or repaired there, by whatever transport, since
    the node joined this master."""
    read_bytes: int = 0
    """Bytes that clients have read over the node's data port since its start, as the node says.
    What clients move through shared memory or a transfer engine does not pass that port."""
    written_bytes: int = 0
    """Bytes that clients have written so."""

    @property
    def size(self) -> int:
        """Bytes of its memory."""
        return sum(each.size for each in self.segments)

    @property
    def used(self) -> int:
        """Of these: bytes that are not free."""
        return sum(each.used for each in self.segments)

    @property
    def largest_free(self) -> int:
        """Bytes of its largest free extent: no larger object fits."""
        return max((each.largest_free for each in self.segments), default=0)

    @property
    def transports(self) -> list[str]:
        """How clients reach its memory: shm, device, tcp."""
        ways = {
            "shm": any(each.shm_name for each in self.segments),
            "device": any(":" in segment.device for segment in self.segments),
            "tcp": bool(self.address),
        }
        return [name for name, is_there in ways.items() if is_there]


class DepartedNode(NamedTuple):
    """A node that has left or died some minutes ago and is not back with all of its objects."""

    name: str
    host: str
    """Where its data port was; of a node without one, the id of its host's running kernel."""
    reason: str
    """left, silent, broken, replaced, untold or unwiped, as the log has it."""
    departed_ms: int
    """Time since then."""
    missing: int
    """Objects that were on no other node, and come back with this node."""
    lost: int
    """Objects that were on no other node, and did not come back in time or with its memory."""
    reports: bool
    """Whether its memory is back, and reports its objects."""


class NamespaceStatus(NamedTuple):
    name: str
    objects: int
    size: int
    """Payload bytes, replicas not counted."""
    pinned_objects: int = 0
    """Objects that pins hold: those named by a pin, and their ancestors."""
    pinned_bytes: int = 0
    """Bytes of memory that the pinned objects take, headers and replicas included."""


class TenantStatus(NamedTuple):
    """Bytes are those of memory: headers, replicas, puts and allocations under way included."""

    name: str
    """Empty: has what belongs to no other tenant."""
    bytes: int
    guarantee_bytes: int
    limit_bytes: int
    """0: no bound."""
    pinned: int
    """Bytes that its pins hold."""
    pinned_max: int
    """0: no bound of its own."""
    objects: int
    evicted_by_own: int
    """Objects that made room for its own puts since the master started. Room that is made ahead of
    need counts for the tenants whose puts used it."""
    evicted_by_others: int
    """Objects that made room for puts of others, and for copies by drains and repairs."""
    refused: int
    """Puts and pins that a quota refused."""
    namespaces: Sequence[str] = ()
    """Patterns."""


class Counter(NamedTuple):
    name: str
    value: int


class ClusterStatus(NamedTuple):
    epoch: int
    version: str
    uptime_ms: int
    nodes: Sequence[NodeStatus]
    namespaces: Sequence[NamespaceStatus]
    counters: Sequence[Counter]
    """What happened since the master started: name and number, sorted by name."""
    role: str = "single"
    """single, or leader: a master that stands by answers NotLeaderError."""
    leader: str = ""
    """The address that the leader advertises; empty: none was given."""
    cluster: str = ""
    """Name of the cluster; empty: it has none."""
    next_cursor: int = 0
    """Not 0: there are more nodes or namespaces. ``counters``, ``departed`` and ``tenants`` are
    part of the first page only."""
    departed: Sequence[DepartedNode] = ()
    tenants: Sequence[TenantStatus] = ()
    """Empty: the master has no tenants."""

    @property
    def size(self) -> int:
        """Bytes of the memory of all nodes."""
        return sum(node.size for node in self.nodes)

    @property
    def used(self) -> int:
        """Of these: bytes that are not free."""
        return sum(node.used for node in self.nodes)

    def nodes_by_segment(self) -> dict[int, str]:
        """The name of the node of each segment."""
        return {each.segment_id: node.name for node in self.nodes for each in node.segments}

    def with_page(self, page: ClusterStatus) -> ClusterStatus:
        """This status with the rows of the next page added; sorted once that page is the last."""
        nodes = [*self.nodes, *page.nodes]
        namespaces = [*self.namespaces, *page.namespaces]
        return self._replace(
            nodes=nodes if page.next_cursor else sorted(nodes),
            namespaces=namespaces if page.next_cursor else sorted(namespaces),
            next_cursor=page.next_cursor,
        )


class ListObjects(NamedTuple):
    namespace: NamespaceOrEmpty
    prefix: Annotated[bytes, KeyPrefix()]
    cursor: int
    """0 first, then ``next_cursor`` of the answer before. Objects that come or go between two
    pages may be missed or seen twice."""
    limit: PageRows


class ObjectRow(NamedTuple):
    namespace: str
    key: Key
    size: int
    replicas: int
    depth: int
    leased_ms: int
    state: str
    """complete, detached or being_written."""


class ListObjectsReply(NamedTuple):
    objects: Sequence[ObjectRow]
    next_cursor: int
    """0: that was the last page."""


class StatObject(NamedTuple):
    namespace: Namespace
    key: Key


class ObjectDetail(NamedTuple):
    row: ObjectRow | None
    """None: no such object."""
    parent: bytes
    """Empty: a root."""
    children: int
    version: Version
    idle_ms: int
    """Time since the object was last matched, looked up or put."""
    placements: Placements
    epoch: int = 0
    """The epoch of the segment ids in ``placements``."""


class DrainStep(enum.IntEnum):
    """One step of draining a node."""

    BEGIN = 1
    """The node gets nothing new. Its objects are still read."""
    UNDO = 2
    """The node takes puts again, as any other."""
    LEAVE = 3
    """The master tells the node to leave, with the objects left on it; only after BEGIN."""


class Drain(NamedTuple):
    node: Name
    step: DrainStep


class DrainReply(NamedTuple):
    epoch: int
    used: int
    """Bytes of the node's segments that are not free."""
    pending: int
    """Puts and allocations under way that were to be written there."""
    began: Version = NO_VERSION
    """The newest version when the draining began. An object that is moved off the node gets a later
    one."""


class StartMoves(NamedTuple):
    """Grant space elsewhere for some objects of a draining node. The caller copies each payload,
    with a header for the token's version, and ends the copy by ``PutEnd``. That is refused if the
    object was removed or replaced meanwhile."""

    node: Name
    cursor: int
    """0 begins a pass over all objects; then ``next_cursor`` of the last reply."""
    limit: PageRows
    """Objects granted at most."""
    bytes_max: Size
    """Payload bytes granted at most, one object at least."""
    avoid: Avoided = ()
    """Segments (uuids) to which the caller could not write a moment ago."""
    client_number: int = 0
    """As in ``PutStart``."""
    repair: bool = False
    """Instead of moves off a draining node, grant one more replica for objects that have too few.
    Nothing is evicted for that. The reply is empty if nothing is to be copied now."""
    evict_up_to: Version = NO_VERSION
    """Moves may evict objects elsewhere of this version or an earlier one, if they were used longer
    ago than the moved object; by default none. With ``DrainReply.began`` a drain evicts no object
    that was moved off the node."""


class StartMovesReply(NamedTuple):
    next_cursor: int
    """0: the pass is over."""
    skipped: int
    """Objects that are being replaced at this moment, or for which there will be room elsewhere
    in a moment."""
    remaining: int
    """Objects for which there is no room elsewhere: the objects there may not be evicted, or are
    leased or being written."""
    remaining_bytes: int
    evicted: int
    """Objects elsewhere that were used longer ago, and had to make room."""
    namespaces: Sequence[Namespace]
    """Of the granted objects, one row each, as in the next three fields."""
    keys: Sequence[Key]
    sources: Placements
    grants: Grants
    keeps_version: bool = False
    """The copy has the version of its source, not that of its token."""


OperatorRequest = Status | ListObjects | StatObject | Drain | StartMoves
