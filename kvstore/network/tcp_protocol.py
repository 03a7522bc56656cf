"""What a client and a node's data server say to each other over tcp.

A connection is for one segment, and for one request at a time:

    client                                               server
    hello   magic, version, uuid, token, generation,
            client, connection                       ->
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
(``DataServer.cut``). Ranges are checked before any byte moves: they lie behind the superblock and
within the segment, and sum up to no more than its size. Numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

DATA_PROTOCOL_VERSION: Final = 2
"""The highest version that this release speaks, and that its nodes announce."""

DATA_PROTOCOL_MIN: Final = 2
"""The lowest such version: that of the release before (docs/compatibility.md). The first is 2."""

RANGES_MAX: Final = 4096
"""Ranges in one request: 64 KiB of them. A client splits longer calls."""

_MAGIC: Final = b"KVdt"
_HELLO: Final = struct.Struct("<4sI16s16sQQQ")
_REQUEST: Final = struct.Struct("<4sHHI")
_STATUS: Final = struct.Struct("<4sI")

HELLO_BYTES: Final = _HELLO.size
REQUEST_BYTES: Final = _REQUEST.size
RANGE_BYTES: Final = 16
STATUS_BYTES: Final = _STATUS.size


class Op(enum.IntEnum):
    READ = 1
    WRITE = 2


class TransferStatus(enum.IntEnum):
    OK = 0
    BUSY = 1
    """More connections than the server takes; try again later."""
    DENIED = 2
    """Wrong token."""
    GONE = 3
    """No such segment here, or mounted anew since."""
    INVALID_RANGE = 4
    BAD_REQUEST = 5
    """Not this protocol, or another version of it."""


class RefusedTransferError(Exception):
    """The server ends the connection with this status; None: with something that is no status."""

    def __init__(self, status: TransferStatus | None) -> None:
        super().__init__(status)
        self.status = status


class Hello(NamedTuple):
    uuid: bytes
    token: bytes
    generation: int
    client: int = 0
    """Number of the client, which it shows to the master, too; 0: it writes nothing."""
    connection: int = 0
    """Number of this connection among those of the client."""
    protocol: int = DATA_PROTOCOL_VERSION
    """The version that both speak from here on."""


def pack_hello(hello: Hello) -> bytes:
    return _HELLO.pack(_MAGIC, hello.protocol, *hello[:-1])


def unpack_hello(raw: bytes | bytearray) -> Hello | None:
    """The hello; None: not this protocol. ``raw`` has ``HELLO_BYTES``."""
    magic, version, uuid, token, generation, client, connection = _HELLO.unpack(raw)
    if magic != _MAGIC or not DATA_PROTOCOL_MIN <= version <= DATA_PROTOCOL_VERSION:
        return None
    return Hello(uuid, token, generation, client, connection, version)


def pack_request(op: Op, ranges: Sequence[tuple[int, int]]) -> bytes:
    """``ranges`` are (offset, length) in bytes, at most ``RANGES_MAX``."""
    numbers = [number for pair in ranges for number in pair]
    return _REQUEST.pack(_MAGIC, op, 0, len(ranges)) + struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_request(raw: bytes | bytearray) -> tuple[Op, int] | None:
    """The op and the number of ranges; None: not this protocol. ``raw`` has ``REQUEST_BYTES``."""
    magic, op, reserved, count = _REQUEST.unpack(raw)
    if magic != _MAGIC or reserved or op not in (Op.READ, Op.WRITE) or not 0 < count <= RANGES_MAX:
        return None
    return Op(op), count


def unpack_ranges(raw: bytes | bytearray) -> list[tuple[int, int]]:
    numbers = struct.unpack(f"<{len(raw) // 8}Q", raw)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def pack_status(status: TransferStatus) -> bytes:
    return _STATUS.pack(_MAGIC, status)


def unpack_status(raw: bytes | bytearray | memoryview) -> TransferStatus | None:
    """The status; None: not this protocol."""
    magic, status = _STATUS.unpack(raw)
    try:
        return TransferStatus(status) if magic == _MAGIC else None
    except ValueError:
        return None
