"""``python -m kvstore.console.master_server``: the HTTP child of a master; not for users.

It has one event loop, on a socket that the master has bound.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from kvstore.console.api.chains import ChainsAPI
from kvstore.console.api.diagnostics import DiagnosticsAPI
from kvstore.console.api.lookups import LookupsAPI
from kvstore.console.dashboard.master import ParentMaster
from kvstore.console.dashboard.routes import Dashboard
from kvstore.console.events.journal import Journal
from kvstore.console.events.paths import EventsAPI, disabled_endpoints
from kvstore.http.access_control import AccessControl, AllowedHosts, access_control
from kvstore.http.operations import OpenApiDocument, endpoints_of
from kvstore.http.ports import HttpSecurity
from kvstore.http.serving import ProcessStatus, Route, serving
from kvstore.master.ipc_channel import SERVED, ChildChannel
from kvstore.runtime import logs, memory_protection, tasks
from kvstore.runtime.child_process import ParentLink
from kvstore.runtime.tasks import start_task
from kvstore.runtime.watched_files import watching
from kvstore.security.credentials import MASTER_NAME

if TYPE_CHECKING:
    from kvstore.console.events.zmq_publisher import ZmqPublisher


class HttpChildOptions(NamedTuple):
    listener: socket.socket
    channel: socket.socket
    parent: ParentLink
    pid: int
    """The master's process id."""
    master: str
    """The master's own ``host:port``."""
    cluster: str
    has_events: bool
    """Whether the master sends its events (``--events``)."""
    events_at: str
    """ZeroMQ address of the events; see ``MasterConfig.events``. Empty: none."""
    names: Sequence[str]
    """Host names that requests may use, in addition to addresses and ``localhost``."""
    secured: HttpSecurity
    auth: str
    """The master's certificate file; empty: no authentication."""


async def serve(served: HttpChildOptions) -> None:
    """Serve until the master exits, or stops this process."""
    loop = asyncio.get_running_loop()
    tasks.watch_loop(loop)
    tasks.watch_threads()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    tasks.install_signal_handlers()
    assert served.parent.fd is not None
    loop.add_reader(served.parent.fd, stopped.set)
    journal = Journal()
    channel = ChildChannel(served.channel, journal.append)
    reading = start_task("channel", channel.run())
    secured = served.secured
    master = ParentMaster(
        served.master, cluster=served.cluster, pid=served.pid, channel=channel,
        scheme=secured.scheme, auth=served.auth,
    )  # fmt: skip
    answers = ProcessStatus(master.readiness, master.metrics)
    events = EventsAPI(journal, channel, master.readiness) if served.has_events else None
    port = served.listener.getsockname()[1]
    dashboard = Dashboard(master, port=port, scheme=secured.scheme)
    publisher: ZmqPublisher | None = None
    try:
        if events is not None and served.events_at:
            publisher = _publisher(served, events, master)
        access = access_control(secured, AllowedHosts([*served.names, MASTER_NAME]))
        routes = _routes(access, master, dashboard, events)
        async with serving(served.listener, answers, routes, access=access, secured=secured):
            served.parent.notify_ready(ready=1)
            await stopped.wait()
    finally:
        loop.remove_reader(served.parent.fd)
        if publisher is not None:
            await publisher.close()
        await dashboard.close()
        await master.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _routes(
    access: AccessControl,
    master: ParentMaster,
    dashboard: Dashboard,
    events: EventsAPI | None,
) -> list[Route]:
    """Return all routes except those of health and metrics."""
    client, nodes_of = master.client, master.nodes_of
    endpoints = endpoints_of(events) if events else disabled_endpoints()
    owners = LookupsAPI(client, nodes_of), ChainsAPI(client, nodes_of), DiagnosticsAPI(client)
    for owner in (dashboard, *owners):
        endpoints += endpoints_of(owner)
    endpoints += endpoints_of(OpenApiDocument(endpoints))
    routes = [
        Route("GET", path, access.require_known_host(way)) for path, way in dashboard.page().items()
    ]
    for endpoint in endpoints:
        guard = access.require_write if endpoint.is_trusted else access.require_read
        if endpoint.is_of_all:
            guard = access.require_all_namespaces
        routes.append(Route(endpoint.method, endpoint.path, guard(endpoint.handle)))
    return routes


def _publisher(served: HttpChildOptions, events: EventsAPI, master: ParentMaster) -> ZmqPublisher:
    from kvstore.console.events.zmq_publisher import (
        ZmqPublisher,  # needs the optional packages pyzmq and msgpack
    )

    pool = served.cluster or "kvstore"
    return ZmqPublisher(served.events_at, pool, events.journal, events.streams, master.fleet)


@click.command()
@click.option("--parent-fd", type=int, required=True)
@click.option("--listener", type=int, required=True, help="The bound socket.")
@click.option("--channel", type=int, required=True, help="The socket to the parent.")
@click.option(
    "--config", expose_value=False
)  # ``kvstore.runtime.child_process`` gives it to each child
@click.option("--log-level", required=True)
@click.option("--log-format", required=True)
def command(parent_fd: int, listener: int, channel: int, log_level: str, log_format: str) -> None:
    logs.configure(log_level, log_format)
    given = json.loads(os.environ.pop(SERVED))
    if given["auth"]:
        memory_protection.hide_memory()
    given["secured"] = HttpSecurity(*given["secured"])
    sockets = socket.socket(fileno=listener), socket.socket(fileno=channel)
    with ParentLink(parent_fd) as parent, watching():
        asyncio.run(serve(HttpChildOptions(*sockets, parent, os.getppid(), **given)))
        sys.exit(0)
    sys.exit(1)  # the parent has received the reason


if __name__ == "__main__":
    command()
