"""Calls of operators: cluster state, objects, drains. Programs that copy objects request moves."""

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
    """Get the state of the cluster, in batches."""

    cursor: int = 0
    """0 first, then ``next_cursor`` of the previous reply."""


class SegmentStatus(NamedTuple):
    """Memory of a node, in bytes."""

    segment_id: int
    size: int
    """Size of the segment."""
    used: int
    """Bytes in extents that are not free: objects, grants, quarantine, pending frees."""
    largest_free: int
    """The largest free extent, which limits the size of new objects."""
    shm_name: str
    pending: int = 0
    """Used bytes that are granted to puts in progress."""
    quarantined: int = 0
    """Used bytes of abandoned puts, to which their writers may still write."""
    reclaim: int = 0
    """Used bytes of removed and evicted objects that may still be read, or whose headers are not
    wiped yet."""
    device: NameOrEmpty = ""
    """Name of its medium (``SegmentOffer.medium``): ``cuda:0``; empty: memory of the host."""
    ready_ms: int = 0
    """Time until its memory can be granted: leases from before its join may last."""
    reports: bool = False
    """Whether its inventory is still being reported; nothing is granted meanwhile."""


class DiskStatus(NamedTuple):
    """A disk of a node, in bytes."""

    segment_id: int
    size: int
    """Size of the file."""
    used: int
    """Bytes in extents that are not free: copies, copies in progress, and wipes in progress."""
    objects: int
    """Objects with a copy on the disk; those in memory, too, are among them."""
    copied: int
    """Payload bytes of these objects."""
    written: int
    """Payload bytes written since the node joined this master."""
    brought: int
    """Payload bytes brought back into memory since then."""
    budget: int
    """Bytes that may be written now, as if the file were written at most ``--disk-writes-per-day``;
    the size of the file if there is no limit."""
    failed: bool = False
    """Whether it is not used any more, after three errors within a minute."""
    reports: bool = False
    """Whether its inventory is still being reported."""


class NodeStatus(NamedTuple):
    name: str
    host: str
    state: str
    """alive, draining (alive, without new objects), suspect or dead."""
    address: str
    silent_ms: int
    """Time since the last message from the node."""
    segments: Sequence[SegmentStatus]
    version: str = ""
    """Release of the node."""
    unreachable: str = ""
    """Reason of the failed connectivity probe after the join; empty: it succeeded or is pending."""
    shm_entry_missing: bool = False
    """Whether the /dev/shm entry of its memory was removed: new processes cannot map it, and its
    contents are lost when the node ends."""
    stored_bytes: int = 0
    """Payload bytes of objects put, moved or repaired there, by any transport, since the node
    joined this master."""
    read_bytes: int = 0
    """Bytes read by clients over the node's data port since its start, as reported. Shared memory
    and transfer engines do not use that port."""
    written_bytes: int = 0
    """Bytes written by clients over that port."""
    disks: Sequence[DiskStatus] = ()

    @property
    def size(self) -> int:
        """Bytes of its memory."""
        return sum(segment.size for segment in self.segments)

    @property
    def used(self) -> int:
        """Bytes that are not free."""
        return sum(segment.used for segment in self.segments)

    @property
    def largest_free(self) -> int:
        """Bytes of its largest free extent, which limits the size of new objects."""
        return max((segment.largest_free for segment in self.segments), default=0)

    @property
    def transports(self) -> list[str]:
        """The transports to its memory: shm, device, tcp."""
        ways = {
            "shm": any(each.shm_name for each in self.segments),
            "device": any(":" in segment.device for segment in self.segments),
            "tcp": bool(self.address),
        }
        return [name for name, is_there in ways.items() if is_there]


class DepartedNode(NamedTuple):
    """A node that has left or died recently and is not back with all of its objects."""

    name: str
    host: str
    """Address of its data port; without one, the boot id of its host."""
    reason: str
    """The reason in the log: left, silent, broken, replaced, untold or unwiped."""
    departed_ms: int
    """Time since then."""
    missing: int
    """Objects that were on no other node, and come back with this node."""
    lost: int
    """Objects that were on no other node, and were not recovered in time or with its memory."""
    reports: bool
    """Whether its memory is back, and its inventory is being reported."""


class NamespaceStatus(NamedTuple):
    name: str
    objects: int
    size: int
    """Payload bytes without replicas."""
    pinned_objects: int = 0
    """Pinned objects: those named by a pin, and their ancestors."""
    pinned_bytes: int = 0
    """Memory of the pinned objects, with headers and replicas."""
    disk_objects: int = 0
    """Objects that have a copy on a disk."""


