"""One connection of a client to a data server.

It connects when it is first used, and again when it finds that the server has ended it since.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Final

from kvstore.calls import SegmentInfo
from kvstore.errors import (
    BusyError,
    InvalidRangeError,
    KVStoreError,
    NodeUnreachableError,
    PermissionDeniedError,
)
from kvstore.native.kinds import (
    ANSWERED,
    ENDED,
    REFUSED,
    TIMED_OUT,
    UNASKED,
    Fast,
    ReadRow,
    WriteRow,
)
from kvstore.transport import tcp_protocol as protocol
from kvstore.transport.base import PIECE_BYTES, Move
from kvstore.transport.pieces import deadline_exceeded, feed, segment_gone, windows
from kvstore.transport.stream import EndedError, StalledError, Stream
from kvstore.transport.tcp_protocol import Hello, Op, Status
from kvstore.wire.spinning import SpinGauge

CONNECT_S: Final = 2.0
"""For connecting and the hello. A host that is gone does not answer at all; whoever waits for it
should know soon enough to try another replica."""

RECEIVE_BYTES: Final = PIECE_BYTES
SEND_BYTES: Final = 1 << 20
WINDOW_BUFFERS: Final = 512
"""Of one system call; the kernel takes 1024 buffers. What is received is hashed at once, so it
should still be in cache: 60 x 1 MiB were read at 7.4 GB/s in windows of 256 KiB, 4.4 in windows of
1 MiB. Sending is the other way round, 4.7 GB/s in large windows, 3.0 in small ones: each is one
wake-up of the other end. (Medians over loopback, with hashing.)"""


SPIN_S: Final = 200e-6
"""How long an answer is polled for before sleeping, where that has paid lately (ADR 2)."""

_STATUSES: Final = frozenset(Status)
_Exchanged = tuple[int, int, int, list[bytes | int] | None]
"""As ``Fast.tcp_read`` and ``Fast.tcp_write`` return."""


class _RefusedError(Exception):
    """The server answered with this status (None: with something else), and closes."""

    def __init__(self, status: Status | None) -> None:
        super().__init__(status)
        self.status = status


class ClientConnection:
    """One call at a time; ``interrupt`` from any thread. After an error: ``close``."""

    def __init__(self, segment: SegmentInfo) -> None:
        """Does not connect yet."""
        self._segment = segment
        self._stream: Stream | None = None
        self._is_interrupted = False
        self._is_settled = True
        """Whether no byte of what was sent can still land."""
        self._status = memoryview(bytearray(protocol.STATUS_BYTES))
        self._gauge = SpinGauge()

    def read(self, moves: Sequence[Move], deadline: float) -> None:
        """One READ of 1 to ``RANGES_MAX`` moves. Errors as ``TcpTransport.read``."""
        try:
            self._read(moves, deadline)
        except (OSError, _RefusedError) as error:
            raise self._explained(error, deadline) from error

    def write(self, moves: Sequence[Move], deadline: float) -> None:
        """One WRITE of 1 to ``RANGES_MAX`` moves. Errors as ``TcpTransport.write``."""
        try:
            self._write(moves, deadline)
        except (OSError, _RefusedError) as error:
            raise self._explained(error, deadline) from error

    def greet(self, deadline: float) -> None:
        """Connect and say hello, where that was not done or the server has ended it since. Errors
        as ``TcpTransport.read``: the segment is not there, in this generation, for our token."""
        if self.is_open:
            return
        self.close()
        try:
            self._connect(deadline)
        except (OSError, _RefusedError) as error:
            raise self._explained(error, deadline) from error

    @property
    def is_open(self) -> bool:
        """Whether the server has said nothing since its last answer, nor ended the connection."""
        return self._stream is not None and self._stream.is_quiet()

    def read_objects(
        self, fast: Fast, namespace: str, rows: list[ReadRow], verify: bool, deadline: float
    ) -> list[bytes | int]:
        """One READ of whole objects. Errors as ``TcpTransport.read``."""
        segment = self._segment

        def read(fd: int, spin_s: float) -> _Exchanged:
            return fast.tcp_read(
                fd, segment.size, segment.seed, namespace, rows, verify, deadline, spin_s
            )

        outcomes = self._exchange(read, deadline)
        assert outcomes is not None
        return outcomes

    def write_objects(
        self, fast: Fast, namespace: str, rows: list[WriteRow], deadline: float
    ) -> None:
        """One WRITE of whole objects. Errors as ``TcpTransport.write``."""
        segment = self._segment

        def write(fd: int, spin_s: float) -> _Exchanged:
            return fast.tcp_write(fd, segment.size, segment.seed, namespace, rows, deadline, spin_s)

        self._exchange(write, deadline)

    def _exchange(
        self, exchange: Callable[[int, float], _Exchanged], deadline: float
    ) -> list[bytes | int] | None:
        """Compiled, on the open connection, or on a new one where that was ended."""
        try:
            stream = self._stream or self._connect(deadline)
            while True:
                spins = self._gauge.pays()
                status, number, settled, outcomes = exchange(
                    stream.fileno, SPIN_S if spins else 0.0
                )
                if status != UNASKED:
                    break
                self.close()
                stream = self._connect(deadline)
            self._is_settled = bool(settled)
            if status == ANSWERED:
                if spins:
                    self._gauge.hit() if number else self._gauge.missed()
                return outcomes
            if status == REFUSED:
                raise _RefusedError(Status(number) if number in _STATUSES else None)
            if status == TIMED_OUT:
                raise StalledError(0)
            if status == ENDED:
                raise EndedError(0)
            raise OSError(number, os.strerror(number))
        except (OSError, _RefusedError) as error:
            raise self._explained(error, deadline) from error

    def interrupt(self) -> None:
        """Make a call under way fail. From any thread."""
        self._is_interrupted = True
        if self._stream is not None:
            self._stream.shutdown()

    def close(self) -> None:
        """Not during a call. Idempotent."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _read(self, moves: Sequence[Move], deadline: float) -> None:
        stream = self._begin(Op.READ, moves, deadline)
        self._receive_status(stream, deadline)
        for window in _windows(moves, RECEIVE_BYTES):
            stream.receive([piece for _, piece in window], deadline)
            for index, piece in window:
                hasher = moves[index].hasher
                if hasher is not None:
                    feed(hasher, piece)

    def _write(self, moves: Sequence[Move], deadline: float) -> None:
        # More follows, at once: so the request travels with its first bytes.
        stream = self._begin(Op.WRITE, moves, deadline, socket.MSG_MORE)
        self._is_settled = False
        try:
            begun = -1
            for window in _windows(moves, SEND_BYTES):
                for index, piece in window:
                    move = moves[index]
                    if index != begun:
                        begun = index
                        if move.prepare is not None:
                            move.prepare()
                    if move.hasher is not None:
                        feed(move.hasher, piece)
                stream.send([piece for _, piece in window], deadline)
        except ConnectionError:
            self._receive_status(stream, deadline)  # the server may have said why
            raise
        self._receive_status(stream, deadline)

    def _begin(self, op: Op, moves: Sequence[Move], deadline: float, flags: int = 0) -> Stream:
        """Send the request on the open connection, or on a new one where that was ended.

        Without its bytes a request does nothing: one that could not be sent may be sent again.
        """
        request = protocol.pack_request(op, [(move.offset, len(move.buffer)) for move in moves])
        stream = self._stream
        if stream is not None and stream.is_quiet():
            try:
                stream.send([request], deadline, flags)
                return stream
            except ConnectionError:
                pass
        self.close()
        stream = self._connect(deadline)
        stream.send([request], deadline, flags)
        return stream

    def _connect(self, deadline: float) -> Stream:
        segment = self._segment
        deadline = min(deadline, monotonic() + CONNECT_S)
        timeout = max(deadline - monotonic(), 1e-3)
        sock = socket.create_connection(_host_and_port(segment.address), timeout)
        stream = self._stream = Stream(sock)
        if self._is_interrupted:
            raise ConnectionAbortedError("the transport was closed")
        hello = Hello(segment.uuid, segment.token, segment.generation)
        try:
            stream.send([protocol.pack_hello(hello)], deadline)
        except ConnectionError:
            pass  # a busy server says so without listening
        self._receive_status(stream, deadline)
        return stream

    def _receive_status(self, stream: Stream, deadline: float) -> None:
        stream.receive([self._status], deadline)
        self._is_settled = True
        status = protocol.unpack_status(self._status)
        if status is not Status.OK:
            raise _RefusedError(status)

    def _explained(self, error: OSError | _RefusedError, deadline: float) -> KVStoreError:
        segment = self._segment
        settled = int(self._is_settled)
        where = f"node {segment.node!r} at {segment.address}"
        if isinstance(error, TimeoutError) and monotonic() >= deadline:
            return deadline_exceeded(segment, settled=settled)
        if not isinstance(error, _RefusedError):
            return NodeUnreachableError(f"{where}: {error}", node=segment.node, settled=settled)
        match error.status:
            case Status.BUSY:
                return BusyError(f"{where} has no connection left", node=segment.node, settled=1)
            case Status.DENIED:
                return PermissionDeniedError(
                    f"{where} does not know this token", node=segment.node, settled=settled
                )
            case Status.GONE:
                return segment_gone(segment, settled=settled)
            case Status.INVALID_RANGE:
                return InvalidRangeError(
                    f"{where} finds a range outside its segment", settled=settled
                )
            case _:
                return NodeUnreachableError(
                    f"{where} does not speak this data protocol",
                    advice="Run the same release on all hosts, and check the address.",
                    node=segment.node,
                    settled=settled,
                )


def _host_and_port(address: str) -> tuple[str, int]:
    """Raises OSError: it is no ``host:port`` or ``[host]:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise OSError(f"{address!r} is no address")
    return host.strip("[]"), int(port)


def _windows(moves: Sequence[Move], window_bytes: int) -> Iterator[list[tuple[int, memoryview]]]:
    return windows(
        [move.buffer for move in moves], window_bytes=window_bytes, window_buffers=WINDOW_BUFFERS
    )
