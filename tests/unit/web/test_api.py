"""Questions of programs over HTTP: what no real store shows in a test's time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from kvstore.web import openapi


def test_a_store_that_hangs_in_call_after_call_ends_with_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A match may need a call for each namespace: each has a deadline, and so have all."""
    monkeypatch.setattr(openapi, "ANSWER_S", 0.05)

    async def hangs(_: Any) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async def ask() -> Any:
        return await openapi.answered(hangs)(make_mocked_request("GET", "/"))

    answer = asyncio.run(ask())
    assert (answer.status, answer.text) == (503, "no answer within 0.05 s\n")
