"""Turns: an identity that asks for much waits for itself, and not others for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvstore.errors import NoSpaceError
from kvstore.master.fair_scheduler import SLICE_S, FairScheduler
from tests.support.invariants import check_invariants


class World:
    """Turns over a clock that work moves, and what was done, in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done: list[str] = []
        self.turns = FairScheduler(lambda: self.now_s)

    def work(self, name: str, seconds: float = SLICE_S) -> str:
        self.done.append(name)
        self.now_s += seconds * 1.001  # rounding must not make a slice of it and a second one
        return name

    def asks(self, who: str, name: str = "", seconds: float = SLICE_S) -> Coroutine[Any, Any, str]:
        return self.turns.run_in_turn(who, functools.partial(self.work, name or who, seconds))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    check_invariants(world.turns)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_flood_of_one_is_met_by_a_call_of_another_within_a_round(world: World) -> None:
    async def main() -> None:
        flood = [asyncio.create_task(world.asks("flood")) for _ in range(500)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        before = world.done.count("flood")
        assert await world.asks("other") == "other"
        assert world.done.count("flood") - before <= 1
        await asyncio.gather(*flood)

    run(main)
    assert world.done.count("flood") == 500


def test_two_floods_take_turns(world: World) -> None:
    async def main() -> None:
        asked = [asyncio.create_task(world.asks("a")) for _ in range(50)]
        asked += [asyncio.create_task(world.asks("b")) for _ in range(50)]
        await asyncio.gather(*asked)

    run(main)
    ahead = [world.done[:end].count("a") - world.done[:end].count("b") for end in range(101)]
    assert max(map(abs, ahead)) <= 1


def test_time_counts_and_not_calls(world: World) -> None:
    """One of a quarter of the slice is done four times as often as one of a whole one."""

    async def main() -> None:
        asked = [asyncio.create_task(world.asks("long")) for _ in range(20)]
        asked += [asyncio.create_task(world.asks("short", "", SLICE_S / 4)) for _ in range(80)]
        await asyncio.gather(*asked)

    run(main)
    assert 30 <= world.done[:50].count("short") <= 42


def test_a_call_whose_caller_has_gone_is_not_made(world: World) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(world.asks("a", str(number))) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)

    run(main)
    assert world.done == ["0", "2"]


def test_an_error_is_the_callers(world: World) -> None:
    def refuse() -> None:
        world.now_s += SLICE_S
        raise NoSpaceError("full")

    async def main() -> None:
        for _ in range(2):  # at once, and in a later round
            with pytest.raises(NoSpaceError):
                await world.turns.run_in_turn("a", refuse)
        assert await world.asks("a") == "a"

    run(main)


def test_work_that_fails_does_not_end_the_rounds(world: World) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        world.turns.defer("a", fail)
        assert await world.asks("b") == "b"
        world.turns.defer("a", fail)
        world.turns.defer("b", functools.partial(world.work, "after"))
        for _ in range(4):
            await asyncio.sleep(0)

    run(main)
    assert world.done == ["b", "after"]
