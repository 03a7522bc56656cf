"""Data protocol between a client and a node's data server over tcp.

A connection serves one segment, and one request at a time:

    client                                               server
    hello   magic, version, 0, uuid, token,
            generation, client, connection           ->
                                                     <-  status
    request magic, op, count; count x (offset, length) ->
    READ                                             <-  status, then all ranges end to end
    WRITE   all ranges end to end                    ->
                                                     <-  status

After any status except OK the server closes the connection. It replies to a WRITE when it has
finished with the segment, so after a status the request is quiesced.

The uuid names the segment and the generation its mount; the token proves that the client has the
segment's description from the master. The client chooses the numbers of client and connection, by
which the master requests a node to close connections that may still carry bytes of abandoned puts
(``DataServer.close_writers``). Ranges are checked before any transfer: they are after the
superblock, within the segment, and in total not larger than it. Numbers are little-endian.

With capabilities (docs/transports.md) two messages differ:

    hello   as above, with 1 behind the version; in
            the token's place 8 bytes with the
            number of the holder, 8 bytes 0          ->
                                                     <-  status; if that is OK: nonce, 16 bytes
    proof   16 bytes, see ``prove``                  ->
                                                     <-  status
    request magic, op, count; count x record         ->

If the segment's description says so, the connection uses TLS 1.3
(``kvstore.security.data_port_tls``). A server without free connections sends a TLS alert
(``kvstore.security.tls_stream.BUSY``) instead of a handshake.

A holder is an authenticated identity. Its clients prove that they have the holder's key of the
segment (``holder_key``), which the master sends to no other identity. A record is a range with its
capability: offset, length; offset and length of its extent; expiry in ms of the node's clock
(``kvstore.runtime.clock.uptime``); wipe sequence number; rights; MAC. The MAC is SipHash-2-4 (128
bits) over the output of ``pack_capability_input``, with the segment's token as key, so a capability
is for one holder, mount and extent.

The wipe sequence number is the last one at the issue of the capability. A later wipe request for
the extent revokes the right to write: ``pure_python.revoke_writes``.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.limits import DATA_PROTOCOL_VERSION

RANGES_MAX: Final = 4096
"""Ranges in one request: 64 KiB, or 288 with capabilities. A client splits longer calls."""

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 16

_MAGIC: Final = b"KVdt"
_HELLO: Final = struct.Struct("<4sHH16s16sQQQ")
_HOLDER: Final = struct.Struct("<QQ")
_REQUEST: Final = struct.Struct("<4sHHI")
_STATUS: Final = struct.Struct("<4sI")
_RECORD: Final = struct.Struct("<7Q16s")
_CAPABILITY_INPUT: Final = struct.Struct("<8s7Q")
_CAPABILITY: Final = struct.Struct("<2Q16s")

_CAPABILITY_TAG: Final = b"KVcap\0\0\2"
_HOLDER_TAG: Final = b"holder"

HELLO_BYTES: Final = _HELLO.size
REQUEST_BYTES: Final = _REQUEST.size
RANGE_BYTES: Final = 16
RECORD_BYTES: Final = _RECORD.size
STATUS_BYTES: Final = _STATUS.size


class Op(enum.IntEnum):
    READ = 1
    WRITE = 2


class TransferStatus(enum.IntEnum):
    OK = 0
    BUSY = 1
    """The server has no free connection; try again later."""
    DENIED = 2
    """Wrong token or proof; or a token instead of a required capability."""
    UNMOUNTED = 3
    """No such segment here, or it was mounted again since."""
    INVALID_RANGE = 4
    BAD_REQUEST = 5
    """Not this protocol or version."""
    NOT_ALLOWED = 6
    """A range without a valid capability."""


class RefusedTransferError(Exception):
    """The server closes the connection with this status; None: an invalid status."""

    def __init__(self, status: TransferStatus | None) -> None:
        super().__init__(status)
        self.status = status


LOWER_HALF: Final = 0xFFFF_FFFF
"""The part of a client number that the client chooses. The upper half follows from its identity."""


class Hello(NamedTuple):
    uuid: bytes
    token: bytes
    """Token of the segment; not sent by a holder."""
    generation: int
    client: int = 0
    """Client number, as known to the master; 0: it writes nothing."""
    connection: int = 0
    """Number of this connection among those of the client."""
    holder: int = 0
    """Number of the client's identity, assigned by the master; 0: the client has no capabilities,
    and presents the token."""


class Extent(NamedTuple):
    """An extent, and its capability."""

    offset: int
    length: int
    """Bytes, header included."""
    capability: bytes
    """``CAPABILITY_BYTES``: expiry, wipe sequence number and MAC."""


NO_EXTENT: Final = Extent(0, 0, bytes(_CAPABILITY.size))
"""The extent of a range without a capability."""


class CapabilityRange(NamedTuple):
    """A range of a request, with its capability."""

    offset: int
    length: int
    extent_offset: int
    extent_length: int
    expires_ms: int
    wipe_seq: int
    rights: int
    """One bit for each ``Op``, with its value."""
    mac: bytes

    def covers(self) -> bool:
        """Return whether the range is within the extent."""
        start = self.offset - self.extent_offset
        return 0 <= start and start + self.length <= self.extent_length


def pack_hello(hello: Hello) -> bytes:
    uuid, token, generation, client, connection, holder = hello
    if holder:
        token = _HOLDER.pack(holder, 0)
    return _HELLO.pack(
        _MAGIC, DATA_PROTOCOL_VERSION, bool(holder), uuid, token, generation, client, connection
    )


def unpack_hello(raw: bytes | bytearray) -> Hello | None:
    """Parse a hello of ``HELLO_BYTES``; return None if it is not this protocol."""
    magic, version, form, uuid, token, generation, client, connection = _HELLO.unpack(raw)
    if magic != _MAGIC or version != DATA_PROTOCOL_VERSION or form > 1:
        return None
    if not form:
        return Hello(uuid, token, generation, client, connection)
    holder, reserved = _HOLDER.unpack(token)
    if reserved or not holder:
        return None
    return Hello(uuid, b"", generation, client, connection, holder)


def holder_key(token: bytes, uuid: bytes, generation: int, holder: int) -> bytes:
    """Derive the key of one holder for one mount of a segment from the segment's token."""
    said = _HOLDER_TAG + uuid + struct.pack("<QQ", generation, holder)
    return hmac.digest(token, said, "sha256")[:16]


