"""Limit on client connections of a port: a new one closes the one that was idle longest.

A connection is *idle* without a request in progress: before its first request, between requests,
while headers arrive, and while it closes. A request is in progress while its body arrives, and
while its client reads the response. The server limits these to half of the connections, so that
inactive clients cannot block others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http import HttpProcessingError

from kvstore.errors import BusyError
from kvstore.runtime import descriptors
from kvstore.runtime.limiter import Limiter

log = logging.getLogger("kvstore.console")

CLIENT_LEFT: Final = 499
"""Status in logs and metrics of a request whose client disconnected before the response, as in
nginx."""

CUT_S: Final = 1.0
"""Time for cancelled handlers to end."""

HANDSHAKE_S: Final = 10.0
"""Timeout of a TLS handshake."""

RETRY_AFTER_S: Final = 1
"""``Retry-After`` of a 503: connections become free within a second."""

FILES_WANTED: Final = 65_536
FILES_OTHERWISE: Final = 96
"""File descriptors for other files, and for the connections of one step of the event loop."""

AT_ONCE: Final = 32
"""Connections accepted in one step of the event loop, which closes none."""

BACKLOG: Final = 1_024
"""Connections that wait in the kernel."""

FILES_PER_CONNECTION: Final = 2
"""One for the client, and one for an engine (in the proxy)."""

SAID_MAX: Final = 200
"""Logged characters of the reason of a malformed request."""

BUFFER_BYTES: Final = 64 << 10
"""Bytes that asyncio buffers for a connection; smaller responses are written without waiting."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ENCODED: Final = "a body is taken as it is: no Content-Encoding\n"

_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n"
    b"Retry-After: %d\r\n\r\n" % RETRY_AFTER_S
)


def connections_max(inflight_max: int) -> int:
    """Return the maximum number of connections: four per request in flight, if the limit of open
    files allows it. Raises that limit as far as possible."""
    files = descriptors.raise_limit(FILES_WANTED)
    return max(2, min(4 * inflight_max, (files - FILES_OTHERWISE) // FILES_PER_CONNECTION))


@contextlib.asynccontextmanager
async def serving_connections(
    application: web.Application,
    doors: ConnectionLimiter,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    idle_s: float,
    line_bytes_max: int,
    log: logging.Logger,
) -> AsyncIterator[asyncio.Server]:
    """Serve connections to the bound ``listener`` through ``doors`` in the block; at its end close
    it and cancel the handlers.

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
        auto_decompress=False,  # ``ConnectionLimiter.middleware`` refuses compressed bodies
        keepalive_timeout=idle_s,
        max_line_size=line_bytes_max,
        max_field_size=line_bytes_max,
        logger=log,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        doors.open(runner.server)
        server = await asyncio.get_running_loop().create_server(
            doors,
            sock=listener,
            backlog=AT_ONCE,
            ssl=tls,
            ssl_handshake_timeout=HANDSHAKE_S if tls else None,
            ssl_shutdown_timeout=CUT_S if tls else None,
        )
        try:
            for sock in server.sockets:
                # asyncio uses one number for the kernel's queue and for the accepts per step.
                with socket.socket(fileno=os.dup(sock.fileno())) as same:
                    same.listen(BACKLOG)
            yield server
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _say_in_one_line(record: logging.LogRecord) -> bool:
    """Log a client's malformed request in one line; aiohttp adds a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        said = " ".join(error.message.split())[:SAID_MAX]
        peer = record.args[0] if isinstance(record.args, tuple) and record.args else "?"
        record.msg, record.args = "malformed_request peer=%s reason=%r", (peer, said)
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
    return True


class ConnectionLimiter:
    """Creates the protocol of each new connection of a server, for ``loop.create_server``."""

    def __init__(self, connections_max: int) -> None:
        self._limiter = Limiter[web.RequestHandler]("connections", connections_max)
        """Idle connections wait."""
        self._connections_max = connections_max
        self._server: web.Server | None = None

    def open(self, server: web.Server) -> None:
        self._server = server
        forget = server.connection_lost

        def connection_lost(handler: web.RequestHandler, exc: BaseException | None = None) -> None:
            self._limiter.release(handler)
            forget(handler, exc)

        server.connection_lost = connection_lost  # type: ignore[method-assign]

    def __call__(self) -> asyncio.Protocol:
        assert self._server is not None, "open comes first"
        handler = self._server()
        try:
            self._limiter.wait(handler, partial(self._preempt, handler, None))
        except BusyError:
            return _ServiceUnavailable()
        return handler

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keep a connection while its request is processed."""
        transport, protocol = request.transport, request.protocol
        try:
            self._limiter.keep(protocol)
        except BusyError:  # the connection was closed before the request was handled
            return web.Response(status=CLIENT_LEFT)
        try:
            encodings = request.headers.getall("Content-Encoding", [])
            if any(encoding.lower() != "identity" for encoding in encodings):
                return web.Response(status=415, text=_ENCODED)
            return await handler(request)
        finally:
            self._limiter.release(protocol)
            if request.transport is not None:
                self._limiter.wait(protocol, partial(self._preempt, protocol, transport))

    def _preempt(self, handler: web.RequestHandler, transport: asyncio.Transport | None) -> None:
        log.warning("connections_full limit=%d", self._connections_max)
        handler.force_close()
        if transport is not None:  # a closing one may wait for its client to read
            transport.abort()


class _ServiceUnavailable(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()
