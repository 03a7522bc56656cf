"""Questions to a parent, and its answers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore.errors import UnavailableError
from kvstore.web.server.link import Answers, Link, answer_forever

LONG_S = 30.0


def run(test: Callable[[Link, socket.socket], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        link = Link(theirs)
        with ours, theirs:
            await test(link, ours)
            link.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(inside())


def _nothing() -> dict[str, object]:
    return {}


def test_each_question_gets_its_answer() -> None:
    async def test(link: Link, ours: socket.socket) -> None:
        counted = iter(range(100))
        answers: Answers = {"a": lambda: {"n": next(counted)}, "b": lambda: {"b": "x" * 100_000}}
        answering = asyncio.create_task(answer_forever(ours, answers))
        assert not answering.done()
        found = await asyncio.gather(*(link.ask("a", LONG_S) for _ in range(10)))
        assert [each["n"] for each in found] == list(range(10))
        assert len((await link.ask("b", LONG_S))["b"]) == 100_000

    run(test)


def test_a_parent_that_hangs_costs_its_time_and_is_heard_when_it_is_back() -> None:
    """An answer that comes late is not taken for that to a later question."""

    async def test(link: Link, ours: socket.socket) -> None:
        for _ in range(3):
            with pytest.raises(UnavailableError, match=r"no answer within 0\.1 s"):
                await link.ask("old", 0.1)
        answers = {"old": lambda: {"is": "old"}, "new": lambda: {"is": "new"}}
        answering = asyncio.create_task(answer_forever(ours, answers))
        assert await link.ask("new", LONG_S) == {"is": "new"}
        assert not answering.done()

    run(test)


def test_a_parent_that_is_gone_is_said_to_be() -> None:
    async def test(link: Link, ours: socket.socket) -> None:
        ours.close()
        with pytest.raises(UnavailableError, match="is gone"):
            await link.ask("role", LONG_S)

    run(test)


def test_the_parent_ends_its_side_when_the_child_is_gone() -> None:
    async def test(link: Link, ours: socket.socket) -> None:
        answering = asyncio.create_task(answer_forever(ours, {"a": _nothing}))
        assert await link.ask("a", LONG_S) == {}
        assert link._streams is not None
        link._streams[1].close()
        await asyncio.wait_for(answering, LONG_S)

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        b"nothing\n", b"\n", b"\xff\n", b"a 1\n", b"b\n", b"b x\n", b"b -1\n", b"b 1 2\n",
        b"b " + b"9" * 200 + b"\n", b"x" * 300, b"b 1_0\n", b"b \xd9\xa1\n",
    ],
)  # fmt: skip
def test_a_child_that_asks_what_is_no_question_is_let_go(said: bytes) -> None:
    async def test(link: Link, ours: socket.socket) -> None:
        answers: Answers = {"a": _nothing, "b": lambda number: {"n": number}}
        answering = asyncio.create_task(answer_forever(ours, answers))
        assert await link.ask("b 7", LONG_S) == {"n": 7}
        assert link._streams is not None
        link._streams[1].write(said)
        async with asyncio.timeout(LONG_S):
            assert "it asks" in await answering

    run(test)


def test_a_child_that_hangs_is_noticed_and_one_that_lives_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.web.server.link.SILENT_S", 0.5)
    monkeypatch.setattr("kvstore.web.server.link.ASK_S", 0.02)

    async def test(link: Link, ours: socket.socket) -> None:
        answering = asyncio.create_task(answer_forever(ours, {"a": _nothing}))
        living = asyncio.create_task(link.ask_forever("a", LONG_S))
        await asyncio.sleep(1.0)
        assert not answering.done()
        time.sleep(1.0)  # the parent is stopped: the child is not to blame
        await asyncio.sleep(0.2)
        assert not answering.done()
        living.cancel()
        async with asyncio.timeout(LONG_S):
            assert await answering == "it is silent for 0.5 s"

    run(test)
