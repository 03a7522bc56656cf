"""Limits the number of clients' connections to a port: idle ones make room for new ones.

A connection is *idle* while it has no request under way: before its first request, between two
requests, while the headers of a request arrive, and while it closes. A request is under way while
its body arrives, and while its client reads the answer; ``kvstore.network.waits`` bounds how many
of these may wait for their clients, so that clients that do nothing cannot keep others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Final

from aiohttp import web
from aiohttp.http import HttpProcessingError

from kvstore.network import listening

log = logging.getLogger("kvstore.web")

CLIENT_LEFT: Final = 499
"""The status of a request whose client left before the answer, in logs and metrics, as in nginx."""

CUT_S: Final = 1.0
"""Time that cancelled handlers get to end."""

HANDSHAKE_S: Final = 10.0
"""Time that the handshake of a TLS connection may take."""

RETRY_AFTER_S: Final = 1
"""``Retry-After`` of a 503: connections come free within a second."""

FILES_WANTED: Final = 65_536
FILES_OTHERWISE: Final = 96
"""Descriptors kept for other files, and for the connections of one step of the event loop."""

AT_ONCE: Final = 32
"""Connections that one step of the event loop accepts; it closes none in that step."""

BACKLOG: Final = 1_024
"""Connections that wait in the kernel to be accepted."""

FILES_PER_CONNECTION: Final = 3
"""One for the client, one for an engine (in the proxy), and a spare one: if no connection is idle,
half as many more are accepted."""

SAID_MAX: Final = 200
"""Characters of the reason of a malformed request that are logged."""

BUFFER_BYTES: Final = 64 << 10
"""What asyncio buffers for a connection before a writer waits: a smaller answer waits for nobody.
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ENCODED: Final = "a body is taken as it is: no Content-Encoding\n"

_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n"
    b"Retry-After: %d\r\n\r\n" % RETRY_AFTER_S
)


def connections_max(inflight_max: int) -> int:
    """How many clients may be connected: four per request in flight, if the limit of open files
    allows it. Raises that limit as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = FILES_WANTED if soft == resource.RLIM_INFINITY else soft
    return max(1, min(4 * inflight_max, (files - FILES_OTHERWISE) // FILES_PER_CONNECTION))


@contextlib.asynccontextmanager
async def answering(
    application: web.Application,
    doors: Doors,
    *,
    idle_s: float,
    line_bytes_max: int,
    log: logging.Logger,
) -> AsyncIterator[None]:
    """Inside the block, connections through ``doors`` are served; at its end, handlers are
    cancelled.

    Args:
        idle_s: a connection without a request is closed after this time.
        line_bytes_max: limit of the request line, and of each header.
    """
    log.addFilter(_say_in_one_line)
    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=CUT_S,
        lingering_time=CUT_S,
        auto_decompress=False,  # ``Doors.middleware`` refuses what would need it
        keepalive_timeout=idle_s,
        max_line_size=line_bytes_max,
        max_field_size=line_bytes_max,
        logger=log,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        doors.open(runner.server)
        yield
    finally:
        await runner.cleanup()


def _say_in_one_line(record: logging.LogRecord) -> bool:
    """Logs a client's malformed request in one line; aiohttp adds a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        said = " ".join(error.message.split())[:SAID_MAX]
        peer = record.args[0] if isinstance(record.args, tuple) and record.args else "?"
        record.msg, record.args = "malformed_request peer=%s reason=%r", (peer, said)
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
    return True


async def listen(doors: Doors, host: str, port: int) -> asyncio.Server:
    """Starts the server. Raises OSError."""
    return await listen_on(doors, await asyncio.to_thread(listening.listen, host, port))


async def listen_on(
    doors: Doors, listener: socket.socket, tls: ssl.SSLContext | None = None
) -> asyncio.Server:
    """Starts the server on a socket that is bound."""
    server = await asyncio.get_running_loop().create_server(
        doors,
        sock=listener,
        backlog=AT_ONCE,
        ssl=tls,
        ssl_handshake_timeout=HANDSHAKE_S if tls else None,
        ssl_shutdown_timeout=CUT_S if tls else None,
    )
    for each in server.sockets:
        # asyncio uses one number for the kernel's queue and for the accepts of one step.
        with socket.socket(fileno=os.dup(each.fileno())) as same:
            same.listen(BACKLOG)
    return server


class Doors:
    """Makes the protocol of each new connection of a server, for ``loop.create_server``."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._server: web.Server | None = None
        self._idle: dict[web.RequestHandler, asyncio.Transport | None] = {}
        """Ordered, longest idle first, each with the transport of its last request. May hold
        connections that have ended."""
        self._is_full = False

    def open(self, server: web.Server) -> None:
        self._server = server

    def __call__(self) -> asyncio.Protocol:
        assert self._server is not None, "open comes first"
        connections = set(self._server.connections)
        if len(self._idle) > 2 * len(connections) + 16:
            self._idle = {each: at for each, at in self._idle.items() if each in connections}
        if len(connections) >= self._connections_max:
            made_room = self._make_room(connections)
            if not made_room and len(connections) >= 1.5 * self._connections_max:
                return _Refusal()
        if self._is_full and len(connections) < self._connections_max // 2:
            self._is_full = False
        handler = self._server()
        self._idle[handler] = None
        return handler

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keeps a connection out of the idle ones while its request is answered."""
        self._idle.pop(request.protocol, None)
        transport = request.transport
        if transport is None:  # the connection was closed before the request was handled
            return web.Response(status=CLIENT_LEFT)
        try:
            encodings = request.headers.getall("Content-Encoding", [])
            if any(each.lower() != "identity" for each in encodings):
                return web.Response(status=415, text=_ENCODED)
            return await handler(request)
        finally:
            self._idle[request.protocol] = transport

    def _make_room(self, connections: Collection[web.RequestHandler]) -> bool:
        if not self._is_full:
            self._is_full = True
            log.warning("connections_full limit=%d", self._connections_max)
        while self._idle:
            longest = next(iter(self._idle))
            transport = self._idle.pop(longest)
            if longest not in connections:
                continue
            longest.force_close()
            if transport is not None:  # if it is closing, it may still wait for its client to read
                transport.abort()
            return True
        return False


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()
