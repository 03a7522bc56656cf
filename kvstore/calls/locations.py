"""Where objects are: the version, the segments, and the extents in them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from kvstore.calls.field_constraints import IntRange, Name, ShmName, Uuid
from kvstore.limits import DATA_PROTOCOL_VERSION


class Version(NamedTuple):
    """Identifies one put of a key: the master's epoch, and its counter at ``put_start``.

    The counter is also the token of the put that wrote it.
    """

    epoch: int
    counter: int


NO_VERSION = Version(0, 0)
"""The version before all others."""


class EngineAddress(NamedTuple):
    """Where a segment is registered with a transfer engine (``kvstore.transport.mooncake``)."""

    name: Name
    """Peers open this: ``host:port`` of its handshake, or its key in the metadata server."""
    base: int
    """The address of the segment's first byte in the node's process; new for each generation."""
    protocol: Name
    metadata_server: Name


class DeviceLocation(NamedTuple):
    """Where a segment is in the memory of a device, for processes on its host."""

    device: Name
    """Its name in the node's process: ``cuda:0``."""
    entry: ShmName
    """Entry in ``/dev/shm`` that holds the superblock alone."""
    ipc_handle: Name
    """Opens the memory in another process (``kvstore.device.driver.DeviceDriver.export``)."""


class MapRight(enum.IntFlag):
    """What an identity may do, as far as it matters for a mapping, which shows all namespaces."""

    READ = 1
    """Read in some namespace."""
    WRITE = 2
    """Write in some namespace."""
    READ_ALL = 4
    """Read in every namespace."""
    WRITE_ALL = 8


class DescriptorHandle(NamedTuple):
    """How a client of the node's host gets a descriptor of the segment's memory
    (``kvstore.security.descriptor_protocol``)."""

    socket: ShmName
    """Entry in ``/dev/shm``: a Unix socket of the node."""
    rights: Annotated[int, IntRange(0, 15)]
    """``MapRight`` of the client's identity."""
    key: Uuid
    """The client's key for these rights."""


class SegmentInfo(NamedTuple):
    """How to reach a segment. ``segment_id`` is never used again within an epoch."""

    segment_id: int
    node: str
    host: str
    """Equal on both ends when they may see the same ``/dev/shm``; see ``kvstore.runtime.host``."""
    size: int
    uuid: bytes
    """16 bytes, new at each creation; also written in the superblock."""
    shm_name: str
    """Entry in ``/dev/shm`` that the client may open; empty when the segment is no POSIX shared
    memory, and for a ``holder``, who gets a descriptor."""
    address: str
    """``host:port`` of the node's data server; empty when it has none."""
    token: bytes
    """16 bytes that the data server asks for; if there is a ``holder``, the holder's key."""
    seed: int
    """Seed of the header checksums of this segment (64 bits)."""
    generation: int
    """Counts mounts; a data connection or mapping of an older one is refused."""
    engine: EngineAddress | None = None
    """None: its node has no transfer engine."""
    data_protocol: int = DATA_PROTOCOL_VERSION
    """The version of the data protocol that the node's data server speaks."""
    device: DeviceLocation | None = None
    """None: the segment is in memory of the host."""
    holder: int = 0
    """The number of the identity that has this description, if the node takes its capabilities. 0:
    clients show the token."""
    descriptor_socket: DescriptorHandle | None = None
    """Where a holder asks for the memory; None: its node hands none over."""
    certified: str = ""
    """What the certificate of the node said of its identity when the node joined
    (``Identity.certified``), if its data port ``encrypts``; empty: not known."""
    takes_capabilities: bool = False
    """Whether the node takes capabilities (``Placements``)."""
    encrypts: bool = False
    """Whether its data port speaks TLS."""


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
    capabilities: bytes = b""
    """``CAPABILITY_BYTES`` for each extent, with which the client may read it; empty: none."""


CAPABILITY_BYTES = 32
"""Expiry, order and MAC of one capability, which a client shows to the extent's node as it got them
(``kvstore.runtime.tcp_protocol``)."""

STAMP_BYTES = 16
"""A MAC behind a header, which a client writes there as it got it (``kvstore.memory.header``)."""

NO_PLACEMENTS = Placements((), (), (), (), (), ())
