"""One call on a connection of TLS: what ``Steps.exchange`` does on a plain one."""

from __future__ import annotations

import errno
import select
import ssl
import struct
from typing import Final

from kvstore.clocks import uptime
from kvstore.native.kinds import (
    ANSWERED,
    BROKEN,
    ENDED,
    GARBLED,
    NOT_SENT,
    TIMED_OUT,
    UNASKED,
)

_HEAD: Final = struct.Struct("<IQBB")
_RECORD_BYTES: Final = 16 << 10
"""TLS hands out no more at once."""


def exchange(
    sock: ssl.SSLSocket,
    request: bytes,
    call_id: int,
    spin_s: float,
    deadline: float,
    length_max: int,
) -> tuple[int, int, int, bytes | None]:
    """As ``kvstore.native.kinds.Steps.exchange``. ``sock`` does not block, before and after."""
    now = uptime()
    if now >= deadline:
        return TIMED_OUT, 0, 0, None
    failure = UNASKED
    try:
        if not _is_quiet(sock):
            return UNASKED, 0, 0, None
        failure = NOT_SENT
        _send(sock, request, deadline)
        failure = BROKEN
        received, spun = _first(sock, now + spin_s, deadline)
        head = _more(sock, received, _HEAD.size, deadline)
        if head is None:
            return ENDED, 0, 0, None
        length, answered, kind, name_size = _HEAD.unpack_from(head)
        if length + 4 < _HEAD.size or length > length_max or name_size:
            return GARBLED, 0, 0, None
        whole = _more(sock, head, length + 4, deadline)
        if whole is None:
            return ENDED, 0, 0, None
    except TimeoutError:
        return TIMED_OUT, 0, 0, None
    except ssl.SSLError:  # its number is OpenSSL's
        return failure, errno.EPROTO, 0, None
    except OSError as error:
        return failure, error.errno or 0, 0, None
    if answered != call_id or len(whole) != length + 4:
        return GARBLED, 0, kind, None
    return ANSWERED, int(spun), kind, bytes(whole[_HEAD.size :])


def _is_quiet(sock: ssl.SSLSocket) -> bool:
    """Whether the master has neither sent bytes nor ended the connection since the last call."""
    try:
        sock.recv(1)
    except ssl.SSLWantReadError:
        return True
    return False


def _send(sock: ssl.SSLSocket, request: bytes, deadline: float) -> None:
    left = memoryview(request)
    while left:
        try:
            left = left[sock.send(left) :]
        except ssl.SSLWantWriteError:
            _wait(sock, select.POLLOUT, deadline)
        except ssl.SSLWantReadError:
            _wait(sock, select.POLLIN, deadline)


def _first(sock: ssl.SSLSocket, spin_until: float, deadline: float) -> tuple[bytearray, bool]:
    """The first bytes of the answer, and whether polling has found them."""
    while True:
        try:
            return bytearray(sock.recv(_RECORD_BYTES)), uptime() < spin_until
        except ssl.SSLWantReadError:
            if uptime() >= spin_until:
                break
    return _received(sock, deadline), False


def _more(sock: ssl.SSLSocket, received: bytearray, size: int, deadline: float) -> bytearray | None:
    """``received``, with at least ``size`` bytes; None: the master has ended the connection."""
    while len(received) < size:
        some = _received(sock, deadline) if received else received
        if not some:
            return None
        received += some
    return received


def _received(sock: ssl.SSLSocket, deadline: float) -> bytearray:
    while True:
        try:
            return bytearray(sock.recv(_RECORD_BYTES))
        except ssl.SSLWantReadError:
            _wait(sock, select.POLLIN, deadline)


def _wait(sock: ssl.SSLSocket, events: int, deadline: float) -> None:
    """Raises TimeoutError."""
    poll = select.poll()
    poll.register(sock, events)
    left_s = deadline - uptime()
    if left_s <= 0 or not poll.poll(left_s * 1000):
        raise TimeoutError
