"""HTTP server for health, readiness and metrics, from ``ProcessStatus``, and for routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Final, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvstore.errors import BusyError, UnavailableError
from kvstore.http.access_control import HEADERS, AccessControl
from kvstore.http.connection_limiter import (
    BUFFER_BYTES,
    RETRY_AFTER_S,
    ConnectionLimiter,
    Handler,
    connections_max,
    serving_connections,
)
from kvstore.http.ports import NOT_SECURED, HttpSecurity
from kvstore.limits import BATCH_KEYS_MAX, KEY_BYTES_MAX
from kvstore.runtime.limiter import Limiter, WaitPreemptedError

log = logging.getLogger("kvstore.console")

HEALTH: Final = ("/healthz", "/readyz")

AT_WORK_MAX: Final = 8
"""Requests processed at once; more would slow each other, and health, down."""

_BODIES: Final = web.AppKey("bodies", Limiter[asyncio.Timeout])
_WORK: Final = web.AppKey("work", asyncio.Semaphore)

REQUESTS_MAX: Final = 128
"""Requests in progress, including event streams; further ones are refused. Health and readiness do
not count: they always get a connection."""

BODY_BYTES_MAX: Final = BATCH_KEYS_MAX * (2 * KEY_BYTES_MAX + 4) + (1 << 20)
"""Limit of a JSON body: the maximum keys of one request, of maximum length, and names."""

BODIES_BYTES: Final = 32 << 20
BODY_S: Final = 5.0
"""Limits on the bytes of incoming JSON bodies, and on the time of one body."""

UNREAD_BYTES: Final = 16 << 20
READ_S: Final = 10.0
READ_BYTES_PER_S_MIN: Final = 1 << 18
"""Limits on response bytes that wait for clients. A client may take ``READ_S``, plus the time of
the response at ``READ_BYTES_PER_S_MIN``."""

LINE_BYTES_MAX: Final = 1 << 13
IDLE_CONNECTION_S: Final = 120.0


class Readiness(NamedTuple):
    ready: bool
    """Whether the process can receive traffic."""
    reason: str


class ProcessStatus(NamedTuple):
    """State of a process. Both raise UnavailableError if it does not respond in time."""

    readiness: Callable[[], Awaitable[Readiness]]
    metrics: Callable[[], Awaitable[bytes]]


Routes = Mapping[str, Handler]
"""Handlers of GET, by path."""


class Route(NamedTuple):
    method: str
    path: str
    handler: Handler


@contextlib.asynccontextmanager
async def serving(
    listener: socket.socket,
    answers: ProcessStatus,
    routes: Iterable[Route] = (),
    *,
    access: AccessControl,
    secured: HttpSecurity = NOT_SECURED,
) -> AsyncIterator[None]:
    """Serve health, readiness, metrics and ``routes`` in the block. Closes ``listener``.

    Args:
        access: access to the metrics.
        secured: TLS of the port.

    Raises:
        ConfigError: as ``HttpSecurity.tls``.
    """
    tls = secured.tls()
    doors = ConnectionLimiter(connections_max(REQUESTS_MAX))
    bounded = RequestLimiter(access).middleware
    application = _application(answers, [doors.middleware, bounded], routes, access)
    async with serving_connections(
        application, doors, listener, tls=tls, idle_s=IDLE_CONNECTION_S,
        line_bytes_max=LINE_BYTES_MAX, log=log,
    ):  # fmt: skip
        yield


class RequestLimiter:
    """The requests in progress on one port: fewer than connections, so that some are always idle.
    Use it in one event loop."""

    def __init__(self, access: AccessControl) -> None:
        size = max(1, min(REQUESTS_MAX, connections_max(REQUESTS_MAX) // 2))
        self._limiter = Limiter[object]("http", size)
        self._access = access
        self._unread = Limiter[asyncio.Timeout]("unread answers", UNREAD_BYTES)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request above the limit, in total or of its identity, except health. After a
        large response, wait until the client has read it, or close the connection at a timeout."""
        slot = object()
        try:
            if request.path not in HEALTH:
                self._limiter.acquire(slot, self._access.name_of(request))
            response = await handler(request)
            if isinstance(response, web.Response):
                await self._send(request, response)
            return response
        except UnavailableError as error:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return web.Response(status=503, text=f"{error.message}\n", headers=headers)
        finally:
            self._limiter.release(slot)

    async def _send(self, request: web.Request, response: web.Response) -> None:
        size = response.content_length or 0
        if size < BUFFER_BYTES:
            return  # sent by aiohttp
        with writing(request):
            async with self._unread.waiting(READ_S + size / READ_BYTES_PER_S_MIN, size):
                await response.prepare(request)
                await response.write_eof()


@contextlib.contextmanager
def writing(request: web.Request) -> Iterator[None]:
    """Guard writes to a client in the block. The connection is closed if the client does not read
    in time or the response is incomplete; if the client disconnected, the block ends."""
    try:
        yield
    except (TimeoutError, WaitPreemptedError, UnavailableError):
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request for one of ``routes``, at most ``BODY_BYTES_MAX``.

    Raises:
        BusyError: a timeout, or the slot was given to another body. web.HTTPRequestEntityTooLarge
    """
    size = request.content_length
    weight = BODY_BYTES_MAX if size is None else min(size, BODY_BYTES_MAX)
    try:
        async with request.app[_BODIES].waiting(BODY_S, max(weight, BUFFER_BYTES)):
            return await request.read()
    except WaitPreemptedError:
        raise BusyError("request body timed out: its slot was given to another request") from None
    except TimeoutError:
        raise BusyError(f"request body timed out after {BODY_S:g} s") from None


def processing_slot(request: web.Request) -> asyncio.Semaphore:
    """Return the semaphore to hold while a request is processed, but not while waiting for its
    client."""
    return request.app[_WORK]


async def _protect(request: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers for browsers."""
    del request
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def _application(
    answers: ProcessStatus,
    middlewares: Sequence[Middleware],
    routes: Iterable[Route],
    access: AccessControl,
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

    application = web.Application(middlewares=middlewares, client_max_size=BODY_BYTES_MAX)
    application[_BODIES] = Limiter("arriving bodies", BODIES_BYTES)
    application[_WORK] = asyncio.Semaphore(AT_WORK_MAX)
    application.on_response_prepare.append(_protect)
    own = {"/healthz": healthz, "/readyz": readyz, "/metrics": access.require_metrics(metrics)}
    for path, handler in own.items():
        application.router.add_get(path, handler)
    for method, path, handler in routes:
        if method == "GET":
            application.router.add_get(path, handler)  # and HEAD
        else:
            application.router.add_route(method, path, handler)
    return application
