"""Health checks of engines by ``GET /health``."""

from __future__ import annotations

import asyncio

from kvstore.proxy.engine import EngineClient, EngineError
from kvstore.proxy.instances import Instance, Instances
from kvstore.proxy.metrics import clock_ms

INTERVAL_S = 1.0
"""Interval of the health checks of each engine."""

TIMEOUT_MS = 1_000
"""Timeout of a health check; two failures in a row make an engine unhealthy."""


class HealthChecks:
    """Checks the health of all instances in rounds. A round checks them in parallel, so that a
    silent one delays no other."""

    def __init__(self, instances: Instances, engines: EngineClient) -> None:
        self._instances = instances
        self._engines = engines

    async def run(self) -> None:
        """Run rounds until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await self.round()
            await asyncio.sleep(max(0.0, started + INTERVAL_S - loop.time()))

    async def round(self) -> None:
        await asyncio.gather(*(self.check(instance) for instance in self._instances))

    async def check(self, instance: Instance) -> None:
        """Check one instance. Never raises."""
        outcome: str
        reason: object
        instance.on_request(clock_ms())
        try:
            answer = await self._engines.post(
                "GET", instance.address, "/health", timeout_ms=TIMEOUT_MS
            )
        except EngineError as error:
            outcome, reason = error.failure, error
        else:
            outcome, reason = "well" if answer.is_ok else "ill", f"status {answer.status}"
        instance.checked(outcome, reason)
