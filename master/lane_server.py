"""The lane's server: calls and nodes' streams as frames, in the master's loop. It listens on TCP
and on an abstract Unix socket.

A misbehaving client costs the master a bounded amount, and other clients nothing: connections are
counted, the first frame must come soon and must carry the token, each frame must be complete soon
after it has begun, a connection whose call waits for its reply is read no further, and a client
that does not read its replies is cut.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from kvstore.errors import (
    BusyError,
    KVStoreError,
    PermissionDeniedError,
    ProtocolError,
    UnavailableError,
    without_frames,
)
from kvstore.limits import REQUEST_BYTES_MAX
from kvstore.master.authorizer import Access
from kvstore.master.dispatcher import Dispatcher, logger
from kvstore.master.node_connection import NodeConnection
from kvstore.master.open_access import LOCAL, OpenAccess
from kvstore.master.state.traffic import Caller
from kvstore.runtime.limiter import Limiter
from kvstore.runtime.listeners import listen
from kvstore.runtime.resolver import limit_silence
from kvstore.runtime.tasks import start_task
from kvstore.security.tls_stream import TlsError
from kvstore.wire import frames
from kvstore.wire.frames import CALL, ERROR, NODE_MESSAGE, REPLY, FrameReader, frame
from kvstore.wire.messages import BY_WIRE_NAME
from kvstore.wire.status import encode_error

HELLO_BYTES_MAX = 256
"""Bytes that the master buffers, at most, for a client without a valid token."""

HANDSHAKES_MAX = 128
"""Handshakes of TLS at once; the oldest makes room for one more."""

ACCEPT_PAUSE_S = 0.2
"""Pause after a connection that could not be accepted."""

CLOSE_S = 1.0
"""How long a client may take to agree to the end of TLS."""

FRAMES_PER_TURN = 64
"""Calls of one connection that are answered before other connections get their turn: well under a
millisecond, if they are small."""

REPLY_BYTES_PER_WRITE = 64 << 10
"""Replies to calls that arrived together are sent in one write, up to about so many bytes."""

WRITE_BYTES_HIGH = 64 << 10
"""Bytes of unread replies at which the lane stops reading that client's calls."""

ARRIVING_BYTES_MAX = 64 << 20
"""Bytes of buffers in which frames arrive, of those that have outgrown their connection's first
buffer. If there are more, the connection is closed whose frame began first."""

UNREAD_BYTES_MAX = 32 << 20
"""Bytes of unread replies of all clients that have ``WRITE_BYTES_HIGH``. If there are more, the
client is cut that has not read for longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Bounds of the lane."""

    connections_max: int = 1024
    limited_by: str = "its settings"
    """What determines ``connections_max``."""
    hello_timeout_s: float = 5.0
    frame_timeout_s: float = 5.0
    """How long a frame may take from its first byte to its last."""
    stall_timeout_s: float = 10.0
    """How long a client may leave replies unread once ``WRITE_BYTES_HIGH`` are waiting."""


@dataclass(slots=True)
class LaneStats:
    """Counters of the lane since the master's start."""

    accepted: int = 0
    rejected: int = 0
    """Connections that sent no good HELLO, were over the bound, or broke the protocol."""
    stalled: int = 0
    """Clients that were cut because they did not read."""


