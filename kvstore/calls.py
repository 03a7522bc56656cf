"""What can be asked of a master, as plain values: one request and one reply type per call.

The client's flows yield these requests, the master's handlers take them and answer with these
replies, the simulator passes them by hand, and ``kvstore.wire.messages`` is the one place that
knows their protobuf form (``proto/kvstore/v1``). An annotation says what a field may hold when it
comes from a stranger (``kvstore.fields``). Batches are columns, one entry per key, because a row
object per key would cost more than the call. All values are immutable by agreement: the
receiver of a list does not change it.

Times are ``*_ms`` durations, never points in time: no two clocks are compared.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from kvstore.fields import (
    Avoided,
    Between,
    Epoch,
    KeyPrefix,
    Name,
    NameOrEmpty,
    NamespaceOrEmpty,
    NumberPerKey,
    NumberPerOffset,
    Numbers,
    PageRows,
    PinMs,
    Port,
    Replicas,
    Rows,
    ShmName,
    Size,
    TtlMs,
    Uuid,
    WaitMs,
)
from kvstore.limits import (
    BLOCKS_MAX,
    CHAINS_MAX,
    CONNECTIONS_CUT_MAX,
    NAMESPACES_MAX,
    NODE_SEGMENTS_MAX,
    PIN_KEYS_MAX,
    PUT_KEYS_MAX,
    SIZE_BYTES_MAX,
    Key,
    Namespace,
)


class Version(NamedTuple):
    """Which writing of a key this is: the master's epoch, and its counter at ``put_start``.

    The counter is also the token of the put that wrote it.
    """

    epoch: int
    counter: int


class PutOutcome(enum.IntEnum):
    """What became of one key of a put."""

    WRITE = 1
    """Granted: write here (only in the answer to ``put_start``)."""
    FOUND = 2
    """Already there: same key, same content."""
    BEING_WRITTEN = 3
    """Another put is writing it at this moment."""
    STORED = 4
    """Complete now, by this put (only in the answer to ``put_end`` and ``commit``)."""
    REFUSED = 5
    """Not stored: the token is unknown, its deadline passed, or its segment is gone."""
    NO_SPACE = 6
    """Not stored: the pool is full (only as the result of ``put_many(..., partial=True)``)."""


class Presence(enum.IntEnum):
    """What the master knows of a key."""

    ABSENT = 0
    COMPLETE = 1
    BEING_WRITTEN = 2


class EngineAddress(NamedTuple):
    """Where a segment is registered with a transfer engine (``kvstore.transport.mooncake``)."""

    name: Name
    """What peers open: ``host:port`` of its handshake, or its key in the metadata server."""
    base: int
    """The address of the segment's first byte in the node's process; new for each generation."""
    protocol: Name
    metadata_server: Name


class DevicePlace(NamedTuple):
    """Where a segment is in the memory of a device, for processes on its host."""

    device: Name
    """Its name in the node's process: ``cuda:0``."""
    entry: ShmName
    """Entry in ``/dev/shm`` that holds the superblock alone."""
    handle: Name
    """What opens the memory in another process (``kvstore.device.driver.Driver.export``)."""


class SegmentInfo(NamedTuple):
    """How to reach a segment. ``segment_id`` is never used again within an epoch."""

    segment_id: int
    node: str
    host: str
    """Equal on both ends when they may see the same ``/dev/shm``; see ``kvstore.host``."""
    size: int
    uuid: bytes
    """16 bytes, new at each creation; also written in the superblock."""
    shm_name: str
    """Entry in ``/dev/shm``; empty when the segment is no POSIX shared memory."""
    address: str
    """``host:port`` of the node's data server; empty when it has none."""
    token: bytes
    """16 bytes that the data server asks for."""
    seed: int
    """Seed of the header checksums of this segment (64 bits)."""
    generation: int
    """Counts mounts; a data connection or mapping of an older one is refused."""
    engine: EngineAddress | None = None
    """None: its node has no transfer engine."""
    data_protocol: int = 2
    """The highest version of the data protocol that the node's data server speaks."""
    device: DevicePlace | None = None
    """None: the segment is in memory of the host."""


class Placements(NamedTuple):
    """Where objects are, as columns. Row i has ``replicas[i]`` extents (0: a miss).

    ``segments`` and ``offsets`` hold the extents of all rows one after the other. An extent starts
    with the header; its payload follows (``kvstore.memory.header``).
    """

    sizes: Sequence[int]
    """Payload bytes."""
    epochs: Sequence[int]
    counters: Sequence[int]
    replicas: Sequence[int]
    segments: Sequence[int]
    offsets: Sequence[int]


