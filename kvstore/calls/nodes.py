"""Messages of the stream between a node and its master; they are not calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from kvstore.calls.field_constraints import (
    ClockMs,
    IntRange,
    Name,
    NameOrEmpty,
    NumberPerOffset,
    Numbers,
    RowCount,
    ShmName,
    SixteenOrEmpty,
    Uuid,
)
from kvstore.calls.locations import NO_VERSION, DeviceLocation, EngineAddress, Version
from kvstore.limits import (
    DATA_PROTOCOL_VERSION,
    NODE_SEGMENTS_MAX,
    REFUSED_HOLDERS_MAX,
    SIZE_BYTES_MAX,
    Key,
    Namespace,
)


class SegmentOffer(NamedTuple):
    """A segment that a node mounts: a ``SegmentInfo`` before the master has numbered it."""

    size: Annotated[int, IntRange(1, SIZE_BYTES_MAX)]
    uuid: Uuid
    shm_name: ShmName
    address: NameOrEmpty
    token: Uuid
    seed: int
    generation: int
    fresh: bool
    """Whether no extent of it has ever been granted."""
    removal_watermark: Version = NO_VERSION
    """The last mark that the node was ordered to keep (``MasterWipe``)."""
    engine: EngineAddress | None = None
    data_protocol: int = DATA_PROTOCOL_VERSION
    """The version of the data protocol that the node's data server speaks."""
    device: DeviceLocation | None = None
    """None: the segment is in memory of the host."""
    descriptor_socket: ShmName = ""
    """Entry in ``/dev/shm``: the Unix socket where the node hands descriptors of its memory to
    clients of its host; empty: it has none."""
    header_mac_key: SixteenOrEmpty = b""
    """16 bytes, which no client learns: the key of the stamps behind the segment's headers
    (``kvstore.memory.header``); empty: the node takes headers without one."""
    takes_capabilities: bool = False
    """Whether the node takes capabilities (``Placements``)."""
    encrypts: bool = False
    """Whether its data port speaks TLS."""
    medium: NameOrEmpty = ""
    """Name of its medium: ``cuda:0``, with a colon, of a device; empty: memory of the host."""
    is_opaque: bool = False
    """Whether clients cannot write to it as to an array: it takes puts, but no allocations."""


class NodeJoin(NamedTuple):
    """First message of a node's stream."""

    name: Name
    host: Name
    protocol: int
    resume_epoch: int
    """The epoch to resume after a broken stream. A master that does not know these segments any
    more refuses with ``SegmentGoneError``. 0: it joins anew, and has fenced every older grant."""
    segments: Annotated[Sequence[SegmentOffer], RowCount(NODE_SEGMENTS_MAX)]
    highest_epoch: int = 0
    """The highest epoch that the node has joined, or that its memory records. A master of a lower
    one begins a term above that epoch, if it believes it (``kvstore.limits.highest_believed``)."""
    cluster: NameOrEmpty = ""
    """Name of the cluster that the node was given, or that its memory belongs to."""
    version: NameOrEmpty = ""
    """The release of the node's program, for people."""
    clock_ms: ClockMs = 0
    """The time on the clock with which the node compares expiries of capabilities."""


class NodeHeartbeat(NamedTuple):
    """I am alive."""

    number: int
    shm_entry_missing: bool = False
    """Somebody has removed the entry of my memory in /dev/shm."""
    clock_ms: ClockMs = 0
    """As in ``NodeJoin``."""
    read_bytes: int = 0
    """Bytes that clients have read over the node's data port since its start."""
    written_bytes: int = 0
    """Bytes that clients have written so."""


class NodeWipeDone(NamedTuple):
    """The headers of this order are wiped."""

    wipe_seq: int


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
    heartbeat_ms: Annotated[int, IntRange(1, 3_600_000)]
    """How often to send ``NodeHeartbeat``."""
    dead_ms: Annotated[int, IntRange(1, 86_400_000)]
    """Silence after which the node counts as dead, and must join anew."""
    segment_ids: Annotated[Sequence[int], RowCount(NODE_SEGMENTS_MAX)]
    cluster: NameOrEmpty = ""
    """Name of the master's cluster; empty: it has none."""


class MasterHeartbeat(NamedTuple):
    """Echo of a ``NodeHeartbeat``."""

    number: int
    repair: bool = False
    """The node has objects with too few replicas: it is to ask what to copy (``StartMoves``)."""
    rejected_holders: Annotated[Sequence[int], RowCount(REFUSED_HOLDERS_MAX)] = ()
    """Whose data connections the node ends and refuses, until a beat names them no more: identities
    that were revoked a short time ago."""


class MasterWipe(NamedTuple):
    """Wipe the headers at these offsets, each only if it still has that version; then zero."""

    wipe_seq: int
    uuid: Uuid
    offsets: Numbers
    epochs: NumberPerOffset
    counters: NumberPerOffset
    removal_watermark: Version = NO_VERSION
    """The mark to keep in the segment; ``NO_VERSION``: none. Memory whose mark is older than
    another's was away during a removal. A master that does not know what was removed refuses the
    claims of such memory."""
    disconnect_clients: Numbers = ()
    """Data connections to end first, because they may still carry bytes of abandoned puts: the
    client of each, 0 for any."""
    disconnect_connections: Annotated[Sequence[int], RowCount(like="disconnect_clients")] = ()
    """For each of them the number that its client has given it; 0: all of that client."""
    lengths: Numbers = ()
    """Bytes to zero from each offset on, whatever is there; 0: none. Empty: none anywhere. Only a
    node that takes capabilities gets lengths, and only for extents that no client may use."""


class MasterClaimsAck(NamedTuple):
    """One ``NodeClaims`` is processed. A ``MasterWipe`` names the refused objects."""

    segment: int
    """Its index among the offered segments."""


NodeMessage = NodeJoin | NodeHeartbeat | NodeWipeDone | NodeLeave | NodeClaims


MasterMessage = MasterAccepted | MasterHeartbeat | MasterWipe | MasterClaimsAck
