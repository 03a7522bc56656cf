"""Keeps the health of engines up to date, by their ``GET /health`` and by how requests end."""

from __future__ import annotations

import asyncio
import logging

from kvstore.proxy.engine import EngineError, Engines
from kvstore.proxy.instances import Instance, Instances
from kvstore.proxy.metrics import clock_ms

log = logging.getLogger("kvstore.proxy")

INTERVAL_S = 1.0
"""How often the proxy asks each engine for its health."""

TIMEOUT_MS = 1_000
"""Silence after which such a request counts as failed; two failures in a row make an engine
unhealthy."""


class HealthChecks:
    """Checks the health of all instances in rounds. A round asks all of them in parallel, so that a
    silent one delays no other."""

    def __init__(self, instances: Instances, engines: Engines) -> None:
        self._instances = instances
        self._engines = engines

    async def run(self) -> None:
        """Runs rounds until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await self.round()
            await asyncio.sleep(max(0.0, started + INTERVAL_S - loop.time()))

    async def round(self) -> None:
        await asyncio.gather(*(self.check(each) for each in self._instances))

    async def check(self, instance: Instance) -> None:
        """Checks one instance. Never raises."""
        outcome: str
        reason: object
        instance.note_asked(clock_ms())
        try:
            answer = await self._engines.ask(
                "GET", instance.address, "/health", timeout_ms=TIMEOUT_MS
            )
        except EngineError as error:
            outcome, reason = error.failure, error
        else:
            outcome, reason = "well" if answer.is_ok else "ill", f"status {answer.status}"
        before = instance.healthy
        instance.checked(outcome)
        _tell(instance, before, reason)


def answered(instance: Instance) -> None:
    """Called when the instance answers a request, or continues its answer."""
    before = instance.healthy
    instance.answered(clock_ms())
    if not before:
        _tell(instance, before, "it answers a request")


def unconnected(instance: Instance, error: EngineError) -> None:
    """Called when a request could not connect to the instance."""
    before = instance.healthy
    instance.unconnected(clock_ms(), refused=error.failure == "refused")
    _tell(instance, before, error)


def _tell(instance: Instance, before: bool, reason: object) -> None:
    if instance.healthy and not before:
        log.info("instance_healthy role=%s instance=%s", instance.role, instance.address)
    elif before and not instance.healthy:
        log.warning(
            "instance_unhealthy role=%s instance=%s reason=%s",
            instance.role, instance.address, reason,
        )  # fmt: skip
