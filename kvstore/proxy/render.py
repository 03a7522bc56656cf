"""Token ids of a prompt, made once by an engine and handed on to both hops."""

from __future__ import annotations

import logging
from typing import Final

from kvstore.proxy import bodies
from kvstore.proxy.asked import Asked, Parts
from kvstore.proxy.engine import EngineError
from kvstore.proxy.instances import ROLES, Instance
from kvstore.proxy.metrics import clock_ms

log = logging.getLogger("kvstore.proxy")

CANNOT: Final = frozenset({403, 404, 405, 501})
"""An engine without rendering; 403: vLLM without ``--enable-scale-out``."""

WRONG: Final = frozenset({400, 401, 413, 422})
"""The engine would not take the request itself either."""

SAID_MAX: Final = 200
"""Characters of an engine's words that are logged."""

CANNOT_REST_MS: Final = 60_000
"""How long it is not asked again: it may be replaced by a newer one at the same address."""


async def render(parts: Parts, asked: Asked) -> bool:
    """Sets ``asked.token_ids`` where there is exactly one prompt, of nothing but text.

    Returns:
        Whether an engine refused the request as wrong: then no prefiller need see it.
    """
    asked.token_ids = bodies.given_ids(asked.route, asked.body)
    if asked.token_ids is not None or not bodies.can_be_rendered(asked.route, asked.body):
        return False
    instance = _renderer(parts)
    if instance is None:
        parts.metrics.renders.labels("unavailable").inc()
        return False
    try:
        answer = await parts.engines.ask(
            "POST",
            instance.address,
            asked.route.path + "/render",
            data=asked.raw,
            headers=asked.engine_headers("-render"),
            timeout_ms=parts.config.render_timeout_ms,
        )
    except EngineError as error:
        if error.failure == "connect":
            instance.is_gone()
        parts.metrics.renders.labels("failed").inc()
        log.warning("render_failed id=%s reason=%s", asked.request_id, error)
        return False
    if answer.is_ok:
        asked.token_ids = bodies.ids_of_rendered(asked.route, answer.json())
        parts.metrics.renders.labels("done" if asked.token_ids is not None else "refused").inc()
        return False
    said = bodies.error_message(answer.json())
    # A missing model is an error of the engine's own, a missing route is its web server's.
    is_wrong = answer.status in WRONG or (answer.status == 404 and said is not None)
    cannot = answer.status in CANNOT and not is_wrong
    if cannot:
        instance.renders_from_ms = clock_ms() + CANNOT_REST_MS
    outcome = "refused" if is_wrong else "unavailable" if cannot else "failed"
    parts.metrics.renders.labels(outcome).inc()
    log.log(
        logging.INFO if is_wrong else logging.WARNING,
        "render_%s id=%s instance=%s status=%d said=%r",
        outcome, asked.request_id, instance.address, answer.status, (said or "")[:SAID_MAX],
    )  # fmt: skip
    return is_wrong


def _renderer(parts: Parts) -> Instance | None:
    """The least busy engine of any role: tokenizing is work of its server, not of its device."""
    now_ms = clock_ms()
    able = [
        each
        for role in ROLES
        for each in parts.instances.usable(role, now_ms)
        if each.renders_from_ms <= now_ms
    ]
    return min(able, key=lambda each: (each.in_flight, each.chosen), default=None)
