"""The HTTP endpoint of object events: a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Annotated, Final

from aiohttp import web
from pydantic import BeforeValidator, ConfigDict, Field

from kvstore.console.events.journal import EventPosition, EventStreams, Journal
from kvstore.errors import UnavailableError
from kvstore.http.access_control import identity_still_valid
from kvstore.http.operations import ApiRequest, Operation, endpoint, endpoints_of
from kvstore.http.serving import Readiness, writing
from kvstore.limits import check_namespace
from kvstore.master.ipc_channel import ChildChannel
from kvstore.runtime.limiter import Limiter
from kvstore.security.impersonation import impersonated
from kvstore.security.permissions import check_events

PATH: Final = "/api/v1/events"

SUBSCRIBERS_MAX: Final = 64
"""Concurrent streams, with a limit per identity, or else per address."""

STALLED_S: Final = 30.0
"""Seconds after which a subscriber that reads nothing is disconnected; it may resume."""

FIRST_S: Final = 2.0
"""Seconds for which a request waits for the master's first frame after the start."""

RETRY: Final = b"retry: 1000\n\n"
"""Reconnection delay of clients, in milliseconds."""

_TRUE: Final = ("1", "true", "yes", "")

_NONE: Final = "This master has no events."


class EventsRequest(ApiRequest):
    model_config = ConfigDict(extra="ignore")

    namespace: str = Field(default="", description="Empty: all.")
    snapshot: Annotated[int, BeforeValidator(lambda text: text in _TRUE)] = Field(
        default=0, description="1: begin with all that is there."
    )
    since: str = Field(default="", alias="from", description="Resume after this event.")
    under: str = Field(default="", description="Only namespaces whose names begin so; empty: all.")


def disabled_endpoints() -> list[Operation]:
    """Return the endpoints of ``EventsAPI`` for a master without events: each responds 404."""

    async def refused(request: web.Request, params: ApiRequest) -> web.StreamResponse:
        del request, params
        raise web.HTTPNotFound(text="this master has no events: start it with --events\n")

    return [each._replace(response=refused) for each in endpoints_of(EventsAPI)]


class EventsAPI:
    """Serves the events that the parent sends. Use it in one event loop."""

    def __init__(
        self, journal: Journal, channel: ChildChannel, readiness: Callable[[], Awaitable[Readiness]]
    ) -> None:
        """``readiness`` returns the leader if this master does not lead; raises UnavailableError if
        this master hangs."""
        self._readiness = readiness
        self.journal = journal
        self.streams = EventStreams(journal, channel, self._lives)
        self._subscribers = Limiter[object]("events", SUBSCRIBERS_MAX)

    async def _lives(self) -> bool:
        try:
            await self._readiness()
        except UnavailableError:
            return False
        return True

    async def _check_leads(self) -> None:
        """Raises UnavailableError."""
        if not self.journal.epoch:
            await self.journal.change(FIRST_S)
        said = await self._readiness()
        if not self.journal.epoch:
            raise UnavailableError(said.reason)

    @endpoint(
        "GET", PATH, {200: "Server-sent events.", 404: _NONE},
        content="text/event-stream", has_own_bounds=True,
    )  # fmt: skip
    async def _events(self, request: web.Request, params: EventsRequest) -> web.StreamResponse:
        """Stream object events: objects stored and removed."""
        since = request.headers.get("Last-Event-ID") or params.since
        place = EventPosition.parse(since) if since else None
        _check(params.namespace, params.under)
        check_events(impersonated(), params.namespace, params.under)
        with self._subscriber(request):
            await self._check_leads()
            texts = self.streams.events(
                place,
                snapshot=bool(params.snapshot),
                namespace=params.namespace,
                under=params.under,
            )
            return await _send(request, texts)

    @contextlib.contextmanager
    def _subscriber(self, request: web.Request) -> Iterator[None]:
        slot = object()
        self._subscribers.acquire(slot, impersonated().name or request.remote or "?")
        try:
            yield
        finally:
            self._subscribers.release(slot)


def _check(*namespaces: str) -> None:
    """Raises InvalidArgumentError. An empty name is valid: all namespaces."""
    for namespace in filter(None, namespaces):
        check_namespace(namespace)


async def _send(request: web.Request, texts: AsyncGenerator[bytes]) -> web.StreamResponse:
    no_buffer = {"X-Accel-Buffering": "no"}  # nginx would buffer events
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **no_buffer})
    await response.prepare(request)
    with writing(request):
        await response.write(RETRY)
        async with contextlib.aclosing(texts):
            async for text in texts:
                if not identity_still_valid():
                    break  # it was revoked
                if not text:  # an empty chunk would end the body
                    continue
                async with asyncio.timeout(STALLED_S):
                    await response.write(text)
        await response.write_eof()
    return response