NO_PLACEMENTS = Placements((), (), (), (), (), ())


# --- for clients -------------------------------------------------------------------------------


class Join(NamedTuple):
    client: Name
    """The name of the client, for logs and statistics."""
    host: Name
    protocol: int
    """The highest version that the client speaks."""
    protocol_min: int = 0
    """The lowest one; 0: only ``protocol``."""
    cluster: NameOrEmpty = ""
    """Name of the cluster that the client means; empty: any."""
    highest_epoch: Epoch = 0
    """The highest epoch that the client has joined; as ``NodeJoin.highest_epoch``."""


class Joined(NamedTuple):
    epoch: int
    lane_port: Port
    """TCP port of the lane on the address that the client already used; 0: no lane."""
    lane_unix: str
    """Name of the lane's abstract Unix socket, for clients on the same host; may be empty."""
    lane_token: bytes
    """What the lane's first frame must carry."""
    lease_ms: int
    put_deadline_ms: int
    version: str
    protocol: int = 1
    """The version that both speak from here on."""
    cluster: str = ""
    """Name of the master's cluster; empty: it has none."""
    http_port: Port = 0
    """TCP port of HTTP on the address that the client already used; 0: none, or an older release
    that does not say."""
    has_events: bool = False
    """Whether events are served there."""


class MatchPrefix(NamedTuple):
    """How much of the chain ``keys`` is present, in each of ``namespaces``?"""

    namespaces: Annotated[Sequence[Namespace], Rows(NAMESPACES_MAX)]
    keys: Sequence[Key]
    placements: bool
    """Whether the answer says where the matched objects are, too."""


class PrefixMatch(NamedTuple):
    matched: int
    """Leading keys that are present and reachable; the tip is leased, which holds the chain."""
    being_written: int
    """How many keys after those are being written at this moment."""
    placements: Placements


class Matched(NamedTuple):
    epoch: int
    lease_ms: int
    matches: Annotated[Sequence[PrefixMatch], Rows(NAMESPACES_MAX)]
    """One per namespace, in the order asked."""


class Lookup(NamedTuple):
    """Where are these objects? Each one found is leased."""

    namespace: Namespace
    keys: Sequence[Key]


class Found(NamedTuple):
    epoch: int
    lease_ms: int
    placements: Placements


class Exists(NamedTuple):
    """Which of these keys are stored?"""

    namespace: Namespace
    keys: Sequence[Key]
    lease: bool = False
    """Lease those that are, as ``Lookup`` does, which also says where they are. Without a lease
    the answer is about this moment only. Masters of the release before lease nothing."""


class Existing(NamedTuple):
    presence: Sequence[int]
    """One ``Presence`` per key; ``bytes`` is a sequence of small integers."""


class PutStart(NamedTuple):
    namespace: Namespace
    keys: Annotated[Sequence[Key], Rows(PUT_KEYS_MAX, distinct=True)]
    sizes: Annotated[Sequence[int], Rows(like="keys", value_max=SIZE_BYTES_MAX)]
    parent: Key | None
    """Parent of the first key (``chain``) or of every key (otherwise); None: a root."""
    chain: bool
    """Whether each key's parent is the key before it."""
    replicas: Replicas
    """The number of distinct nodes for each object; fewer if there are fewer."""
    overwrite: bool
    """Write a new version even where a complete one is there."""
    wait_ms: WaitMs
    """How long to wait for leases to end when there is no room."""
    host: NameOrEmpty
    """The putter's host, for placement."""
    avoid: Avoided = ()
    """Segments (uuids) that the putter could not reach a moment ago, at most ``AVOID_MAX``."""
    here_only: bool = False
    """Only segments of ``host``: the putter has no transport that reaches another one."""
    client_number: int = 0
    """The number that the putter shows to data servers; 0: unknown."""
    ttl_ms: TtlMs = 0
    """How long an object lives after the end of its put; 0: for ever."""


class Grants(NamedTuple):
    epoch: int
    deadline_ms: int
    outcomes: Sequence[int]
    """One ``PutOutcome`` per key: WRITE, FOUND or BEING_WRITTEN."""
    replicas: int
    """Extents per granted key."""
    tokens: Sequence[int]
    """One per granted key, in the order of the keys. The version is (epoch, token)."""
    segments: Sequence[int]
    """``replicas`` entries per granted key."""
    offsets: Sequence[int]


