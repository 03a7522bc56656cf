"""One request: token ids once, a prefiller if that helps, a decoder.

Whatever the first two steps cannot do only costs time; the decoder decides what the client is told.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from kvstore.errors import InvalidArgumentError
from kvstore.proxy import bodies
from kvstore.proxy.affinity import fingerprints
from kvstore.proxy.asked import (
    CLIENT_LEFT,
    REQUEST_ID,
    RETRY_AFTER_S,
    Asked,
    Parts,
    error_response,
    headers_for_engines,
    request_id_of,
)
from kvstore.proxy.bodies import Route
from kvstore.proxy.decode import decode, no_decoder
from kvstore.proxy.metrics import clock_ms
from kvstore.proxy.prefill import prefill
from kvstore.proxy.render import render

log = logging.getLogger("kvstore.proxy")


async def serve(parts: Parts, route: Route, request: web.Request) -> web.StreamResponse:
    """The handler of both routes: bounds, counts and logs; ``_answer`` does it."""
    request_id = request_id_of(request)
    tag = {REQUEST_ID: request_id}
    arrived_ms = clock_ms()
    asked: Asked | None = None
    status = CLIENT_LEFT
    if parts.stopping or parts.in_flight >= parts.config.inflight_max:
        why = "the proxy stops" if parts.stopping else "too many requests at once"
        parts.metrics.requests.labels(route.name, 503).inc()
        log.warning("request_refused id=%s route=%s reason=%s", request_id, route.name, why)
        response = error_response(
            503, why, "overloaded", headers={**tag, "Retry-After": str(RETRY_AFTER_S)}
        )
        response.force_close()  # its body was not read
        return response
    parts.in_flight += 1
    parts.metrics.in_flight.inc()
    parts.idle.clear()
    try:
        try:
            async with asyncio.timeout(parts.config.idle_timeout_ms / 1000):
                raw = await request.read()
            body = bodies.parse(raw)
        except web.HTTPRequestEntityTooLarge:
            status = 413
            message = f"the body is larger than {parts.config.body_max} bytes"
            return error_response(413, message, "invalid_request_error", headers=tag)
        except TimeoutError:
            status = 408
            return error_response(408, "the body did not come", "timeout", headers=tag)
        except InvalidArgumentError as error:
            status = 400
            return error_response(400, str(error), "invalid_request_error", headers=tag)
        asked = Asked(route, request_id, raw, body, headers_for_engines(request), arrived_ms)
        answer = await _answer(parts, asked, request)
        status = answer.status
        if asked.broken:
            status = 502  # in the log and in the metrics: the client saw a good beginning
        elif request.transport is None or request.transport.is_closing():
            status = CLIENT_LEFT
        return answer
    finally:
        parts.in_flight -= 1
        parts.metrics.in_flight.dec()
        if not parts.in_flight:
            parts.idle.set()
        parts.metrics.requests.labels(route.name, status).inc()
        _log(route, request_id, asked, status, clock_ms() - arrived_ms)


async def _answer(parts: Parts, asked: Asked, request: web.Request) -> web.StreamResponse:
    if not parts.instances.usable("decode", clock_ms()):
        return no_decoder(asked)  # before anything is computed for nobody
    refused = await render(parts, asked)
    if asked.token_ids is not None and parts.config.affinity == "prefix":
        asked.prints = fingerprints(asked.token_ids, blocks_max=parts.config.affinity_blocks_max)
    await prefill(parts, asked, refused=refused)
    return await decode(parts, asked, request)


def _log(route: Route, request_id: str, asked: Asked | None, status: int, total_ms: int) -> None:
    if asked is None:
        log.info(
            "request id=%s route=%s status=%d total_ms=%d",
            request_id, route.name, status, total_ms,
        )  # fmt: skip
        return
    log.info(
        "request id=%s route=%s status=%d tokens=%s prefill=%s prefill_ms=%d stored=%s decode=%s "
        "retries=%d first_byte_ms=%s total_ms=%d",
        request_id, route.name, status,
        "?" if asked.token_ids is None else len(asked.token_ids),
        asked.prefill or "-", asked.prefill_ms, "-" if asked.stored is None else asked.stored,
        asked.decode or "-", asked.retries,
        "-" if asked.first_byte_ms is None else asked.first_byte_ms, total_ms,
    )  # fmt: skip
