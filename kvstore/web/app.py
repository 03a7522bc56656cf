"""The child that serves HTTP for a master: one event loop on a socket that the master has bound."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from typing import Final, NamedTuple

from aiohttp import web

from kvstore import background
from kvstore.calls import ClusterStatus
from kvstore.children import ParentLink
from kvstore.client.aio import AsyncClient
from kvstore.errors import KVStoreError, UnavailableError
from kvstore.web import metrics
from kvstore.web.doors import Doors, connections_max, listen_on
from kvstore.web.link import Link

log = logging.getLogger("kvstore.web")

ANSWER_S: Final = 1.0
"""How long the master may take to say how it is: a probe of Kubernetes waits as long by default."""

STATUS_MS: Final = 5_000
"""How long the status of the store may take."""

SHARE: Final = 0.05
"""Of the time, how much may go into asking for the status: it is asked again after so many times
its own duration, whatever the number of scrapes."""

REQUESTS_MAX: Final = 32
LINE_BYTES_MAX: Final = 1 << 13
IDLE_CONNECTION_S: Final = 120.0
CUT_S: Final = 1.0


class Served(NamedTuple):
    """What the master gives its child."""

    listener: socket.socket
    link: socket.socket
    parent: ParentLink
    pid: int
    """The master's."""
    master: str
    """Its own ``host:port``."""
    cluster: str


async def serve(served: Served) -> None:
    """Serves until the master is gone, or stops this process."""
    loop = asyncio.get_running_loop()
    background.watch_loop(loop)
    background.watch_threads()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    assert served.parent.fd is not None
    loop.add_reader(served.parent.fd, stopped.set)
    pages = Pages(served)
    doors = Doors(connections_max(REQUESTS_MAX))
    runner = web.AppRunner(
        pages.application(doors),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=CUT_S,
        lingering_time=CUT_S,
        keepalive_timeout=IDLE_CONNECTION_S,
        max_line_size=LINE_BYTES_MAX,
        max_field_size=LINE_BYTES_MAX,
        logger=log,
    )
    await runner.setup()
    assert runner.server is not None
    doors.open(runner.server)
    server = await listen_on(doors, served.listener)
    served.parent.tell(ready=1)
    try:
        await stopped.wait()
    finally:
        loop.remove_reader(served.parent.fd)
        server.close()
        await runner.cleanup()
        await pages.close()


class Pages:
    """What is served."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._link = Link(served.link)
        self._client = AsyncClient(
            served.master, cluster=served.cluster, name="kvstore-web", timeout_ms=STATUS_MS
        )
        self._asking = asyncio.Lock()
        self._status: ClusterStatus | None = None
        self._fresh_until = 0.0

    async def close(self) -> None:
        self._link.close()
        await self._client.close()

    def application(self, doors: Doors) -> web.Application:
        application = web.Application(middlewares=[doors.middleware])
        application.router.add_get("/healthz", self.healthz)
        application.router.add_get("/readyz", self.readyz)
        application.router.add_get("/metrics", self.metrics)
        return application

    async def healthz(self, request: web.Request) -> web.Response:
        """Whether the master's loop answers."""
        del request
        try:
            await self._link.ask("role", ANSWER_S)
        except UnavailableError as error:
            return _not_now(f"the master does not answer: {error.message}")
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        """Whether clients may be sent here: it leads, or knows who does."""
        del request
        try:
            said = await self._link.ask("role", ANSWER_S)
        except UnavailableError as error:
            return _not_now(f"the master does not answer: {error.message}")
        if said["leads"]:
            return web.Response(text="leads\n")
        if said["leader"]:
            return web.Response(text=f"stands by; {said['leader']} leads\n")
        return _not_now("stands by, and knows of no master that leads")

    async def metrics(self, request: web.Request) -> web.Response:
        del request
        try:
            measured = await self._link.ask("measures", ANSWER_S)
        except UnavailableError as error:
            return _not_now(f"the master does not answer: {error.message}")
        status = await self._store_status() if measured["leads"] else None
        page = await asyncio.to_thread(metrics.text, measured, status, pid=self._served.pid)
        return web.Response(body=page, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _store_status(self) -> ClusterStatus | None:
        async with self._asking:
            started = time.monotonic()
            if started >= self._fresh_until:
                try:
                    self._status = await self._client.status()
                except KVStoreError as error:
                    log.warning("status_unknown reason=%s", error)
                    self._status = None
                ended = time.monotonic()
                self._fresh_until = ended + (ended - started) / SHARE
            return self._status


def _not_now(reason: str) -> web.Response:
    return web.Response(status=503, text=reason + "\n")