class PutEnd(NamedTuple):
    """The payloads and headers of these tokens are written."""

    epoch: int
    tokens: Numbers


class PutEnded(NamedTuple):
    outcomes: Sequence[int]
    """One ``PutOutcome`` per token: STORED or REFUSED."""


class PutRevoke(NamedTuple):
    """These puts are given up."""

    epoch: int
    tokens: Numbers
    settled: bool
    """Whether no write of these puts can still land, so that the extents are free at once."""
    connections: Annotated[Sequence[int], Rows(CONNECTIONS_CUT_MAX)] = ()
    """Not settled: the connections to data servers that may still carry bytes of these puts, by the
    client's numbers for them. Empty: any connection of that client."""


class Revoked(NamedTuple):
    revoked: int


class Allocate(NamedTuple):
    """Memory in the pool for an object whose key is not known yet (``commit`` names it)."""

    size: Size
    wait_ms: WaitMs
    host: NameOrEmpty
    avoid: Avoided = ()
    """As in ``PutStart``; and so are the next two."""
    here_only: bool = False
    client_number: int = 0


class Commit(NamedTuple):
    """Give an allocation, whose header is written, its key: it becomes an object."""

    epoch: int
    token: int
    namespace: Namespace
    key: Key
    parent: Key | None
    size: Size
    """Payload bytes; not more than were allocated."""
    overwrite: bool
    ttl_ms: TtlMs = 0
    """As in ``PutStart``."""


class Committed(NamedTuple):
    outcome: Annotated[int, Between(1, PutOutcome.REFUSED)]
    """STORED; FOUND or BEING_WRITTEN (the allocation is freed); REFUSED."""


class Renew(NamedTuple):
    """Extend leases of objects, by key and version, and deadlines of allocations, by token."""

    namespace: Namespace
    keys: Sequence[Key]
    epochs: NumberPerKey
    counters: NumberPerKey
    epoch: int
    """The epoch of the tokens."""
    tokens: Numbers


class Renewed(NamedTuple):
    lease_ms: int
    deadline_ms: int
    keys_held: Sequence[int]
    """1 or 0 per key: whether that version is still promised."""
    tokens_held: Sequence[int]


class Pin(NamedTuple):
    """Keep these objects, and their ancestors, from eviction."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], Rows(PIN_KEYS_MAX)]
    hold_ms: PinMs
    """How long from now on; of two pins of an object the later end counts."""


class Pinned(NamedTuple):
    pinned: Sequence[int]
    """1 or 0 per key: whether the object is stored, and is pinned now."""


class Unpin(NamedTuple):
    """End the pins of these objects. Ancestors of other pinned objects are still kept."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], Rows(PIN_KEYS_MAX)]


class Unpinned(NamedTuple):
    unpinned: Sequence[int]
    """1 or 0 per key: whether it was pinned."""


class Remove(NamedTuple):
    namespace: Namespace
    keys: Sequence[Key]


class Removed(NamedTuple):
    removed: Sequence[int]
    """1 or 0 per key: whether there was something to remove."""


class Clear(NamedTuple):
    """Remove up to ``limit`` objects of a namespace (empty: of any); repeat until none remain."""

    namespace: NamespaceOrEmpty
    limit: PageRows


class Cleared(NamedTuple):
    removed: int
    remaining: int


class DescribeSegments(NamedTuple):
    segment_ids: Numbers


class Segments(NamedTuple):
    epoch: int
    """The epoch of the answering master: in another epoch the same ids mean other segments."""
    segments: Sequence[SegmentInfo]
    """The requested segments that are mounted."""


class ReportFailure(NamedTuple):
    """Reads or writes on these segments fail from the client's host."""

    segment_ids: Numbers
    client: NameOrEmpty = ""
    """The client that reports; ``host`` is where it runs."""
    host: NameOrEmpty = ""
    reason: NameOrEmpty = ""
    """What failed: one line, for the master's log."""


class Reported(NamedTuple):
    suspects: int
    """Nodes that are suspect now."""


class ReportCorrupt(NamedTuple):
    """These replicas, as columns, hold other bytes than were put: an invalid header, or a payload
    that does not match its checksum. If all replicas of an object are reported, the master removes
    it."""

    namespace: Namespace
    keys: Sequence[Key]
    epochs: NumberPerKey
    counters: NumberPerKey
    """With ``epochs``, the version that was read; if the object has another one now, it is kept."""
    uuids: Annotated[Sequence[bytes], Rows(like="keys")]
    """The replicas' segments, by uuid: the reporter's segment ids may be of an earlier master."""


