"""The header of every extent, and the superblock of a segment.

A segment is one superblock, then extents, all aligned to ``EXTENT_ALIGN``:

    0            4096
    | superblock | header | payload .... | header | payload ... |   (free)   |
                 ^ 1024 bytes            ^ the next multiple of 1024

A valid header has the magic, this format's version, lengths within bounds, and a checksum that is
seeded with *segment seed XOR offset of the extent*. So payload bytes that look like a header, a
header copied elsewhere, and a header of another segment are not valid.

    offset  size   header                        offset  size   superblock
         0     8   magic                              0     8   magic
         8     8   checksum of what follows           8     8   checksum of bytes 24 to 256
        16     2   format version                    16     8   generation (not in the checksum)
        18     2   flags, none yet: 0                24     4   format version
        20     2   namespace bytes                   28     4   node name bytes
        22     2   key bytes                         32     8   size of the segment
        24     2   parent key bytes, 0: a root       40     8   seed
        26     2   descriptor bytes                  48    16   uuid
        28     4   0                                 64   192   node name, zero-padded
        32     8   payload bytes
        40     8   version: epoch
        48     8   version: counter
        56     8   payload checksum, xxh3_64
        64         namespace, key, parent key, descriptor, end to end; the rest is undefined
       end    16   the header MAC, if the segment has a key for them

Every client of a segment knows its seed, so a valid header proves nothing about its writer. A
header MAC does: the SipHash (128 bits) of offset, payload bytes, version, namespace and key, with a
key that only the node and its master know. The master signs what it grants, the client writes the
MAC after the header, and a scan verifies it. A header that leaves less than 16 of its 1,024 bytes
has none.

The superblock continues, outside of that checksum, with fields that change later:

    offset  size
       256    16   the removal watermark's epoch and counter (``kvstore.calls.MasterWipe``)
       272     8   the highest epoch of a master that the node has joined
       280     8   xxh3_64 of that epoch
       512     8   checksum of the record of the owner's cluster, from 520 up to its end
       520     8   u16 each: flags (1: volatile, 2: on a device), bytes of the cluster's name, of
                   the addresses, 0
       528         the cluster's name, and the addresses, separated by line feeds
      3072    64   in a device's memory: ``kvstore.memory.owner_futex``

Numbers are little-endian. Every function here is pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.calls import HEADER_MAC_BYTES
from kvstore.limits import KEY_BYTES_MAX, NAMESPACE_BYTES_MAX, Key, Namespace

HEADER_BYTES: Final = 1024
EXTENT_ALIGN: Final = 1024
"""Extents start and end at multiples of this, which aligns payloads for any tensor."""

DISK_ALIGN: Final = 4096
"""The same on disks: the largest block of those that are read and written without a cache."""

SUPERBLOCK_BYTES: Final = 4096
"""The superblock is one page; extents follow it."""

FORMAT_VERSION: Final = 1
"""Of headers and superblocks. ``native/rows.h`` has it as well."""

WIPE: Final = bytes(64)
"""Written over a header, these bytes erase its magic, checksum and lengths."""

DESCRIPTOR_BYTES_MAX: Final = 320
NODE_NAME_BYTES_MAX: Final = 192
GENERATION_OFFSET: Final = 16
"""Offset of the u64 in the superblock that mapped readers and writers compare; aligned."""
MARK_OFFSET: Final = 256
"""Offset of two u64 in the superblock."""
EPOCH_OFFSET: Final = 272
"""Offset of two u64 in the superblock."""
OWNER_OFFSET: Final = 512
OWNER_BYTES_MAX: Final = 2048
ALIVE_OFFSET: Final = 3072

_MAGIC: Final = b"KVextnt\x01"
_MAGIC_WORD: Final = int.from_bytes(_MAGIC, "little")
_FIXED: Final = struct.Struct("<8sQHHHHHHIQQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKED_FROM: Final = 16

_SUPERBLOCK_MAGIC: Final = b"KVsegmt\x01"
_SUPERBLOCK: Final = struct.Struct("<8sQQIIQQ16s192s")
_SUPERBLOCK_CHECKED_FROM: Final = 24

_OWNER: Final = struct.Struct("<QHHHH")
_OWNER_CHECKED_FROM: Final = 8
_VOLATILE: Final = 1
_ON_DEVICE: Final = 2

_SCAN_BYTES: Final = 64 << 20
"""Bytes per step of a scan, so that its index arrays stay small."""

assert _FIXED.size == len(WIPE)
assert _FIXED.size + NAMESPACE_BYTES_MAX + 2 * KEY_BYTES_MAX + DESCRIPTOR_BYTES_MAX == HEADER_BYTES
assert _SUPERBLOCK.size == 256


class Header(NamedTuple):
    """The object of an extent. ``kvstore.limits`` bounds the lengths."""

    namespace: Namespace
    key: Key
    parent: Key | None
    """Key of the object before it in its chain; None: a root."""
    payload_size: int
    """Bytes; the payload starts ``HEADER_BYTES`` after the extent does."""
    epoch: int
    counter: int
    payload_checksum: int
    """xxh3_64 of the payload, unseeded."""
    descriptor: bytes
    """Restores the payload's type at the client; opaque here."""


