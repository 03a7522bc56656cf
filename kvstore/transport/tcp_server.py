"""A node's data server: it accepts, limits and closes connections to its segments.

One thread accepts, and one per connection serves (``tcp_connection``) by blocking system calls
without the GIL, so that a long ``sendfile`` never delays another client's small read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.errors import AddressInUseError, BusyError, InternalError, StartupError
from kvstore.memory.medium import Medium
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
"""256 clients with 4 streams each. One thread and file descriptor each; one identity has at most
half."""

STALL_S: Final = 10.0
"""How long a peer may take for one chunk of a request, or for its hello."""

IDLE_S: Final = 600.0
"""How long a connection may wait for its next request."""

CUT_S: Final = 1.0
"""How long ``close_writers`` waits for replies to reads."""

STOP_S: Final = 5.0
"""How long ``stop``, ``fence`` and ``close_writers`` wait for a system call of each thread."""

_log = logging.getLogger(__name__)


class DataServer:
    """Serves ``segments`` on one port.

    Life cycle: create, ``start``, ``fence`` whenever the node joins again, ``stop``. The caller
    closes the segments afterwards. Threads: any may call.
    """

    def __init__(
        self, segments: Iterable[Medium], host: str = "0.0.0.0", port: int = 0, *,
        connections_max: int = CONNECTIONS_MAX, stall_s: float = STALL_S, idle_s: float = IDLE_S,
        capabilities: bool = False, tls: NodeTls | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            capabilities: whether clients present capabilities, instead of the segments' tokens.
            tls: encrypts and authenticates all connections; None: no encryption.
        """
        self._address = (host, port)
        self._connections = Limiter[ServerConnection]("data", connections_max)
        self._context = ServerContext(
            segments={segment.uuid: segment for segment in segments}, stall_s=stall_s,
            idle_s=idle_s, capabilities=capabilities, tls=tls, limiter=self._connections,
        )  # fmt: skip
        self._context.reset_wipe_seqs()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Listen and serve.

        Raises:
            AddressInUseError: another process listens on that port.
            StartupError: the address cannot be used.
        """
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
        """The port, after ``start``."""
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

    def fence(self) -> None:
        """Closes all connections; returns when none of them can access a segment any more.

        A node that joins again calls it after ``Medium.bump_generation``, so that no client
        reconnects in between, and before its join.

        Raises:
            InternalError: a thread did not end; the node must not join.
        """
        self._context.reset_wipe_seqs()
        _end(list(self._connections))

    def revoke_writes(self, uuid: bytes, offsets: Sequence[int], wipe_seq: int) -> int:
        """Revokes older capabilities to write to these extents, and closes connections that do.
        Returns how many, when none of them can access the segment any more. A correct client has no
        such connection. Without capabilities it does nothing.

        Args:
            uuid: of the segment.
            offsets: of the extents.
            wipe_seq: of the wipe request.

        Raises:
            InternalError: a thread did not end.
        """
        wipe_seqs = self._context.wipe_seqs.get(uuid)
        if wipe_seqs is None or not offsets:
            return 0
        steps.revoke_writes(wipe_seqs, offsets, wipe_seq)
        extents = frozenset(offsets)
        chosen = [
            connection for connection in self._connections
            if connection.uuid == uuid and connection.writes_to(extents)
        ]  # fmt: skip
        _end(chosen)
        return len(chosen)

    def close_writers(self, writers: Iterable[tuple[int, int]]) -> int:
        """Closes the connections that may still carry bytes of abandoned puts. Returns how many,
        when none of them can access a segment any more.

        A client sends no bytes of a put after it has abandoned it, or after the deadline. So late
        bytes are on connections whose handshake was before.

        Args:
            writers: (client, connection) of each, by the numbers in its hello; connection 0: all of
                the client's, client 0: all connections. The lower half of a client's number counts:
                the master uses the upper half, for identities.

        Raises:
            InternalError: a thread did not end.
        """
        keys = {(client & LOWER_HALF, number) for client, number in writers}

        def may_write(connection: ServerConnection) -> bool:
            client = connection.client & LOWER_HALF
            return not keys.isdisjoint(((client, connection.number), (client, 0), (0, 0)))

        chosen = [connection for connection in self._connections if may_write(connection)]
        for connection in chosen:
            connection.close(gently=True)
        give_up = uptime() + CUT_S
        _end([each for each in chosen if not each.join(max(0.0, give_up - uptime()))])
        return len(chosen)

    def stop(self) -> None:
        """Stops listening, closes all connections, joins all threads. Idempotent.

        Raises:
            InternalError: as ``fence``.
        """
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
                # No file descriptors, memory or threads, or a peer that left: not permanent.
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
            # Fits the send buffer of a new connection, so this does not wait. A handshake would.
            busy = pack_status(TransferStatus.BUSY) if stream.is_plain else BUSY
            Stream.send(stream, [busy], uptime() + 0.1)
        stream.close()


def _end(connections: Sequence[ServerConnection]) -> None:
    """Raises InternalError: a thread did not end."""
    for connection in connections:
        connection.close()
    give_up = uptime() + STOP_S
    for connection in connections:
        if not connection.join(max(0.0, give_up - uptime())):
            raise InternalError("a data connection did not end", connections=len(connections))
