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

from kvstore.web.server import access
from kvstore.web.server.access import (
    DELAYED_MAX,
    WRONG_TOKENS_FREE,
    WRONG_TOKENS_S,
    Access,
    Hosts,
    _network,
)

TOKEN = "0123456789abcdef-secret"
GUESSER, OTHER = "10.0.0.9", "10.0.0.10"


class Port:
    """A port with a token, and a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(access, "uptime", lambda: self.now)
        monkeypatch.setattr(access, "DELAY_S", 3_600.0)  # a delayed answer does not come by itself

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
        for _ in range(WRONG_TOKENS_FREE):
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
    assert said == [f"wrong_tokens peer={GUESSER}: answers to it are delayed"] * 4
    assert TOKEN not in caplog.text


def test_a_delayed_answer_comes(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        await port.is_noticed()
        monkeypatch.setattr(access, "DELAY_S", 0.01)
        assert await port.guess() == 401

    asyncio.run(scenario())


def test_wrong_tokens_are_forgotten(port: Port) -> None:
    async def scenario() -> None:
        await port.is_noticed()
        assert await port.waits(port.guess())
        port.now += WRONG_TOKENS_S + 1
        await port.is_noticed()
        assert await port.waits(port.guess())

    asyncio.run(scenario())


def test_no_more_than_some_answers_wait(port: Port) -> None:
    async def scenario() -> None:
        await port.is_noticed()
        asked = [asyncio.ensure_future(port.guess()) for _ in range(DELAYED_MAX + 3)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert [each.done() for each in asked] == [True] * 3 + [False] * DELAYED_MAX
        assert {await each for each in asked[:3]} == {401}
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("addresses", "rows"),
    [
        (["10.0.0.1", "::ffff:10.0.0.1"], 1),
        (["2001:db8::1", "2001:db8::2:3"], 1),
        (["2001:db8::1", "2001:db8:0:1::1"], 2),
        (["10.0.0.1", "10.0.0.2", "fe80::1%eth0", "no address"], 4),
    ],
)
def test_addresses_are_counted_by_network(addresses: list[str], rows: int) -> None:
    assert len({_network(address) for address in addresses}) == rows
