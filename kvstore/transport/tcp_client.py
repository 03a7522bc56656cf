"""One connection of a client to a data server; it reconnects after the server has closed it."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstore.calls import SegmentInfo
from kvstore.errors import (
    BusyError,
    CapabilityRefusedError,
    InvalidArgumentError,
    InvalidRangeError,
    KVStoreError,
    NodeUnreachableError,
    PermissionDeniedError,
)
from kvstore.limits import DATA_PROTOCOL_VERSION
from kvstore.native import pure_python, steps
from kvstore.native.interface import (
    ANSWERED,
    ENDED,
    REFUSED,
    TIMED_OUT,
    UNASKED,
    ReadRow,
    WriteRow,
)
from kvstore.runtime import resolver
from kvstore.runtime import tcp_protocol as protocol
from kvstore.runtime.addresses import split_address
from kvstore.runtime.clock import uptime
from kvstore.runtime.stream import ConnectionEndedError, StalledError, Stream
from kvstore.runtime.tcp_protocol import (
    NO_EXTENT,
    Hello,
    Op,
    RefusedTransferError,
    TransferStatus,
)
from kvstore.security.data_port_tls import ClientTls
from kvstore.security.tls_stream import TlsError
from kvstore.transport.base import PIECE_BYTES
from kvstore.transport.common import (
    RangeCopy,
    deadline_exceeded,
    feed,
    not_encrypted,
    segment_unmounted,
    windows,
)
from kvstore.wire.busy_poll_gauge import BusyPollGauge

STALL_S: Final = 1.0
"""Maximum time without a byte while a call waits: a stopped node or absent host sends none."""

CONNECT_STALLS: Final = 1.25
"""Timeout of connect and hello in ``stall_s``; a lost request is resent after 1 s."""

LATE_S: Final = 0.01
"""A timeout this close to the deadline is the deadline's: the kernel's timers are coarse."""

_NOT_ACCEPTED: Final = "Open its port to this host; kvstore doctor tests it."
_NOT_MOVING: Final = (
    "It had accepted the connection, so its port is open: the node is stopped or overloaded, or "
    "the network loses packets (large ones, where the MTU of a link is too high)."
)

RECEIVE_BYTES: Final = PIECE_BYTES
SEND_BYTES: Final = 1 << 20
WINDOW_BUFFERS: Final = 512
"""Buffers per system call; the kernel accepts 1024. Received bytes are hashed at once and should
still be in cache: 60 x 1 MiB were read at 7.4 GB/s in windows of 256 KiB, 4.4 in windows of 1 MiB.
Sends are faster in large windows, 4.7 GB/s, than in small ones, 3.0: each wakes the other end.
(Medians over loopback, with hashing.)"""


SPIN_S: Final = 200e-6
"""Busy-polling time for a reply, where that has paid recently."""

_STATUSES: Final = frozenset(TransferStatus)
_REFUSALS: Final[dict[TransferStatus | None, tuple[type[KVStoreError], str, str]]] = {
    TransferStatus.BUSY: (BusyError, "has reached its limit of connections", ""),
    TransferStatus.DENIED: (
        PermissionDeniedError,
        "does not accept this client's token",
        "The node may require capabilities: docs/transports.md.",
    ),
    TransferStatus.NOT_ALLOWED: (
        CapabilityRefusedError,
        "refused a capability of this client: it has expired, or is for another extent or client",
        "",
    ),
    TransferStatus.INVALID_RANGE: (InvalidRangeError, "refused a range outside its segment", ""),
}
_Exchanged = tuple[int, int, int, list[bytes | int] | None]


class ClientConnection:
    """One call at a time; any thread may ``interrupt``. ``close`` it after an error."""

    def __init__(
        self,
        segment: SegmentInfo,
        client_number: int = 0,
        *,
        stall_s: float = STALL_S,
        tls: ClientTls | None = None,
    ) -> None:
        """Does not connect yet. Arguments as of ``TcpTransport``."""
        self._tls = tls
        self._segment = segment
        self._client_number = client_number
        self._stall_s = stall_s
        self._has_capabilities = bool(segment.holder)
        """Whether each range is sent with its capability."""
        self._number = 0
        """Number of the present connection, as ``Hello.connection``."""
        self._stream: Stream | None = None
        self._is_interrupted = False
        self._is_quiesced = True
        """Whether no sent byte can still arrive."""
        self._gauge = BusyPollGauge()

    def read(self, moves: Sequence[RangeCopy], deadline: float) -> None:
        """One READ of 1 to ``RANGES_MAX`` ranges. Errors as ``TcpTransport.read``."""

        def receive(stream: Stream) -> None:
            for window in _windows(moves, RECEIVE_BYTES):
                stream.receive([data for _, data in window], deadline)
                _hash(window)

        self._request(Op.READ, moves, receive, deadline)

    def write(self, moves: Sequence[RangeCopy], deadline: float) -> None:
        """One WRITE of 1 to ``RANGES_MAX`` ranges. Errors as ``TcpTransport.write``."""

        def send(stream: Stream) -> None:
            for window in _windows(moves, SEND_BYTES):
                _hash(window)
                stream.send([data for _, data in window], deadline)

        self._request(Op.WRITE, moves, send, deadline)

    def _request(
        self, op: Op, moves: Sequence[RangeCopy], run: Callable[[Stream], None], deadline: float
    ) -> None:
        ranges = [(copy.offset, len(copy.buffer)) for copy in moves]
        extents = [copy.extent or NO_EXTENT for copy in moves] if self._has_capabilities else None

        def request(stream: Stream, spin_s: float) -> _Exchanged:
            del spin_s
            return *pure_python.request(stream, op, ranges, extents, run, deadline), None

        self._exchange(request, deadline)

    def handshake(self, deadline: float) -> None:
        """Connect and send the hello, unless that is done. Errors as ``TcpTransport.read``."""
        if self.is_open:
            return
        self.close()
        try:
            self._connect(deadline)
        except (OSError, RefusedTransferError) as error:
            raise self._explained(error, deadline) from error

    @property
    def has_ended(self) -> bool:
        """Whether it was open, and the server has closed it."""
        return self._stream is not None and not self._stream.is_idle()

    @property
    def _where(self) -> str:
        return f"node {self._segment.node} ({self._segment.address})"

    @property
    def _connect_s(self) -> float:
        return self._stall_s * CONNECT_STALLS

    @property
    def is_open(self) -> bool:
        """Whether it is connected and idle."""
        return self._stream is not None and self._stream.is_idle()

    def read_objects(
        self, namespace: str, rows: list[ReadRow], verify: bool, deadline: float
    ) -> list[bytes | int]:
        """One READ of complete objects. Errors as ``TcpTransport.read``."""
        segment = self._segment

        def read(stream: Stream, spin_s: float) -> _Exchanged:
            tcp_read = steps.tcp_read if stream.is_plain else pure_python.tcp_read
            return tcp_read(
                stream, segment.size, segment.seed, namespace, rows, verify, deadline,
                self._stall_s, spin_s, self._has_capabilities,
            )  # fmt: skip

        outcomes = self._exchange(read, deadline)
        assert outcomes is not None
        return outcomes

    def write_objects(self, namespace: str, rows: list[WriteRow], deadline: float) -> None:
        """One WRITE of complete objects. Errors as ``TcpTransport.write``."""
        segment = self._segment

        def write(stream: Stream, spin_s: float) -> _Exchanged:
            tcp_write = steps.tcp_write if stream.is_plain else pure_python.tcp_write
            return tcp_write(
                stream, segment.size, segment.seed, namespace, rows, deadline, self._stall_s,
                spin_s, self._has_capabilities,
            )  # fmt: skip

        self._exchange(write, deadline)

    def _exchange(
        self, exchange: Callable[[Stream, float], _Exchanged], deadline: float
    ) -> list[bytes | int] | None:
        """Run an exchange on the open connection, or on a new one if that has ended."""
        try:
            stream = self._stream or self._connect(deadline)
            is_new = False
            while True:
                spins = self._gauge.should_poll()
                status, number, quiesced, outcomes = exchange(stream, SPIN_S if spins else 0.0)
                if status != UNASKED:
                    break
                if is_new:
                    raise ConnectionEndedError(0)  # a server that sends bytes before a request
                self.close()
                stream, is_new = self._connect(deadline), True
            self._is_quiesced = bool(quiesced)
            if status == ANSWERED:
                if spins:
                    self._gauge.record(number)
                return outcomes
            if status == REFUSED:
                raise RefusedTransferError(TransferStatus(number) if number in _STATUSES else None)
            if status == TIMED_OUT:
                raise StalledError(0)
            if status == ENDED:
                raise ConnectionEndedError(0)
            raise OSError(number, os.strerror(number))
        except (OSError, RefusedTransferError) as error:
            raise self._explained(error, deadline) from error

    def interrupt(self) -> None:
        self._is_interrupted = True
        if self._stream is not None:
            self._stream.shutdown()

    def close(self) -> None:
        """Close it. Must not be called during a call. Idempotent."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close_after_fork(self) -> None:
        if self._stream is not None:
            self._stream.close_after_fork()
            self._stream = None

    def reset(self) -> None:
        """As ``close``, after a failed call: the kernel sends nothing more of it."""
        if self._stream is not None:
            self._stream.reset()
            self._stream = None

    def _connect(self, deadline: float) -> Stream:
        segment = self._segment
        if self._tls is not None and self._tls.demands and not segment.encrypts:
            raise not_encrypted(segment)
        if segment.data_protocol != DATA_PROTOCOL_VERSION:
            raise self._protocol_error(
                f"speaks data protocol {segment.data_protocol}, this client {DATA_PROTOCOL_VERSION}"
            )
        deadline = min(deadline, uptime() + self._connect_s)
        try:
            sock = resolver.connect(*split_address(segment.address), deadline)
        except InvalidArgumentError as error:
            raise OSError(error.message) from None
        stream = self._begin(sock, deadline)
        self._number = 1 + secrets.randbits(63)  # differs in a child of a fork
        hello = protocol.pack_hello(
            Hello(
                segment.uuid,
                segment.token,
                segment.generation,
                self._client_number,
                self._number,
                segment.holder,
            )
        )
        try:
            stream.send([hello], deadline)
        except ConnectionError:
            pass  # a busy server replies without reading the hello
        pure_python.receive_status(stream, deadline)
        if self._has_capabilities:
            nonce = bytearray(protocol.NONCE_BYTES)
            stream.receive([memoryview(nonce)], deadline)
            stream.send([protocol.prove(segment.token, bytes(nonce), hello)], deadline)
            pure_python.receive_status(stream, deadline)
        return stream

    def _begin(self, sock: socket.socket, deadline: float) -> Stream:
        """Start a stream on ``sock``, which it takes over.

        A node that encrypts gets no byte before it is authenticated.

        Raises:
            PermissionDeniedError: we have no identity, or the node is another one.
            TlsError, RefusedTransferError, OSError
        """
        node = self._segment.node
        encrypts = self._segment.encrypts
        if not encrypts:
            stream = self._stream = Stream(sock, stall_s=self._stall_s)
        elif self._tls is not None:
            stream = self._stream = self._tls.stream(sock, self._stall_s)
        else:
            sock.close()
            raise PermissionDeniedError(
                f"{self._where} encrypts its data port, and this client has no identity",
                advice="Set KVSTORE_AUTH to a certificate file (kvstore auth issue writes it).",
                node=node,
                quiesced=1,
            )
        if self._is_interrupted:
            raise ConnectionAbortedError("the transport was closed")
        try:
            stream.begin(deadline)
        except TlsError as error:
            if error.is_busy:
                raise RefusedTransferError(TransferStatus.BUSY) from None
            raise
        certified = self._segment.certified
        if (
            self._tls is not None
            and encrypts
            and not self._tls.accepts(stream.certificate, node, certified)
        ):
            joined = f": it has joined as {certified}" if certified else ""
            raise PermissionDeniedError(
                f"{self._where} has the identity of another node{joined}",
                advice="Check --advertise, and the names that its identity may have as a node: "
                "kvstore auth issue --role node --node 'PATTERN' NAME. Restart a "
                "node after its identity has changed.",
                node=node,
                quiesced=1,
            )
        return stream

    def _explained(self, error: OSError | RefusedTransferError, deadline: float) -> KVStoreError:
        explained = self._explain(error, deadline)
        if not explained.fields["quiesced"]:
            explained.fields["connection"] = self._number
        return explained

    def _explain(self, error: OSError | RefusedTransferError, deadline: float) -> KVStoreError:
        segment, where = self._segment, self._where
        quiesced = int(self._is_quiesced)
        if isinstance(error, TimeoutError) and uptime() >= deadline - LATE_S:
            return deadline_exceeded(segment, quiesced=quiesced)
        if isinstance(error, TlsError) and error.is_plain:
            advice = "Start it with --data-encryption tls, or correct its address."
            return self._unreachable("does not speak TLS on its data port", advice)
        if isinstance(error, TlsError):
            return PermissionDeniedError(
                f"{where} and this client do not accept each other's identity: {error.strerror}",
                advice="Compare both clocks; kvstore auth show FILE shows identity and problems of "
                "a certificate file.",
                node=segment.node,
                quiesced=quiesced,
            )
        if not isinstance(error, RefusedTransferError):
            silent = isinstance(error, TimeoutError)
            advice = _NOT_ACCEPTED if self._stream is None else _NOT_MOVING
            unreachable = self._unreachable(self._failed(error), advice if silent else "")
            unreachable.fields["silent_ms"] = round(self._stall_s * 1000) if silent else 0
            return unreachable
        if error.status is TransferStatus.UNMOUNTED:
            return segment_unmounted(segment, quiesced=quiesced)
        if error.status not in _REFUSALS:
            return self._protocol_error("does not speak this data protocol")
        kind, what, advice = _REFUSALS[error.status]
        return kind(f"{where} {what}", advice=advice, node=segment.node, quiesced=quiesced)

    def _unreachable(self, what: str, advice: str) -> NodeUnreachableError:
        segment, quiesced = self._segment, int(self._is_quiesced)
        return NodeUnreachableError(
            f"{self._where} {what}",
            advice=advice,
            node=segment.node, address=segment.address, transport="tcp", quiesced=quiesced,
        )  # fmt: skip

    def _protocol_error(self, what: str) -> NodeUnreachableError:
        return self._unreachable(what, "Run the same release on all hosts, and check the address.")

    def _failed(self, error: OSError) -> str:
        """Return what the node did, as the end of a sentence."""
        if self._stream is None:
            if isinstance(error, TimeoutError):
                return f"did not accept a tcp connection within {self._connect_s:.1f} s"
            if isinstance(error, ConnectionRefusedError):
                return "refused the tcp connection"
            return f"cannot be connected to over tcp ({error.strerror or error})"
        if isinstance(error, TimeoutError):
            return f"moved no byte over tcp for {self._stall_s:.1f} s"
        if isinstance(error, ConnectionEndedError):
            return "ended the tcp connection"
        if error.errno == errno.EBADMSG:
            return "sent bytes that do not decrypt: they were changed on the network"
        return f"broke the tcp connection ({error.strerror or error})"


def _hash(window: list[tuple[RangeCopy, memoryview]]) -> None:
    for copy, data in window:
        if copy.hasher is not None:
            feed(copy.hasher, data)


def _windows(
    moves: Sequence[RangeCopy], bytes_max: int
) -> Iterator[list[tuple[RangeCopy, memoryview]]]:
    """Yield the chunks of one system call, each with its range."""
    lengths = [len(copy.buffer) for copy in moves]
    for window in windows(lengths, bytes_max, WINDOW_BUFFERS):
        yield [(moves[row], moves[row].buffer[at : at + size]) for row, at, size in window]