def prove(key: bytes, nonce: bytes, hello: bytes) -> bytes:
    """Return the proof that a client has the holder's key, for this hello and nonce."""
    return hmac.digest(key, nonce + hello, "sha256")[:PROOF_BYTES]


def pack_capability_input(
    generation: int, holder: int, offset: int, length: int, expires_ms: int, order: int, rights: int
) -> bytes:
    """Return the bytes that the MAC of a capability signs."""
    return _CAPABILITY_INPUT.pack(
        _CAPABILITY_TAG, generation, holder, offset, length, expires_ms, order, rights
    )


def pack_capability(expires_ms: int, order: int, mac: bytes) -> bytes:
    return _CAPABILITY.pack(expires_ms, order, mac)


def pack_request(
    op: Op, ranges: Sequence[tuple[int, int]], extents: Sequence[Extent] | None = None
) -> bytes:
    """Pack (offset, length) ``ranges``, at most ``RANGES_MAX``, with ``extents`` around them if the
    connection uses capabilities."""
    head = _REQUEST.pack(_MAGIC, op, 0, len(ranges))
    if extents is None:
        numbers = [number for pair in ranges for number in pair]
        return head + struct.pack(f"<{len(numbers)}Q", *numbers)
    return head + b"".join(
        _RECORD.pack(*pair, offset, length, expires_ms, order, op, mac)
        for pair, (offset, length, capability) in zip(ranges, extents, strict=True)
        for expires_ms, order, mac in (_CAPABILITY.unpack(capability),)
    )


def unpack_request(raw: bytes | bytearray) -> tuple[Op, int] | None:
    """Parse the op and the number of ranges from ``REQUEST_BYTES``; return None if it is not this
    protocol."""
    magic, op, reserved, count = _REQUEST.unpack(raw)
    if magic != _MAGIC or reserved or op not in (Op.READ, Op.WRITE) or not 0 < count <= RANGES_MAX:
        return None
    return Op(op), count


def unpack_ranges(raw: bytes | bytearray) -> list[tuple[int, int]]:
    numbers = struct.unpack(f"<{len(raw) // 8}Q", raw)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def unpack_records(raw: bytes | bytearray) -> list[CapabilityRange]:
    return [CapabilityRange(*fields) for fields in _RECORD.iter_unpack(raw)]


def pack_status(status: TransferStatus) -> bytes:
    return _STATUS.pack(_MAGIC, status)


def unpack_status(raw: bytes | bytearray | memoryview) -> TransferStatus | None:
    """Parse a status; return None if it is not this protocol."""
    magic, status = _STATUS.unpack(raw)
    try:
        return TransferStatus(status) if magic == _MAGIC else None
    except ValueError:
        return None
