"""What a client and a node's data server say to each other over tcp.

A connection is for one segment, and for one request at a time:

    client                                               server
    hello   magic, version, 0, uuid, token,
            generation, client, connection           ->
                                                     <-  status
    request magic, op, count; count x (offset, length) ->
    READ                                             <-  status, then all ranges end to end
    WRITE   all ranges end to end                    ->
                                                     <-  status

Any status but OK is the last message of the server: it closes the connection. It answers a WRITE
when it has done with the segment, so after a status no byte of the request can still land.

The uuid names the segment and the generation its mount; the token proves that the master has told
the client of the segment. The client chooses the numbers of client and connection: by them the
master orders a node to end the connections that may still carry bytes of abandoned puts
(``DataServer.close_writers``). Ranges are checked before any byte moves: they lie behind the
superblock and within the segment, and sum up to no more than its size. Numbers are little-endian.

With capabilities (docs/transports.md says what they are for) two places differ:

    hello   as above, with 1 behind the version; in
            the token's place 8 bytes with the
            number of the holder, 8 bytes 0          ->
                                                     <-  status; if that is OK: nonce, 16 bytes
    proof   16 bytes, see ``prove``                  ->
                                                     <-  status
    request magic, op, count; count x record         ->

Where the segment's description says so, all of this is within TLS 1.3, which begins the connection
(``kvstore.security.data_port_tls``). A server that has no connection left sends an
alert of TLS (``kvstore.security.tls_stream.BUSY``) instead of a handshake.

A holder is an identity that the master has authenticated. Its clients prove that they have the
holder's key of the segment (``holder_key``), which the master tells to no other identity. A record
is a range with the capability for it: offset, length; offset and length of its extent; expiry in ms
of the node's clock (``kvstore.runtime.clock.uptime``); order; rights; MAC. The MAC is SipHash-2-4,
of 128 bits, of what ``sealed`` packs, under the segment's token. So each capability is for one
holder, mount and extent.

The order is the number of the last order to wipe that the master had made when it made the
capability. A later order for the extent ends the right to write there: ``slow.call_back``.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.limits import DATA_PROTOCOL_VERSION

RANGES_MAX: Final = 4096
"""Ranges in one request: 64 KiB of them, or 288 with capabilities. A client splits longer calls."""

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 16

_MAGIC: Final = b"KVdt"
_HELLO: Final = struct.Struct("<4sHH16s16sQQQ")
_HOLDER: Final = struct.Struct("<QQ")
_REQUEST: Final = struct.Struct("<4sHHI")
_STATUS: Final = struct.Struct("<4sI")
_RECORD: Final = struct.Struct("<7Q16s")
_SEALED: Final = struct.Struct("<8s7Q")
_CAPABILITY: Final = struct.Struct("<2Q16s")

_SEAL_TAG: Final = b"KVcap\0\0\2"
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
    """More connections than the server takes; try again later."""
    DENIED = 2
    """Wrong token or proof; or a token where capabilities are required."""
    GONE = 3
    """No such segment here, or mounted anew since."""
    INVALID_RANGE = 4
    BAD_REQUEST = 5
    """Not this protocol, or another version of it."""
    NOT_ALLOWED = 6
    """A range without a valid capability for it."""


class RefusedTransferError(Exception):
    """The server ends the connection with this status; None: with something that is no status."""

    def __init__(self, status: TransferStatus | None) -> None:
        super().__init__(status)
        self.status = status


LOWER_HALF: Final = 0xFFFF_FFFF
"""Of a client's number: the part that it chooses. The upper half follows from its identity."""


class Hello(NamedTuple):
    uuid: bytes
    token: bytes
    """Of the segment; not sent by a holder."""
    generation: int
    client: int = 0
    """Number of the client, which it shows to the master, too; 0: it writes nothing."""
    connection: int = 0
    """Number of this connection among those of the client."""
    holder: int = 0
    """The number that the master has given the client's identity; 0: the client has no
    capabilities, and shows the token."""


class Extent(NamedTuple):
    """An extent, and a capability for it."""

    offset: int
    length: int
    """Bytes, the header included."""
    capability: bytes
    """``CAPABILITY_BYTES``: expiry, order and MAC."""


NO_EXTENT: Final = Extent(0, 0, bytes(_CAPABILITY.size))
"""Stands for the extent of a range for which the client has no capability."""


class CapabilityRange(NamedTuple):
    """One range of a request, with its capability."""

    offset: int
    length: int
    extent_offset: int
    extent_length: int
    expires_ms: int
    wipe_seq: int
    rights: int
    """One bit for each ``Op``, of that value."""
    mac: bytes

    def covers(self) -> bool:
        """Whether the range is within the extent."""
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
    """The hello; None: not this protocol. ``raw`` has ``HELLO_BYTES``."""
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
    """The key of one holder for one mount of a segment, which follows from the segment's token."""
    said = _HOLDER_TAG + uuid + struct.pack("<QQ", generation, holder)
    return hmac.digest(token, said, "sha256")[:16]


def prove(key: bytes, nonce: bytes, hello: bytes) -> bytes:
    """Proves that a client has the holder's key, for this hello and nonce alone."""
    return hmac.digest(key, nonce + hello, "sha256")[:PROOF_BYTES]


def sealed(
    generation: int, holder: int, offset: int, length: int, expires_ms: int, order: int, rights: int
) -> bytes:
    """What the MAC of a capability is of."""
    return _SEALED.pack(_SEAL_TAG, generation, holder, offset, length, expires_ms, order, rights)


def pack_capability(expires_ms: int, order: int, mac: bytes) -> bytes:
    return _CAPABILITY.pack(expires_ms, order, mac)


def pack_request(
    op: Op, ranges: Sequence[tuple[int, int]], extents: Sequence[Extent] | None = None
) -> bytes:
    """``ranges`` are (offset, length) in bytes, at most ``RANGES_MAX``; ``extents`` those around
    them, on a connection with capabilities."""
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
    """The op and the number of ranges; None: not this protocol. ``raw`` has ``REQUEST_BYTES``."""
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
    """The status; None: not this protocol."""
    magic, status = _STATUS.unpack(raw)
    try:
        return TransferStatus(status) if magic == _MAGIC else None
    except ValueError:
        return None