class Dropped(NamedTuple):
    dropped: int
    """Objects that were removed."""


# --- for operators -----------------------------------------------------------------------------


class Status(NamedTuple):
    """The cluster at a glance, a page at a time."""

    cursor: int = 0
    """0 first, then ``next_cursor`` of the answer before."""


class SegmentStatus(NamedTuple):
    segment_id: int
    size: int
    used: int
    """Bytes in extents that are not free, including quarantined ones and those pending free."""
    largest_free: int
    shm_name: str
    pending: int = 0
    """Of the used bytes: those granted to puts under way."""
    quarantined: int = 0
    """Of the used bytes: those of abandoned puts, which their writers may still write to."""
    reclaim: int = 0
    """Of the used bytes: those of removed and evicted objects, which readers may still read or
    whose headers are not wiped yet."""
    device: NameOrEmpty = ""
    """Name of the device whose memory it is (``cuda:0``); empty: memory of the host."""


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
    """Of its program; empty: an older one, or an older master."""


class NamespaceStatus(NamedTuple):
    name: str
    objects: int
    size: int
    """Payload bytes, replicas not counted."""
    pinned_objects: int = 0
    """Objects that pins hold: those named by a pin, and their ancestors."""
    pinned_bytes: int = 0
    """Bytes of memory that those take, headers and replicas included."""


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
    """Not 0: there are more nodes or namespaces. Counters are part of the first page only."""

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


class Listed(NamedTuple):
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
    """In which the segments of ``placements`` have their numbers; 0 from older masters."""


class Traffic(NamedTuple):
    """Who puts, who asks and what is not found, a page of namespaces at a time."""

    namespace: NamespaceOrEmpty = ""
    """Empty: of every one that the master remembers."""
    cursor: int = 0
    """0 first, then ``next_cursor`` of the answer before."""


class ClientTraffic(NamedTuple):
    """One client in one namespace, as one who puts or as one who asks."""

    client: str
    """The name with which it joined; empty: not known."""
    address: str
    """Where it calls from; ``local``: from the host of the master."""
    first_ms: int
    """Since it was first seen. The master remembers the last clients only."""
    idle_ms: int
    """Since its last call."""
    keys: int
    """That it wanted to put, or asked for."""
    found: int
    """Of those: that were there already."""
    stored: int
    """That it has put."""
    key: bytes
    """One of its last put; empty: it has only asked."""


class MissedKey(NamedTuple):
    """A key that was asked for and not found: the first such of its question."""

    key: Key
    client: str
    address: str
    idle_ms: int
    """Since then."""
    found: int
    """Keys before it in that question, which were there."""
    asked: int
    """Keys of that question."""
    present: bool
    """Whether it is there now."""


class NamespaceTraffic(NamedTuple):
    name: str
    objects: int
    size: int
    """Payload bytes, replicas not counted."""
    putters: Sequence[ClientTraffic]
    askers: Sequence[ClientTraffic]
    misses: Sequence[MissedKey]
    """The last one of each client that asked, the last of all first."""
    questions: int
    none: int
    """Questions whose first key was not there."""
    partly: int
    """Questions of which a later key was not there."""
    evicted: int
    """Objects."""
    evicted_ms: int
    """Since the last of those."""
    evicted_idle_ms: int
    """How long that one had not been used then."""


class TrafficReport(NamedTuple):
    epoch: int
    uptime_ms: int
    """Of the master, which remembers nothing from before."""
    namespaces: Sequence[NamespaceTraffic]
    next_cursor: int
    """0: that was the last page."""

    def with_page(self, page: TrafficReport) -> TrafficReport:
        """With the rows of the page behind it."""
        namespaces = [*self.namespaces, *page.namespaces]
        return self._replace(namespaces=namespaces, next_cursor=page.next_cursor)


class Chains(NamedTuple):
    """The chains that were matched most and used last, from their tips to their roots."""

    namespace: NamespaceOrEmpty = ""
    """Empty: of the last namespaces in which clients put or asked."""
    keys: Annotated[Sequence[Key], Rows(CHAINS_MAX)] = ()
    """The chains that end at these blocks of ``namespace`` instead."""
    limit: Annotated[int, Between(0, CHAINS_MAX)] = 0
    """Chains; 0: as many as are allowed."""


