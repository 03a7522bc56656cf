"""The memory for payloads over HTTP is bounded, and given in the order of asking."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvstore.errors import BusyError
from kvstore.web.api import objects
from kvstore.web.api.objects import LEAST_BYTES, Room

MIB = 1 << 20


def run(work: object) -> None:
    asyncio.run(work)  # type: ignore[arg-type]


def test_no_more_than_there_is_and_first_come_first_served() -> None:
    async def work() -> None:
        room, order = Room(4 * MIB), []

        async def use(name: str, size: int, until: asyncio.Event) -> None:
            async with room.of(size):
                order.append(name)
                await until.wait()

        ended = [asyncio.Event() for _ in range(3)]
        tasks = []
        for name, size, end in zip("abc", (3 * MIB, 2 * MIB, LEAST_BYTES), ended, strict=True):
            tasks.append(asyncio.create_task(use(name, size, end)))
            await asyncio.sleep(0)
        assert order == ["a"]  # c would fit, but b was first
        ended[0].set()
        await tasks[0]
        await asyncio.sleep(0)
        assert order == ["a", "b", "c"]
        for each in ended:
            each.set()
        await asyncio.gather(*tasks)
        assert room.free == 4 * MIB

    run(work())


def test_whoever_gives_up_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "ROOM_S", 0.02)

    async def work() -> None:
        room = Room(2 * MIB)

        async def hold(size: int) -> None:
            async with room.of(size):
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold(MIB))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            async with room.of(2 * MIB):
                pass
        waiting = asyncio.create_task(hold(2 * MIB))
        await asyncio.sleep(0)
        small = asyncio.create_task(hold(MIB))
        await asyncio.sleep(0)
        assert room.free == MIB
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert room.free == 0  # the small one has what was free
        for task in (holding, small):
            task.cancel()
        await asyncio.gather(holding, small, return_exceptions=True)
        assert room.free == 2 * MIB

    run(work())


def test_a_grant_whose_task_is_cancelled_at_once_goes_back() -> None:
    async def work() -> None:
        room = Room(MIB)

        async def hold() -> None:
            async with room.of(MIB):
                await asyncio.Event().wait()

        first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
        for _ in range(2):
            await asyncio.sleep(0)
        first.cancel()
        while room._waiting:
            await asyncio.sleep(0)
        second.cancel()  # it is granted, and has not run yet
        await asyncio.gather(first, second, return_exceptions=True)
        assert room.free == MIB

    run(work())


def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "WAITING_MAX", 1)

    async def work() -> None:
        room = Room(MIB)
        async with room.of(MIB):
            waiting = asyncio.create_task(room._take(MIB))
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match="wait for memory"):
                await room._take(MIB)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    run(work())
