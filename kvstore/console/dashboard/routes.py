"""The dashboard of a master: its files, and the JSON that they fetch. Read-only."""

from __future__ import annotations

import asyncio
import heapq
import html
import json
import logging
import re
import time
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, Final

from aiohttp import web
from pydantic import Field

from kvstore.calls import ClusterStatus, NamespaceStatus
from kvstore.calls.fleet_records import FleetRecord
from kvstore.console.api import schemas
from kvstore.console.diagnostics import problems
from kvstore.console.diagnostics.history import EVERY_S, HistoryPoints, sample
from kvstore.console.diagnostics.rows import ROWS
from kvstore.errors import InvalidArgumentError, KVStoreError, UnavailableError
from kvstore.http.access_control import HEADERS
from kvstore.http.connection_limiter import Handler
from kvstore.http.operations import ApiRequest, endpoint
from kvstore.http.serving import Routes
from kvstore.runtime.addresses import join_address, split_address
from kvstore.runtime.tasks import start_task
from kvstore.security.validity import ValidityPeriod

if TYPE_CHECKING:
    from kvstore.console.dashboard.master import MasterSample, ParentMaster

log = logging.getLogger("kvstore.console")

NAMESPACES_SHOWN: Final = 300
"""Namespaces with their own row, the largest ones; all others share one row."""

FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/misses.js": ("misses.js", "text/javascript"),
    "/prefixes.js": ("prefixes.js", "text/javascript"),
}

RUNBOOK: Final = "/runbook"

NAMESPACES_MAX: Final = 64

FIELDS_MAX: Final = 64
TEXT_MAX: Final = 200

_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Runbook of kvstore</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
</head>
<body>
<main class="runbook">
<p><a href="./">Dashboard</a></p>
<h1>Runbook</h1>
"""


class ClusterEventsRequest(ApiRequest):
    after: int = Field(default=0, ge=0, lt=10**15, description="The last number that is known.")


class Dashboard:
    """Samples the history, and serves the dashboard. Use it in one event loop."""

    def __init__(self, master: ParentMaster, *, port: int, scheme: str) -> None:
        """
        Args:
            port, scheme: of this server; the leader is assumed to use the same.
        """
        self._master = master
        self._port = port
        self._scheme = scheme
        self._history = HistoryPoints()
        self._task = start_task("history", self._sample_forever())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def page(self) -> Routes:
        """The static files by path; they contain no data of the store."""
        page = resources.files("kvstore.console.dashboard") / "page"
        files = {
            path: _file((page / name).read_bytes(), kind) for path, (name, kind) in FILES.items()
        }
        return files | {RUNBOOK: _file(runbook(), "text/html")}

    async def _sample_forever(self) -> None:
        while True:
            try:
                seen = await self._master.seen()
                self._history.add(sample(seen.at_ms, seen.measured, seen.status))
            except KVStoreError as error:
                log.debug("no_sample reason=%s", error)
            await asyncio.sleep(EVERY_S)

    @endpoint("GET", "/api/v1/status", {200: "At a glance."}, is_of_all=True, has_own_bounds=True)
    async def _get_status(self) -> schemas.StatusResponse:
        """Get the status of the cluster."""
        seen = await self._master.seen()
        summary: dict[str, Any] = {"address": self._master.address}
        valid = seen.measured["auth_valid"]
        identity = problems.of_identity(valid and ValidityPeriod(*valid), seen.at_ms)
        if seen.measured["leads"]:
            if seen.status is None:
                raise UnavailableError("this master leads, and does not tell its status in time")
            found = problems.leader_problems(seen.status, self._history, seen.at_ms)
            found += await self._master.engine_problems() + identity
            return schemas.StatusResponse.model_validate(
                summary | status_of(seen, seen.status, found)
            )
        return schemas.StatusResponse.model_validate(
            {
                **summary,
                **_process(seen),
                "leader": seen.leader,
                "leader_page": self._page_of(seen.leader),
                "problems": [*problems.standby_problems(seen.leader), *identity],
            }
        )

    @endpoint("GET", "/api/v1/history", {200: "In columns."}, is_of_all=True, has_own_bounds=True)
    async def _get_history(self) -> Annotated[dict[str, Any], schemas.HistoryResponse]:
        """Get the last hour."""
        return self._history.as_columns(time.time_ns() // 1_000_000)

    @endpoint(
        "GET",
        "/api/v1/cluster-events",
        {200: "Those after a number."},
        is_of_all=True,
        has_own_bounds=True,
    )
    async def _get_cluster_events(
        self, params: ClusterEventsRequest
    ) -> Annotated[dict[str, Any], schemas.ClusterEventsResponse]:
        """Get the last cluster events."""
        run, last, kept = await self._master.notices()
        new = [columns for columns in kept if columns[0] > params.after]
        return {"run": run, "last": last, "events": new}

    @endpoint("GET", "/api/v1/fleet", {200: "By model."}, is_of_all=True, has_own_bounds=True)
    async def _get_fleet(self) -> Annotated[dict[str, Any], schemas.FleetResponse]:
        """Get the engines."""
        return {"models": compared(await self._master.fleet_records())}

    def _page_of(self, leader: str) -> str:
        try:
            host, _ = split_address(leader)
        except InvalidArgumentError:
            return ""
        return f"{self._scheme}://{join_address(host, self._port)}/"


def status_of(
    seen: MasterSample, status: ClusterStatus, found: list[problems.DetectedProblem]
) -> dict[str, Any]:
    """Return a leader's status: that of ``kvstore status``, and the problems."""
    rows = status.namespaces
    largest = heapq.nlargest(NAMESPACES_SHOWN, rows, key=lambda row: (row.size, row.name))
    sums = (sum(column) for column in zip(*(row[1:] for row in rows)))
    shown = (sum(column) for column in zip(*(row[1:] for row in largest)))
    rest = [whole - part for whole, part in zip(sums, shown)] or [0, 0, 0, 0]
    others = NamespaceStatus("", *rest)._asdict() | {"namespaces": len(rows) - len(largest)}
    return {
        **status._asdict(),
        **_process(seen),
        "namespaces": largest,
        "other_namespaces": others,
        "counters": dict(status.counters),
        "problems": found,
    }