class LaneServer:
    """Serves the lane between ``bind`` and ``stop``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        token: bytes,
        settings: LaneSettings | None = None,
        access: Access | None = None,
    ) -> None:
        """``access``: authenticates the peers; by default none."""
        self.settings = settings or LaneSettings()
        self.stats = LaneStats()
        self.token = token
        self.port = 0
        """TCP port; 0: not bound."""
        self.unix = ""
        """Name in the abstract namespace; empty: none."""
        self.access = access or OpenAccess()
        self.connections = Limiter[_LaneProtocol]("lane", self.settings.connections_max)
        """Those that have sent no good HELLO so far wait."""
        self.arriving = Limiter[_LaneProtocol]("arriving frames", ARRIVING_BYTES_MAX)
        self.unread = Limiter[_LaneProtocol]("unread replies", UNREAD_BYTES_MAX)
        self.dispatcher = dispatcher
        self._servers: list[asyncio.Server] = []
        self._listener: socket.socket | None = None
        """Of connections by TCP, with authentication."""
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes = Limiter[asyncio.Task[None]]("handshakes", HANDSHAKES_MAX)

    async def bind(self, host: str, port: int, *, unix: bool = True) -> None:
        """Listens on ``host:port`` (0: any) and, where ``unix``, on a fresh abstract Unix socket.

        Raises:
            OSError: the port or the socket cannot be had. ``stop`` gives back what was bound.
        """
        loop = asyncio.get_running_loop()
        listener = await asyncio.to_thread(listen, host, port)
        self.port = listener.getsockname()[1]
        if self.access.lane_tls is None:
            server = await loop.create_server(self._connection, sock=listener, start_serving=False)
            self._servers.append(server)
        else:
            self._listener = listener
            listener.setblocking(False)
        if unix:
            # The random name prevents connections by accident; the token keeps unauthenticated
            # peers out.
            self.unix = f"kvstore-lane-{self.port}-{secrets.token_hex(8)}"
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(b"\0" + self.unix.encode())
            self._servers.append(
                await loop.create_unix_server(self._connection, sock=sock, start_serving=False)
            )

    async def start(self) -> None:
        for server in self._servers:
            await server.start_serving()
        if self._listener is not None:
            self._accepting = start_task("accept", self._accept(self._listener))

    async def stop(self) -> None:
        """Stops listening and cuts every connection. Idempotent."""
        for server in self._servers:
            server.close()
        tasks = [*self._handshakes, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        self._listener = self._accepting = None
        self.drop_connections()
        await asyncio.sleep(0)  # lets ``connection_lost`` of each connection run
        self._servers.clear()
        self.port, self.unix = 0, ""

    def drop_connections(self) -> None:
        """Cuts every connection, and goes on listening."""
        for connection in self.connections:
            connection.close()

    async def _accept(self, listener: socket.socket) -> None:
        """Accepts connections that begin with TLS."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # most likely no descriptors are left
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = loop.create_task(self._handshake(sock))
            self._handshakes.wait(task, task.cancel)
            task.add_done_callback(self._handshakes.release)
            await asyncio.sleep(0)  # accepting does not wait while there is a queue

    async def _handshake(self, sock: socket.socket) -> None:
        """Completes the TLS handshake with a peer, and serves the peer from then on."""
        access = self.access
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection, sock, ssl=access.lane_tls,
                ssl_handshake_timeout=self.settings.hello_timeout_s, ssl_shutdown_timeout=CLOSE_S,
            )  # fmt: skip
        except (OSError, asyncio.CancelledError) as error:  # cancelled: we stop, or are too many
            # A cycle of the error, frames and our task would never be freed, since the collector
            # does not see what is frozen. Nothing of the task is left that could be cancelled.
            without_frames(error)
            told = TlsError(error) if isinstance(error, ssl.SSLError) else error
            why = getattr(told, "strerror", "") or str(told) or "it was ended"
            self.stats.rejected += 1
            access.log_refusal(f"a connection to the lane: {why}")

    def _connection(self) -> _LaneProtocol:
        return _LaneProtocol(self)


