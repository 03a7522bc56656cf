"""The paths of events: a stream of server-sent events, and a snapshot as lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Final

from aiohttp import web

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.limits import check_namespace
from kvstore.process.background import start_task
from kvstore.web.events.feed import Channel
from kvstore.web.events.journal import Journal, Place, Streams
from kvstore.web.events.subscribers import Subscribers
from kvstore.web.server.serving import Readiness, Routes

PATH: Final = "/api/v1/events"
SNAPSHOT_PATH: Final = "/api/v1/events/snapshot"

SUBSCRIBERS_MAX: Final = 64
"""Streams and snapshots at once; one more takes the place of another one (``Subscribers``)."""

STALLED_S: Final = 30.0
"""A subscriber that reads nothing for so long is cut; it may resume."""

FIRST_S: Final = 2.0
"""How long a request waits for the first word of the master, after the start of this process."""

RETRY: Final = b"retry: 1000\n\n"
"""When clients connect again, in milliseconds."""

_TRUE: Final = ("1", "true", "yes", "")


def not_asked_for() -> Routes:
    """What these paths answer in a master without events."""

    async def refused(request: web.Request) -> web.Response:
        del request
        return web.Response(status=404, text="this master has no events: start it with --events\n")

    return {PATH: refused, SNAPSHOT_PATH: refused}


class Events:
    """Serves what the parent sends. Use it in one event loop."""

    def __init__(self, sock: socket.socket, readiness: Callable[[], Awaitable[Readiness]]) -> None:
        """Owns ``sock``.

        ``readiness``: says who leads, if this master does not; raises UnavailableError: it hangs.
        """
        self._readiness = readiness
        self.journal = Journal()
        self.channel = Channel(sock, self.journal.took)
        self.streams = Streams(self.journal, self.channel, self._lives)
        self._task = start_task("events", self.channel.run())
        self._subscribers = Subscribers(SUBSCRIBERS_MAX)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

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

    def routes(self) -> Routes:
        def namespace_of(request: web.Request, name: str = "namespace") -> str:
            given = request.query.get(name, "")
            return check_namespace(given) if given else ""

        async def events(request: web.Request) -> web.StreamResponse:
            query = request.query
            since = request.headers.get("Last-Event-ID") or query.get("from", "")
            try:
                place = Place.parse(since) if since else None
                namespace, under = namespace_of(request), namespace_of(request, "under")
            except InvalidArgumentError as error:
                return web.Response(status=400, text=error.message + "\n")
            with self._subscriber(request):
                await self._check_leads()
                texts = self.streams.events(
                    place,
                    whole=query.get("snapshot", "0") in _TRUE,
                    namespace=namespace,
                    under=under,
                )
                return await _send(request, "text/event-stream", texts, RETRY)

        async def snapshot(request: web.Request) -> web.StreamResponse:
            try:
                namespace = namespace_of(request)
            except InvalidArgumentError as error:
                return web.Response(status=400, text=error.message + "\n")
            with self._subscriber(request):
                await self._check_leads()
                texts = self.streams.snapshot(namespace)
                return await _send(request, "application/x-ndjson", texts, b"")

        return {PATH: events, SNAPSHOT_PATH: snapshot}

    @contextlib.contextmanager
    def _subscriber(self, request: web.Request) -> Iterator[None]:
        transport = request.transport
        assert transport is not None, "the doors let it in"
        number = self._subscribers.enter(request.remote or "", transport.abort)
        if number is None:
            raise UnavailableError(f"there are {SUBSCRIBERS_MAX} subscribers already")
        try:
            yield
        finally:
            self._subscribers.leave(number)


async def _send(
    request: web.Request, kind: str, texts: AsyncGenerator[bytes], first: bytes
) -> web.StreamResponse:
    no_buffer = {"X-Accel-Buffering": "no"}  # of nginx, which would hold events back
    response = web.StreamResponse(headers={"Content-Type": kind, **no_buffer})
    await response.prepare(request)
    try:
        if first:
            await response.write(first)
        async with contextlib.aclosing(texts):
            async for text in texts:
                if not text:  # an empty chunk would end the body
                    continue
                async with asyncio.timeout(STALLED_S):
                    await response.write(text)
        await response.write_eof()
    except (TimeoutError, UnavailableError):  # it reads nothing, or our master hangs
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the subscriber has left
    return response
