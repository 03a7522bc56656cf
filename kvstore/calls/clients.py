"""Calls that clients make for programs."""

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
    RetainMs,
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
    RETAIN_MS_MAX,
    SIZE_BYTES_MAX,
    Key,
    Namespace,
)


class PutOutcome(enum.IntEnum):
    """The result of a put for one key."""

    WRITE = 1
    """Granted: write to the extent (only in the reply to ``put_start``)."""
    FOUND = 2
    """Already stored: same key, same content."""
    BEING_WRITTEN = 3
    """Another put is writing it."""
    STORED = 4
    """Stored by this put (only in replies to ``put_end`` and ``commit``)."""
    REFUSED = 5
    """Not stored: the token is unknown, its deadline passed, or its segment is not mounted."""
    NO_SPACE = 6
    """Not stored: the pool is full (only in results of puts with ``partial=True``)."""

    def __str__(self) -> str:
        """Return ``stored``, ``found``, ``being_written`` etc."""
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Presence(enum.IntEnum):
    """The state of a key in the master."""

    ABSENT = 0
    COMPLETE = 1
    BEING_WRITTEN = 2


class HintAction(enum.IntEnum):
    """A client's expectation of a chain, named by its last key."""

    NONE = 0
    RETAIN = 1
    """It is used again within ``retain_ms``: evict it last."""
    RELEASE = 2
    """It is over: evict first the blocks at its end that no other chain shares."""
    DEMOTE = 3
    """It is not used again soon: evict these blocks next after those that are over."""
    PREFETCH = 4
    """It is used soon: bring it into memory, if it is on a slower medium."""


class HintOutcome(enum.IntEnum):
    """The answer to a hint."""

    ACCEPTED = 1
    CLIPPED = 2
    """Retained for a shorter time than requested."""
    MISSING = 3
    """No object has this key."""
    IGNORED = 4
    """Other chains continue this one; or there is nothing to do."""

    def __str__(self) -> str:
        """Return ``accepted``, ``clipped`` etc."""
        return self.name.lower()


HintNumber = Annotated[int, IntRange(0, int(HintAction.PREFETCH))]


class Join(NamedTuple):
    client: Name
    """Name of the client, for logs and statistics."""
    host: Name
    protocol: int
    cluster: NameOrEmpty = ""
    """Name of the expected cluster; empty: any."""
    highest_epoch: int = 0
    """The highest epoch that the client has joined. A master with a lower one refuses the client
    until its nodes have had time to report a higher epoch; a client's report ends no term."""
    client_number: int = 0
    """Client number for data servers and puts; 0: none. With authentication it belongs to the first
    identity that joins with it."""


class JoinReply(NamedTuple):
    epoch: int
    lane_port: Port
    """TCP port of the lane on the address that the client used; 0: no lane."""
    lane_unix: str
    """Abstract Unix socket of the lane for clients on the same host; may be empty."""
    lane_token: bytes
    """Lane token for the first frame on the lane."""
    lease_ms: int
    put_deadline_ms: int
    version: str
    cluster: str = ""
    """Name of the master's cluster; may be empty."""
    http_port: Port = 0
    """HTTP port on the address that the client used; 0: none."""
    has_events: bool = False
    """Whether object events are served there."""
    identity: str = ""
    """The authenticated identity of the client (``kvstore.security.identity``); empty: no
    authentication."""


class MatchPrefix(NamedTuple):
    """Match the chain ``keys`` in each of ``namespaces``, and find its last recurrent state, which
    has a part in each of ``states``."""

    namespaces: Annotated[Sequence[Namespace], RowCount(NAMESPACES_MAX)]
    keys: Sequence[Key]
    placements: bool
    """Whether the reply includes the locations of matched objects."""
    states: Annotated[Sequence[Namespace], RowCount(NAMESPACES_MAX)] = ()
    """Namespaces of recurrent states, whose objects form no chains: one suffices to resume at its
    key."""
    lease: int = 0
    """Lease number, with which the client releases it; 0: the lease ends by time alone."""
    released: Released = ()
    """Earlier leases to release now; unknown numbers are ignored."""
    hint: HintNumber = 0
    """A ``HintAction`` for the chain that ends with the last matched key of each namespace."""
    retain_ms: RetainMs = 0
    bring: bool = False
    """Whether to begin to bring matched objects that are on a disk only into memory."""


class PrefixMatch(NamedTuple):
    matched: int
    """Leading keys that are present and reachable. A lease on the last one in memory protects the
    chain up to there."""
    being_written: int
    """Number of keys after those that are being written."""
    placements: Placements
    on_disk: int = 0
    """Number of the matched keys from the first one on that is on a disk only."""


