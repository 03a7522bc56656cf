"""The proxy's background tasks: none dies unseen."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvstore.config import ProxyConfig
from kvstore.process.background import EXIT_BROKEN
from kvstore.proxy import app
from kvstore.proxy.health import HealthChecks
from kvstore.proxy.instances import Instances
from kvstore.proxy.lookup import StoreLookup
from kvstore.proxy.metrics import Metrics


def test_the_proxy_ends_with_a_status_of_its_own_when_its_health_checks_die(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def dies(self: HealthChecks) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(HealthChecks, "run", dies)
    monkeypatch.setattr(app, "GRACE_S", 0.0)
    assert app.run(ProxyConfig(port=0)) == EXIT_BROKEN
    assert "background_died name=health checks error=RuntimeError('a bug')" in caplog.text


def test_the_fleets_records_are_read_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvstore.proxy")
    rounds = 0
    third = asyncio.Event()

    async def read(self: StoreLookup) -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 3:
            raise RuntimeError("a bug")
        third.set()

    async def scenario() -> None:
        lookup = StoreLookup("127.0.0.1:1", metrics=Metrics(Instances()))
        lookup.start()
        await third.wait()
        await asyncio.sleep(0)
        await lookup.close()

    monkeypatch.setattr(StoreLookup, "_read", read)
    monkeypatch.setattr("kvstore.proxy.lookup.REFRESH_S", 0.0)
    asyncio.run(scenario())
    assert caplog.text.count("fleet_not_read") == 1
    assert "store_reachable" in caplog.text