HeaderFilter = Callable[[int, Header, bytes], bool]
"""Whether a scan accepts a valid header, given offset, header and the bytes of its MAC."""


@lru_cache(maxsize=1024)  # a put of 64 keys asks 193 times, usually for one size
def extent_bytes(payload_size: int) -> int:
    """The size of an extent: header and payload, rounded up to ``EXTENT_ALIGN``."""
    return (HEADER_BYTES + payload_size + EXTENT_ALIGN - 1) & -EXTENT_ALIGN


def pack_into(buffer: memoryview | bytearray, header: Header, seed: int, offset: int) -> int:
    """Writes a header that is valid at ``offset`` of the segment of ``seed``; returns its end.

    Args:
        buffer: at least ``HEADER_BYTES``, writable, ``B``-formatted; the rest remains unchanged.
        header: fields within their bounds, which the caller has checked.
        seed: of the segment's header checksums, 64 bits.
        offset: of the extent in its segment, bytes.
    """
    namespace, key, parent, payload_size, epoch, counter, payload_checksum, descriptor = header
    name = namespace.encode()
    parent_key = b"" if parent is None else parent
    assert 0 < len(name) <= NAMESPACE_BYTES_MAX
    assert 0 < len(key) <= KEY_BYTES_MAX
    assert len(parent_key) <= KEY_BYTES_MAX
    assert len(descriptor) <= DESCRIPTOR_BYTES_MAX
    tail = name + key + parent_key + descriptor
    fixed = _FIXED.pack(
        _MAGIC, 0, FORMAT_VERSION, 0, len(name), len(key), len(parent_key), len(descriptor), 0,
        payload_size, epoch, counter, payload_checksum,
    )  # fmt: skip
    checked = fixed[_CHECKED_FROM:] + tail
    checksum = _CHECKSUM.pack(xxh3_64_intdigest(checked, seed ^ offset))
    packed = _MAGIC + checksum + checked
    buffer[: len(packed)] = packed
    return len(packed)


def write_header_mac(buffer: memoryview | bytearray, end: int, header_mac: bytes) -> None:
    """Writes the MAC (empty: none) after the header in ``buffer``, which ends at ``end``, if it
    fits."""
    if end + len(header_mac) <= HEADER_BYTES:
        buffer[end : end + len(header_mac)] = header_mac


def header_mac_offset(header: Header) -> int:
    """The offset of the MAC from the start of the header."""
    name, key, parent, *_, descriptor = header
    return _FIXED.size + len(name.encode()) + len(key) + len(parent or b"") + len(descriptor)


