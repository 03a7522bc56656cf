"""Prompt rendering: an engine computes the token ids once, for both hops."""

from __future__ import annotations

import logging
from typing import Final

from kvstore.proxy import bodies
from kvstore.proxy.engine import EngineError
from kvstore.proxy.instances import ROLES, Instance
from kvstore.proxy.metrics import clock_ms
from kvstore.proxy.request_context import ProxyContext, RequestContext

log = logging.getLogger("kvstore.proxy")

CANNOT: Final = frozenset({403, 404, 405, 501})
"""Statuses of an engine that cannot render; 403: vLLM without ``--enable-scale-out``."""

WRONG: Final = frozenset({400, 401, 413, 422})
"""Statuses of a wrong request, which the engine would also reject unrendered."""

SAID_MAX: Final = 200
"""Characters of an engine's error message that are logged."""

TIMEOUT_MS = 5_000
"""Timeout of rendering; without token ids the prompt is tokenized twice."""

CANNOT_REST_MS: Final = 60_000
"""Time after which an engine that cannot render is tried again: it may have been upgraded."""


async def render(parts: ProxyContext, context: RequestContext) -> bool:
    """Set ``context.token_ids`` if the request has exactly one prompt, of text or token ids alone.

    Returns: Whether an engine rejected the request as wrong, so that a prefiller is useless.
    """
    context.token_ids = bodies.given_ids(context.route, context.body)
    if context.token_ids is not None or not bodies.can_be_rendered(context.route, context.body):
        return False
    instance = _renderer(parts)
    if instance is None:
        parts.metrics.renders.labels("unavailable").inc()
        return False
    try:
        answer = await parts.engines.post(
            "POST",
            instance.address,
            context.route.path + "/render",
            data=context.raw,
            headers=context.engine_headers("-render"),
            timeout_ms=TIMEOUT_MS,
        )
    except EngineError as error:
        if error.is_unconnected:
            instance.on_connect_failed(clock_ms(), refused=error.failure == "refused", reason=error)
        parts.metrics.renders.labels("failed").inc()
        log.warning("render_failed id=%s reason=%s", context.request_id, error)
        return False
    if answer.is_ok:
        instance.on_response(clock_ms())
        context.token_ids = bodies.ids_of_rendered(context.route, answer.json())
        parts.metrics.renders.labels("done" if context.token_ids is not None else "refused").inc()
        return False
    said = bodies.error_message(answer.json())
    # A 404 with a message means a missing model; without one, a missing route.
    is_wrong = answer.status in WRONG or (answer.status == 404 and said is not None)
    cannot = answer.status in CANNOT and not is_wrong
    if cannot:
        instance.renders_from_ms = clock_ms() + CANNOT_REST_MS
    outcome = "refused" if is_wrong else "unavailable" if cannot else "failed"
    parts.metrics.renders.labels(outcome).inc()
    log.log(
        logging.INFO if is_wrong else logging.WARNING,
        "render_%s id=%s instance=%s status=%d said=%r",
        outcome, context.request_id, instance.address, answer.status, (said or "")[:SAID_MAX],
    )  # fmt: skip
    return is_wrong


def _renderer(parts: ProxyContext) -> Instance | None:
    """Return the least busy engine of any role: an engine tokenizes on its CPU."""
    now_ms = clock_ms()
    able = [
        each
        for role in ROLES
        for each in parts.instances.usable(role, now_ms)
        if each.renders_from_ms <= now_ms
    ]
    return min(able, key=lambda each: (each.in_flight, each.chosen), default=None)
