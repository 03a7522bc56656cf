"""The process ``kvstore-proxy``: one event loop, one port, its engines and maybe a store."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from functools import partial
from typing import Final

from aiohttp import web

from kvstore._version import __version__
from kvstore.addresses import join_address, shown_place
from kvstore.config import ProxyConfig
from kvstore.errors import AddressInUseError, StartupError
from kvstore.proxy import bodies, metrics
from kvstore.proxy.admin import Admin, rows
from kvstore.proxy.asked import (
    REQUEST_ID,
    RETRY_AFTER_S,
    Parts,
    error_response,
    headers_for_engines,
    request_id_of,
)
from kvstore.proxy.engine import EngineError, Engines
from kvstore.proxy.health import HealthChecks
from kvstore.proxy.instances import ROLES, Instances, Rules
from kvstore.proxy.lookup import StoreLookup
from kvstore.proxy.metrics import Metrics, clock_ms
from kvstore.proxy.serving import serve

log = logging.getLogger("kvstore.proxy")

CUT_S: Final = 1.0
"""What handlers get to notice that their time is over."""

LINE_BYTES_MAX: Final = 1 << 14
"""Of a request's line and of each header."""

MODELS_TIMEOUT_MS: Final = 5_000


def run(config: ProxyConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Raises:
        AddressInUseError, StartupError: it could not start; nothing is left behind.
    """
    return asyncio.run(_serve(config))


async def _serve(config: ProxyConfig) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        parts = await _parts(config, stack)
        health = HealthChecks(
            parts.instances,
            parts.engines,
            interval_ms=config.health_interval_ms,
            timeout_ms=config.health_timeout_ms,
        )
        await health.round()
        checking = loop.create_task(health.run())
        stack.push_async_callback(_cancel, checking)
        runner = web.AppRunner(
            _application(parts, health),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CUT_S,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, config.host, config.port)
        await _listen(site, config)
        _greet(config, runner)
        await stopped.wait()
        await _end(parts, site)
    log.info("proxy_stopped")
    return 0


async def _parts(config: ProxyConfig, stack: contextlib.AsyncExitStack) -> Parts:
    instances = Instances(
        Rules(
            breaker_failures=config.breaker_failures,
            breaker_open_ms=config.breaker_open_ms,
            prefix_affinity=config.affinity == "prefix",
            affinity_slack=config.affinity_slack,
            affinity_blocks_max=config.affinity_blocks_max,
        )
    )
    for role, addresses in zip(ROLES, (config.prefill, config.decode)):
        for address in addresses:
            instances.add(role, address)
    numbers = Metrics(instances)
    engines = Engines(
        connect_timeout_ms=config.connect_timeout_ms, idle_timeout_ms=config.idle_timeout_ms
    )
    stack.push_async_callback(engines.close)
    lookup = None
    if config.master:
        lookup = StoreLookup(config.master, timeout_ms=config.lookup_timeout_ms, metrics=numbers)
        stack.push_async_callback(lookup.close)
        lookup.start()
    parts = Parts(config, instances, engines, numbers, lookup)
    parts.idle.set()
    return parts


def _application(parts: Parts, health: HealthChecks) -> web.Application:
    app = web.Application(client_max_size=parts.config.body_max)
    for route in bodies.ROUTES:
        app.router.add_post(route.path, partial(serve, parts, route))
    app.router.add_get("/v1/models", partial(_models, parts))
    app.router.add_get("/healthz", partial(_healthz, parts))
    app.router.add_get("/metrics", partial(_metrics, parts))
    Admin(parts.instances, health, token=parts.config.admin_token).add_routes(app.router)
    return app


async def _listen(site: web.TCPSite, config: ProxyConfig) -> None:
    at = join_address(config.host, config.port)
    try:
        await site.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"{at} is in use", advice="Choose another --port.") from None
        raise StartupError(
            f"cannot listen on {at}: {error.strerror or error}", advice="Is --host of this host?"
        ) from None


def _greet(config: ProxyConfig, runner: web.AppRunner) -> None:
    port = runner.addresses[0][1]
    only = (
        "; this host only, use --host to serve others"
        if config.host in ("127.0.0.1", "localhost", "::1")
        else ""
    )
    print(
        f"kvstore-proxy listening on {join_address(config.host, port)}"
        f"; prefill: {', '.join(config.prefill) or 'none'}"
        f"; decode: {', '.join(config.decode) or 'none'}"
        f"; store: {shown_place(config.master) or 'none'}{only}",
        flush=True,
    )
    log.info("proxy_started version=%s", __version__)


async def _end(parts: Parts, site: web.TCPSite) -> None:
    """No new connections, no new requests; what runs gets its time."""
    parts.stopping = True
    await site.stop()
    log.info("proxy_stopping in_flight=%d grace_ms=%d", parts.in_flight, parts.config.grace_ms)
    try:
        async with asyncio.timeout(parts.config.grace_ms / 1000):
            await parts.idle.wait()
    except TimeoutError:
        log.warning("grace_over in_flight=%d", parts.in_flight)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


# --- small handlers ----------------------------------------------------------------------------


async def _healthz(parts: Parts, request: web.Request) -> web.Response:
    """200 when a request could be answered now."""
    del request
    usable = bool(parts.instances.usable("decode", clock_ms()))
    ready = usable and not parts.stopping
    return web.json_response(
        {
            "status": "ok" if ready else "stopping" if parts.stopping else "no decoder",
            "version": __version__,
            "in_flight": parts.in_flight,
            "instances": rows(parts.instances),
            "models_known_in_store": parts.lookup.models if parts.lookup else [],
        },
        status=200 if ready else 503,
    )


async def _metrics(parts: Parts, request: web.Request) -> web.Response:
    del request
    return web.Response(body=parts.metrics.text(), headers={"Content-Type": metrics.CONTENT_TYPE})


async def _models(parts: Parts, request: web.Request) -> web.Response:
    """The first engine that answers, decoders before prefillers."""
    request_id = request_id_of(request)
    headers = headers_for_engines(request)
    headers[REQUEST_ID] = request_id
    now_ms = clock_ms()
    for role in reversed(ROLES):
        for instance in parts.instances.usable(role, now_ms):
            try:
                answer = await parts.engines.ask(
                    "GET", instance.address, "/v1/models",
                    headers=headers, timeout_ms=MODELS_TIMEOUT_MS,
                )  # fmt: skip
            except EngineError as error:
                log.warning("models_failed id=%s reason=%s", request_id, error)
                continue
            if answer.status < 500:
                parts.metrics.requests.labels("models", answer.status).inc()
                kind = answer.headers.get("Content-Type", "application/json")
                return web.Response(
                    body=answer.data,
                    status=answer.status,
                    headers={"Content-Type": kind, REQUEST_ID: request_id},
                )
    parts.metrics.requests.labels("models", 503).inc()
    tags = {REQUEST_ID: request_id, "Retry-After": str(RETRY_AFTER_S)}
    return error_response(503, "no engine is usable now", "no_engine", headers=tags)
