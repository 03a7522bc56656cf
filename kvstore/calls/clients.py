"""The calls that programs make, through a client."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from kvstore.calls.field_constraints import (
    Avoided,
    IntRange,
    Name,
    NameOrEmpty,
    NamespaceOrEmpty,
    NumberPerKey,
    Numbers,
    PageRows,
    PinMs,
    Port,
    Released,
    Replicas,
    RowCount,
    SixteenBytes,
    SixteenOrEmpty,
    Size,
    TtlMs,
    WaitMs,
)
from kvstore.calls.locations import Placements, SegmentInfo
from kvstore.limits import (
    CONNECTIONS_CUT_MAX,
    NAMESPACES_MAX,
    PIN_KEYS_MAX,
    PUT_KEYS_MAX,
    SIZE_BYTES_MAX,
    Key,
    Namespace,
)


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
    """Not stored: the pool is full (only in results of puts with ``partial=True``)."""

    def __str__(self) -> str:
        """A word: ``stored``, ``found``, ``being_written``."""
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Presence(enum.IntEnum):
    """What the master knows of a key."""

    ABSENT = 0
    COMPLETE = 1
    BEING_WRITTEN = 2


class Join(NamedTuple):
    client: Name
    """The name of the client, for logs and statistics."""
    host: Name
    protocol: int
    cluster: NameOrEmpty = ""
    """Name of the cluster that the client means; empty: any."""
    highest_epoch: int = 0
    """The highest epoch that the client has joined. A master of a lower one refuses the client
    until its nodes have had time to join it; the word of a client ends no term."""
    client_number: int = 0
    """The number that the client shows to data servers and in its puts; 0: it chooses none. With
    authentication it belongs to the first identity that joins with it."""


class JoinReply(NamedTuple):
    epoch: int
    lane_port: Port
    """TCP port of the lane on the address that the client already used; 0: no lane."""
    lane_unix: str
    """Name of the lane's abstract Unix socket, for clients on the same host; may be empty."""
    lane_token: bytes
    """The token that the first frame on the lane must carry."""
    lease_ms: int
    put_deadline_ms: int
    version: str
    cluster: str = ""
    """Name of the master's cluster; empty: it has none."""
    http_port: Port = 0
    """TCP port of HTTP on the address that the client already used; 0: none."""
    has_events: bool = False
    """Whether events are served there."""
    identity: str = ""
    """Who the client is to the master (``kvstore.security.identity``); empty: no authentication."""


class MatchPrefix(NamedTuple):
    """How much of the chain ``keys`` is present, in each of ``namespaces``? And where is the last
    state of it, of which each of ``states`` has a part?"""

    namespaces: Annotated[Sequence[Namespace], RowCount(NAMESPACES_MAX)]
    keys: Sequence[Key]
    placements: bool
    """Whether the answer says where the matched objects are, too."""
    states: Annotated[Sequence[Namespace], RowCount(NAMESPACES_MAX)] = ()
    """Namespaces whose objects are no chains: each is of use alone, to go on from its key."""
    lease: int = 0
    """The number under which the client will release the lease; 0: the lease ends by time alone."""
    released: Released = ()
    """Earlier leases that the client releases now; unknown numbers are ignored."""


class PrefixMatch(NamedTuple):
    matched: int
    """Leading keys that are present and reachable; the tip is leased, which holds the chain."""
    being_written: int
    """How many keys after those are being written at this moment."""
    placements: Placements


class MatchPrefixReply(NamedTuple):
    epoch: int
    lease_ms: int
    matches: Annotated[Sequence[PrefixMatch], RowCount(NAMESPACES_MAX)]
    """One per namespace, in the order asked."""
    state: int = 0
    """Leading keys up to the last one that is present in each of ``states``, among those that all
    of ``namespaces`` have; it is leased there. 0: there is none, or ``states`` is empty."""


class Lookup(NamedTuple):
    """Where are these objects? Each one found is leased."""

    namespace: Namespace
    keys: Sequence[Key]
    lease: int = 0
    """As in ``MatchPrefix``, like the next field."""
    released: Released = ()


class LookupReply(NamedTuple):
    epoch: int
    lease_ms: int
    placements: Placements


class Exists(NamedTuple):
    """Which of these keys are stored?"""

    namespace: Namespace
    keys: Sequence[Key]
    lease: int = 0
    """Lease the stored ones under this number, as ``Lookup`` does, which also says where they are.
    0: no lease; the answer is about this moment only."""
    released: Released = ()
    """As in ``MatchPrefix``."""


class ExistsReply(NamedTuple):
    presence: Sequence[int]
    """One ``Presence`` per key; ``bytes`` is a sequence of small integers."""


