"""Serves one request: renders it to token ids, uses a prefiller if that helps, then a decoder.

A failure of the first two steps only costs time; the decoder's result is the client's response.
"""

from __future__ import annotations

import logging
from typing import Final

from aiohttp import web
from yarl import URL

from kvstore.errors import InvalidArgumentError
from kvstore.http.connection_limiter import CLIENT_LEFT, RETRY_AFTER_S
from kvstore.proxy import bodies
from kvstore.proxy.affinity import fingerprints
from kvstore.proxy.bodies import EngineRoute
from kvstore.proxy.decode import decode, no_decoder
from kvstore.proxy.hints import SESSION, SessionHints, envelope_of, session_of
from kvstore.proxy.metrics import clock_ms
from kvstore.proxy.prefill import prefill
from kvstore.proxy.render import render
from kvstore.proxy.request_context import (
    REQUEST_ID,
    ProxyContext,
    RequestContext,
    error_response,
    headers_for_engines,
    request_id_of,
)
from kvstore.runtime.limiter import WaitPreemptedError
from kvstore.runtime.logs import EACH

log = logging.getLogger("kvstore.proxy")

INFLIGHT_MAX = 1_024
"""Concurrent requests, each with its body in memory; further ones get 503 with Retry-After. As many
as some decoders run together."""

BODY_BYTES_MAX = 32 << 20
"""Limit of a request body: a million token ids are 8 MiB; images take more."""

BODY_TIMEOUT_S = 60.0
"""Timeout of a request's body: the largest one at 5 Mbit/s. Of as many bodies as requests, the
slowest gives way to one more."""


RELAYED: Final = "/v1/"
RESPONSES: Final = "/v1/responses"
"""The one relayed path whose prompts engines salt."""
_WITHOUT_PROMPT: Final = ("GET", "HEAD", "OPTIONS")


async def serve(
    parts: ProxyContext, hints: SessionHints, route: EngineRoute, request: web.Request
) -> web.StreamResponse:
    """Handle all requests for engines: limit, count and log requests; ``_answer`` does the work.

    A request counts as in flight once its body has arrived; before that it takes no slot.
    """
    request_id = request_id_of(request)
    arrived_ms = clock_ms()
    context: RequestContext | None = None
    status = CLIENT_LEFT
    with parts.counting_request():
        try:
            context = await _read_request(parts, route, request, request_id, arrived_ms)
            with parts.slot():
                answer = await _answer(parts, context, request)
            status = answer.status
            if context.broken:
                status = 502  # in the log and in the metrics; the client saw the engine's status
            elif request.transport is None or request.transport.is_closing():
                status = CLIENT_LEFT
            if status == 200:
                hints.on_answer(context)
            return answer
        except _RejectedError as error:
            status = error.response.status
            return error.response
        finally:
            parts.metrics.requests.labels(route.name, status).inc()
            _log(route, request_id, context, status, clock_ms() - arrived_ms)


async def relay(
    parts: ProxyContext, hints: SessionHints, request: web.Request
) -> web.StreamResponse:
    """Relay a request below ``/v1/`` that the proxy does not interpret, such as one of coding
    agents, to a decoder. Other paths are refused: engines do not authenticate them."""
    path = URL(f"http://engine{request.rel_url}").raw_path_qs  # as sent: without dot segments
    if path.startswith(RELAYED):
        route = EngineRoute("relayed", path, method=request.method)
        return await serve(parts, hints, route, request)
    message = f"the proxy serves {RELAYED}, /healthz, /metrics and /admin/instances, not this path"
    headers = {REQUEST_ID: request_id_of(request)}
    return error_response(404, message, "not_found", headers=headers)


class _RejectedError(Exception):
    """The proxy rejects the request with ``response``."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response.status)
        self.response = response


async def _read_request(
    parts: ProxyContext, route: EngineRoute, request: web.Request, request_id: str, arrived_ms: int
) -> RequestContext:
    """Read the request with its body. Raises _RejectedError."""

    def not_taken(status: int, message: str, kind: str) -> _RejectedError:
        headers = {REQUEST_ID: request_id}
        if status == 503:
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        response = error_response(status, message, kind, headers=headers)
        if status in (401, 408, 503):
            response.force_close()  # the body may be incomplete
        return _RejectedError(response)

    if parts.stopping:
        raise not_taken(503, "the proxy is stopping", "overloaded")
    salts, caller = None if request.method in _WITHOUT_PROMPT else parts.salts, None
    if salts is not None and not (route.is_generation or request.path == RESPONSES):
        message = f"this proxy isolates callers, which {request.path} does not support"
        raise not_taken(404, message, "not_found")
    if salts is not None and (caller := salts.caller(request.headers)) is None:
        raise not_taken(401, f"this needs one header {salts.header}", "authentication_error")
    try:
        async with parts.bodies.waiting(BODY_TIMEOUT_S):
            raw = await request.read()
        body = bodies.parse(raw) if salts or route.is_generation else {}
        envelope = envelope_of(request.headers, request_id) if route.is_generation else None
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is larger than {BODY_BYTES_MAX} bytes"
        raise not_taken(413, message, "invalid_request_error") from None
    except WaitPreemptedError:
        message = "too many requests whose body has not arrived"
        raise not_taken(503, message, "overloaded") from None
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise not_taken(408, message, "timeout") from None
    except InvalidArgumentError as error:
        raise not_taken(400, str(error), "invalid_request_error") from None
    if parts.in_flight >= parts.inflight_max:
        raise not_taken(503, "too many requests at once", "overloaded")
    if salts is not None and caller is not None:
        body = salts.salted(caller, body)
        raw = bodies.dump(body)
    if envelope is not None:
        body = bodies.with_hint(body, envelope)
        raw = bodies.dump(body)
    context = RequestContext(route, request_id, raw, body, headers_for_engines(request), arrived_ms)
    context.session = session_of(request.headers.get(SESSION, ""), caller)
    return context


async def _answer(
    parts: ProxyContext, context: RequestContext, request: web.Request
) -> web.StreamResponse:
    if not context.route.is_generation:
        return await decode(parts, context, request)
    now_ms = clock_ms()
    if not parts.instances.usable("decode", now_ms):
        able = parts.instances.last_resort("decode", now_ms)
        if not able:
            return no_decoder(context)
        if all(instance.refuses for instance in able):  # tries these, but without a prefiller
            context.prefill = "skipped:no_decoder"
            return await decode(parts, context, request)
    refused = await render(parts, context)
    if context.token_ids is not None and parts.config.affinity == "prefix":
        context.prefix_fingerprints = fingerprints(
            context.token_ids, salt=bodies.salt_of(context.body) or ""
        )
    await prefill(parts, context, refused=refused)
    return await decode(parts, context, request)


def _log(
    route: EngineRoute, request_id: str, context: RequestContext | None, status: int, total_ms: int
) -> None:
    if context is None:
        log.info(
            "request id=%s route=%s status=%d total_ms=%d",
            request_id, route.name, status, total_ms,
        )  # fmt: skip
        return
    log.info(
        "request id=%s route=%s status=%d tokens=%s prefill=%s prefill_ms=%d stored=%s decode=%s "
        "retries=%d first_byte_ms=%s total_ms=%d",
        request_id, route.name, status,
        "?" if context.token_ids is None else len(context.token_ids),
        context.prefill or "-", context.prefill_ms,
        "-" if context.stored is None else context.stored,
        context.decode or "-", context.retries,
        "-" if context.first_byte_ms is None else context.first_byte_ms, total_ms, extra=EACH,
    )  # fmt: skip
