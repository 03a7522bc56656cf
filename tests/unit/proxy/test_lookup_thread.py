"""The proxy's background tasks: none dies unseen."""

from __future__ import annotations

import pytest

from kvstore.config import ProxyConfig
from kvstore.proxy import main
from kvstore.proxy.health import HealthChecks
from kvstore.runtime.tasks import EXIT_BROKEN


def test_the_proxy_ends_with_a_status_of_its_own_when_its_health_checks_die(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def dies(self: HealthChecks) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(HealthChecks, "run", dies)
    monkeypatch.setattr(main, "GRACE_S", 0.0)
    assert main.run(ProxyConfig(port=0)) == EXIT_BROKEN
    assert "background_task_failed name=health checks error=RuntimeError('a bug')" in caplog.text
