"""The child that serves HTTP for a master: one event loop on a socket that the master has bound."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore import background
from kvstore.background import start_task
from kvstore.calls import ClusterStatus
from kvstore.children import ParentLink
from kvstore.client.aio import AsyncClient
from kvstore.errors import KVStoreError, UnavailableError
from kvstore.web import metrics
from kvstore.web.dashboard import Dashboard
from kvstore.web.events import Events, not_asked_for
from kvstore.web.fleet import Record, read_records
from kvstore.web.hosts import Hosts
from kvstore.web.link import Link
from kvstore.web.serving import Answers, Readiness, serving

if TYPE_CHECKING:
    from kvstore.web.publisher import Publisher

log = logging.getLogger("kvstore.web")

ANSWER_S: Final = 1.0
"""How long the master may take to say how it is: a probe of Kubernetes waits as long by default."""

STATUS_MS: Final = 5_000
"""How long the status of the store may take."""

SHARE: Final = 0.05
"""Of the time, how much may go into asking for the status: it is asked again after so many times
its own duration, whatever the number of scrapes."""


FRESH_S: Final = 1.0
"""How old an answer may be: the master is asked no more often, however many pages are open."""

FLEET_S: Final = 30.0
NOTICES_MAX: Final = 1_000


class Seen(NamedTuple):
    measured: dict[str, Any]
    """The answer to ``measures``."""
    status: ClusterStatus | None
    """None: it does not lead, or the store could not be asked."""
    leader: str
    """Who leads instead, ``host:port``; empty: it does, or it knows of none."""
    at_ms: int
    """Wall clock, milliseconds since 1970."""


class Noticed(NamedTuple):
    """See ``kvstore.master.notices.Notices.after``."""

    run: int
    last: int
    kept: deque[list[Any]]
    """Number, time, event and fields of the last ones."""


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
    events: socket.socket | None = None
    """Where it sends its events, if they were asked for."""
    events_at: str = ""
    """Where to publish them, too; see ``MasterConfig.events``."""
    names: Sequence[str] = ()
    """By which browsers may reach it, beside addresses and ``localhost``."""


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
    master = Master(served)
    answers = Answers(master.readiness, master.metrics)
    events = Events(served.events, master.readiness) if served.events else None
    dashboard = Dashboard(master, Hosts(served.names), port=served.listener.getsockname()[1])
    publisher: Publisher | None = None
    try:
        if events is not None and served.events_at:
            publisher = _publisher(served, events, master)
        routes = {**dashboard.routes(), **(events.routes() if events else not_asked_for())}
        async with serving(served.listener, answers, dashboard.guarded(routes)):
            served.parent.tell(ready=1)
            await stopped.wait()
    finally:
        loop.remove_reader(served.parent.fd)
        if publisher is not None:
            await publisher.close()
        await dashboard.close()
        if events is not None:
            await events.close()
        await master.close()


def _publisher(served: Served, events: Events, master: Master) -> Publisher:
    from kvstore.web.publisher import Publisher  # needs packages that are installed if asked for

    pool = served.cluster or "kvstore"
    return Publisher(served.events_at, pool, events.journal, events.streams, master.fleet)


class Master:
    """The parent, as its child sees it. Its methods raise UnavailableError: it does not answer."""

    def __init__(self, served: Served) -> None:
        self._pid = served.pid
        self._link = Link(served.link)
        self._client = AsyncClient(
            served.master, cluster=served.cluster, name="kvstore-web", timeout_ms=STATUS_MS
        )
        self._asking = asyncio.Lock()
        self._status: ClusterStatus | None = None
        self._fresh_until = 0.0
        self._looking: asyncio.Task[Seen] | None = None
        self._looked = -FRESH_S
        self._noting = asyncio.Lock()
        self._noticed = Noticed(0, 0, deque(maxlen=NOTICES_MAX))
        self._noted = -FRESH_S
        self._reading = asyncio.Lock()
        self._fleet: list[Record] = []
        self._fleet_until = 0.0

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._link.close()
        await self._client.close()

    async def readiness(self) -> Readiness:
        """Whether clients may be sent here: it leads, or knows who does."""
        said = await self._ask("role")
        if said["leads"]:
            return Readiness(True, "leads")
        if said["leader"]:
            return Readiness(True, f"stands by; {said['leader']} leads")
        return Readiness(False, "stands by, and knows of no master that leads")

    async def seen(self) -> Seen:
        """What is measured and known of the store. All who ask within ``FRESH_S`` share an answer,
        and an error, too."""
        if self._looking is None or (
            self._looking.done() and time.monotonic() >= self._looked + FRESH_S
        ):
            self._looking = start_task("look", self._look(), expected=UnavailableError)
        return await asyncio.shield(self._looking)

    async def _look(self) -> Seen:
        try:
            measured, leader, status = await self._ask("measures"), "", None
            if measured["leads"]:
                status = await self._store_status()
            else:
                leader = (await self._ask("role"))["leader"]
            return Seen(measured, status, leader, time.time_ns() // 1_000_000)
        finally:
            self._looked = time.monotonic()

    async def notices(self) -> Noticed:
        """The last ones, in order; the master is asked for new ones at most every ``FRESH_S``."""
        async with self._noting:
            if time.monotonic() >= self._noted + FRESH_S:
                try:
                    await self._note()
                finally:
                    self._noted = time.monotonic()
            return self._noticed

    async def _note(self) -> None:
        while True:
            answer = await self._ask(f"notices {self._noticed.last}")
            if answer["run"] != self._noticed.run:
                self._noticed = Noticed(answer["run"], 0, deque(maxlen=NOTICES_MAX))
                continue
            self._noticed.kept.extend(answer["notices"])
            self._noticed = self._noticed._replace(last=answer["last"])
            if answer["is_all"]:
                return

    async def metrics(self) -> bytes:
        seen = await self.seen()
        measured, status = seen.measured, seen.status
        return await asyncio.to_thread(metrics.of_master, measured, status, pid=self._pid)

    async def fleet_records(self) -> list[Record]:
        """At most ``FLEET_S`` old. Empty as long as they cannot be read."""
        async with self._reading:
            if time.monotonic() >= self._fleet_until:
                try:
                    self._fleet = await read_records(self._client)
                except KVStoreError as error:
                    log.warning("fleet_unknown reason=%s", error)
                self._fleet_until = time.monotonic() + FLEET_S
            return self._fleet

    async def fleet(self) -> dict[str, tuple[str, int]]:
        """The model of each namespace that is in a record of the fleet, and tokens per block."""
        return {
            name: (record.model, record.block_size)
            for record in await self.fleet_records()
            for name in record.namespaces
        }

    async def _ask(self, question: str) -> dict[str, Any]:
        try:
            return await self._link.ask(question, ANSWER_S)
        except UnavailableError as error:
            raise UnavailableError(f"the master does not answer: {error.message}") from None

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
