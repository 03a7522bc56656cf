"""Who tries tokens waits for the answers; who has the token never does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from kvstore.web.server import guesses
from kvstore.web.server.access import Access, Hosts
from kvstore.web.server.guesses import FREE

TOKEN = "0123456789abcdef-secret"
GUESSER, OTHER = "10.0.0.9", "10.0.0.10"


class Port:
    """A port with a token, and a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(guesses, "uptime", lambda: self.now)
        monkeypatch.setattr(guesses, "DELAY_S", 3_600.0)  # a delayed answer does not come by itself

        async def done(_: web.Request) -> web.Response:
            return web.Response(status=204)

        self._handler = Access(Hosts([]), token=TOKEN).trusted(done)

    async def ask(self, peer: str, authorization: str | None) -> int:
        transport = mock.Mock()
        transport.get_extra_info = lambda name: (peer, 1) if name == "peername" else None
        headers = CIMultiDict({"Host": "127.0.0.1"})
        if authorization is not None:
            headers["Authorization"] = authorization
        return (
            await self._handler(make_mocked_request("PUT", "/", headers, transport=transport))
        ).status

    async def guess(self, peer: str = GUESSER) -> int:
        return await self.ask(peer, "Bearer wrong")

    async def waits(self, asking: Coroutine[Any, Any, int]) -> bool:
        """Whether the answer does not come at once."""
        task = asyncio.ensure_future(asking)
        for _ in range(5):
            await asyncio.sleep(0)
        waits = not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return waits

    async def is_noticed(self) -> None:
        """As many wrong tokens as are answered at once."""
        for _ in range(FREE):
            assert not await self.waits(self.guess())


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Port:
    return Port(monkeypatch)


def test_after_some_wrong_tokens_the_next_ones_wait(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        await port.is_noticed()
        for _ in range(3):
            assert await port.waits(port.guess())
        # Neither the right token, nor no token at all, nor others.
        assert await port.ask(GUESSER, f"Bearer {TOKEN}") == 204
        assert await port.ask(GUESSER, None) == 401
        assert await port.guess(OTHER) == 401
        assert await port.waits(port.ask(GUESSER, "Basic eDp5"))

    caplog.set_level(logging.WARNING)
    asyncio.run(scenario())
    said = [each.message for each in caplog.records if "wrong_tokens" in each.message]
    assert said == [f"wrong_tokens peer={GUESSER} count={FREE + 1}: answers to it are delayed"]
    assert TOKEN not in caplog.text
