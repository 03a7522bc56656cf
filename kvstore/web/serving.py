"""A port for HTTP: health, readiness, metrics. What they say comes from ``Answers``."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Final, NamedTuple

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvstore.addresses import join_address
from kvstore.errors import AddressInUseError, StartupError, UnavailableError
from kvstore.listening import listen
from kvstore.ports import what_answers
from kvstore.web.access import Access
from kvstore.web.doors import Doors, Handler, answering, connections_max, listen_on

log = logging.getLogger("kvstore.web")

PORTS: Final = 16
"""The default port, or the next free one of so many: several processes on one host."""

TAKEN_S: Final = 2.0
"""How long a port may be taken by the child of a master that was killed."""

REQUESTS_MAX: Final = 32
LINE_BYTES_MAX: Final = 1 << 13
IDLE_CONNECTION_S: Final = 120.0


class Readiness(NamedTuple):
    ready: bool
    """Whether traffic may be sent here."""
    reason: str


class Answers(NamedTuple):
    """What a process says of itself. Both raise UnavailableError: it does not answer in time."""

    readiness: Callable[[], Awaitable[Readiness]]
    metrics: Callable[[], Awaitable[bytes]]


def bind(host: str, port: int, *, is_given: bool) -> socket.socket:
    """A listening socket on ``port``; on the next free one if the user has not asked for this one.
    Blocks for up to ``TAKEN_S``.

    Raises:
        AddressInUseError, StartupError
    """
    patience = time.monotonic() + TAKEN_S
    while True:
        for each in range(port, port + (1 if is_given else PORTS)):
            try:
                listener = listen(host, each)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise StartupError(
                    f"HTTP cannot listen on {join_address(host, each)}: {error.strerror or error}",
                    advice="Give --host an address of this host, or --http-port 0.",
                ) from None
            if each != port:
                log.warning(
                    "http_port_taken wanted=%d port=%d: choose one with --http-port", port, each
                )
            return listener
        if time.monotonic() >= patience:
            by = what_answers(join_address(host, port))
            said = f": {by} answers there" if by else ""
            raise AddressInUseError(
                f"port {port} for HTTP is taken on {host}{said}",
                advice="Give another one with --http-port, or 0 for none.",
                port=port,
            )
        time.sleep(0.05)


Routes = Mapping[str, Handler]
"""Handlers of GET, by path."""


class Route(NamedTuple):
    method: str
    path: str
    handler: Handler


@contextlib.asynccontextmanager
async def serving(
    listener: socket.socket,
    answers: Answers,
    routes: Iterable[Route] = (),
    *,
    access: Access,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serves inside the block, and ``routes`` as well. Closes ``listener``.

    Args:
        access: who may read the metrics.
        tls: serve HTTPS; None: HTTP.
    """
    doors = Doors(connections_max(REQUESTS_MAX))
    application = _application(answers, doors, routes, access)
    async with answering(
        application, doors, idle_s=IDLE_CONNECTION_S, line_bytes_max=LINE_BYTES_MAX, log=log
    ):
        server = await listen_on(doors, listener, tls)
        try:
            yield
        finally:
            server.close()


def _application(
    answers: Answers, doors: Doors, routes: Iterable[Route], access: Access
) -> web.Application:
    async def healthz(request: web.Request) -> web.Response:
        del request
        ready, reason = await answers.readiness()
        return web.Response(text="ok\n" if ready else f"ok: {reason}\n")

    async def readyz(request: web.Request) -> web.Response:
        del request
        ready, reason = await answers.readiness()
        return web.Response(text=reason + "\n", status=200 if ready else 503)

    async def metrics(request: web.Request) -> web.Response:
        del request
        return web.Response(
            body=await answers.metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    @web.middleware
    async def answered(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except UnavailableError as error:
            return web.Response(status=503, text=error.message + "\n")

    application = web.Application(middlewares=[doors.middleware, answered])
    own = {"/healthz": healthz, "/readyz": readyz, "/metrics": access.measuring(metrics)}
    for path, handler in own.items():
        application.router.add_get(path, handler)
    for method, path, handler in routes:
        if method == "GET":
            application.router.add_get(path, handler)  # and HEAD
        else:
            wait = _wait if method == "PUT" else None
            application.router.add_route(method, path, handler, expect_handler=wait)
    return application


async def _wait(request: web.Request) -> web.StreamResponse | None:
    """Instead of asking for the body at once: the handler of a PUT asks when it has room."""
    del request
    return None
