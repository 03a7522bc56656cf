"""The client's end of ``kvstore.security.descriptor_protocol``: requests a file descriptor of a
node's memory."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import Final

from kvstore.calls import DescriptorHandle, MapRight, SegmentInfo
from kvstore.memory.shm_entries import SOCKET_PREFIX
from kvstore.runtime.host import SHM_DIRECTORY
from kvstore.security import descriptor_protocol as protocol
from kvstore.security.descriptor_protocol import WHY, DescriptorHello, DescriptorStatus

ANSWER_S: Final = 1.0
"""Timeout of each of a node's two messages; an idle one takes 0.1 ms."""

_FD: Final = struct.Struct("i")


class NoDescriptorError(Exception):
    """The node passed no file descriptor; ``str`` is the reason."""

    def __init__(self, why: str, *, is_for_now: bool = False) -> None:
        """Create it. ``is_for_now``: the socket does not respond as a node's, so another attempt is
        cheap and may succeed, for example after a restart of the node."""
        super().__init__(why)
        self.is_for_now = is_for_now


def request_descriptor(segment: SegmentInfo, handle: DescriptorHandle) -> int:
    """Return a file descriptor of the segment's memory, owned by the caller: read-write or
    read-only.

    Takes up to twice ``ANSWER_S``.

    Raises:
        NoDescriptorError
    """
    if not handle.rights & MapRight.READ:
        raise NoDescriptorError(WHY[DescriptorStatus.NO_RIGHT])
    if not handle.socket.startswith(SOCKET_PREFIX) or "/" in handle.socket:
        raise NoDescriptorError(f"{handle.socket!r} is no name of a node's socket")
    path = f"{SHM_DIRECTORY}/{handle.socket}"
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise NoDescriptorError(f"no socket: {error.strerror}", is_for_now=True) from None
    with sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(path)
        except PermissionError:
            raise NoDescriptorError(WHY[DescriptorStatus.OTHER_USER]) from None
        except OSError as error:
            raise NoDescriptorError(
                f"its node's socket {path} does not answer: {error.strerror or error}",
                is_for_now=True,
            ) from None
        try:
            return _ask(sock, segment, handle)
        except TimeoutError:
            raise NoDescriptorError(f"its node did not answer within {ANSWER_S} s") from None
        except OSError as error:
            why = error.strerror or str(error)
            raise NoDescriptorError(
                f"its node ended the connection: {why}", is_for_now=True
            ) from None


def _ask(sock: socket.socket, segment: SegmentInfo, handle: DescriptorHandle) -> int:
    """Exchange the messages. Raises OSError, NoDescriptorError."""
    nonce = _taken(sock.recv(protocol.HEAD_BYTES + 1))
    hello = DescriptorHello(
        segment.uuid,
        segment.generation,
        segment.holder,
        handle.rights,
        secrets.token_bytes(protocol.NONCE_BYTES),
    )
    raw = protocol.pack_hello(hello, handle.key, nonce)
    sock.send(raw)
    answer, ancillary, _, _ = sock.recvmsg(
        protocol.HEAD_BYTES + 1, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = [
        _FD.unpack(data)[0]
        for level, kind, data in ancillary
        if (level, kind, len(data)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.size)
    ]
    try:
        proof = _taken(answer)
        if not protocol.is_of_node(proof, handle.key, raw):
            raise NoDescriptorError("the other end of its node's socket is not its node")
        if not fds:
            raise NoDescriptorError("no descriptor is left in this process", is_for_now=True)
        return fds.pop()
    finally:
        for fd in fds:
            os.close(fd)


def _taken(raw: bytes) -> bytes:
    """Return the content of a greeting or an answer after its status.

    Raises:
        ConnectionError: the node closed the connection. NoDescriptorError
    """
    if not raw:
        raise ConnectionResetError("connection closed")
    head = protocol.unpack_head(raw)
    status, rest = head or (DescriptorStatus.BAD_REQUEST, b"")
    if status is not DescriptorStatus.OK:
        raise NoDescriptorError(WHY[status], is_for_now=status is DescriptorStatus.UNMOUNTED)
    return rest