class PutStart(NamedTuple):
    namespace: Namespace
    keys: Annotated[Sequence[Key], RowCount(PUT_KEYS_MAX, distinct=True)]
    sizes: Annotated[Sequence[int], RowCount(like="keys", value_max=SIZE_BYTES_MAX)]
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
    avoid_segments: Avoided = ()
    """Segments (uuids) that the putter could not reach a moment ago, at most ``AVOID_MAX``."""
    local_only: bool = False
    """Only segments of ``host``: the putter has no transport that reaches another one."""
    client_number: int = 0
    """The number that the putter shows to data servers; 0: unknown."""
    ttl_ms: TtlMs = 0
    """How long an object lives after the end of its put; 0: for ever."""
    released: Released = ()
    """As in ``MatchPrefix``."""


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
    capabilities: bytes = b""
    """``CAPABILITY_BYTES`` for each extent, with which the client may write it; empty: none."""
    header_macs: bytes = b""
    """``STAMP_BYTES`` for each extent, which the client writes behind the header; empty: none."""


class PutEnd(NamedTuple):
    """The payloads and headers of these tokens are written."""

    epoch: int
    tokens: Numbers


class PutEndReply(NamedTuple):
    outcomes: Sequence[int]
    """One ``PutOutcome`` per token: STORED or REFUSED."""


class PutRevoke(NamedTuple):
    """These puts are given up."""

    epoch: int
    tokens: Numbers
    quiesced: bool
    """Whether no write of these puts can still land, so that the extents are free at once."""
    connections: Annotated[Sequence[int], RowCount(CONNECTIONS_CUT_MAX)] = ()
    """If not settled: the connections to data servers that may still carry bytes of these puts, by
    the client's numbers for them. Empty: any connection of that client."""


class PutRevokeReply(NamedTuple):
    revoked: int


class Allocate(NamedTuple):
    """Memory in the pool for an object whose key is not known yet (``commit`` names it)."""

    namespace: Namespace
    """Its tenant holds the memory until the commit, which may name another namespace."""
    size: Size
    wait_ms: WaitMs
    host: NameOrEmpty
    avoid_segments: Avoided = ()
    """As in ``PutStart``, like the next two fields."""
    local_only: bool = False
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


class CommitReply(NamedTuple):
    outcome: Annotated[int, IntRange(1, int(PutOutcome.REFUSED))]
    """STORED; FOUND or BEING_WRITTEN (the allocation is freed); REFUSED."""
    header_mac: SixteenOrEmpty = b""
    """``STAMP_BYTES``, which the client writes behind the header until the allocation's deadline;
    empty: none."""


class Renew(NamedTuple):
    """Extend leases of objects, by key, version and place, and deadlines of allocations, by
    token."""

    namespace: Namespace
    keys: Sequence[Key]
    epochs: NumberPerKey
    counters: NumberPerKey
    epoch: int
    """The epoch of the tokens."""
    tokens: Numbers
    uuids: Annotated[Sequence[bytes], RowCount(like="keys"), SixteenBytes()]
    """The uuids of the segments of the leased memory; ``offsets`` are those of its extents."""
    offsets: NumberPerKey


class RenewReply(NamedTuple):
    lease_ms: int
    deadline_ms: int
    keys_leased: Sequence[int]
    """1 or 0 per key: whether that version is still promised at its place. A version alone does not
    name the leased memory: it may have ended there, and have come back elsewhere."""
    tokens_leased: Sequence[int]
    capabilities: bytes = b""
    """``CAPABILITY_BYTES`` per token: the allocation's, extended; empty: none."""


class Release(NamedTuple):
    """Leases that the client releases, without another call that could carry them."""

    released: Released


class ReleaseReply(NamedTuple):
    pass


class Pin(NamedTuple):
    """Keep these objects, and their ancestors, from eviction."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], RowCount(PIN_KEYS_MAX)]
    hold_ms: PinMs
    """How long from now on; of two pins of an object the later end counts."""


class PinReply(NamedTuple):
    pinned: Sequence[int]
    """1 or 0 per key: whether the object is stored, and is pinned now."""


class Unpin(NamedTuple):
    """End the pins of these objects. Ancestors of other pinned objects are still kept."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], RowCount(PIN_KEYS_MAX)]


class UnpinReply(NamedTuple):
    unpinned: Sequence[int]
    """1 or 0 per key: whether it was pinned."""


class Remove(NamedTuple):
    namespace: Namespace
    keys: Sequence[Key]


class RemoveReply(NamedTuple):
    removed: Sequence[int]
    """1 or 0 per key: whether there was something to remove."""


class Clear(NamedTuple):
    """Remove up to ``limit`` objects of a namespace (empty: of any); repeat until none remain."""

    namespace: NamespaceOrEmpty
    limit: PageRows


class ClearReply(NamedTuple):
    removed: int
    remaining: int


class DescribeSegments(NamedTuple):
    segment_ids: Numbers


class DescribeSegmentsReply(NamedTuple):
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
    epoch: int = 0
    """The epoch of the segment ids, which may name other segments under another master."""


class ReportFailureReply(NamedTuple):
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
    uuids: Annotated[Sequence[bytes], RowCount(like="keys")]
    """The replicas' segments, by uuid: the reporter's segment ids may be of an earlier master."""


class ReportCorruptReply(NamedTuple):
    dropped: int
    """Objects that were removed."""


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
    | Release
    | Pin
    | Unpin
    | Remove
    | Clear
    | DescribeSegments
    | ReportFailure
    | ReportCorrupt
)