class MatchPrefixReply(NamedTuple):
    epoch: int
    lease_ms: int
    matches: Annotated[Sequence[PrefixMatch], RowCount(NAMESPACES_MAX)]
    """One per namespace, in the order of the request."""
    state: int = 0
    """Leading keys up to the last one that is present in each of ``states``, among those that all
    of ``namespaces`` have; it is leased there. 0: none."""


class Lookup(NamedTuple):
    """Look up objects and lease those found."""

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
    """Check which of these keys are stored."""

    namespace: Namespace
    keys: Sequence[Key]
    lease: int = 0
    """Lease the stored objects under this number, as ``Lookup`` does, which also returns locations.
    0: no lease; the reply holds for this moment only."""
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
    """Parent of the first key (``chain``) or of every key; None: a root."""
    chain: bool
    """Whether the parent of each key is the previous key."""
    replicas: Replicas
    """Number of distinct nodes per object; fewer if there are fewer nodes."""
    overwrite: bool
    """Whether to write a new version of complete objects."""
    wait_ms: WaitMs
    """Maximum time to wait for leases to end if space is lacking."""
    host: NameOrEmpty
    """Host of the writer, for placement."""
    avoid_segments: Avoided = ()
    """Uuids of up to ``AVOID_MAX`` segments that the writer failed to reach recently."""
    local_only: bool = False
    """Only segments of ``host``: the writer has no transport to other hosts."""
    client_number: int = 0
    """Client number of the writer for data servers; 0: unknown."""
    ttl_ms: TtlMs = 0
    """TTL of an object, from the end of its put; 0: unlimited."""
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
    """Grant tokens, one per granted key, in the order of the keys. The version is (epoch,
    token)."""
    segments: Sequence[int]
    """``replicas`` entries per granted key."""
    offsets: Sequence[int]
    capabilities: bytes = b""
    """``CAPABILITY_BYTES`` per extent, for writing it; may be empty."""
    header_macs: bytes = b""
    """``HEADER_MAC_BYTES`` per extent: the header MAC, which the client writes after the header;
    may be empty."""


class PutEnd(NamedTuple):
    """Complete the puts of these grant tokens: payloads and headers are written."""

    epoch: int
    tokens: Numbers
    hint: HintNumber = 0
    """A ``HintAction`` for the chain that ends with the last object that is stored."""
    retain_ms: RetainMs = 0


class PutEndReply(NamedTuple):
    outcomes: Sequence[int]
    """One ``PutOutcome`` per token: STORED or REFUSED."""


class PutRevoke(NamedTuple):
    """Revoke puts."""

    epoch: int
    tokens: Numbers
    quiesced: bool
    """Whether the puts are quiesced, so that their extents are free at once."""
    connections: Annotated[Sequence[int], RowCount(CONNECTIONS_CUT_MAX)] = ()
    """If not quiesced: the client's numbers of its connections to data servers that may still carry
    bytes of these puts. Empty: all of its connections."""


class PutRevokeReply(NamedTuple):
    revoked: int


class Allocate(NamedTuple):
    """Allocate memory for an object whose key is not known yet (``commit`` names it)."""

    namespace: Namespace
    """Its tenant is charged until the commit, which may name another namespace."""
    size: Size
    wait_ms: WaitMs
    host: NameOrEmpty
    avoid_segments: Avoided = ()
    """As in ``PutStart``, like the next two fields."""
    local_only: bool = False
    client_number: int = 0


class Commit(NamedTuple):
    """Make an allocation whose header is written an object with this key."""

    epoch: int
    token: int
    namespace: Namespace
    key: Key
    parent: Key | None
    size: Size
    """Payload bytes, at most the allocated ones."""
    overwrite: bool
    ttl_ms: TtlMs = 0
    """As in ``PutStart``."""
    quiesced: bool = False
    """Whether the owner does not access the memory any more: an allocation that is not stored is
    free at once, and an object is not leased to its owner."""
    next_size: Size = 0
    """Payload bytes of another allocation in the same namespace, with the reply; 0: none."""
    host: NameOrEmpty = ""
    """For the next allocation, as in ``PutStart``, like the next field."""
    local_only: bool = False


class CommitReply(NamedTuple):
    outcome: Annotated[int, IntRange(1, int(PutOutcome.REFUSED))]
    """STORED; FOUND or BEING_WRITTEN (the allocation is freed); REFUSED."""
    header_mac: SixteenOrEmpty = b""
    """``HEADER_MAC_BYTES``: the header MAC, which the client writes until the allocation's
    deadline; may be empty."""
    next_token: int = 0
    """Grant token of the next allocation, whose deadline is as far away as that of ``Allocate``;
    0: there is none."""
    next_segment: int = 0
    next_offset: int = 0


