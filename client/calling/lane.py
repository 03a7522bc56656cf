"""One connection to a master's lane, of a blocking stub: one call at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time

from kvstore.calls import Joined
from kvstore.client.calling.retries import (
    CarrierBrokenError,
    LaneUnreachableError,
    TokenRefusedError,
)
from kvstore.clocks import uptime
from kvstore.errors import PermissionDeniedError, ProtocolError
from kvstore.limits import FRAME_BYTES_MAX
from kvstore.native import fast
from kvstore.native.kinds import ANSWERED, BROKEN, ENDED, NOT_SENT, TIMED_OUT, UNASKED, Fast
from kvstore.network import names
from kvstore.network.addresses import join_address
from kvstore.wire.frames import CALL, ERROR, REPLY, Frame, FrameReader, frame, hello
from kvstore.wire.spinning import SpinGauge
from kvstore.wire.status import decode_error

_CONNECT_PAUSE_S = 0.005
"""The pause between attempts to connect to a Unix socket whose backlog is full."""


class EndedBeforeError(CarrierBrokenError):
    """The other end has closed, or has sent bytes without a call; nothing was sent."""


class LaneConnection:
    """One connection, one call at a time. Threads: the one that took it; ``interrupt``: any."""

    def __init__(self, sock: socket.socket, spin_s: float, generation: int) -> None:
        self._sock = sock
        self.generation = generation
        self._spin_s = spin_s
        self._reader = FrameReader()
        self._gauge = SpinGauge()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._call_id = 0

    def is_quiet(self) -> bool:
        """Whether nothing has arrived: no end of the stream, and no reply to an abandoned call."""
        return not self._readable.poll(0)

    def greet(self, joined: Joined, until: float) -> None:
        """
        Raises:
            TokenRefusedError, LaneUnreachableError
        """
        try:
            self._send(hello(joined.lane_token, joined.protocol), until)
            _, kind, _, data = self._receive(until, spin=False)
        except (TimeoutError, CarrierBrokenError) as error:
            raise LaneUnreachableError(f"no greeting: {error}", silent=True) from None
        except ProtocolError as error:
            raise LaneUnreachableError(error.message) from None
        if kind == ERROR:
            refusal = decode_error(data)
            if isinstance(refusal, PermissionDeniedError):
                raise TokenRefusedError(refusal.message)
            raise LaneUnreachableError(refusal.message)

    def exchange(self, name: bytes, payload: bytes, deadline: float, *, spin: bool) -> Frame:
        """The answer to one call, a REPLY or an ERROR.

        Raises:
            TimeoutError, CarrierBrokenError, ProtocolError: the connection cannot be used any more.
        """
        call_id = self._call_id = self._call_id + 1
        request = frame(call_id, CALL, name, payload)
        if fast is not None:
            return self._exchange_fast(fast, call_id, request, deadline, spin=spin)
        self._send(request, deadline)
        received = self._receive(deadline, spin=spin)
        if received[0] != call_id or received[1] not in (REPLY, ERROR):
            if received[1] == ERROR:
                raise CarrierBrokenError(decode_error(received[3]).message, sent=True)
            raise ProtocolError("the master's reply on the lane belongs to another call")
        return received

    def _exchange_fast(
        self, fast: Fast, call_id: int, request: bytes, deadline: float, *, spin: bool
    ) -> Frame:
        """``exchange``, compiled."""
        gauge = self._gauge
        spinning = spin and self._spin_s > 0 and gauge.pays()
        spin_s = self._spin_s if spinning else 0.0
        # The reader holds no bytes: the answer to the greeting was all that had arrived.
        status, number, kind, data = fast.exchange(
            self._sock.fileno(), request, call_id, spin_s, deadline, FRAME_BYTES_MAX
        )
        if status == ANSWERED and data is not None:
            if spinning:
                gauge.hit() if number else gauge.missed()
            if kind in (REPLY, ERROR):
                return call_id, kind, b"", data
        if status == TIMED_OUT:
            raise TimeoutError("no answer in time")
        if status == UNASKED:
            raise EndedBeforeError("the connection had ended", sent=False)
        if status in (NOT_SENT, BROKEN):
            reason = _reason(OSError(number, os.strerror(number)))
            raise CarrierBrokenError(reason, sent=status == BROKEN)
        if status == ENDED:
            raise CarrierBrokenError("the master closed the connection", sent=True)
        if kind == ERROR and data is not None:
            raise CarrierBrokenError(decode_error(data).message, sent=True)
        raise ProtocolError(
            "the master's reply on the lane belongs to another call, or is not a frame"
        )

    def interrupt(self) -> None:
        """Makes a call under way fail."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._sock.close()  # of a call that a signal has cut short

    def _send(self, data: bytes, deadline: float) -> None:
        sock = self._sock
        try:
            sent = sock.send(data)
            if sent == len(data):
                return
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise CarrierBrokenError(_reason(error), sent=False) from None
        rest = memoryview(data)[sent:]
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        while rest:
            self._wait(writable, deadline)
            try:
                rest = rest[sock.send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise CarrierBrokenError(_reason(error), sent=False) from None

    def _receive(self, deadline: float, *, spin: bool) -> Frame:
        reader, sock = self._reader, self._sock
        spinning = spin and self._spin_s > 0 and self._gauge.pays()
        spin_until = time.perf_counter() + self._spin_s if spinning else 0.0
        while True:
            try:
                count = sock.recv_into(reader.space())
            except BlockingIOError:
                if spinning and time.perf_counter() < spin_until:
                    continue
                if spinning:
                    self._gauge.missed()
                    spinning = False
                self._wait(self._readable, deadline)
                continue
            except OSError as error:
                raise CarrierBrokenError(_reason(error), sent=True) from None
            if not count:
                raise CarrierBrokenError("the master closed the connection", sent=True)
            reader.received(count)
            received = reader.next()
            if received is not None:
                if spinning:
                    self._gauge.hit()
                return received

    @staticmethod
    def _wait(poll: select.poll, deadline: float) -> None:
        left_s = deadline - uptime()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        poll.poll(left_s * 1000 + 1)  # ``poll`` rounds down


def connect(
    joined: Joined, host: str, until: float, spin_s: float, generation: int
) -> LaneConnection:
    """Connects by the Unix socket that the master names, if this host has it, else by TCP.

    Raises:
        LaneUnreachableError
    """
    sock = _connect_unix(joined.lane_unix, until) if joined.lane_unix else None
    if sock is None:
        if not joined.lane_port:
            raise LaneUnreachableError(
                "the lane's Unix socket cannot be reached, and the master has no TCP port for it"
            )
        address = join_address(host, joined.lane_port)
        try:
            sock = names.connect(host, joined.lane_port, until)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise LaneUnreachableError(f"{address}: {_reason(error)}") from None
    sock.setblocking(False)
    return LaneConnection(sock, spin_s, generation)


def _connect_unix(name: str, until: float) -> socket.socket | None:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptor is left
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
    if error.errno == errno.ECONNREFUSED:
        return "connection refused"
    return (error.strerror or str(error) or type(error).__name__).lower()
