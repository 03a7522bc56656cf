"""``LaneConnection``: a blocking connection to a master's lane, one call at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import struct
import time

from kvstore.calls import JoinReply
from kvstore.client.rpc.retries import (
    ConnectionBrokenError,
    LaneUnreachableError,
    TokenRefusedError,
)
from kvstore.errors import PermissionDeniedError, ProtocolError
from kvstore.limits import FRAME_BYTES_MAX
from kvstore.native import pure_python, steps
from kvstore.native.interface import ANSWERED, BROKEN, ENDED, NOT_SENT, TIMED_OUT, UNASKED
from kvstore.runtime import resolver
from kvstore.runtime.clock import uptime
from kvstore.security.credentials import MASTER_NAME, Credentials
from kvstore.security.tls_stream import TlsError
from kvstore.wire.busy_poll_gauge import BusyPollGauge
from kvstore.wire.frames import CALL, ERROR, REPLY, Frame, FrameReader, frame, hello
from kvstore.wire.status import decode_error

SILENCE_S = 4
"""As ``limit_silence``: less than half of the default timeout, so that calls are retried."""

_CONNECT_PAUSE_S = 0.005
"""Pause between attempts to connect to a Unix socket whose backlog is full."""


class StaleConnectionError(ConnectionBrokenError):
    """The master had closed the connection or sent bytes before the call: nothing was sent."""


class LaneConnection:
    """One connection, one call at a time. Threads: the acquiring one; ``interrupt``: any."""

    def __init__(self, sock: socket.socket, spin_s: float, generation: int) -> None:
        self._sock = sock
        self._exchange = pure_python.exchange if isinstance(sock, ssl.SSLSocket) else steps.exchange
        self.generation = generation
        self._spin_s = spin_s
        self._gauge = BusyPollGauge()
        self._call_id = 0

    def handshake(self, joined: JoinReply, until: float) -> None:
        """Send the HELLO and read the reply. Raises TokenRefusedError, LaneUnreachableError."""
        first = hello(joined.lane_token)
        try:
            reply = _exchange_hello(self._sock, first, until)
        except OSError as error:
            raise LaneUnreachableError(f"no HELLO: {_reason(error)}") from None
        except ProtocolError as error:
            raise LaneUnreachableError(error.message) from None
        if reply[1] == ERROR:
            refusal = decode_error(reply[3])
            if isinstance(refusal, PermissionDeniedError):
                raise TokenRefusedError(refusal.message)
            raise LaneUnreachableError(str(refusal))

    def exchange(self, name: bytes, payload: bytes, deadline: float, *, spin: bool) -> Frame:
        """Return the reply. The connection is unusable after an error.

        Raises:
            TimeoutError, ConnectionBrokenError, ProtocolError
        """
        self._call_id += 1
        request = frame(self._call_id, CALL, name, payload)
        gauge = self._gauge
        spinning = spin and self._spin_s > 0 and gauge.should_poll()
        spin_s = self._spin_s if spinning else 0.0
        status, number, kind, data = self._exchange(
            self._sock, request, self._call_id, spin_s, deadline, FRAME_BYTES_MAX
        )
        if status == ANSWERED and data is not None:
            if spinning:
                gauge.record(number)
            if kind in (REPLY, ERROR):
                return self._call_id, kind, b"", data
        if status == TIMED_OUT:
            raise TimeoutError("no reply in time")
        if status == UNASKED:
            raise StaleConnectionError("the connection had ended", sent=False)
        if status in (NOT_SENT, BROKEN):
            reason = _reason(OSError(number, os.strerror(number)))
            raise ConnectionBrokenError(reason, sent=status == BROKEN)
        if status == ENDED:
            raise ConnectionBrokenError("the master closed the connection", sent=True)
        if kind == ERROR and data is not None:
            raise ConnectionBrokenError(decode_error(data).message, sent=True)
        raise ProtocolError(
            "the master's reply on the lane belongs to another call, or is not a frame"
        )

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            # The class's method: the object's own would continue without TLS.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._sock.close()  # after an exception has interrupted its call


def connect(
    joined: JoinReply,
    host: str,
    until: float,
    spin_s: float,
    generation: int,
    credentials: Credentials | None = None,
) -> LaneConnection:
    """Connect by the Unix socket that the master names, if it is on this host, else by TCP.

    ``credentials``: the identity for TLS over TCP; None: no TLS. A Unix socket needs none: its
    bytes stay in the kernel, and the token of the join, received over TLS, identifies the client.

    Raises:
        LaneUnreachableError
    """
    sock = _connect_unix(joined.lane_unix, until) if joined.lane_unix else None
    if sock is not None and credentials is not None and not _is_trusted(sock):
        sock.close()
        sock = None
    if sock is None:
        if not joined.lane_port:
            raise LaneUnreachableError(
                "the lane's Unix socket cannot be reached, and the master has no TCP port for it"
            )
        try:
            sock = resolver.connect(host, joined.lane_port, until)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            resolver.limit_silence(sock, SILENCE_S)
            if credentials is not None:
                sock = _with_tls(sock, credentials, until)
                return LaneConnection(sock, 0.0, generation)
        except OSError as error:
            raise LaneUnreachableError(
                f"{_reason(error)}; open TCP port {joined.lane_port} of the master for faster calls"
            ) from None
    sock.setblocking(False)
    return LaneConnection(sock, spin_s, generation)


def _is_trusted(sock: socket.socket) -> bool:
    """Return whether the peer of a Unix socket is our user or root, and may get our token."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (0, os.geteuid())


def _with_tls(sock: socket.socket, credentials: Credentials, until: float) -> ssl.SSLSocket:
    """Start TLS on ``sock``, which it takes over. Raises OSError."""
    sock.settimeout(max(until - uptime(), 1e-3))
    try:
        return credentials.client().wrap_socket(sock, server_hostname=MASTER_NAME)
    except BaseException:
        sock.close()
        raise


def _exchange_hello(sock: socket.socket, first: bytes, until: float) -> Frame:
    """Send the first frame; return the reply. Raises TimeoutError, OSError."""
    reader = FrameReader()

    def wait_until() -> None:
        left_s = until - uptime()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)

    wait_until()
    sock.sendall(first)
    while (reply := reader.next()) is None:
        wait_until()
        if not (count := sock.recv_into(reader.space())):
            raise ConnectionError("the master closed the connection")
        reader.received(count)
    sock.setblocking(False)
    return reply


def _connect_unix(name: str, until: float) -> socket.socket | None:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # out of file descriptors
        return None
    sock.setblocking(False)
    while True:
        try:
            sock.connect(b"\0" + name.encode())
            return sock
        except BlockingIOError:  # its backlog is full
            if uptime() < until:
                time.sleep(_CONNECT_PAUSE_S)
                continue
        except OSError:
            pass
        sock.close()
        return None


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        error = TlsError(error)
    if error.errno == errno.ECONNREFUSED:
        return "connection refused"
    if isinstance(error, TimeoutError) and not error.errno:
        return "no reply in time"
    return (error.strerror or str(error) or type(error).__name__).lower()
