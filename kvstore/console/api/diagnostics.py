"""``/api/v1`` for cache misses: why lookups miss, and the traffic of engines and namespaces.

Read-only; its calls are checked against the permissions of the request.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

from aiohttp import web
from pydantic import BaseModel, Field

from kvstore import calls
from kvstore.client.async_client import AsyncClient
from kvstore.client.client import Client
from kvstore.console.api.lookups import TIMEOUT_MS, QueryThrottle
from kvstore.console.api.schemas import Shape, shaped
from kvstore.console.diagnostics.evidence import Explanation, Report, explain, report_of
from kvstore.errors import InvalidArgumentError
from kvstore.http.operations import ApiRequest, endpoint
from kvstore.limits import is_fleet
from kvstore.security.impersonation import impersonated
from kvstore.security.permissions import visible_status

WHY_PATH: Final = "/api/v1/why"
TRAFFIC_PATH: Final = "/api/v1/traffic"

ROWS_SHOWN: Final = 300
"""Engines, and namespaces, in one traffic response."""


class DiagnosisRequest(ApiRequest):
    """The namespace or model to diagnose; without both: all."""

    namespace: str = Field(default="", description="One namespace.")
    model: str = Field(default="", description="The engines of this model: its name, or its path.")


@shaped(Report)
class DiagnosisResponse(Shape):
    pass


class TrafficRequest(ApiRequest):
    namespace: str = Field(default="", description="Empty: all namespaces.")


class EngineTraffic(BaseModel):
    """A client in all of these namespaces together, as far as the master remembers it."""

    client: str
    address: str
    namespaces: int
    put: int = Field(description="Keys that it has put.")
    put_bytes: int = Field(description="Payload of these.")
    queries: int = Field(description="Keys.")
    found: int = Field(description="Of those.")
    idle_ms: int


@shaped(calls.NamespaceTraffic, without=("writers", "readers", "misses"))
class NamespaceTrafficResponse(Shape):
    pass


class TrafficResponse(BaseModel):
    """At most 300 engines, the last active ones, and 300 namespaces, those with most evictions."""

    uptime_ms: int
    engines: list[EngineTraffic]
    namespaces: list[NamespaceTrafficResponse]


class DiagnosticsAPI:
    """Serves these operations as a client of the master. Use it in one event loop."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._throttle = QueryThrottle()

    @endpoint("GET", WHY_PATH, {200: "The causes.", 404: "No such namespace or model."})
    async def _diagnose(self, params: DiagnosisRequest) -> DiagnosisResponse:
        """Explain cache misses."""
        if params.namespace and params.model:
            raise InvalidArgumentError("give a namespace or a model, not both")
        async with self._throttle.lock:
            found = await self._throttle.run(
                lambda: self._client._carry_out(_explained, params.namespace, params.model)
            )
        if not found.groups and (params.namespace or params.model):
            raise web.HTTPNotFound(text="neither puts nor questions nor objects there\n")
        return DiagnosisResponse.model_validate(report_of(found))

    @endpoint("GET", TRAFFIC_PATH, {200: "By engine and by namespace."})
    async def _traffic(self, params: TrafficRequest) -> TrafficResponse:
        """Show puts, lookups and evictions by engine and namespace."""
        async with self._throttle.lock:
            report = await self._throttle.run(
                lambda: self._client.traffic(params.namespace or None, timeout_ms=TIMEOUT_MS)
            )
        spaces = [row for row in report.namespaces if not is_fleet(row.name)]
        rows = heapq.nlargest(ROWS_SHOWN, spaces, key=lambda row: row.evicted)
        return TrafficResponse(
            uptime_ms=report.uptime_ms,
            engines=_engines(spaces)[:ROWS_SHOWN],
            namespaces=[NamespaceTrafficResponse.model_validate(row) for row in rows],
        )


def _explained(client: Client, namespace: str, model: str) -> Explanation:
    """In a thread of the client; its calls are checked by the rights of the request."""
    status = visible_status(impersonated(), client.status())
    return explain(client, status, namespace=namespace, model=model)


def _engines(spaces: Iterable[calls.NamespaceTraffic]) -> list[EngineTraffic]:
    """Return one row per client, the last active first."""
    found: dict[tuple[str, str], EngineTraffic] = {}
    for space in spaces:
        here = set()
        rows = [(row, row.stored, row.stored_bytes, 0, 0) for row in space.writers]
        rows += [(row, 0, 0, row.keys, row.found) for row in space.readers]
        for row, put, put_bytes, params, hits in rows:
            mark = row.client, row.address
            engine = found.setdefault(
                mark,
                EngineTraffic(
                    client=row.client, address=row.address, namespaces=0, put=0, put_bytes=0,
                    queries=0, found=0, idle_ms=row.idle_ms,
                ),
            )  # fmt: skip
            engine.put += put
            engine.put_bytes += put_bytes
            engine.queries += params
            engine.found += hits
            engine.idle_ms = min(engine.idle_ms, row.idle_ms)
            engine.namespaces += mark not in here
            here.add(mark)
    return sorted(found.values(), key=lambda engine: engine.idle_ms)
