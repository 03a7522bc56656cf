"""Serves a port for HTTP: health, readiness and metrics, as ``ProcessStatus`` gives them, and
routes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
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

from kvstore.errors import AddressInUseError, BusyError, StartupError, UnavailableError
from kvstore.http.access_control import HEADERS, NOT_SECURED, AccessControl, HttpSecurity
from kvstore.http.connection_limiter import (
    BUFFER_BYTES,
    RETRY_AFTER_S,
    ConnectionLimiter,
    Handler,
    connections_max,
    serving_connections,
)
from kvstore.limits import BATCH_KEYS_MAX, KEY_BYTES_MAX
from kvstore.runtime.addresses import join_address
from kvstore.runtime.limiter import Limiter, WaitPreemptedError
from kvstore.runtime.listeners import listen
from kvstore.wire.port_probe import identify_service

log = logging.getLogger("kvstore.console")

HEALTH: Final = ("/healthz", "/readyz")

AT_WORK_MAX: Final = 8
"""Requests that are worked on at once: more of them would only slow each other, and health, down.
"""

_BODIES: Final = web.AppKey("bodies", Limiter[asyncio.Timeout])
_WORK: Final = web.AppKey("work", asyncio.Semaphore)

PORTS: Final = 16
"""Ports that are tried, from the default one on: several processes may run on one host."""

TAKEN_S: Final = 2.0
"""How long the child of a master that was killed may still hold a port."""

REQUESTS_MAX: Final = 128
"""Requests under way at once, streams of events among them; one more is told to come again. Health
and readiness do not count: there is always a connection for them."""

BODY_BYTES_MAX: Final = BATCH_KEYS_MAX * (2 * KEY_BYTES_MAX + 4) + (1 << 20)
"""Limit of a JSON body: the most keys of one request, each of the greatest length, and names."""

BODIES_BYTES: Final = 32 << 20
BODY_S: Final = 5.0
"""How many bytes of JSON bodies may be arriving at once, and how long one body may take."""

UNREAD_BYTES: Final = 16 << 20
READ_S: Final = 10.0
READ_BYTES_PER_S_MIN: Final = 1 << 18
"""How many bytes of answers may wait for their clients to read them. A client may take ``READ_S``,
plus the time of the answer at ``READ_BYTES_PER_S_MIN``."""

LINE_BYTES_MAX: Final = 1 << 13
IDLE_CONNECTION_S: Final = 120.0


class Readiness(NamedTuple):
    ready: bool
    """Whether traffic may be sent here."""
    reason: str


class ProcessStatus(NamedTuple):
    """What a process says of itself. Both raise UnavailableError: it does not answer in time."""

    readiness: Callable[[], Awaitable[Readiness]]
    metrics: Callable[[], Awaitable[bytes]]


def bind(host: str, port: int, *, is_given: bool, flag: str = "--http-port") -> socket.socket:
    """A listening socket on ``port``, or on the next free port unless ``is_given``: then the user
    has asked for this one. Blocks for up to ``TAKEN_S``. ``flag``: that of the port.

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
                    advice="Give --host an address of this host.",
                ) from None
            if each != port:
                log.warning(
                    "http_port_taken wanted=%d port=%d: choose one with --http-port", port, each
                )
            return listener
        if time.monotonic() >= patience:
            by = identify_service(join_address(host, port))
            said = f": {by} answers there" if by else ""
            raise AddressInUseError(
                f"port {port} for HTTP is taken on {host}{said}",
                advice=f"Give another one with {flag}.",
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
    answers: ProcessStatus,
    routes: Iterable[Route] = (),
    *,
    access: AccessControl,
    secured: HttpSecurity = NOT_SECURED,
    requests: Limiter[object] | None = None,
) -> AsyncIterator[None]:
    """Serves health, readiness, metrics and ``routes`` inside the block. Closes ``listener``.

    Args:
        access: who may read the metrics.
        secured: whether the port speaks TLS.
        requests: ``request_limiter()``, if its refusals are for metrics.

    Raises:
        ConfigError: as ``HttpSecurity.tls``.
    """
    tls = secured.tls()
    doors = ConnectionLimiter(connections_max(REQUESTS_MAX))
    limiter = request_limiter() if requests is None else requests
    bounded = RequestLimiter(limiter, access).middleware
    application = _application(answers, [doors.middleware, bounded], routes, access)
    async with serving_connections(
        application, doors, listener, tls=tls, idle_s=IDLE_CONNECTION_S,
        line_bytes_max=LINE_BYTES_MAX, log=log,
    ):  # fmt: skip
        yield


def request_limiter() -> Limiter[object]:
    """For the requests under way at once on one port. Fewer than connections: there are always
    idle ones that can make room."""
    return Limiter("http", max(1, min(REQUESTS_MAX, connections_max(REQUESTS_MAX) // 2)))


class RequestLimiter:
    """The requests under way on one port. Use it in one event loop."""

    def __init__(self, limiter: Limiter[object], access: AccessControl) -> None:
        self._limiter = limiter
        self._access = access
        self._unread = Limiter[asyncio.Timeout]("unread answers", UNREAD_BYTES)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses a request that is one too many, of all or of its identity, unless it asks for
        health. After a large answer, waits until the client has read it, and cuts a client that
        takes too long."""
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
            return  # and aiohttp sends it
        with writing(request):
            async with self._unread.waiting(READ_S + size / READ_BYTES_PER_S_MIN, size):
                await response.prepare(request)
                await response.write_eof()


@contextlib.contextmanager
def writing(request: web.Request) -> Iterator[None]:
    """The block writes to a client. If the client does not read in time, or the rest of the answer
    does not come, its connection is cut; if the client has left, the block just ends."""
    try:
        yield
    except (TimeoutError, WaitPreemptedError, UnavailableError):
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass


async def read_body(request: web.Request) -> bytes:
    """The body of a request for one of ``routes``, which is limited to ``BODY_BYTES_MAX``.

    Raises:
        BusyError: the body has not come in time, or not before another body needed its place.
        web.HTTPRequestEntityTooLarge
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
    """The semaphore to hold while a request is worked on, but not while waiting for its client."""
    return request.app[_WORK]


async def _protect(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the headers by which an answer tells browsers what they may do with it."""
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
