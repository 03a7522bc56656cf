"""Data shared by the steps of a request: the parts of the process, and the request itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from kvstore.config import ProxyConfig
from kvstore.proxy.affinity import Prints
from kvstore.proxy.answer_ending import AnswerEnding
from kvstore.proxy.bodies import Body, EngineRoute
from kvstore.proxy.cache_salts import CacheSalts
from kvstore.proxy.engine import EngineClient
from kvstore.proxy.instances import Instances
from kvstore.proxy.lookup import StoreLookup
from kvstore.proxy.metrics import Metrics, clock_ms
from kvstore.runtime.limiter import Limiter

REQUEST_ID: Final = "X-Request-Id"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

# Headers that concern only one connection (RFC 9110, 7.6.1), or that the proxy replaces.
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
class ProxyContext:
    """The parts of the process that a request needs."""

    config: ProxyConfig
    instances: Instances
    engines: EngineClient
    metrics: Metrics
    lookup: StoreLookup | None
    salts: CacheSalts | None
    bodies: Limiter[asyncio.Timeout]
    """Bodies of requests that are arriving."""
    inflight_max: int
    in_flight: int = 0
    """Requests whose body has arrived. Only these take a slot."""
    under_way: int = 0
    """All requests, including those whose body is still arriving."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request is in progress."""
    stopping: bool = False

    @contextlib.contextmanager
    def counting_request(self) -> Iterator[None]:
        """Count a request as in progress, from its arrival to its response."""
        self.under_way += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Count a request as in flight, from the arrival of its body to its response."""
        self.in_flight += 1
        self.metrics.in_flight.inc()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.dec()


@dataclass
class RequestContext:
    """One request and its outcome: the fields of its log line."""

    route: EngineRoute
    request_id: str
    raw: bytes
    """The body for engines if the proxy has nothing to add."""
    body: Body
    headers: CIMultiDict[str]
    """Headers for engines, without the request id."""
    arrived_ms: int
    token_ids: list[int] | None = None
    prefix_fingerprints: Prints = ()
    stored: int | None = None
    prefill: str = ""
    """The prefiller's address, or the reason why no prefiller was used."""
    prefill_ms: int = 0
    decode: str = ""
    first_byte_ms: int | None = None
    retries: int = 0
    session: tuple[str, str] | None = None
    """Its caller and session; None: it names no session."""
    ending: AnswerEnding = field(default_factory=AnswerEnding)
    broken: bool = False
    """Whether the response ended too early, after its first byte was relayed."""

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
    """Return an error response in OpenAI's form."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


def request_id_of(request: web.Request) -> str:
    """Return the client's request id if it is safe in a header and in a log line; otherwise a new
    one."""
    given = request.headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def headers_for_engines(request: web.Request) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in request.headers.get("Connection", "").split(",")}
    headers: CIMultiDict[str] = CIMultiDict()
    for key, value in request.headers.items():
        if key.lower() not in _HOP_HEADERS and key.lower() not in named:
            headers.add(key, value)
    return headers
