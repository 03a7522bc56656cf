"""A connected socket whose operations end by a deadline; used by both ends of tcp.

The socket is blocking, with timeouts of the kernel (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): Python's
timeouts make it non-blocking, which rules out ``MSG_WAITALL`` and costs a ``poll`` per call.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import socket
import struct
import sys
import termios
import threading
from collections.abc import Sequence
from typing import Final

from kvstore.runtime.clock import uptime
from kvstore.runtime.resolver import limit_silence

_TIMEVAL: Final = struct.Struct("@ll")
_NO_LINGER: Final = struct.pack("@ii", 1, 0)

MOVED_MIN: Final = 64 << 10
"""Bytes that must be acknowledged within ``stall_s`` to count as progress."""


class StalledError(TimeoutError):
    """The deadline passed, or no byte was transferred for ``stall_s``. ``received``: bytes so
    far."""

    def __init__(self, received: int) -> None:
        super().__init__(f"stalled after {received} bytes")
        self.received = received


class ConnectionEndedError(ConnectionError):
    """The peer closed the connection. ``received``: bytes so far."""

    def __init__(self, received: int) -> None:
        super().__init__(f"closed by the peer after {received} bytes")
        self.received = received


class Stream:
    """Sends and receives complete sequences of buffers. One thread at a time; ``shutdown`` any."""

    def __init__(self, sock: socket.socket, *, stall_s: float = math.inf) -> None:
        """Take over ``sock``, a connected TCP socket. ``stall_s``: the longest time without a
        transferred byte, in either direction, while a call waits."""
        self._sock = sock
        self._stall_s = stall_s
        self._unsent = 0
        self._ending = threading.Lock()
        self.peer = _peer(sock)
        """The peer's address for logs."""
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_silence(sock, 10)

    def fileno(self) -> int:
        """Return the file descriptor, for code that sets timeouts and keeps deadlines itself."""
        return self._sock.fileno()

    @property
    def is_plain(self) -> bool:
        """Whether bytes are sent unencrypted, so that other code may use ``fileno``."""
        return True

    @property
    def certificate(self) -> object:
        """The peer's certificate, as ``ssl`` describes it; None: none."""
        return None

    def begin(self, deadline: float) -> None:
        """Negotiate encryption with the peer; here there is none. Call it once, before any other
        exchange."""

    def receive(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """Fill all of ``buffers`` (``B``-formatted, writable, at most ``IOV_MAX`` of them).

        Raises:
            StalledError, ConnectionEndedError: with the number of received bytes.
            OSError: the connection broke.
        """
        wanted = sum(map(len, buffers))
        received = 0
        while received < wanted:
            self._arm(socket.SO_RCVTIMEO, deadline, received)
            try:
                if len(buffers) == 1:
                    count = self._sock.recv_into(buffers[0], 0, socket.MSG_WAITALL)
                else:
                    count = self._sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                if self._moves(deadline):
                    continue
                raise StalledError(received) from None
            if count == 0:
                raise ConnectionEndedError(received)
            received += count
            if received < wanted:  # a signal, the deadline or the end
                buffers = _behind(buffers, count)

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float, flags: int = 0) -> None:
        """Send all of ``buffers`` (at most ``IOV_MAX`` of them).

        Raises:
            StalledError: the peer does not accept the bytes.
            OSError: the connection broke.
        """
        wanted = sum(map(len, buffers))
        sent = 0
        while sent < wanted:
            self._arm(socket.SO_SNDTIMEO, deadline, 0)
            try:
                count = self._sock.sendmsg(buffers, (), flags)
            except BlockingIOError:
                if self._moves(deadline):
                    continue
                raise StalledError(0) from None
            sent += count
            self._note_unsent()
            if sent < wanted:
                buffers = _behind(buffers, count)

    def is_idle(self) -> bool:
        """Return whether the connection is open and has nothing to read."""
        try:
            # Of the class: with TLS the object's own method would decrypt.
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut down both directions (or one), which wakes a waiting thread. From any thread."""
        with self._ending, contextlib.suppress(OSError):
            # Of the class: with TLS the object's own method would continue without TLS.
            socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Close it in the thread that uses the stream: the file descriptor may be reused at
        once."""
        with self._ending:
            self._sock.close()

    def close_after_fork(self) -> None:
        """Close our file descriptor in the child of a fork. The connection stays the parent's."""
        self._sock.close()

    def __del__(self) -> None:
        # A signal may have interrupted a call: none of its unsent bytes may leave this host.
        if (sock := getattr(self, "_sock", None)) is not None and sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            sock.close()

    def reset(self) -> None:
        """As ``close``, but drop sent bytes that have not left this host yet."""
        with self._ending, contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.close()

    def _remaining_s(self, deadline: float, received: int) -> float:
        """Return the time for the next bytes. Raises StalledError: the deadline passed."""
        remaining = deadline - uptime()
        if remaining <= 0:
            raise StalledError(received)
        return min(remaining, self._stall_s)

    def _arm(self, option: int, deadline: float, received: int) -> None:
        remaining = self._remaining_s(deadline, received)
        seconds = int(remaining)
        micros = max(1, int((remaining - seconds) * 1e6))  # zero in both would mean no timeout
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, micros))

    def _moves(self, deadline: float) -> bool:
        """Return whether to continue after a timeout of the kernel, because the peer has
        acknowledged earlier bytes meanwhile. (A few bytes are acknowledged even by the kernel of a
        stopped process.)"""
        if self._stall_s == math.inf or uptime() >= deadline:
            return False
        unsent, before = self._unsent_bytes(), self._unsent
        self._unsent = unsent
        return before - unsent >= MOVED_MIN

    def _note_unsent(self) -> None:
        if self._stall_s < math.inf:
            self._unsent = self._unsent_bytes()

    def _unsent_bytes(self) -> int:
        answer = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(answer, sys.byteorder)


def _peer(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # already disconnected
        return "unknown"


def _behind(buffers: Sequence[memoryview | bytes], count: int) -> list[memoryview]:
    """Return ``buffers`` without their first ``count`` bytes."""
    remaining: list[memoryview] = []
    for buffer in buffers:
        if count >= len(buffer):
            count -= len(buffer)
        else:
            remaining.append(memoryview(buffer)[count:])
            count = 0
    return remaining