class Renew(NamedTuple):
    """Extend leases of objects, by key, version and location, and deadlines of allocations, by
    grant token."""

    namespace: Namespace
    keys: Sequence[Key]
    epochs: NumberPerKey
    counters: NumberPerKey
    epoch: int
    """The epoch of the grant tokens."""
    tokens: Numbers
    uuids: Annotated[Sequence[bytes], RowCount(like="keys"), SixteenBytes()]
    """Uuids of the segments of the leased memory; ``offsets`` are those of its extents."""
    offsets: NumberPerKey


class RenewReply(NamedTuple):
    lease_ms: int
    deadline_ms: int
    keys_leased: Sequence[int]
    """1 or 0 per key: whether that version is still leased at that location. The version alone does
    not identify the leased memory: it may have ended there and have come back elsewhere."""
    tokens_leased: Sequence[int]
    capabilities: bytes = b""
    """``CAPABILITY_BYTES`` per token: the extended one of the allocation; may be empty."""


class Release(NamedTuple):
    """Release leases without another call that could carry them."""

    released: Released


class ReleaseReply(NamedTuple):
    pass


class Pin(NamedTuple):
    """Protect these objects and their ancestors from eviction."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], RowCount(PIN_KEYS_MAX)]
    hold_ms: PinMs
    """Duration from now on; of two pins of an object the later end counts."""


class PinReply(NamedTuple):
    pinned: Sequence[int]
    """1 or 0 per key: whether the object is stored, and now pinned."""


class Unpin(NamedTuple):
    """End the pins of these objects. Ancestors of other pinned objects stay protected."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], RowCount(PIN_KEYS_MAX)]


class UnpinReply(NamedTuple):
    unpinned: Sequence[int]
    """1 or 0 per key: whether it was pinned."""


class Hint(NamedTuple):
    """Tell what to expect of chains. Hints change the order of eviction within a tenant."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], RowCount(PIN_KEYS_MAX)]
    """The last key of each chain."""
    actions: Annotated[Sequence[int], RowCount(like="keys", value_max=int(HintAction.PREFETCH))]
    """One ``HintAction`` per key."""
    retain_ms: Annotated[Sequence[int], RowCount(like="keys", value_max=RETAIN_MS_MAX)]
    """Per key: of RETAIN, for how long from now; else 0."""


class HintReply(NamedTuple):
    outcomes: Sequence[int]
    """One ``HintOutcome`` per key."""
    retained_ms: Numbers
    """Per key: for how long it is retained from now; 0: it is not."""


class Remove(NamedTuple):
    namespace: Namespace
    keys: Sequence[Key]


class RemoveReply(NamedTuple):
    removed: Sequence[int]
    """1 or 0 per key: whether an object was removed."""


class Clear(NamedTuple):
    """Remove up to ``limit`` objects of a namespace (empty: of all); repeat until none remain."""

    namespace: NamespaceOrEmpty
    limit: PageRows


class ClearReply(NamedTuple):
    removed: int
    remaining: int


class DescribeSegments(NamedTuple):
    segment_ids: Numbers


class DescribeSegmentsReply(NamedTuple):
    epoch: int
    """The epoch of the segment ids; ids of other epochs mean other segments."""
    segments: Sequence[SegmentInfo]
    """The requested segments that are mounted."""


class ReportFailure(NamedTuple):
    """Report segments that cannot be read or written from the client's host."""

    segment_ids: Numbers
    client: NameOrEmpty = ""
    """The reporting client; it runs on ``host``."""
    host: NameOrEmpty = ""
    reason: NameOrEmpty = ""
    """The reason in one line, for the master's log."""
    epoch: int = 0
    """The epoch of the segment ids."""


class ReportFailureReply(NamedTuple):
    suspects: int
    """Nodes that are now suspect."""


class ReportCorrupt(NamedTuple):
    """Report damaged replicas, as columns: an invalid header, or a payload that does not match its
    checksum. If all replicas of an object are reported, the master removes it."""

    namespace: Namespace
    keys: Sequence[Key]
    epochs: NumberPerKey
    counters: NumberPerKey
    """With ``epochs``, the version that was read; a later version is kept."""
    uuids: Annotated[Sequence[bytes], RowCount(like="keys")]
    """Uuids of the replicas' segments: the reporter's segment ids may be of an earlier master."""


class ReportCorruptReply(NamedTuple):
    dropped: int
    """Number of removed objects."""


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
    | Hint
    | Remove
    | Clear
    | DescribeSegments
    | ReportFailure
    | ReportCorrupt
)