def _process(seen: MasterSample) -> dict[str, Any]:
    """Return the fields that any master knows of its process."""
    of_process = ("leads", "epoch", "version", "cluster", "connections")
    return {"at_ms": seen.at_ms, **{name: seen.measured[name] for name in of_process}}


def _file(body: bytes, kind: str) -> Handler:
    async def file(request: web.Request) -> web.Response:
        del request
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return file


def compared(records: Sequence[FleetRecord]) -> list[dict[str, Any]]:
    """Compare records by engine and model: the differing fields, and each record's values."""
    groups: dict[tuple[str, str], list[FleetRecord]] = {}
    for record in records:
        groups.setdefault((record.engine, record.model), []).append(record)
    return [
        {"engine": engine, "model": model, **_compared(group)}
        for (engine, model), group in sorted(groups.items())
    ]


def _compared(group: Sequence[FleetRecord]) -> dict[str, Any]:
    summary = [
        {name: json.dumps(value, sort_keys=True) for name, value in record.description.items()}
        for record in group
    ]
    names = sorted({name for columns in summary for name in columns})
    differing = [name for name in names if len({columns.get(name) for columns in summary}) > 1]
    return {
        "differing": differing[:FIELDS_MAX],
        "records": [
            {
                "fingerprint": record.fingerprint,
                "loaded": record.models[0][:TEXT_MAX],
                "namespaces": record.namespaces[:NAMESPACES_MAX],
                "differing": [columns.get(name, "")[:TEXT_MAX] for name in differing[:FIELDS_MAX]],
            }
            for record, columns in zip(group, summary)
        ],
    }


def runbook() -> bytes:
    """Return the runbook as HTML without external resources, from
    ``kvstore.console.diagnostics``."""
    sections = "".join(
        f'<h2 id="{row.anchor}">{row.name}</h2>\n'
        + "".join(f"<p><strong>{name}</strong>: {_inline(text)}</p>\n" for name, text in row.parts)
        for row in ROWS
    )
    return f"{_HEAD}{sections}</main>\n</body>\n</html>\n".encode()


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)
