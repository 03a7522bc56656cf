"""Locations of objects: versions, segments, and the extents in them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from kvstore.calls.field_constraints import IntRange, Name, ShmName, Uuid
from kvstore.limits import DATA_PROTOCOL_VERSION


class Version(NamedTuple):
    """One put of a key: the master's epoch, and its counter at ``put_start``.

    The counter is also the grant token of that put.
    """

    epoch: int
    counter: int


NO_VERSION = Version(0, 0)
"""The version before all others."""


class EngineAddress(NamedTuple):
    """The registration of a segment with a transfer engine (``kvstore.transport.mooncake``)."""

    name: Name
    """Address for peers: ``host:port`` of its handshake, or its key in the metadata server."""
    base: int
    """Address of the segment's first byte in the node's process; new for each generation."""
    protocol: Name
    metadata_server: Name


class DeviceLocation(NamedTuple):
    """A segment in device memory, for processes on its host."""

    device: Name
    """Device name in the node's process: ``cuda:0``."""
    entry: ShmName
    """Entry in ``/dev/shm`` that holds the superblock only."""
    ipc_handle: Name
    """IPC handle that opens the memory in another process
    (``kvstore.device.driver.DeviceDriver.export``)."""


class MapRight(enum.IntFlag):
    """Permissions of an identity for mappings, which expose all namespaces."""

    READ = 1
    """Read in some namespace."""
    WRITE = 2
    """Write in some namespace."""
    READ_ALL = 4
    """Read in every namespace."""
    WRITE_ALL = 8


class DescriptorHandle(NamedTuple):
    """Access for clients on the node's host to a file descriptor of the segment's memory
    (``kvstore.security.descriptor_protocol``)."""

    socket: ShmName
    """Entry in ``/dev/shm``: Unix socket of the node."""
    rights: Annotated[int, IntRange(0, 15)]
    """``MapRight`` of the client's identity."""
    key: Uuid
    """Key of the client for these rights."""


class SegmentInfo(NamedTuple):
    """Connection data of a segment. ``segment_id`` is never reused within an epoch."""

    segment_id: int
    node: str
    host: str
    """Equal if both ends may share ``/dev/shm``; see ``kvstore.runtime.host``."""
    size: int
    uuid: bytes
    """16 bytes, new at each creation; also in the superblock."""
    shm_name: str
    """Entry in ``/dev/shm`` that the client may open; empty if the segment is not POSIX shared
    memory, and for a ``holder``, which gets a file descriptor."""
    address: str
    """``host:port`` of the node's data server; empty: none."""
    token: bytes
    """16 bytes that the data server requires; with a ``holder``, the holder's key."""
    seed: int
    """Seed of the header checksums (64 bits)."""
    generation: int
    """Mount counter; data connections and mappings of an older one are refused."""
    engine: EngineAddress | None = None
    """None: its node has no transfer engine."""
    data_protocol: int = DATA_PROTOCOL_VERSION
    """Version of the node's data protocol."""
    device: DeviceLocation | None = None
    """None: host memory."""
    holder: int = 0
    """Holder number of the identity that received this description, if the node requires
    capabilities. 0: clients present the token."""
    descriptor_socket: DescriptorHandle | None = None
    """Descriptor socket for a holder; None: the node passes no descriptors."""
    certified: str = ""
    """The certified identity of the node at its join (``Identity.certified``), if its data port
    ``encrypts``; empty: unknown."""
    takes_capabilities: bool = False
    """Whether the node requires capabilities (``Placements``)."""
    encrypts: bool = False
    """Whether its data port uses TLS."""


class Placements(NamedTuple):
    """Locations of objects, as columns. Row i has ``replicas[i]`` extents (0: a miss).

    ``segments`` and ``offsets`` hold the extents of all rows in sequence. An extent is a header
    followed by the payload (``kvstore.memory.header``).
    """

    sizes: Sequence[int]
    """Payload bytes."""
    epochs: Sequence[int]
    counters: Sequence[int]
    replicas: Sequence[int]
    segments: Sequence[int]
    offsets: Sequence[int]
    capabilities: bytes = b""
    """``CAPABILITY_BYTES`` per extent, for reading it; may be empty."""


CAPABILITY_BYTES = 32
"""Expiry, wipe sequence number and MAC of a capability, which a client sends unchanged to the
extent's node (``kvstore.runtime.tcp_protocol``)."""

HEADER_MAC_BYTES = 16
"""A header MAC, which a client writes unchanged after the header (``kvstore.memory.header``)."""

NO_PLACEMENTS = Placements((), (), (), (), (), ())