class TenantStatus(NamedTuple):
    """Usage of a tenant. Bytes include headers, replicas, puts and allocations in progress."""

    name: str
    """Empty: everything that belongs to no other tenant."""
    bytes: int
    guarantee_bytes: int
    limit_bytes: int
    """0: no limit."""
    pinned: int
    """Bytes protected by its pins."""
    pinned_max: int
    """0: no limit."""
    objects: int
    evicted_by_own: int
    """Objects evicted by its own puts since the master started. Evictions ahead of demand count for
    the tenants whose puts used the space."""
    evicted_by_others: int
    """Objects evicted by puts of other tenants, drains and repairs."""
    refused: int
    """Puts, pins and writes to disks rejected by a quota."""
    namespaces: Sequence[str] = ()
    """Patterns."""
    disk_bytes: int = 0
    """Bytes on disks."""
    disk_limit_bytes: int = 0
    """0: no limit."""


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
    """Counts of events since the master started, sorted by name."""
    role: str = "single"
    """single, or leader: a standby raises NotLeaderError."""
    leader: str = ""
    """The address that the leader advertises; may be empty."""
    cluster: str = ""
    """Name of the cluster; may be empty."""
    next_cursor: int = 0
    """Not 0: there are more nodes or namespaces. Only
    nodes and namespaces are in further batches."""
    departed: Sequence[DepartedNode] = ()
    tenants: Sequence[TenantStatus] = ()
    """Empty: no tenants are configured."""

    @property
    def size(self) -> int:
        """Bytes of memory of all nodes."""
        return sum(node.size for node in self.nodes)

    @property
    def used(self) -> int:
        """Bytes that are not free."""
        return sum(node.used for node in self.nodes)

    def nodes_by_segment(self) -> dict[int, str]:
        """Return the node name of each segment."""
        return {segment.segment_id: node.name for node in self.nodes for segment in node.segments}

    def with_page(self, page: ClusterStatus) -> ClusterStatus:
        """Return this status with the rows of the next batch; sorted once that batch is the
        last."""
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
    """0 first, then ``next_cursor`` of the previous reply. Objects that are added or removed
    between two batches may be missed or repeated."""
    limit: PageRows


class ObjectRow(NamedTuple):
    namespace: str
    key: Key
    size: int
    replicas: int
    depth: int
    leased_ms: int
    state: str
    """complete, detached (an ancestor is missing), being_written or on_disk (only there)."""


class ListObjectsReply(NamedTuple):
    objects: Sequence[ObjectRow]
    next_cursor: int
    """0: no more batches."""


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
    """Time since the last match, lookup or put."""
    placements: Placements
    epoch: int = 0
    """The epoch of the segment ids in ``placements``."""
    disk: str = ""
    """The node with a copy on a disk; empty: none."""


class DrainStep(enum.IntEnum):
    """A step of draining a node."""

    BEGIN = 1
    """Stop placing objects on the node. Its objects can still be read."""
    UNDO = 2
    """Cancel the drain."""
    LEAVE = 3
    """Shut the node down, with the remaining objects; only after BEGIN."""


class Drain(NamedTuple):
    node: Name
    step: DrainStep


class DrainReply(NamedTuple):
    epoch: int
    used: int
    """Bytes of the node's segments that are not free."""
    pending: int
    """Puts and allocations in progress on the node."""
    began: Version = NO_VERSION
    """The newest version at the beginning of the drain. Objects moved off the node get later
    ones."""


class StartMoves(NamedTuple):
    """Grant space elsewhere for some objects of a draining node. The caller copies each payload,
    with a header for the token's version, and ends the copy by ``PutEnd``, which is refused if the
    object was removed or replaced meanwhile."""

    node: Name
    cursor: int
    """0 starts a pass over all objects; then ``next_cursor`` of the last reply."""
    limit: PageRows
    """Maximum number of granted objects."""
    bytes_max: Size
    """Maximum payload bytes granted, at least one object."""
    avoid: Avoided = ()
    """Uuids of segments to which the caller failed to write recently."""
    client_number: int = 0
    """As in ``PutStart``."""
    repair: bool = False
    """Whether to grant one more replica for objects that lack some, instead of moves off a draining
    node. Nothing is evicted for that. The reply is empty if nothing is to be copied now."""
    evict_up_to: Version = NO_VERSION
    """Evict objects elsewhere of this version or an earlier one if they were used less recently
    than the moved object; none by default. With ``DrainReply.began`` a drain evicts no object that
    it has moved."""


class StartMovesReply(NamedTuple):
    next_cursor: int
    """0: the pass is complete."""
    skipped: int
    """Objects that are being replaced, or for which space elsewhere will be free shortly."""
    remaining: int
    """Objects without space elsewhere: the objects there may not be evicted, or are leased or being
    written."""
    remaining_bytes: int
    evicted: int
    """Less recently used objects that were evicted elsewhere."""
    namespaces: Sequence[Namespace]
    """Granted objects, one row each, as in the next three fields."""
    keys: Sequence[Key]
    sources: Placements
    grants: Grants
    keeps_version: bool = False
    """Whether the copy has the version of its source, not that of its token."""


OperatorRequest = Status | ListObjects | StatObject | Drain | StartMoves
