"""The process ``kvstore-proxy``: one event loop, one port, engines, and optionally a store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from functools import partial
from typing import Final

from aiohttp import web

from kvstore._version import __version__
from kvstore.config import ProxyConfig
from kvstore.http.connection_limiter import (
    ConnectionLimiter,
    connections_max,
    serving_connections,
)
from kvstore.http.ports import bind
from kvstore.proxy import bodies, metrics, serving
from kvstore.proxy.admin import AdminHandlers, rows
from kvstore.proxy.cache_salts import salts_by
from kvstore.proxy.engine import EngineClient
from kvstore.proxy.health import HealthChecks
from kvstore.proxy.hints import SessionHints, delete_session
from kvstore.proxy.instances import ROLES, Instances
from kvstore.proxy.lookup import StoreLookup
from kvstore.proxy.metrics import Metrics, clock_ms
from kvstore.proxy.request_context import ProxyContext
from kvstore.proxy.serving import relay, serve
from kvstore.runtime import tasks
from kvstore.runtime.addresses import join_address, shown_place
from kvstore.runtime.limiter import Limiter
from kvstore.runtime.tasks import EXIT_BROKEN, start_task
from kvstore.runtime.watched_files import watching

log = logging.getLogger("kvstore.proxy")

LINE_BYTES_MAX: Final = 1 << 14
"""Limit of the request line, and of each header."""

IDLE_CONNECTION_S: Final = 600.0
"""Timeout of a connection without a request, longer than that of load balancers."""

GRACE_S = 30.0
"""Maximum time for requests in progress at shutdown: that of Kubernetes."""


def run(config: ProxyConfig) -> int:
    """Serve until SIGTERM or SIGINT, or until a required background task dies. Return the exit
    status, which is ``EXIT_BROKEN`` in the last case.

    Raises:
        AddressInUseError, ConfigError, StartupError: the proxy could not start; all is cleaned up.
    """
    with watching():
        return asyncio.run(_serve(config))


async def _serve(config: ProxyConfig) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    tasks.watch_loop(loop)
    tasks.watch_threads()
    broken = tasks.ShutdownRequest()
    for number in tasks.shutdown_signals():
        loop.add_signal_handler(number, stopped.set)
    tasks.install_signal_handlers()
    async with contextlib.AsyncExitStack() as stack:
        clients_max = connections_max(serving.INFLIGHT_MAX)
        # Fewer requests than connections, so that there is always an idle one.
        requests_max = max(1, min(serving.INFLIGHT_MAX, clients_max // 3))
        parts = await _parts(config, stack, requests_max=requests_max)
        health = HealthChecks(parts.instances, parts.engines)
        await health.round()
        checking = start_task("health checks", health.run(), died=broken)
        stack.push_async_callback(_cancel, checking)
        doors = ConnectionLimiter(clients_max)
        hints = SessionHints(parts.lookup)
        stack.push_async_callback(hints.close)
        application = _application(parts, hints, health, doors)
        listener = await asyncio.to_thread(
            bind, config.host, config.port, is_given=True, flag="--port"
        )
        server = await stack.enter_async_context(
            serving_connections(
                application,
                doors,
                listener,
                idle_s=IDLE_CONNECTION_S,
                line_bytes_max=LINE_BYTES_MAX,
                log=logging.getLogger("kvstore.proxy.http"),
            )
        )
        _print_startup(config, server)
        ends = [start_task("end", event.wait()) for event in (stopped, broken)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await _end(parts, server)
    log.info("proxy_stopped")
    return 0 if broken.error is None else EXIT_BROKEN


async def _parts(
    config: ProxyConfig, stack: contextlib.AsyncExitStack, *, requests_max: int
) -> ProxyContext:
    instances = Instances(prefix_affinity=config.affinity == "prefix")
    for role, addresses in zip(ROLES, (config.prefill, config.decode)):
        for address in addresses:
            instances.add(role, address)
    numbers = Metrics(instances)
    engines = EngineClient()
    stack.push_async_callback(engines.close)
    lookup = None
    if config.master:
        lookup = StoreLookup(
            config.master,
            metrics=numbers,
            cluster=config.cluster,
            auth=config.auth,
            tenant=config.tenant,
        )
        stack.push_async_callback(lookup.close)
        lookup.start()
    bodies = Limiter[asyncio.Timeout]("arriving bodies", requests_max)
    parts = ProxyContext(
        config, instances, engines, numbers, lookup, salts_by(config), bodies, requests_max
    )
    parts.idle.set()
    return parts


def _application(
    parts: ProxyContext, hints: SessionHints, health: HealthChecks, doors: ConnectionLimiter
) -> web.Application:
    app = web.Application(client_max_size=serving.BODY_BYTES_MAX, middlewares=[doors.middleware])
    for route in bodies.ROUTES:
        app.router.add_post(route.path, partial(serve, parts, hints, route))
    app.router.add_delete("/v1/sessions/{session}", partial(delete_session, parts, hints))
    app.router.add_get("/healthz", partial(_healthz, parts))
    app.router.add_get("/metrics", partial(_metrics, parts))
    AdminHandlers(parts.instances, health, token=parts.config.admin_token).add_routes(app.router)
    app.router.add_route("*", "/{path:.*}", partial(relay, parts, hints))  # after all others
    return app


def _print_startup(config: ProxyConfig, server: asyncio.Server) -> None:
    port = server.sockets[0].getsockname()[1]
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
    if not config.decode:
        print(
            "kvstore-proxy: no decoder is known, so every request gets 503 until one is: give "
            f"--decode HOST:PORT, or add it with POST /admin/instances on port {port}",
            file=sys.stderr,
            flush=True,
        )
    log.info("proxy_started version=%s", __version__)


async def _end(parts: ProxyContext, server: asyncio.Server) -> None:
    """Reject new connections and requests, and give running requests ``GRACE_S`` to end."""
    parts.stopping = True
    server.close()
    log.info("proxy_stopping in_flight=%d grace_s=%g", parts.under_way, GRACE_S)
    try:
        async with asyncio.timeout(GRACE_S):
            await parts.idle.wait()
    except TimeoutError:
        log.warning("grace_over in_flight=%d", parts.under_way)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _healthz(parts: ProxyContext, request: web.Request) -> web.Response:
    """Respond 200 if a request could be answered now."""
    del request
    now_ms = clock_ms()
    status = "no decoder"
    if parts.stopping:
        status = "stopping"
    elif parts.instances.usable("decode", now_ms):
        status = "ok"
    elif not all(instance.refuses for instance in parts.instances.last_resort("decode", now_ms)):
        status = "no healthy decoder"
    return web.json_response(
        {
            "status": status,
            "version": __version__,
            "in_flight": parts.in_flight,
            "instances": rows(parts.instances),
            "models_known_in_store": parts.lookup.models if parts.lookup else [],
        },
        status=200 if status in ("ok", "no healthy decoder") else 503,
    )


async def _metrics(parts: ProxyContext, request: web.Request) -> web.Response:
    del request
    return web.Response(body=parts.metrics.text(), headers={"Content-Type": metrics.CONTENT_TYPE})
