"""The first hop: a prefiller computes the prompt and puts its KV blocks into the store."""

from __future__ import annotations

import logging
from typing import Final

from kvstore.proxy import bodies
from kvstore.proxy.engine import EngineAnswer, EngineError
from kvstore.proxy.instances import InFlightRequest
from kvstore.proxy.metrics import clock_ms
from kvstore.proxy.request_context import ProxyContext, RequestContext

log = logging.getLogger("kvstore.proxy")

ATTEMPTS: Final = 2
"""Prefillers that are tried per request. More attempts would make the client wait, and the decoder
can do the work itself."""


async def prefill(parts: ProxyContext, context: RequestContext, *, refused: bool) -> None:
    """Use a prefiller if that helps. Set ``context.prefill`` and, if reported, ``context.stored``.

    Args:
        refused: whether the engine that was to render the request has rejected it as wrong.
    """
    reason = "refused" if refused else await _reason_against(parts, context)
    if reason:
        _skip(parts, context, reason)
        return
    started_ms = clock_ms()
    outcome = await _hop(parts, context)
    if outcome is None:
        _skip(parts, context, "no_prefiller")
        return
    context.prefill_ms = clock_ms() - started_ms
    parts.metrics.prefill_seconds.labels(outcome).observe(context.prefill_ms / 1000)


def _skip(parts: ProxyContext, context: RequestContext, reason: str) -> None:
    context.prefill = f"skipped:{reason}"
    parts.metrics.prefill_skipped.labels(reason).inc()


async def _reason_against(parts: ProxyContext, context: RequestContext) -> str | None:
    reason = bodies.prefill_skip_reason(context.body)
    if reason is not None:
        return reason
    if not parts.instances.usable("prefill", clock_ms()):
        return "no_prefiller"
    if context.token_ids is None:
        return None
    if len(context.token_ids) < parts.config.prefill_threshold:
        return "short"
    return await _reason_of_store(parts, context, context.token_ids)


async def _reason_of_store(
    parts: ProxyContext, context: RequestContext, token_ids: list[int]
) -> str | None:
    model = bodies.model_of(context.body)
    salt = bodies.salt_of(context.body)
    if parts.lookup is None or model is None or salt is None:
        return None
    held = await parts.lookup.stored_tokens(model, token_ids, salt, context.request_id)
    if held is None:
        return None
    missing = held.missing_tokens(len(token_ids))
    return "stored" if missing < max(1, parts.config.prefill_threshold) else None


async def _hop(parts: ProxyContext, context: RequestContext) -> str | None:
    """Send the request to a prefiller; return the outcome, or None: no prefiller was usable."""
    sent = bodies.dump(bodies.for_prefill(context.route, context.body, context.token_ids))
    tried: list[str] = []
    for _ in range(ATTEMPTS):
        turn = parts.instances.choose(
            "prefill", clock_ms(), without=tried, prints=context.prefix_fingerprints
        )
        if turn is None:
            break
        with turn:
            address = turn.instance.address
            if tried:
                parts.metrics.retries.labels("prefill").inc()
            tried.append(address)
            context.prefill = address
            answer = await _attempt(parts, context, turn, sent)
        if answer is None:
            continue
        if answer.is_ok:
            context.stored = bodies.stored_tokens(answer.json())
            return "done"
        log.info(
            "prefill_refused id=%s instance=%s status=%d",
            context.request_id, address, answer.status,
        )  # fmt: skip
        context.prefill = f"refused:{address}"
        return "refused"
    if not tried:
        return None
    context.prefill = f"failed:{','.join(tried)}"
    return "failed"


async def _attempt(
    parts: ProxyContext, context: RequestContext, turn: InFlightRequest, sent: bytes
) -> EngineAnswer | None:
    """Return the prefiller's response; None: it failed, and another one may succeed."""
    address = turn.instance.address
    try:
        answer = await parts.engines.post(
            "POST",
            address,
            context.route.path,
            data=sent,
            headers=context.engine_headers("-prefill"),
            timeout_ms=parts.config.prefill_timeout_ms,
        )
    except EngineError as error:
        turn.failed(clock_ms())
        if error.is_unconnected:
            turn.instance.on_connect_failed(
                clock_ms(), refused=error.failure == "refused", reason=error
            )
        log.warning("prefill_failed id=%s reason=%s", context.request_id, error)
        return None
    if answer.status >= 500:
        turn.failed(clock_ms())
        log.warning(
            "prefill_failed id=%s reason=%s: status %d", context.request_id, address, answer.status
        )
        return None
    turn.succeeded()
    turn.instance.on_response(clock_ms())
    return answer
