"""The child that serves HTTP for a master: one event loop on a socket that the master has bound."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore.process import background
from kvstore.process.children import ParentLink
from kvstore.web.api.chains import Prefixes
from kvstore.web.api.drains import Nodes
from kvstore.web.api.objects import Objects
from kvstore.web.api.places import Places
from kvstore.web.api.questions import Api
from kvstore.web.dashboard.master import Master
from kvstore.web.dashboard.paths import Dashboard
from kvstore.web.events.paths import Events, not_asked_for
from kvstore.web.server.access import NOT_SECURED, Access, Hosts, Secured
from kvstore.web.server.endpoints import Document, endpoints_of
from kvstore.web.server.link import Link
from kvstore.web.server.serving import Answers, Route, serving

if TYPE_CHECKING:
    from kvstore.web.events.publisher import Publisher

log = logging.getLogger("kvstore.web")


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
    secured: Secured = NOT_SECURED


async def serve(served: Served) -> None:
    """Serves until the master is gone, or stops this process."""
    loop = asyncio.get_running_loop()
    background.watch_loop(loop)
    background.watch_threads()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    background.hear_signals()
    assert served.parent.fd is not None
    loop.add_reader(served.parent.fd, stopped.set)
    master = Master(served.master, cluster=served.cluster, pid=served.pid, link=Link(served.link))
    answers = Answers(master.readiness, master.metrics)
    events = Events(served.events, master.readiness) if served.events else None
    secured = served.secured
    port = served.listener.getsockname()[1]
    dashboard = Dashboard(master, port=port, scheme=secured.scheme)
    nodes = Nodes(master.client, master.nodes, master.connect)
    publisher: Publisher | None = None
    try:
        if events is not None and served.events_at:
            publisher = _publisher(served, events, master)
        access = Access(Hosts(served.names), token=secured.token, reads=secured.reads)
        routes = _routes(access, master, dashboard, events, nodes)
        async with serving(served.listener, answers, routes, access=access, tls=secured.tls()):
            served.parent.tell(ready=1)
            await stopped.wait()
    finally:
        loop.remove_reader(served.parent.fd)
        if publisher is not None:
            await publisher.close()
        await dashboard.close()
        await nodes.close()
        if events is not None:
            await events.close()
        await master.close()


def _routes(
    access: Access, master: Master, dashboard: Dashboard, events: Events | None, nodes: Nodes
) -> list[Route]:
    """All but health and metrics."""
    places = Places(master.client, master.nodes_by_segment)
    owners = (dashboard, Api(master.client, places), Prefixes(master.client, places))
    endpoints = endpoints_of(events) if events else not_asked_for()
    for owner in (*owners, Objects(master.client), nodes):
        endpoints += endpoints_of(owner)
    endpoints += endpoints_of(Document(endpoints))
    routes = [Route("GET", path, access.named(way)) for path, way in dashboard.page().items()]
    for each in endpoints:
        guard = access.trusted if each.is_trusted else access.reading
        routes.append(Route(each.method, each.path, guard(each.handle)))
    return routes


def _publisher(served: Served, events: Events, master: Master) -> Publisher:
    from kvstore.web.events.publisher import (
        Publisher,  # needs packages that are installed if asked for
    )

    pool = served.cluster or "kvstore"
    return Publisher(served.events_at, pool, events.journal, events.streams, master.fleet)
