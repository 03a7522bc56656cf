"""What the steps of a request share: the process's parts, and the request itself."""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from kvstore.config import ProxyConfig
from kvstore.proxy.affinity import Prints
from kvstore.proxy.bodies import Body, Route
from kvstore.proxy.engine import Engines
from kvstore.proxy.instances import Instances
from kvstore.proxy.lookup import StoreLookup
from kvstore.proxy.metrics import Metrics, clock_ms

REQUEST_ID: Final = "X-Request-Id"
CLIENT_LEFT: Final = 499
"""In the log and in the metrics, as nginx has it: nobody is there to be answered."""

RETRY_AFTER_S: Final = 1

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

# Between two neighbours only (RFC 9110, 7.6.1), or made anew for each hop.
_HOP_HEADERS: Final = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    }
)


@dataclass
class Parts:
    """What a request needs of the process."""

    config: ProxyConfig
    instances: Instances
    engines: Engines
    metrics: Metrics
    lookup: StoreLookup | None
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request is under way."""
    stopping: bool = False


@dataclass
class Asked:
    """One request, and what became of it: the line of the log."""

    route: Route
    request_id: str
    raw: bytes
    body: Body
    headers: CIMultiDict[str]
    """For engines, without the request id."""
    arrived_ms: int
    token_ids: list[int] | None = None
    prints: Prints = ()
    stored: int | None = None
    prefill: str = ""
    """Address, or why there was none."""
    prefill_ms: int = 0
    decode: str = ""
    first_byte_ms: int | None = None
    retries: int = 0
    broken: bool = False
    """Whether the answer ended too early, after its first byte."""

    @property
    def since_ms(self) -> int:
        return clock_ms() - self.arrived_ms

    def engine_headers(self, suffix: str = "") -> CIMultiDict[str]:
        headers = self.headers.copy()
        headers[REQUEST_ID] = self.request_id + suffix
        return headers


def error_response(
    status: int, message: str, kind: str, *, headers: dict[str, str] | None = None
) -> web.Response:
    """In the form of OpenAI's errors."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


def request_id_of(request: web.Request) -> str:
    """The client's, where it is fit for a header and a line of a log; else a new one."""
    given = request.headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def headers_for_engines(request: web.Request) -> CIMultiDict[str]:
    named = {each.strip().lower() for each in request.headers.get("Connection", "").split(",")}
    headers: CIMultiDict[str] = CIMultiDict()
    for key, value in request.headers.items():
        if key.lower() not in _HOP_HEADERS and key.lower() not in named:
            headers.add(key, value)
    return headers
