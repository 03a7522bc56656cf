"""Questions to a parent, and its answers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore.errors import UnavailableError
from kvstore.master.ipc_channel import Answers, ChildChannel, MasterChannel

LONG_S = 30.0


Test = Callable[[ChildChannel, MasterChannel, socket.socket], Coroutine[Any, Any, None]]


def run(test: Test) -> None:
    """``test`` is given both ends, and the socket to attach the master's to."""

    async def inside() -> None:
        ours, theirs = socket.socketpair()
        child, master = ChildChannel(theirs, lambda _: None), MasterChannel()
        reading = asyncio.create_task(child.run())
        await asyncio.sleep(0)
        with ours, theirs:
            await test(child, master, ours)
            master.detach()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(inside())


def _nothing() -> dict[str, object]:
    return {}


def test_each_question_gets_its_answer() -> None:
    async def test(child: ChildChannel, master: MasterChannel, ours: socket.socket) -> None:
        counted = iter(range(100))
        answers: Answers = {"a": lambda: {"n": next(counted)}, "b": lambda: {"b": "x" * 100_000}}
        ended = master.attach(ours, answers)
        assert not ended.done()
        found = await asyncio.gather(*(child.request("a", LONG_S) for _ in range(10)))
        assert [each["n"] for each in found] == list(range(10))
        assert len((await child.request("b", LONG_S))["b"]) == 100_000

    run(test)


def test_a_parent_that_hangs_costs_its_time_and_is_heard_when_it_is_back() -> None:
    """An answer that comes late is not taken for that to a later question."""

    async def test(child: ChildChannel, master: MasterChannel, ours: socket.socket) -> None:
        for _ in range(3):
            with pytest.raises(UnavailableError, match=r"no reply within 0\.1 s"):
                await child.request("old", 0.1)
        answers = {"old": lambda: {"is": "old"}, "new": lambda: {"is": "new"}}
        ended = master.attach(ours, answers)
        assert await child.request("new", LONG_S) == {"is": "new"}
        assert not ended.done()

    run(test)


def test_a_child_that_hangs_is_noticed_and_one_that_lives_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.master.ipc_channel.SILENT_S", 0.5)
    monkeypatch.setattr("kvstore.master.ipc_channel.ASK_S", 0.02)

    async def test(child: ChildChannel, master: MasterChannel, ours: socket.socket) -> None:
        ended = master.attach(ours, {"a": _nothing})
        living = asyncio.create_task(child.request_until_reply("a", LONG_S))
        await asyncio.sleep(1.0)
        assert not ended.done()
        time.sleep(1.0)  # the parent is stopped: the child is not to blame
        await asyncio.sleep(0.2)
        assert not ended.done()
        living.cancel()
        async with asyncio.timeout(LONG_S):
            assert await ended == "no message for 0.5 s"

    run(test)