class _LaneProtocol(asyncio.BufferedProtocol):
    """The connection of one client. Threads: the loop's."""

    def __init__(self, server: LaneServer) -> None:
        self._server = server
        self._dispatch = server.dispatcher.dispatch
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Task[bytes] | asyncio.Task[None] | None = None
        """The call that waits for its reply, or the stream that has not taken its message; frames
        that come after it are not looked at."""
        self._node: NodeConnection | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._greeted = False
        self._address = LOCAL
        self._caller: Caller | None = None
        self._is_partial = False
        """Whether it has sent a part of a frame, and is to send the rest in time."""
        self._congested = False
        self._held = False
        """Whether frames in the reader wait for their turn; no more bytes are read then."""

    # --- what asyncio calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES_HIGH)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_silence(sock, 15)  # longer than a stall: who reads nothing is silent, too
            peer = transport.get_extra_info("peername")
            self._address = peer[0] if peer else ""  # None: it has gone
        server = self._server
        try:
            server.connections.wait(self, self._preempted)
        except BusyError as error:
            error.advice = f"That follows from the master's {server.settings.limited_by}."
            self._refuse(error)
            return
        server.stats.accepted += 1
        self._set_timer(server.settings.hello_timeout_s, self._on_hello_timeout)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.received(nbytes)
        if not self._held:
            self._reply()

    def eof_received(self) -> bool:
        return False  # close: a client that has gone reads no replies

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._congested = True
        self._pause()
        self._expect_rest(has_begun=False)
        self._set_timer(self._server.settings.stall_timeout_s, self._on_write_timeout)
        if self._node is not None:
            self._node.writable.clear()
        unread = self._transport.get_write_buffer_size()
        self._server.unread.wait(self, self._on_write_timeout, unread)

    def resume_writing(self) -> None:
        self._congested = False
        self._set_timer(0.0, None)
        self._server.unread.release(self)
        if self._node is not None:
            self._node.writable.set()
        self._resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.release(self)
        self._set_timer(0.0, None)
        self._server.arriving.release(self)
        self._server.unread.release(self)
        waiting, self._waiting = self._waiting, None
        node, self._node = self._node, None
        if waiting is not None and (node is None or waiting is not node.task):
            waiting.cancel()
        if node is not None:
            node.cancel()
        self._transport = None  # breaks the cycle with the transport; see also ``new_event_loop``

    # --- frames --------------------------------------------------------------------------------

    def _reply(self) -> None:
        """Answers received calls, until one must wait or other connections get their turn."""
        replies: list[bytes] = []
        size, has_begun = 0, False
        try:
            for _ in range(FRAMES_PER_TURN):
                if self._waiting is not None:
                    if self._reader.buffered:
                        self._pause()
                    break
                received = self._reader.next()
                if received is None:
                    break
                has_begun = True
                call_id, kind, name, payload = received
                if kind == CALL and self._greeted:
                    reply = self._call(call_id, name, payload)
                    if reply is not None:
                        replies.append(reply)
                        size += len(reply)
                        if size > REPLY_BYTES_PER_WRITE:
                            self._write(replies)
                            replies, size = [], 0
                            if self._held:
                                break
                elif not self._greeted:
                    replies.append(self._handle_hello(received))
                else:
                    raise ProtocolError(f"a client sends no frames of kind {kind}")
            else:
                self._pause()
                self._loop.call_soon(self._resume)
        except KVStoreError as error:
            self._write(replies)
            self._refuse(error)
            return
        self._write(replies)
        if self._greeted and (self._is_partial or self._reader.buffered):
            self._expect_rest(has_begun=has_begun)

    def _expect_rest(self, *, has_begun: bool) -> None:
        """Bounds a frame of which a part has come, in time and bytes. ``has_begun``: it is another
        one than at the last call."""
        is_partial = self._reader.buffered > 0 and not self._held
        if self._is_partial and (has_begun or not is_partial):
            self._set_timer(0.0, None)
            self._server.arriving.release(self)
            self._is_partial = False
        if is_partial and not self._is_partial:
            self._set_timer(self._server.settings.frame_timeout_s, self._late)
            self._is_partial = True
        if is_partial and self._reader.size > frames.BUFFER_BYTES:
            self._server.arriving.wait(self, self._late, self._reader.size)

    def _handle_hello(self, received: frames.Frame) -> bytes:
        token, server = frames.read_hello(received), self._server
        assert self._transport is not None
        tls = self._transport.get_extra_info("ssl_object")
        identity = server.access.identify_lane_peer(self._address, tls)
        caller = server.access.verify_client_token(token, server.token, self._address, identity)
        if caller is None:
            raise PermissionDeniedError(
                "the client's token is not valid for this master's lane",
                advice="Join again: the master was restarted, or a different master "
                "uses this address.",
            )
        server.connections.keep(self, caller.identity.name)
        self._caller = caller
        self._greeted = True
        self._reader.length_max = REQUEST_BYTES_MAX + frames.FRAMING_BYTES_MAX
        self._set_timer(0.0, None)
        return frame(received[0], REPLY, b"", b"")

    def _call(self, call_id: int, name: bytes, payload: bytes) -> bytes | None:
        """The reply's frame; None when it must wait."""
        try:
            call = BY_WIRE_NAME.get(name)
            if call is None and name == NODE_MESSAGE:
                self._on_node_message(payload)
                return None
            if call is None:
                raise ProtocolError(
                    f"this master knows no call {name[:64]!r}",
                    advice="Install the same release of kvstore on both sides.",
                )
            reply = self._dispatch(call, payload, self._caller)
        except KVStoreError as error:
            return frame(call_id, ERROR, b"", encode_error(error))
        if isinstance(reply, bytes):
            return frame(call_id, REPLY, b"", reply)
        self._waiting = reply
        reply.add_done_callback(functools.partial(self._finished, call_id))
        return None

    def _finished(self, call_id: int, waited: asyncio.Task[bytes]) -> None:
        error = None if waited.cancelled() else waited.exception()
        if self._waiting is not waited:
            return  # the client has gone
        self._waiting = None
        if waited.cancelled():
            error = UnavailableError("the master is stopping")
        if error is None:
            self._write([frame(call_id, REPLY, b"", waited.result())])
        elif isinstance(error, KVStoreError):
            self._write([frame(call_id, ERROR, b"", encode_error(error))])
        self._resume()

    def _on_node_message(self, payload: bytes) -> None:
        node = self._node
        if node is None:
            assert self._caller is not None
            node = self._node = NodeConnection(
                self._server.dispatcher.service, self._caller.identity,
                write=self._write, taken=self._on_message_taken, ended=self._on_stream_ended,
            )  # fmt: skip
        node.receive(payload)
        self._waiting = node.task

    def _on_message_taken(self) -> None:
        self._waiting = None
        self._resume()

    def _on_stream_ended(self, error: KVStoreError | None) -> None:
        if error is not None:
            self._write([frame(0, ERROR, b"", encode_error(error))])
        self._close_gently()

    # --- bounds --------------------------------------------------------------------------------

    def _write(self, replies: list[bytes]) -> None:
        transport = self._transport
        if transport is None or not replies or transport.is_closing():
            return
        if self._congested:  # it has sent a call that waits behind others, and reads no replies
            self._on_write_timeout()
            return
        transport.write(replies[0] if len(replies) == 1 else b"".join(replies))

    def _pause(self) -> None:
        """Stops reading and answering until ``_resume``."""
        if not self._held and self._transport is not None:
            self._held = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        """Continues after ``_pause``, once no bound is exceeded."""
        if (
            not self._held
            or self._congested
            or self._transport is None
            or self._transport.is_closing()
            or self._waiting is not None
        ):
            return
        self._held = False
        self._transport.resume_reading()
        self._reply()

    def _set_timer(self, after_s: float, action: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if action is None else self._loop.call_later(after_s, action)

    def _preempted(self) -> None:
        self._server.stats.rejected += 1
        self.close()

    def _on_hello_timeout(self) -> None:
        self._refuse(ProtocolError("the client sent no HELLO in time"))

    def _late(self) -> None:
        self._refuse(ProtocolError("the rest of a frame has not come in time"))

    def _on_write_timeout(self) -> None:
        self._server.stats.stalled += 1
        logger.warning("lane client does not read its replies, connection cut")
        self.close()

    def _refuse(self, error: KVStoreError) -> None:
        """Sends the error, closes the connection and counts it as refused."""
        self._server.stats.rejected += 1
        logger.info("lane connection refused error=%s reason=%r", error.code, error.message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(0, ERROR, b"", encode_error(error)))
        self._close_gently()

    def _close_gently(self) -> None:
        """Closes the connection when its peer has read the replies, or does not for too long."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._set_timer(self._server.settings.stall_timeout_s, self.close)

    def close(self) -> None:
        """Closes the connection at once, and drops unsent replies."""
        if self._transport is not None:
            self._transport.abort()
