"""One connection of a data server: hello, then requests, until one end closes it.

The server does not trust its peer: it makes every check before it transfers a byte of a segment,
and limits every wait. A peer that breaks a rule is counted, and gets the reason before the close.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvstore.errors import BusyError
from kvstore.memory.medium import Medium
from kvstore.native import steps
from kvstore.native.interface import REFUSED, TIMED_OUT, WIPE_TABLE_BYTES, WRITES_BYTES
from kvstore.native.pure_python import CapabilityVerifier, serve_ranges
from kvstore.runtime import tcp_protocol as protocol
from kvstore.runtime.clock import uptime
from kvstore.runtime.limiter import Limiter
from kvstore.runtime.stream import StalledError, Stream
from kvstore.runtime.tcp_protocol import Hello, RefusedTransferError, TransferStatus
from kvstore.security.data_port_tls import NodeTls
from kvstore.security.holder_ids import shown
from kvstore.security.tls_stream import TlsError

_READ_BYTES: Final = 256 << 10
_LINGER_BYTES: Final = 64 << 20
_LINGER_S: Final = 2.0
"""Bytes of a rejected write that are dropped, and for how long: unread data at ``close`` would
reset the connection, and the sender would lose the status."""

_log = logging.getLogger(__name__)

BUSY: Final = TransferStatus.BUSY


@dataclass(slots=True)
class DataServerCounters:
    """Counters since the start of the server."""

    connections: int = 0
    """Accepted, including rejected ones."""
    refused_busy: int = 0
    refused_hellos: int = 0
    """Another protocol, a wrong token or proof, an invalid certificate, an unknown segment or
    generation, or no hello in time."""
    bad_requests: int = 0
    """Another protocol, ranges outside the segment, or an older generation."""
    refused_capabilities: int = 0
    """Requests with a range without a valid capability."""
    stalls: int = 0
    """Connections closed because the peer stalled within a request."""
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0


@dataclass(slots=True)
class ServerContext:
    segments: Mapping[bytes, Medium]
    """By uuid; does not change."""
    stall_s: float
    idle_s: float
    limiter: Limiter[ServerConnection]
    """All connections; those before the handshake wait."""
    capabilities: bool = False
    tls: NodeTls | None = None
    """None: connections are not encrypted."""
    wipe_seqs: dict[bytes, memoryview] = field(default_factory=dict)
    """By uuid, for ``revoke_writes``; empty without capabilities. Replaced by a fence."""
    moved: bytearray = field(default_factory=lambda: bytearray(32))
    """As ``counts`` of ``pure_python.serve``."""
    _counters: DataServerCounters = field(default_factory=DataServerCounters)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def reset_wipe_seqs(self) -> None:
        """Starts a mount without wipe requests, of which no capabilities exist yet."""
        if self.capabilities:
            self.wipe_seqs = {
                uuid: memoryview(mmap.mmap(-1, WIPE_TABLE_BYTES)) for uuid in self.segments
            }

    def count(self, **amounts: int) -> None:
        with self._counting:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def snapshot(self) -> DataServerCounters:
        reads, read_bytes, writes, written_bytes = struct.unpack("=4Q", self.moved)
        with self._counting:
            return replace(
                self._counters, reads=reads, read_bytes=read_bytes, writes=writes,
                written_bytes=written_bytes,
            )  # fmt: skip


class ServerConnection:
    """Serves a connected stream in a thread. Any other thread may ``close`` and ``join`` it."""

    def __init__(self, stream: Stream, context: ServerContext) -> None:
        self.client = self.number = 0
        """The numbers of client and connection, after the handshake."""
        self.uuid = b""
        """Of its segment, after the handshake."""
        self._stream = stream
        self._context = context
        self._cut = bytearray(1)  # not 0: end it
        self._asked = memoryview(b"")
        self._thread = threading.Thread(target=self._run, name="kvstore-data", daemon=True)

    def start(self) -> None:
        """Raises RuntimeError: the system has no more threads."""
        self._thread.start()

    def close(self, *, gently: bool = False) -> None:
        """Closes the connection. Only bytes that are being received can still land in a segment.
        ``gently``: completes the reply to a read."""
        self._cut[0] = 1
        self._stream.shutdown(socket.SHUT_RD if gently else socket.SHUT_RDWR)

    def writes_to(self, offsets: frozenset[int]) -> bool:
        """Whether it writes to one of these extents, with capabilities."""
        if not self._asked:
            return False
        words = self._asked.cast("Q")
        return not offsets.isdisjoint(words[1 : 1 + words[0]].tolist())

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within that time."""
        if self._thread.ident is None:  # not started: it will find itself closed
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except OSError:
            pass  # the peer, or ``close``, has ended the connection
        finally:
            self._stream.close()
            self._context.limiter.release(self)

    def _serve(self) -> None:
        try:
            segment, verifier = self._handshake()
        except (RefusedTransferError, OSError) as error:
            is_busy = isinstance(error, RefusedTransferError) and error.status is BUSY
            self._context.count(refused_busy=is_busy, refused_hellos=not is_busy)
            if isinstance(error, RefusedTransferError):
                self._refuse("hello", error)
            elif isinstance(error, TlsError):
                reason, peer = error.strerror, self._stream.peer
                _log.warning("event=data_refused what=tls reason=%s peer=%s", reason, peer)
            return
        self._reply(TransferStatus.OK)
        try:
            self._serve_requests(segment, verifier)
        except StalledError:
            self._context.count(stalls=1)
        except RefusedTransferError as refused:
            if refused.status is TransferStatus.NOT_ALLOWED:
                self._context.count(refused_capabilities=1)
            else:
                self._context.count(bad_requests=1)
            self._refuse("request", refused)
            self._linger()

    def _serve_requests(self, segment: Medium, verifier: CapabilityVerifier) -> None:
        """Raises StalledError or RefusedTransferError."""
        context, stream, generation = self._context, self._stream, verifier.generation
        bounds = context.moved, context.stall_s, context.idle_s
        if segment.ranges is None and stream.is_plain:
            how, number = steps.serve(
                stream, segment.fd, segment.memory, generation, self._cut, *bounds,
                verifier.key, verifier.holder, verifier.wipe_seqs, verifier.writes_in_progress,
            )  # fmt: skip
        else:  # not in memory, or encrypted: the compiled primitives cannot serve it
            how, number = serve_ranges(
                stream, segment.ranges, segment.size, segment.memory, generation, self._cut,
                *bounds, verifier if verifier.key else None,
            )  # fmt: skip
        if how == TIMED_OUT:
            raise StalledError(0)
        if how == REFUSED:
            raise RefusedTransferError(TransferStatus(number))

    def _handshake(self) -> tuple[Medium, CapabilityVerifier]:
        """The segment, and the verifier of the peer's capabilities; without a key: the peer has the
        token, and needs none."""
        self._stream.begin(self._next_deadline())
        tls = self._context.tls
        if tls is not None and not tls.accepts(self._stream.certificate):
            raise RefusedTransferError(TransferStatus.DENIED)
        raw = bytearray(protocol.HELLO_BYTES)
        self._stream.receive([memoryview(raw)], self._next_deadline())
        hello = protocol.unpack_hello(raw)
        wanted = self._context.capabilities
        if hello is None or (hello.holder and not wanted):
            raise RefusedTransferError(TransferStatus.BAD_REQUEST)
        if not hello.holder and wanted:
            raise RefusedTransferError(TransferStatus.DENIED)
        segment = self._context.segments.get(hello.uuid)
        if segment is None:
            raise RefusedTransferError(TransferStatus.UNMOUNTED)
        if hello.holder:
            self._check_proof(segment, hello, bytes(raw))
        elif not hmac.compare_digest(hello.token, segment.token):
            raise RefusedTransferError(TransferStatus.DENIED)
        if hello.generation != segment.generation:
            raise RefusedTransferError(TransferStatus.UNMOUNTED)
        self.client, self.number, self.uuid = hello.client, hello.connection, hello.uuid
        try:
            self._context.limiter.keep(self, shown(hello.holder) if hello.holder else "")
        except BusyError:
            raise RefusedTransferError(BUSY) from None
        nothing = memoryview(bytearray())
        if not hello.holder:
            return segment, CapabilityVerifier(
                b"", hello.generation, 0, steps.siphash, nothing, nothing
            )
        self._asked = memoryview(bytearray(WRITES_BYTES))
        return segment, CapabilityVerifier(
            segment.token, hello.generation, hello.holder, steps.siphash,
            self._context.wipe_seqs[hello.uuid], self._asked,
        )  # fmt: skip

    def _check_proof(self, segment: Medium, hello: Hello, raw: bytes) -> None:
        """Verifies that the peer is the holder in its hello. Raises RefusedTransferError: it lacks
        the holder's key or certificate."""
        tls = self._context.tls
        if tls is not None and not tls.is_holder(self._stream.certificate, hello.holder):
            raise RefusedTransferError(TransferStatus.NOT_ALLOWED)  # or a renewed certificate
        key = protocol.holder_key(segment.token, segment.uuid, hello.generation, hello.holder)
        nonce = secrets.token_bytes(protocol.NONCE_BYTES)
        proof = bytearray(protocol.PROOF_BYTES)
        self._stream.send([protocol.pack_status(TransferStatus.OK), nonce], self._next_deadline())
        self._stream.receive([memoryview(proof)], self._next_deadline())
        if not hmac.compare_digest(proof, protocol.prove(key, nonce, raw)):
            raise RefusedTransferError(TransferStatus.DENIED)

    def _reply(self, status: TransferStatus) -> None:
        self._stream.send([protocol.pack_status(status)], self._next_deadline())

    def _refuse(self, what: str, refused: RefusedTransferError) -> None:
        status = refused.status
        assert status is not None
        # After a takeover, connections of an older mount are normal; other refusals are not.
        level = logging.DEBUG if status is TransferStatus.UNMOUNTED else logging.WARNING
        _log.log(
            level,
            "event=data_refused what=%s status=%s peer=%s",
            what,
            status.name,
            self._stream.peer,
        )
        self._reply(status)

    def _linger(self) -> None:
        self._stream.shutdown(socket.SHUT_WR)
        scratch = memoryview(bytearray(_READ_BYTES))
        deadline = uptime() + _LINGER_S
        for _ in range(_LINGER_BYTES // _READ_BYTES):
            self._stream.receive([scratch], deadline)

    def _next_deadline(self) -> float:
        return uptime() + self._context.stall_s