def unpack(buffer: memoryview | bytearray | bytes, seed: int, offset: int) -> Header | None:
    """Parses the header at the start of ``buffer``; None: it is not valid. Never raises.

    It checks and returns a private copy, because other processes may write to shared memory.

    Args:
        buffer: up to ``HEADER_BYTES`` of it are read.
        seed: of the segment's header checksums, 64 bits.
        offset: of the extent in its segment, bytes.
    """
    raw = bytes(buffer[:HEADER_BYTES])
    if raw[:8] != _MAGIC or len(raw) < _FIXED.size:
        return None
    _, checksum, version, flags, *sizes, _, payload_size, epoch, counter, payload_checksum = (
        _FIXED.unpack_from(raw)
    )
    name_size, key_size, parent_size, descriptor_size = sizes
    key_start = _FIXED.size + name_size
    parent_start = key_start + key_size
    descriptor_start = parent_start + parent_size
    end = descriptor_start + descriptor_size
    if (
        end > len(raw)
        or xxh3_64_intdigest(raw[_CHECKED_FROM:end], seed ^ offset) != checksum
        or version != FORMAT_VERSION
        or flags != 0
        or not 0 < name_size <= NAMESPACE_BYTES_MAX
        or not 0 < key_size <= KEY_BYTES_MAX
        or parent_size > KEY_BYTES_MAX
        or descriptor_size > DESCRIPTOR_BYTES_MAX
    ):
        return None
    try:
        namespace = raw[_FIXED.size : key_start].decode()
    except UnicodeDecodeError:
        return None
    return Header(
        Namespace(namespace), Key(raw[key_start:parent_start]),
        Key(raw[parent_start:descriptor_start]) if parent_size else None, payload_size, epoch,
        counter, payload_checksum, raw[descriptor_start:end],
    )  # fmt: skip


def scan(
    memory: memoryview, seed: int, accepts: HeaderFilter | None = None
) -> Iterator[tuple[int, Header]]:
    """Yields every valid and accepted header of a segment with its offset, ascending.

    Extents may overlap: an evicted object's header stays until it is overwritten, and the space
    after it may hold a newer object. The caller decides which one counts (the newer version).

    Args:
        memory: the complete segment, ``B``-formatted.
        seed: of its header checksums.
        accepts: None: every valid header is accepted.
    """
    for start in range(SUPERBLOCK_BYTES, len(memory), _SCAN_BYTES):
        part = memory[start : start + _SCAN_BYTES]
        yield from scan_part(part, start, len(memory), seed, accepts)


