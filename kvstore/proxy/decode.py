"""The second hop: relays a decoder's response to the client as it arrives.

Until the client has received the first byte, another decoder can take over, and finds the prompt in
the store. After that the client gets an error event in the stream, or an incomplete response.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from typing import Final, NamedTuple

from aiohttp import ClientResponse, web
from multidict import CIMultiDict

from kvstore.http.connection_limiter import RETRY_AFTER_S
from kvstore.proxy import bodies, engine
from kvstore.proxy.engine import EngineError
from kvstore.proxy.instances import InFlightRequest
from kvstore.proxy.metrics import clock_ms
from kvstore.proxy.request_context import REQUEST_ID, ProxyContext, RequestContext, error_response

log = logging.getLogger("kvstore.proxy")

SUSPECT: Final = 500
"""The one status that may be the fault of the request or of the engine. It counts against an engine
only once another engine has answered the same request."""

ERROR_BYTES_MAX: Final = 1 << 20
"""Limit of an engine's error body."""

RETRIES = 2
"""Other decoders that are tried when one fails before its first byte."""

FIRST_BYTE_TIMEOUT_S = 600.0
"""Timeout of a decoder's first byte, which without streaming is the whole response: as long as
OpenAI's own clients wait."""

QUICK_TIMEOUT_S = 5.0
"""The same of a request that computes nothing, such as GET /v1/models."""

_NOT_RELAYED: Final = frozenset(
    {"connection", "date", "keep-alive", "server", "transfer-encoding", "x-request-id"}
)


class _FailedAttempt(NamedTuple):
    """An attempt in which a decoder did not answer, or answered with an error."""

    response: web.Response
    """The client's response if no other decoder succeeds."""
    is_final: bool = False
    """Whether no other decoder is tried: the client has waited long enough."""


async def decode(
    parts: ProxyContext, context: RequestContext, request: web.Request
) -> web.StreamResponse:
    """Return the client's response, or an error. A relayed response has been sent by then."""
    sent = context.raw
    if context.token_ids is not None or context.stored is not None:
        body = bodies.for_decode(context.route, context.body, context.token_ids, context.stored)
        sent = bodies.dump(body)
    tried: list[str] = []
    suspects: list[InFlightRequest] = []
    failed: _FailedAttempt | None = None
    while len(tried) <= RETRIES and not (failed and failed.is_final):
        turn = parts.instances.choose(
            "decode", clock_ms(), without=tried, prints=context.prefix_fingerprints
        )
        if turn is None:
            break
        with turn:
            context.decode = turn.instance.address
            context.retries = len(tried)
            if tried:
                parts.metrics.retries.labels("decode").inc()
            tried.append(turn.instance.address)
            outcome = await _attempt(parts, context, request, turn, sent, suspects)
        if isinstance(outcome, web.StreamResponse):
            return outcome
        failed = outcome
    return failed.response if failed is not None else no_decoder(context)


def no_decoder(context: RequestContext) -> web.Response:
    """Return the response for no usable decoder."""
    return error_response(
        503,
        "no decoder is usable now",
        "no_decoder",
        headers={REQUEST_ID: context.request_id, "Retry-After": str(RETRY_AFTER_S)},
    )


async def _attempt(
    parts: ProxyContext,
    context: RequestContext,
    request: web.Request,
    turn: InFlightRequest,
    sent: bytes,
    suspects: list[InFlightRequest],
) -> web.StreamResponse | _FailedAttempt:
    try:
        async with parts.engines.stream(
            context.route.method,
            turn.instance.address,
            context.route.path,
            headers=context.engine_headers(),
            data=sent,
            first_byte_timeout_s=(
                FIRST_BYTE_TIMEOUT_S if context.route.method == "POST" else QUICK_TIMEOUT_S
            ),
        ) as (answer, first):
            if answer.status >= 500:
                return await _refused(context, turn, answer, first, suspects)
            turn.succeeded()
            turn.instance.on_response(clock_ms())
            for suspect in suspects:
                suspect.failed(clock_ms())
            return await _relay(parts, context, request, turn, answer, first)
    except EngineError as error:
        turn.failed(clock_ms())
        if error.is_unconnected:
            turn.instance.on_connect_failed(
                clock_ms(), refused=error.failure == "refused", reason=error
            )
            if turn.forced:
                return _FailedAttempt(no_decoder(context))
        log.warning("decode_failed id=%s reason=%s", context.request_id, error)
        late = error.failure == "timeout"
        response = error_response(
            504 if late else 502,
            "the decoder did not answer in time" if late else "the decoder does not answer",
            "upstream_error",
            headers={REQUEST_ID: context.request_id},
        )
        return _FailedAttempt(response, is_final=late)


