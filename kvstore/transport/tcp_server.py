"""A node's data server: one thread accepts, and one per connection serves without the GIL."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.errors import AddressInUseError, BusyError, InternalError, StartupError
from kvstore.memory.segment import OwnedSegment
from kvstore.native import steps
from kvstore.runtime.addresses import join_address
from kvstore.runtime.clock import uptime
from kvstore.runtime.limiter import Limiter
from kvstore.runtime.listeners import listen
from kvstore.runtime.stream import Stream
from kvstore.runtime.tcp_protocol import LOWER_HALF, TransferStatus, pack_status
from kvstore.security.data_port_tls import NodeTls
from kvstore.security.tls_stream import BUSY
from kvstore.transport.tcp_connection import (
    DataServerCounters,
    ServerConnection,
    ServerContext,
)

CONNECTIONS_MAX: Final = 1024
"""256 clients with 4 streams. One thread and file descriptor each; half for one identity."""

STALL_S: Final = 10.0
"""Maximum time of a peer for one chunk within a request, or for its hello."""

IDLE_S: Final = 600.0
"""Maximum wait of a connection for its next request."""

CUT_S: Final = 1.0
"""Time for ``close_writers`` to complete reads."""

STOP_S: Final = 5.0
"""Maximum wait of ``stop``, ``fence`` and ``close_writers`` for threads."""

_log = logging.getLogger(__name__)


class DataServer:
    """Serves the caller's segments on one port. Threads: any."""

    def __init__(
        self,
        segments: Iterable[OwnedSegment],
        host: str = "0.0.0.0",
        port: int = 0,
        *,
        connections_max: int = CONNECTIONS_MAX,
        stall_s: float = STALL_S,
        idle_s: float = IDLE_S,
        capabilities: bool = False,
        tls: NodeTls | None = None,
    ) -> None:
        """``capabilities``: required instead of tokens. ``tls``: None: no encryption."""
        self._address = (host, port)
        self._connections = Limiter[ServerConnection]("data", connections_max)
        self._context = ServerContext(
            segments={segment.uuid: segment for segment in segments},
            stall_s=stall_s,
            idle_s=idle_s,
            capabilities=capabilities,
            tls=tls,
            limiter=self._connections,
        )
        self._context.reset_wipe_seqs()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Listen and serve. Raises AddressInUseError, StartupError."""
        host, port = self._address
        try:
            self._listener = listen(host, port)
        except OSError as error:
            kind = AddressInUseError if error.errno == errno.EADDRINUSE else StartupError
            raise kind(
                f"the data server cannot listen on {join_address(host, port)}: "
                f"{error.strerror or error}",
                advice="Choose another address, or port 0 for any free one.",
                host=host,
                port=port,
            ) from error
        self._acceptor = threading.Thread(
            target=self._accept, args=(self._listener,), name="kvstore-data-accept", daemon=True
        )
        self._acceptor.start()

    @property
    def port(self) -> int:
        assert self._listener is not None, "start() first"
        return int(self._listener.getsockname()[1])

    @property
    def takes_capabilities(self) -> bool:
        return self._context.capabilities

    @property
    def encrypts(self) -> bool:
        return self._context.tls is not None

    @property
    def connections(self) -> int:
        return len(self._connections)

    def counters(self) -> DataServerCounters:
        return self._context.snapshot()

    def identity_limit_refusals(self) -> dict[str, int]:
        """Return the connections refused per holder because of its limit."""
        return self._connections.refusals()

    def fence(self) -> None:
        """Close all connections; returns when none of them can touch a segment any more.

        For a node that joins a master again: after ``SegmentUsage.bump_generation``, so that no old
        client returns in between, and before it notifies the master.

        Raises:
            InternalError: a thread did not end; the node must not join.
        """
        self._context.reset_wipe_seqs()
        _end(list(self._connections))

    def revoke_writes(self, uuid: bytes, offsets: Sequence[int], order: int) -> int:
        """Revoke older write capabilities for these extents, and end the writes in progress.

        Returns their number, when none of them can touch the segment any more. Does nothing without
        capabilities. A conforming client has no such write in progress: its put has ended, or
        ``close_writers`` has closed the connection.

        Args:
            uuid: of the segment.
            offsets: of the extents.
            order: the wipe sequence number.

        Raises:
            InternalError: a thread did not end.
        """
        orders = self._context.wipe_seqs.get(uuid)
        if orders is None or not offsets:
            return 0
        steps.call_back(orders, offsets, order)
        selected = frozenset(offsets)
        chosen = [
            connection
            for connection in self._connections
            if connection.uuid == uuid and connection.writes_to(selected)
        ]
        _end(chosen)
        return len(chosen)

    def reject_holders(self, holders: Iterable[int]) -> int:
        """Reject the proofs of exactly these holders; returns the number of closed connections."""
        refused = frozenset(holders)
        if refused == self._context.rejected_holders:
            return 0
        self._context.rejected_holders = refused
        chosen = [each for each in self._connections if each.holder in refused]
        for connection in chosen:
            connection.close()
        return len(chosen)

    def close_writers(self, writers: Iterable[tuple[int, int]]) -> int:
        """Close connections that may still carry bytes of abandoned puts.

        Returns their number, when none of them can touch a segment any more. A client sends nothing
        of a put after it has abandoned it, or after the put's deadline; later bytes can only arrive
        on connections that were open by then.

        Args:
            writers: (client, connection) of each, by the numbers in its hello; connection 0: all of
                the client's, client 0: all connections. Only the lower half of a client's number
                counts: the master sets the upper half, for clients with an identity.

        Raises:
            InternalError: a thread did not end.
        """
        selected = {(client & LOWER_HALF, number) for client, number in writers}
        chosen = [
            connection
            for connection in self._connections
            if not selected.isdisjoint(
                (
                    (connection.client & LOWER_HALF, connection.number),
                    (connection.client & LOWER_HALF, 0),
                    (0, 0),
                )
            )
        ]
        for connection in chosen:
            connection.close(gently=True)
        give_up = uptime() + CUT_S
        _end([each for each in chosen if not each.join(max(0.0, give_up - uptime()))])
        return len(chosen)

    def stop(self) -> None:
        """Stop listening, close connections, join threads. Idempotent. Raises InternalError."""
        self._stopping.set()
        if self._listener is not None and self._acceptor is not None:
            with contextlib.suppress(OSError):  # stopped before
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._acceptor.join(STOP_S)
            self._listener.close()
        self.fence()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                self._admit(listener.accept()[0])
            except Exception as error:  # noqa: BLE001  # the only accepting thread continues
                # Out of file descriptors, memory or threads, or a departed peer: not final.
                if not self._stopping.wait(0.1):
                    _log.warning("event=data_accept_failed error=%r", error)

    def _admit(self, sock: socket.socket) -> None:
        tls = self._context.tls
        stream = Stream(sock) if tls is None else tls.stream(sock)
        connection = ServerConnection(stream, self._context)
        self._context.count(connections=1)
        try:
            self._connections.wait(connection, connection.close)
        except BusyError:
            self._context.count(refused_busy=1)
            self._refuse(stream)
            return
        try:
            connection.start()
        except BaseException:
            self._connections.release(connection)
            stream.close()
            raise

    def _refuse(self, stream: Stream) -> None:
        with contextlib.suppress(OSError):
            # Fits the send buffer of a new connection, so this does not wait, unlike a handshake.
            busy = pack_status(TransferStatus.BUSY) if stream.is_plain else BUSY
            Stream.send(stream, [busy], uptime() + 0.1)
        stream.close()


def _end(connections: Sequence[ServerConnection]) -> None:
    """Close connections. Raises InternalError: a thread did not end."""
    for connection in connections:
        connection.close()
    give_up = uptime() + STOP_S
    for connection in connections:
        if not connection.join(max(0.0, give_up - uptime())):
            raise InternalError("a data connection did not end", connections=len(connections))
