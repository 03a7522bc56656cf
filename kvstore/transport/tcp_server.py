"""A node's data server: it accepts connections to its segments, bounds them and can end them all.

One thread accepts and one thread per connection serves (``tcp_connection``): blocking system calls
without the GIL, so that one client's long ``sendfile`` never delays another's small read.
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
"""One thread and one descriptor each: 256 clients with 4 streams each. With identities one of them
has at most half."""

STALL_S: Final = 10.0
"""How long a peer may take over one piece within a request, or over its hello."""

IDLE_S: Final = 600.0
"""How long a connection may wait for its next request."""

CUT_S: Final = 1.0
"""How long ``close_writers`` lets reads be answered."""

STOP_S: Final = 5.0
"""How long ``stop``, ``fence`` and ``close_writers`` wait for threads, which take one system
call."""

_log = logging.getLogger(__name__)


class DataServer:
    """Serves ``segments`` on one port.

    Life cycle: make, ``start``, ``fence`` whenever the node joins a master anew, ``stop``. The
    segments stay the caller's and outlive the server. Threads: any may call.
    """

    def __init__(
        self,
        segments: Iterable[Medium],
        host: str = "0.0.0.0",
        port: int = 0,
        *,
        connections_max: int = CONNECTIONS_MAX,
        stall_s: float = STALL_S,
        idle_s: float = IDLE_S,
        capabilities: bool = False,
        tls: NodeTls | None = None,
    ) -> None:
        """
        Args:
            capabilities: whether clients show capabilities, instead of the segments' tokens.
            tls: encrypts all connections, and says who may have one; None: without encryption.
        """
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
        """Where it listens, after ``start``."""
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
        """How often each holder was refused a connection, since it had as many as were free."""
        return self._connections.refusals()

    def fence(self) -> None:
        """Close all present connections; returns when none of them can touch a segment any more.

        For a node that joins a master anew: after ``Medium.bump_generation``, so that no old
        client comes back in between, and before it tells the master.

        Raises:
            InternalError: a thread did not end; the node must not join.
        """
        self._context.reset_wipe_seqs()
        _end(list(self._connections))

    def revoke_writes(self, uuid: bytes, offsets: Sequence[int], order: int) -> int:
        """Ends the right to write to these extents that older capabilities give, and the writes
        under way. Returns how many, when none of them can touch the segment any more. Without
        capabilities it does nothing.

        A client that keeps the rules has no such write under way: its put has ended, or
            ``close_writers`` has
        ended the connection.

        Args:
            uuid: of the segment.
            offsets: where the extents start.
            order: the number of the master's order to wipe them.

        Raises:
            InternalError: a thread did not end.
        """
        orders = self._context.wipe_seqs.get(uuid)
        if orders is None or not offsets:
            return 0
        steps.call_back(orders, offsets, order)
        wanted = frozenset(offsets)
        chosen = [
            connection
            for connection in self._connections
            if connection.uuid == uuid and connection.writes_to(wanted)
        ]
        _end(chosen)
        return len(chosen)

    def reject_holders(self, holders: Iterable[int]) -> int:
        """Refuses the proofs of these holders, and of no others, from now on; ends their
        connections. Returns how many."""
        refused = frozenset(holders)
        if refused == self._context.rejected_holders:
            return 0
        self._context.rejected_holders = refused
        chosen = [each for each in self._connections if each.holder in refused]
        for connection in chosen:
            connection.close()
        return len(chosen)

    def close_writers(self, writers: Iterable[tuple[int, int]]) -> int:
        """Closes the connections that may still carry bytes of abandoned puts. Returns how many,
        when none of them can touch a segment any more. The others are not disturbed.

        A client sends nothing of a put after it has given it up, or after the put's deadline. So
        what may still land after that is on connections that have been greeted by then.

        Args:
            writers: (client, connection) of each, by the numbers in its hello; connection 0: all of
                the client's, client 0: all connections. Of a client's number the lower half counts:
                the upper half is the master's, for clients with an identity.

        Raises:
            InternalError: a thread did not end.
        """
        wanted = {(client & LOWER_HALF, number) for client, number in writers}
        chosen = [
            connection
            for connection in self._connections
            if not wanted.isdisjoint(
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
        """Stop listening, close all connections, join all threads. Idempotent.

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
            except Exception as error:  # noqa: BLE001  # the only thread that accepts goes on
                # Out of descriptors, memory or threads, or a peer that left at once: not final.
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
