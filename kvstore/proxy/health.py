"""Asks every engine, again and again, whether it is well: ``GET /health``."""

from __future__ import annotations

import asyncio
import logging

from kvstore.proxy.engine import EngineError, Engines
from kvstore.proxy.instances import Instance, Instances

log = logging.getLogger("kvstore.proxy")


class HealthChecks:
    """In rounds; a round asks all at once, so that a silent one holds up nobody."""

    def __init__(
        self, instances: Instances, engines: Engines, *, interval_ms: int, timeout_ms: int
    ) -> None:
        self._instances = instances
        self._engines = engines
        self._interval_s = interval_ms / 1000
        self._timeout_ms = timeout_ms

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await self.round()
            await asyncio.sleep(max(0.0, started + self._interval_s - loop.time()))

    async def round(self) -> None:
        await asyncio.gather(*(self.check(each) for each in self._instances))

    async def check(self, instance: Instance) -> None:
        """Ask one. Never raises."""
        before = instance.healthy
        reason: object
        try:
            answer = await self._engines.ask(
                "GET", instance.address, "/health", timeout_ms=self._timeout_ms
            )
        except EngineError as error:
            reason = error
            instance.is_silent()
        else:
            reason = f"status {answer.status}"
            if answer.is_ok:
                instance.is_well()
            else:
                instance.is_silent()
        if instance.healthy and not before:
            log.info("instance_healthy role=%s instance=%s", instance.role, instance.address)
        elif before and not instance.healthy:
            log.warning(
                "instance_unhealthy role=%s instance=%s reason=%s",
                instance.role, instance.address, reason,
            )  # fmt: skip