class Branch(NamedTuple):
    """A run of blocks, each of which is the parent of the next one.

    It ends where the chain forks, where the chain ends, and where counted matches ended.
    """

    namespace: str
    above: int
    """The number of the branch that this one continues, counted from 1; 0: there is none."""
    first: Key
    last: Key
    blocks: int
    missing: int
    """Of those: blocks without bytes, which were evicted, removed or lost. No match finds what is
    below."""
    being_written: int
    """Of those: blocks that are being written."""
    size: int
    """Payload bytes, replicas not counted."""
    depth: int
    """Ancestors of the last block, as far as known."""
    children: int
    """Blocks directly below the last one, also in branches that the answer does not have."""
    matched: int
    """Matches that ended in this branch or below it, at the tips that the master remembers."""
    ended: int
    """Of those: matches that ended at its last block."""
    counted_ms: int
    """Since when the oldest of these counts has been kept; 0: there is none."""
    idle_ms: int
    """Since the last use of a block of this branch, or of one below it in this answer."""
    leased_ms: int
    """How long a lease still protects a block of it, or one below it in this answer."""
    pinned: int
    """Of its blocks: those that pins hold."""
    cut: bool
    """Whether the chain goes on above it, and was not walked further: it is too long."""
    segments: Sequence[int]
    """Where the replicas of its blocks are: the segments with most of them."""
    replicas: Sequence[int]
    """How many are on each of these segments."""

    def replicas_by_node(self, nodes: Mapping[int, str]) -> dict[str, int]:
        """``nodes``: the node of each segment. Those of unknown segments are under ``""``."""
        found: dict[str, int] = {}
        for segment, count in zip(self.segments, self.replicas, strict=True):
            name = nodes.get(segment, "")
            found[name] = found.get(name, 0) + count
        return found


class ChainsFound(NamedTuple):
    epoch: int
    uptime_ms: int
    """Of the master, which remembers no match from before."""
    branches: Sequence[Branch]
    """Each one after the one that it continues, the most matched chain first."""
    whole: bool
    """Whether every wanted chain was walked."""


class Blocks(NamedTuple):
    """What the master knows of these blocks, and of those above the last one. It counts as no use
    of them."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], Rows(BLOCKS_MAX)]
    above: Annotated[int, Between(0, BLOCKS_MAX)] = 0
    """How many blocks above the last key are told, too: towards the root."""


class Block(NamedTuple):
    key: Key
    state: str
    """complete, being_written, missing (its place is kept for blocks below it) or absent."""
    parent: bytes
    """Empty: a root, or not known."""
    children: int
    depth: int
    size: int
    idle_ms: int
    leased_ms: int
    pinned_ms: int
    """How long the pin of this block lasts; not that of one below it."""
    segments: Sequence[int]
    """One per replica that is there."""


class BlocksFound(NamedTuple):
    blocks: Sequence[Block]
    """One per key, then those above the last one."""


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


class Drained(NamedTuple):
    epoch: int
    used: int
    """Bytes of the node's segments that are not free."""
    pending: int
    """Puts and allocations under way that were to be written there."""


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


class MovesStarted(NamedTuple):
    next_cursor: int
    """0: the pass is over."""
    skipped: int
    """Objects that are being replaced at this moment."""
    left: int
    """Objects for which there is no room elsewhere: the objects there were used later, are leased
    or are being written."""
    left_bytes: int
    evicted: int
    """Objects elsewhere that were used longer ago, and had to make room."""
    namespaces: Sequence[Namespace]
    """Of the granted objects, as the next three columns."""
    keys: Sequence[Key]
    sources: Placements
    grants: Grants
    keeps_version: bool = False
    """The copy has the version of its source, not that of its token."""


ClientRequest = (
    Join
    | MatchPrefix
    | Lookup
    | Exists
    | PutStart
    | PutEnd
    | PutRevoke
    | Allocate
    | Commit
    | Renew
    | Pin
    | Unpin
    | Remove
    | Clear
    | DescribeSegments
    | ReportFailure
    | ReportCorrupt
)
AdminRequest = Status | ListObjects | StatObject | Traffic | Chains | Blocks | Drain | StartMoves
Request = ClientRequest | AdminRequest
Reply = (
    Joined
    | Matched
    | Found
    | Existing
    | Grants
    | PutEnded
    | Revoked
    | Committed
    | Renewed
    | Pinned
    | Unpinned
    | Removed
    | Cleared
    | Segments
    | Reported
    | Dropped
    | ClusterStatus
    | Listed
    | ObjectDetail
    | TrafficReport
    | ChainsFound
    | BlocksFound
    | Drained
    | MovesStarted
)


# --- for nodes: messages of one stream, not calls ----------------------------------------------


