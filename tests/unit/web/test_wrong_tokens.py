"""Who tries tokens waits for the answers; who has the token never does."""

from __future__ import annotations

import asyncio
import logging
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
WRONG = "Bearer wrong"


def test_after_some_wrong_tokens_the_next_ones_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1_000.0
    monkeypatch.setattr(access, "uptime", lambda: now)
    monkeypatch.setattr(access, "DELAY_S", 3_600.0)  # a delayed answer does not come by itself
    caplog.set_level(logging.WARNING)

    async def done(_: web.Request) -> web.Response:
        return web.Response(status=204)

    handler = Access(Hosts([]), token=TOKEN).trusted(done)

    async def ask(peer: str, authorization: str | None) -> int:
        transport = mock.Mock()
        transport.get_extra_info = lambda name: (peer, 1) if name == "peername" else None
        headers = CIMultiDict({"Host": "127.0.0.1"})
        if authorization is not None:
            headers["Authorization"] = authorization
        return (await handler(make_mocked_request("PUT", "/", headers, transport=transport))).status

    async def guesses(count: int) -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(ask(GUESSER, WRONG)) for _ in range(count)]
        for _ in range(10):
            await asyncio.sleep(0)
        return tasks

    async def scenario() -> None:
        nonlocal now
        later: list[asyncio.Task[int]] = []
        for _ in range(2):
            answers = await guesses(WRONG_TOKENS_FREE + 3)
            assert [each.done() for each in answers[-4:]] == [True, False, False, False]
            # Neither the right token, nor no token at all, nor others.
            assert await ask(GUESSER, f"Bearer {TOKEN}") == 204
            assert await ask(GUESSER, None) == 401
            assert await ask(OTHER, WRONG) == 401
            later = await guesses(DELAYED_MAX)  # the longest wait ends for one more
            assert {await each for each in answers} == {401}
            assert not any(each.done() for each in later)
            now += WRONG_TOKENS_S
        monkeypatch.setattr(access, "DELAY_S", 0.01)
        assert {await each for each in await guesses(WRONG_TOKENS_FREE + 1)} == {401}
        for each in later:
            each.cancel()

    asyncio.run(scenario())
    assert f"wrong_tokens peer={GUESSER}: answers to it are delayed" in caplog.text
    assert TOKEN not in caplog.text


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
