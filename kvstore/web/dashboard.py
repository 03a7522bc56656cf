"""The dashboard of a master: the page, and the paths of JSON that it reads.

Everything here only reads. Requests that come by a name that this port does not know are refused
(``hosts``), and no other site may read an answer: there are no CORS headers.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from kvstore.addresses import join_address, split_address
from kvstore.background import start_task
from kvstore.calls import ClusterStatus, NamespaceStatus, NodeStatus
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.web import problems
from kvstore.web.doors import Handler
from kvstore.web.fleet import compared
from kvstore.web.history import EVERY_S, History, sample
from kvstore.web.hosts import Hosts
from kvstore.web.serving import Routes

if TYPE_CHECKING:
    from kvstore.web.of_master import Master, Seen

log = logging.getLogger("kvstore.web")

NAMESPACES_SHOWN: Final = 300
"""The largest ones; the rest is one row."""

FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/prefixes.js": ("prefixes.js", "text/javascript"),
}

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

MISDIRECTED: Final = (
    "This name is not known here. Use an address, or have the master know the name: "
    "kvstore-master --http-names NAME\n"
)


class Dashboard:
    """Samples the history and answers. Use it in one event loop."""

    def __init__(self, master: Master, hosts: Hosts, *, port: int) -> None:
        """``port``: this one, which is taken to be that of other masters, too."""
        self._master = master
        self._hosts = hosts
        self._port = port
        self._history = History()
        self._task = start_task("history", self._sample_forever())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def routes(self) -> Routes:
        page = resources.files("kvstore.web") / "page"
        return {
            **{
                path: _file((page / name).read_bytes(), kind)
                for path, (name, kind) in FILES.items()
            },
            "/api/v1/status": self._answer_status,
            "/api/v1/history": self._answer_history,
            "/api/v1/notices": self._answer_notices,
            "/api/v1/fleet": self._answer_fleet,
        }

    def guarded(self, routes: Routes) -> Routes:
        """The same routes, for requests that come by a known name alone."""
        return {path: self._guarded(handler) for path, handler in routes.items()}

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if not self._hosts.allow(request.headers.getall("Host", [])):
                return web.Response(status=421, text=MISDIRECTED, headers=HEADERS)
            return await handler(request)

        return guarded

    async def _sample_forever(self) -> None:
        while True:
            try:
                seen = await self._master.seen()
                self._history.add(sample(seen.at_ms, seen.measured, seen.status))
            except UnavailableError as error:
                log.debug("no_sample reason=%s", error)
            await asyncio.sleep(EVERY_S)

    async def _answer_status(self, request: web.Request) -> web.Response:
        del request
        seen = await self._master.seen()
        if seen.measured["leads"]:
            if seen.status is None:
                raise UnavailableError("this master leads, and does not tell its status in time")
            found = problems.of_the_store(seen.status, self._history, seen.at_ms)
            return _json(status_json(seen, seen.status, found))
        return _json(
            {
                **_process(seen),
                "leader": seen.leader,
                "leader_page": self._page_of(seen.leader),
                "problems": [each._asdict() for each in problems.of_a_standby(seen.leader)],
            }
        )

    async def _answer_history(self, request: web.Request) -> web.Response:
        del request
        return _json(self._history.as_columns(time.time_ns() // 1_000_000))

    async def _answer_notices(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= 15):
            return web.Response(status=400, text="after is a number\n", headers=HEADERS)
        run, last, kept = await self._master.notices()
        new = [each for each in kept if each[0] > int(after)]
        return _json({"run": run, "last": last, "notices": new})

    async def _answer_fleet(self, request: web.Request) -> web.Response:
        del request
        return _json({"models": compared(await self._master.fleet_records())})

    def _page_of(self, leader: str) -> str:
        try:
            host, _ = split_address(leader)
        except InvalidArgumentError:
            return ""
        return f"http://{join_address(host, self._port)}/"


def status_json(seen: Seen, status: ClusterStatus, found: list[problems.Problem]) -> dict[str, Any]:
    """What ``kvstore status`` shows, and what is wrong."""
    rows = status.namespaces
    largest = heapq.nlargest(NAMESPACES_SHOWN, rows, key=lambda row: (row.size, row.name))
    sums = (sum(column) for column in zip(*(row[1:] for row in rows)))
    shown = (sum(column) for column in zip(*(row[1:] for row in largest)))
    rest = [whole - part for whole, part in zip(sums, shown)] or [0, 0, 0, 0]
    return {
        **_process(seen),
        "role": status.role,
        "leader": status.leader,
        "uptime_ms": status.uptime_ms,
        "nodes": [_node(node) for node in status.nodes],
        "namespaces": [row._asdict() for row in largest],
        "other_namespaces": {
            "namespaces": len(rows) - len(largest),
            **NamespaceStatus("", *rest)._asdict(),
        },
        "counters": dict(status.counters),
        "problems": [each._asdict() for each in found],
    }


def _process(seen: Seen) -> dict[str, Any]:
    """Of the process, whether it leads or not."""
    measured: Mapping[str, Any] = seen.measured
    return {
        "at_ms": seen.at_ms,
        "leads": measured["leads"],
        "epoch": measured["epoch"],
        "version": measured["version"],
        "cluster": measured["cluster"],
        "connections": measured["connections"],
    }


def _node(node: NodeStatus) -> dict[str, Any]:
    segments = [segment._asdict() for segment in node.segments]
    shm = any(segment.shm_name for segment in node.segments)
    return {
        **node._asdict(),
        "segments": segments,
        "transports": [*(["shm"] if shm else []), *(["tcp"] if node.address else [])],
    }


def _file(body: bytes, kind: str) -> Handler:
    async def file(request: web.Request) -> web.Response:
        del request
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return file


def _json(value: Any) -> web.Response:
    return web.json_response(value, headers=HEADERS)