NO_MARK = Version(0, 0)


class SegmentOffer(NamedTuple):
    """A segment that a node mounts: a ``SegmentInfo`` before the master has numbered it."""

    size: Annotated[int, Between(1, SIZE_BYTES_MAX)]
    uuid: Uuid
    shm_name: ShmName
    address: NameOrEmpty
    token: Uuid
    seed: int
    generation: int
    fresh: bool
    """Whether no extent of it has ever been granted."""
    mark: Version = NO_MARK
    """The last mark that the node was ordered to keep (``MasterWipe``)."""
    engine: EngineAddress | None = None
    data_protocol: int = 2
    """The highest version of the data protocol that the node's data server speaks."""
    device: DevicePlace | None = None
    """None: the segment is in memory of the host."""


class NodeJoin(NamedTuple):
    """First message of a node's stream."""

    name: Name
    host: Name
    protocol: int
    resume_epoch: int
    """The epoch to resume after a broken stream. A master that does not know these segments any
    more refuses with ``SegmentGoneError``. 0: joins anew, having fenced off every older grant."""
    segments: Annotated[Sequence[SegmentOffer], Rows(NODE_SEGMENTS_MAX)]
    protocol_min: int = 0
    """The lowest version that the node speaks, ``protocol`` being the highest; 0: only that."""
    highest_epoch: Epoch = 0
    """The highest epoch that the node has joined, or that its memory records. A master of a lower
    one begins a new term above it."""
    cluster: NameOrEmpty = ""
    """Name of the cluster that the node was given, or that its memory belongs to."""
    version: NameOrEmpty = ""
    """Of the node's program, for people; empty from older ones."""


class NodeBeat(NamedTuple):
    """I am alive."""

    number: int


class NodeWiped(NamedTuple):
    """The headers of this order are wiped."""

    order: int


class NodeLeave(NamedTuple):
    """I stop, cleanly: forget me at once."""


class NodeClaims(NamedTuple):
    """Objects that a node found in one of its segments after it joined anew, in as many messages as
    needed. Until the last one, the master grants nothing on a segment that is not fresh."""

    segment: int
    """Its index among the offered segments."""
    first: bool
    """Whether the inventory begins with this message, perhaps again after it was broken off."""
    last: bool
    namespaces: Sequence[Namespace]
    """Distinct."""
    namespace_of: Sequence[int]
    """Per object, the index of its namespace; the columns below are per object, too."""
    keys: Sequence[Key]
    parents: Sequence[Key | None]
    """None: a root."""
    sizes: Sequence[int]
    epochs: Sequence[int]
    counters: Sequence[int]
    offsets: Sequence[int]


class MasterAccepted(NamedTuple):
    epoch: int
    beat_ms: Annotated[int, Between(1, 3_600_000)]
    """How often to send ``NodeBeat``."""
    dead_ms: Annotated[int, Between(1, 86_400_000)]
    """Silence after which the node counts as dead, and must join anew."""
    segment_ids: Annotated[Sequence[int], Rows(NODE_SEGMENTS_MAX)]
    protocol: int = 1
    """The version that both speak from here on."""
    cluster: NameOrEmpty = ""
    """Name of the master's cluster; empty: it has none."""


class MasterBeat(NamedTuple):
    """Echo of a ``NodeBeat``."""

    number: int
    repair: bool = False
    """The node has objects with too few replicas: it is to ask what to copy (``StartMoves``)."""


class MasterWipe(NamedTuple):
    """Wipe the headers at these offsets, each only if it still has that version."""

    order: int
    uuid: Uuid
    offsets: Numbers
    epochs: NumberPerOffset
    counters: NumberPerOffset
    mark: Version = NO_MARK
    """The mark to keep in the segment; ``NO_MARK``: none. Memory whose mark is older than another's
    was away during a removal. A master that does not know what was removed refuses its claims."""
    cut_clients: Numbers = ()
    """Data connections to end first, because they may still carry bytes of abandoned puts: the
    client of each, 0 for any."""
    cut_connections: Annotated[Sequence[int], Rows(like="cut_clients")] = ()
    """For each the number that its client has given it, 0 for all of that client."""


class MasterClaimed(NamedTuple):
    """One ``NodeClaims`` is processed. A ``MasterWipe`` names the refused objects."""

    segment: int
    """Its index among the offered segments."""


NodeMessage = NodeJoin | NodeBeat | NodeWiped | NodeLeave | NodeClaims
MasterMessage = MasterAccepted | MasterBeat | MasterWipe | MasterClaimed
