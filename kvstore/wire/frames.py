"""The lane: requests and replies as length-prefixed frames on a socket.

A frame is, little-endian:

    u32  length of all that follows
    u64  call id: chosen by the client, repeated in the reply
    u8   kind (``FrameKind``)
    u8   length of the name
    ...  name of the call, ASCII: ``MatchPrefix``; empty but for ``CALL``
    ...  payload: the protobuf message of the call, or what the kind says

A connection opens with a HELLO from the client, whose payload is ``MAGIC``, u32 protocol version
and the lane token of the ``Join`` reply; the server answers with a REPLY (empty) or an ERROR and
closes. Then the client sends CALLs, with replies in order. A client that abandons a reply closes
the connection.

A node's stream has a connection of its own. Each CALL named ``NODE_MESSAGE`` carries a message of
the node, an empty one its end; each REPLY carries a message of the master, an ERROR ends the
stream. All of them have call id 0.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from kvstore.errors import PermissionDeniedError, ProtocolError
from kvstore.limits import (
    FRAME_BYTES_MAX,
    PROTOCOL_VERSION,
    REQUEST_BYTES_MAX,
    check_protocol,
)

MAGIC = b"kvs-lane"
NODE_MESSAGE = b"NodeMessage"
TOKEN_BYTES_MAX = 96
"""Limit of a lane token: a secret of the master or a signature, then the client's identity
(``kvstore.master.authorizer``)."""

_HEAD = struct.Struct("<IQBB")
HEAD_BYTES = _HEAD.size
FRAMING_BYTES_MAX = HEAD_BYTES + 255
_AFTER_LENGTH = HEAD_BYTES - 4
_LENGTH = struct.Struct("<I")
_VERSION = struct.Struct("<I")

BUFFER_BYTES = 64 << 10
"""A reader's buffer: nearly every frame fits, and one ``recv`` empties a busy socket. Larger ones
are released after their frame."""


class FrameKind(IntEnum):
    HELLO = 1
    CALL = 2
    REPLY = 3
    """Payload: the reply message."""
    ERROR = 4
    """Payload: an ``ErrorDetail``."""


HELLO, CALL, REPLY, ERROR = (int(kind) for kind in FrameKind)

Frame = tuple[int, int, bytes, bytes]
"""Call id, kind, name, payload."""


def frame(call_id: int, kind: int, name: bytes, payload: bytes) -> bytes:
    """Return one frame.

    Raises:
        ProtocolError: the frame exceeds ``FRAME_BYTES_MAX``.
    """
    length = _AFTER_LENGTH + len(name) + len(payload)
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a message of {length} bytes, at most {FRAME_BYTES_MAX} are allowed",
            advice="Split the batch.",
            length=length,
        )
    return _HEAD.pack(length, call_id, kind, len(name)) + name + payload


def hello(token: bytes) -> bytes:
    """Return the first frame of a connection."""
    return frame(0, HELLO, b"", MAGIC + _VERSION.pack(PROTOCOL_VERSION) + token)


def read_hello(first: Frame) -> bytes:
    """Return the lane token of a connection's first frame.

    Raises:
        ProtocolError: not a HELLO, or another protocol version.
        PermissionDeniedError: no token, or an overlong one.
    """
    _, kind, _, payload = first
    if kind != HELLO or not payload.startswith(MAGIC):
        raise ProtocolError("the first frame of a lane is a HELLO")
    if len(payload) < len(MAGIC) + _VERSION.size:
        raise ProtocolError("a HELLO without a protocol version")
    (version,) = _VERSION.unpack_from(payload, len(MAGIC))
    check_protocol(version, "the client")
    token = payload[len(MAGIC) + _VERSION.size :]
    if not 0 < len(token) <= TOKEN_BYTES_MAX:
        raise PermissionDeniedError("a HELLO without a lane token")
    return token


class FrameReader:
    """Parses a byte stream into frames, without a socket: ``space``, ``received``, ``next``.

    Bytes are received into the parse buffer, which grows to one frame; only payloads are copied,
    once.

    Attributes:
        length_max: the maximum length of a frame; may be changed between frames.
    """

    __slots__ = ("_buffer", "_end", "_start", "_view", "length_max")

    def __init__(self, length_max: int = REQUEST_BYTES_MAX) -> None:
        self.length_max = length_max
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def space(self) -> memoryview:
        """Return the buffer for the next bytes, never empty. Valid until the next call."""
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = start = end = 0
            if len(self._buffer) > BUFFER_BYTES:
                self._resize(BUFFER_BYTES)
        missing = HEAD_BYTES - (end - start)
        if missing <= 0:
            missing += 4 + _LENGTH.unpack_from(self._buffer, start)[0] - HEAD_BYTES
        if end + max(missing, 1) > len(self._buffer):
            self._reserve(end - start + max(missing, 1))
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Record that ``count`` bytes were written to ``space()``."""
        self._end += count

    def next(self) -> Frame | None:
        """Return the next complete frame; None: more bytes are needed.

        Raises:
            ProtocolError: the frame is invalid or too long. The stream cannot be read further.
        """
        start = self._start
        held = self._end - start
        if held < HEAD_BYTES:
            if held >= 4:
                self._check(_LENGTH.unpack_from(self._buffer, start)[0])
            return None
        length, call_id, kind, name_bytes = _HEAD.unpack_from(self._buffer, start)
        if held < length + 4 or length > self.length_max:
            self._check(length)
            return None
        name_at = start + HEAD_BYTES
        payload_at = name_at + name_bytes
        end = start + 4 + length
        if payload_at > end:
            raise ProtocolError("a frame is shorter than its own head")
        self._start = end
        view = self._view
        return call_id, kind, bytes(view[name_at:payload_at]), bytes(view[payload_at:end])

    @property
    def buffered(self) -> int:
        """Number of received bytes that are not in a frame yet."""
        return self._end - self._start

    @property
    def size(self) -> int:
        """Bytes of the buffer."""
        return len(self._buffer)

    def _check(self, length: int) -> None:
        if length > self.length_max:
            raise ProtocolError(
                f"a frame claims {length} bytes, at most {self.length_max} are allowed",
                length=length,
            )
        if length < _AFTER_LENGTH:
            raise ProtocolError("a frame is shorter than its own head", length=length)

    def _reserve(self, needed: int) -> None:
        """Move the content to the front, of a larger buffer if ``needed`` bytes require it."""
        held = self._end - self._start
        if needed > len(self._buffer):
            self._resize(needed)
        else:
            self._buffer[:held] = self._buffer[self._start : self._end]
        self._start, self._end = 0, held

    def _resize(self, size: int) -> None:
        # A new buffer: a bytearray with a view cannot be resized.
        held = self._view[self._start : self._end]
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._view[: len(held)] = held