async def _refused(
    context: RequestContext,
    turn: InFlightRequest,
    answer: ClientResponse,
    first: bytes,
    suspects: list[InFlightRequest],
) -> _FailedAttempt:
    """Return the outcome for an engine's own error, relayed if no other decoder succeeds."""
    log.warning(
        "decode_failed id=%s reason=%s: status %d",
        context.request_id, turn.instance.address, answer.status,
    )  # fmt: skip
    if answer.status == SUSPECT and not turn.is_probe:
        suspects.append(turn)
    else:
        turn.failed(clock_ms())
    content = bytearray(first)
    try:
        async for piece in engine.rest(turn.instance.address, answer):
            content += piece
            if len(content) > ERROR_BYTES_MAX:
                break
    except EngineError:
        pass  # the part that arrived is enough
    headers = _headers(context, answer)
    headers.popall("Content-Length", None)
    return _FailedAttempt(
        web.Response(status=answer.status, headers=headers, body=bytes(content[:ERROR_BYTES_MAX]))
    )


async def _relay(
    parts: ProxyContext, context: RequestContext, request: web.Request, turn: InFlightRequest,
    answer: ClientResponse, first: bytes,
) -> web.StreamResponse:  # fmt: skip
    """Relay the response byte for byte, each chunk when it arrives. Raises only CancelledError."""
    response = web.StreamResponse(status=answer.status, headers=_headers(context, answer))
    last = first
    try:
        await _sent(response.prepare(request))
        context.first_byte_ms = context.since_ms
        parts.metrics.first_byte_seconds.labels(context.route.name).observe(
            context.first_byte_ms / 1000
        )
        context.ending.feed(first)
        if first:
            await _sent(response.write(first))
        async for piece in engine.rest(turn.instance.address, answer):
            turn.instance.on_response(clock_ms())
            context.ending.feed(piece)
            await _sent(response.write(piece))
            last = piece
        await _sent(response.write_eof())
    except EngineError as error:
        turn.failed(clock_ms())
        context.broken = True
        parts.metrics.broken_streams.inc()
        log.warning("stream_broken id=%s reason=%s", context.request_id, error)
        if answer.content_type != "text/event-stream":
            _cut(request, response)
            return response
        response.force_close()
        try:
            await _sent(response.write(_broken_event(error, last)))
            await _sent(response.write_eof())
        except _ClientDisconnectedError:
            _cut(request, response)
    except _ClientDisconnectedError as error:
        log.info("client_left id=%s reason=%s", context.request_id, error)
        _cut(request, response)
    return response


class _ClientDisconnectedError(Exception):
    """The client does not read the rest of its response."""


async def _sent(step: Awaitable[object]) -> None:
    """Wait for a write to the client. Raises _ClientDisconnectedError: it takes too long, or
    fails."""
    try:
        async with asyncio.timeout(engine.IDLE_TIMEOUT_S):
            await step
    except TimeoutError:
        raise _ClientDisconnectedError("the client does not read") from None
    except OSError as error:
        raise _ClientDisconnectedError(f"{type(error).__name__} {error}") from None


def _cut(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection without a regular end, so that the client sees an incomplete
    response."""
    response.force_close()
    if request.transport is not None:
        request.transport.abort()


def _headers(context: RequestContext, answer: ClientResponse) -> CIMultiDict[str]:
    headers: CIMultiDict[str] = CIMultiDict()
    for key, value in answer.headers.items():
        if key.lower() not in _NOT_RELAYED:
            headers.add(key, value)
    headers[REQUEST_ID] = context.request_id
    return headers


def _broken_event(error: EngineError, last: bytes) -> bytes:
    """Return an error event for the client's stream, after the end of an incomplete event."""
    code = 504 if error.failure == "timeout" else 502
    told = {
        "message": "the decoder stopped before the end of its answer",
        "type": "upstream_error",
        "param": None,
        "code": code,
    }
    before = b"" if last.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
    return before + b"data: " + json.dumps({"error": told}).encode() + b"\n\n"
