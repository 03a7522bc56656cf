"""Questions of programs over HTTP: what no real store shows in a test's time."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.http import operations
from kvstore.http.serving import AT_WORK_MAX, Route
from tests.unit.console.ports import Port, run


def test_a_store_that_hangs_in_call_after_call_ends_with_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A match may need a call for each namespace: each has a deadline, and so have all. Those that
    wait for their turn meanwhile have it, too."""
    monkeypatch.setattr(operations, "ANSWER_S", 0.05)

    class Store:
        @operations.endpoint("GET", "/hangs", {204: "Never."})
        async def hangs(self) -> None:
            await asyncio.Event().wait()

    [hangs] = operations.endpoints_of(Store())

    async def test(port: Port) -> None:
        answers = await asyncio.gather(*(port.ask("/hangs") for _ in range(2 * AT_WORK_MAX)))
        assert {(status, text) for status, _, text in answers} == {
            (503, b"no answer within 0.05 s\n")
        }

    run(test, [Route("GET", "/hangs", hangs.handle)])
