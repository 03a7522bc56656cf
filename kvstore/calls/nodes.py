"""Messages of the stream between a node and its master (not calls)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
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
    SIZE_BYTES_MAX,
    Key,
    Namespace,
)


class DiskLimits(NamedTuple):
    """Limits of the writes to a disk, in bytes of extents; 0: none."""

    write_bytes_per_s: int
    write_bytes_per_day: int
    """On average, once the disk has been filled for the first time."""


class CopyOutcome(IntEnum):
    """The result of one copy between a disk and the memory of its node."""

    DONE = 0
    CHANGED = 1
    """The source has no header of that version."""
    CORRUPT = 2
    """The payload on the disk does not match its checksum."""
    FAILED = 3
    """The disk returned an error."""


class SegmentOffer(NamedTuple):
    """A segment offered by a node: a ``SegmentInfo`` without its number."""

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
    """The last removal watermark that the node was told to keep (``MasterWipe``)."""
    engine: EngineAddress | None = None
    data_protocol: int = DATA_PROTOCOL_VERSION
    """Version of the node's data protocol."""
    device: DeviceLocation | None = None
    """None: host memory."""
    descriptor_socket: ShmName = ""
    """Entry in ``/dev/shm``: Unix socket on which the node passes file descriptors of its memory to
    clients of its host; may be empty."""
    header_mac_key: SixteenOrEmpty = b""
    """16 bytes, secret from clients: the key of the segment's header MACs
    (``kvstore.memory.header``); empty: the node accepts headers without a MAC."""
    takes_capabilities: bool = False
    """Whether the node requires capabilities (``Placements``)."""
    encrypts: bool = False
    """Whether its data port uses TLS."""
    medium: NameOrEmpty = ""
    """Name of its medium: ``cuda:0``, with a colon, of a device; empty: memory of the host."""
    is_opaque: bool = False
    """Whether clients cannot write to it as to an array: it takes puts, but no allocations."""
    disk: DiskLimits | None = None
    """The limits of a disk, which only the node reads and writes; None: clients use the segment."""


class NodeJoin(NamedTuple):
    """The first message of a node's stream."""

    name: Name
    host: Name
    protocol: int
    resume_epoch: int
    """The epoch to resume after a broken stream. A master that no longer has these segments refuses
    with ``SegmentUnmountedError``. 0: a new join; the node has fenced every older grant."""
    segments: Annotated[Sequence[SegmentOffer], RowCount(NODE_SEGMENTS_MAX)]
    highest_epoch: int = 0
    """The highest epoch that the node has joined or that its memory records. A master with a lower
    one starts a term with a higher epoch, if it is plausible
    (``kvstore.limits.plausible_epoch_max``)."""
    cluster: NameOrEmpty = ""
    """Name of the cluster that is configured, or that its memory belongs to."""
    version: NameOrEmpty = ""
    """Release of the node, for people."""
    clock_ms: ClockMs = 0
    """Time on the node's clock, with which it compares expiries of capabilities."""


class NodeHeartbeat(NamedTuple):
    """A heartbeat."""

    number: int
    shm_entry_missing: bool = False
    """Whether the /dev/shm entry of its memory was removed by another process."""
    clock_ms: ClockMs = 0
    """As in ``NodeJoin``."""
    read_bytes: int = 0
    """Bytes read by clients over the node's data port since its start."""
    written_bytes: int = 0
    """Bytes written by clients over that port."""


class NodeWipeDone(NamedTuple):
    """Report that the headers of a wipe request are wiped."""

    wipe_seq: int


class NodeLeave(NamedTuple):
    """Announce a clean stop: the master removes the node at once."""


class NodeClaims(NamedTuple):
    """Objects found in a segment after a new join, in as many messages as needed. Until the last
    one, the master grants nothing on a segment that is not fresh."""

    segment: int
    """Index of the segment among the offered ones."""
    first: bool
    """Whether the inventory begins with this message, perhaps again after an interruption."""
    last: bool
    namespaces: Sequence[Namespace]
    """Distinct."""
    namespace_of: Sequence[int]
    """Per object, the index of its namespace; the columns below are also per object."""
    keys: Sequence[Key]
    parents: Sequence[Key | None]
    """None: a root."""
    sizes: Sequence[int]
    epochs: Sequence[int]
    counters: Sequence[int]
    offsets: Sequence[int]


class NodeCopied(NamedTuple):
    """Report finished copies of a ``MasterCopy``."""

    tokens: Numbers
    outcomes: Annotated[Sequence[int], RowCount(like="tokens")]
    """One ``CopyOutcome`` per token."""


class MasterAccepted(NamedTuple):
    epoch: int
    heartbeat_ms: Annotated[int, IntRange(1, 3_600_000)]
    """Heartbeat interval."""
    dead_ms: Annotated[int, IntRange(1, 86_400_000)]
    """Silence after which the node counts as dead, and must join again."""
    segment_ids: Annotated[Sequence[int], RowCount(NODE_SEGMENTS_MAX)]
    cluster: NameOrEmpty = ""
    """Name of the master's cluster; may be empty."""


class MasterHeartbeat(NamedTuple):
    """The echo of a ``NodeHeartbeat``."""

    number: int
    repair: bool = False
    """Whether objects lack replicas: the node requests what to copy (``StartMoves``)."""


class MasterWipe(NamedTuple):
    """Wipe the headers at these offsets, each only if it still has that version; then zero."""

    wipe_seq: int
    uuid: Uuid
    offsets: Numbers
    epochs: NumberPerOffset
    counters: NumberPerOffset
    removal_watermark: Version = NO_VERSION
    """The removal watermark to keep in the segment; ``NO_VERSION``: none. Memory with an older one
    was absent during a removal. A master that does not know what was removed refuses the claims of
    such memory."""
    disconnect_clients: Numbers = ()
    """Data connections to close first, because they may still carry bytes of abandoned puts: the
    client number of each, 0 for any."""
    disconnect_connections: Annotated[Sequence[int], RowCount(like="disconnect_clients")] = ()
    """Connection number of each, chosen by its client; 0: all of that client."""
    lengths: Numbers = ()
    """Bytes to zero from each offset on, unconditionally; 0: none. Empty: none at all. Sent only to
    nodes that require capabilities, and only for extents that no client may use."""


class MasterCopy(NamedTuple):
    """Copy objects between a disk of the node and its memory. The columns are per object."""

    from_uuid: Uuid
    to_uuid: Uuid
    tokens: Numbers
    from_offsets: Annotated[Sequence[int], RowCount(like="tokens")]
    to_offsets: Annotated[Sequence[int], RowCount(like="tokens")]
    sizes: Annotated[Sequence[int], RowCount(like="tokens")]
    """Payload bytes."""
    epochs: Annotated[Sequence[int], RowCount(like="tokens")]
    counters: Annotated[Sequence[int], RowCount(like="tokens")]


class MasterClaimsAck(NamedTuple):
    """Acknowledge one ``NodeClaims``. A ``MasterWipe`` names the refused objects."""

    segment: int
    """Index of the segment among the offered ones."""


NodeMessage = NodeJoin | NodeHeartbeat | NodeWipeDone | NodeLeave | NodeClaims | NodeCopied


MasterMessage = MasterAccepted | MasterHeartbeat | MasterWipe | MasterClaimsAck | MasterCopy