def scan_part(
    part: memoryview, start: int, size: int, seed: int, accepts: HeaderFilter | None = None
) -> Iterator[tuple[int, Header]]:
    """As ``scan``, for a part of a segment of ``size`` bytes, from the aligned offset ``start``."""
    import numpy as np  # slow to import, and the master does not need it

    magics = np.frombuffer(part, dtype="<u8")[:: EXTENT_ALIGN // 8]
    for index in np.flatnonzero(magics == _MAGIC_WORD).tolist():
        at = index * EXTENT_ALIGN
        raw = bytes(part[at : at + HEADER_BYTES])
        header = unpack(raw, seed, start + at)
        if header is None or start + at + extent_bytes(header.payload_size) > size:
            continue
        if accepts is not None:
            end = header_mac_offset(header)
            if not accepts(start + at, header, raw[end : end + HEADER_MAC_BYTES]):
                continue
        yield start + at, header


class Superblock(NamedTuple):
    """The identity of a segment, for a process that finds it in ``/dev/shm``."""

    uuid: bytes
    """16 bytes, new at each creation."""
    node: str
    size: int
    """Bytes of the segment, superblock included."""
    seed: int
    generation: int
    """Counts mounts; 0: the owner has closed it."""


def pack_superblock(superblock: Superblock) -> bytes:
    """Packs the first 256 bytes of a segment."""
    uuid, node, size, seed, generation = superblock
    name = node.encode()
    assert len(uuid) == 16
    assert len(name) <= NODE_NAME_BYTES_MAX
    packed = _SUPERBLOCK.pack(
        _SUPERBLOCK_MAGIC, 0, generation, FORMAT_VERSION, len(name), size, seed, uuid, name
    )
    checksum = _CHECKSUM.pack(xxh3_64_intdigest(packed[_SUPERBLOCK_CHECKED_FROM:]))
    return packed[:8] + checksum + packed[16:]


def epoch_checksum(epoch: int) -> int:
    """The checksum next to an epoch: a damaged one would raise the epochs of later masters."""
    return xxh3_64_intdigest(_CHECKSUM.pack(epoch))


class SegmentOwner(NamedTuple):
    """The cluster that a segment belongs to; no other cluster may use its objects."""

    cluster: str = ""
    """The cluster's name; empty: none, or not known yet."""
    locations: tuple[str, ...] = ()
    """Addresses of its masters, from the node's settings (``kvstore.runtime.host.places_of``)."""
    volatile: bool = False
    """Memory of a node that a client started: it is not kept."""
    on_device: bool = False
    """The extents were in the memory of a device, and ended with their process."""


def pack_owner(owner: SegmentOwner) -> bytes:
    """Packs the bytes at ``OWNER_OFFSET``, without addresses that do not fit."""
    name = owner.cluster.encode()
    places = list(owner.locations)
    while len(text := "\n".join(places).encode()) + len(name) + _OWNER.size > OWNER_BYTES_MAX:
        places.pop()
    flags = _VOLATILE * owner.volatile | _ON_DEVICE * owner.on_device
    packed = _OWNER.pack(0, flags, len(name), len(text), 0) + name + text
    return _CHECKSUM.pack(xxh3_64_intdigest(packed[_OWNER_CHECKED_FROM:])) + packed[8:]


def unpack_owner(raw: bytes) -> SegmentOwner | None:
    """Parses the bytes from ``OWNER_OFFSET``; None: damaged, or not written."""
    checksum, flags, name_size, text_size, _ = _OWNER.unpack_from(raw)
    text_start = _OWNER.size + name_size
    end = text_start + text_size
    if end > len(raw) or xxh3_64_intdigest(raw[_OWNER_CHECKED_FROM:end]) != checksum:
        return None
    try:
        name, text = raw[_OWNER.size : text_start].decode(), raw[text_start:end].decode()
    except UnicodeDecodeError:
        return None
    places = tuple(text.split("\n")) if text else ()
    return SegmentOwner(name, places, bool(flags & _VOLATILE), bool(flags & _ON_DEVICE))


def owner_mismatch(left: SegmentOwner, wanted: SegmentOwner) -> str:
    """The reason why a node of ``wanted`` may not use memory of ``left``; empty: it may.

    If both have a cluster name, the names decide; otherwise at least one address of a master must
    be the same. Any node may use memory without both, which a node left that was killed at start.
    """
    if left.cluster and wanted.cluster:
        if left.cluster == wanted.cluster:
            return ""
        return f"it belongs to the cluster {left.cluster}, and this node to {wanted.cluster}"
    if not left.cluster and not left.locations:
        return ""
    if not set(left.locations).isdisjoint(wanted.locations):
        return ""
    where = ",".join(left.locations) or "an unknown place"
    of = f"the cluster {left.cluster}, whose master is" if left.cluster else "the master"
    return f"it belongs to {of} at {where}; this node was told {','.join(wanted.locations)}"


def read_superblock(buffer: memoryview | bytearray | bytes) -> Superblock | str:
    """Parses the superblock; or returns the reason why it is not valid, empty if there is none."""
    raw = bytes(buffer[: _SUPERBLOCK.size])
    if not any(raw):
        return ""
    if len(raw) < _SUPERBLOCK.size or raw[:8] != _SUPERBLOCK_MAGIC:
        return "it does not begin with a superblock"
    _, checksum, generation, version, name_size, size, seed, uuid, name = _SUPERBLOCK.unpack(raw)
    if version != FORMAT_VERSION:
        return f"its format is version {version}, this release reads {FORMAT_VERSION}"
    if checksum != xxh3_64_intdigest(raw[_SUPERBLOCK_CHECKED_FROM:]):
        return "the checksum of its superblock is wrong"
    try:
        return Superblock(uuid, name[:name_size].decode(), size, seed, generation)
    except UnicodeDecodeError:
        return "its superblock has invalid fields"


def unpack_superblock(buffer: memoryview | bytearray | bytes) -> Superblock | None:
    """As ``read_superblock``; None: it is not valid."""
    found = read_superblock(buffer)
    return None if isinstance(found, str) else found
