"""The slots of an endpoint: who gets how many, and whose wait ends first."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from kvstore.errors import BusyError
from kvstore.runtime.limiter import Limiter, WaitPreemptedError
from tests.support.limiters import check_limiter

SIZE = 60


class Port:
    """A limiter of ``SIZE`` slots, and who holds them."""

    def __init__(self) -> None:
        self.limiter = Limiter[int]("port", SIZE)
        self.kept: list[tuple[int, str]] = []
        self.preempted: list[int] = []
        self._next = 0

    def wait(self, weight: int = 1) -> int:
        slot = self._next = self._next + 1
        self.limiter.wait(slot, lambda: self.preempted.append(slot), weight)
        return slot

    def takes(self, identity: str, most: int = 2 * SIZE, *, waits: bool = False) -> int:
        """How many slots this identity gets, of ``most`` that it wants."""
        for got in range(most):
            try:
                if waits:
                    slot = self.wait()
                    self.limiter.keep(slot, identity)
                else:
                    slot = self._next = self._next + 1
                    self.limiter.acquire(slot, identity)
            except BusyError:
                return got
            self.kept.append((slot, identity))
        return most

    def leave(self, identity: str, count: int = SIZE) -> None:
        for slot, its in [each for each in self.kept if each[1] == identity][:count]:
            self.limiter.release(slot)
            self.limiter.release(slot)
            self.kept.remove((slot, its))


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    check_limiter(port.limiter)


def greedy(port: Port, count: int) -> object:
    """Each takes one after the other until none gets more."""
    for _ in range(SIZE):
        for number in range(count):
            port.takes(f"greedy-{number}", most=1)
    return set(Counter(identity for _, identity in port.kept).values())


def again(port: Port) -> object:
    taken = []
    for _ in range(3):
        taken.append(port.takes("a"))
        port.leave("a")
    return taken, port.takes("b")


CASES: dict[str, tuple[Callable[[Port], object], object]] = {
    "one gets half": (lambda p: p.takes("a"), 30),
    "two get a third each": (lambda p: greedy(p, 2), {20}),
    "eleven get a twelfth each": (lambda p: greedy(p, 11), {5}),
    "small wishes are met": (lambda p: [p.takes(f"s{n}", most=2) for n in range(29)], [2] * 29),
    "without an identity all": (lambda p: p.takes(""), SIZE),
    "all are kept": (lambda p: (p.takes(""), p.takes("a")), (SIZE, 0)),
    "what is released can be had again": (again, ([30] * 3, 30)),
    "waits count as free": (
        lambda p: ([p.wait() for _ in range(SIZE)] and p.takes("a", waits=True), p.preempted),
        (30, list(range(1, 32))),
    ),
    "a weight ends as many waits as it needs": (
        lambda p: ([p.wait(20) for _ in range(3)], p.wait(30), p.wait(SIZE + 1), p.preempted),
        ([1, 2, 3], 4, 5, [1, 2, 3, 4]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_gets_how_many(port: Port, case: str) -> None:
    take, expected = CASES[case]
    assert take(port) == expected


def test_a_wait_that_was_preempted_keeps_nothing(port: Port) -> None:
    first = port.wait()
    for _ in range(SIZE):
        port.wait()
    assert port.preempted == [first]
    with pytest.raises(BusyError):
        port.limiter.keep(first)
    assert (first in port.limiter, len(port.limiter)) == (False, SIZE)


def test_there_is_no_wait_if_all_are_kept(port: Port) -> None:
    port.takes("")
    with pytest.raises(BusyError, match="port: 60 slots are in use"):
        port.wait()


@pytest.mark.parametrize("waits", [False, True])
def test_any_order_keeps_the_rule(port: Port, waits: bool) -> None:
    chance = random.Random(7)
    for _ in range(5_000):
        identity = chance.choice("abcd")
        held = sum(its == identity for _, its in port.kept)
        free = SIZE - len(port.kept)
        if held and chance.random() < 0.45:
            port.leave(identity, 1)
        else:
            assert (port.takes(identity, most=1, waits=waits) == 1) == (held < free)
        check_limiter(port.limiter)


def test_a_refusal_names_identity_and_limit(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    port.takes("decode-7", most=SIZE // 2)
    with caplog.at_level(logging.WARNING), pytest.raises(BusyError) as caught:
        port.limiter.acquire(0, "decode-7")
    expected = "port: identity decode-7 has reached its limit: 30 of 60 slots in use, 30 free"
    assert str(caught.value).startswith(expected)
    assert "identity_limit_reached endpoint=port identity=decode-7 held=30 free=30" in caplog.text


def test_the_longest_wait_of_the_loop_ends_first() -> None:
    async def test() -> None:
        waits, ended = Limiter[asyncio.Timeout]("waits", 10), []

        async def wait(name: str, weight: int) -> None:
            try:
                async with waits.waiting(60, weight):
                    await asyncio.Event().wait()
            except WaitPreemptedError:
                ended.append(name)

        tasks = []
        for name, weight in (("a", 4), ("b", 5), ("c", 2), ("d", 1), ("e", 9), ("f", 20)):
            tasks.append(asyncio.create_task(wait(name, weight)))
            await asyncio.sleep(0.01)
        assert ended == ["a", "b", "c", "d", "e"]  # d: e and d would fit, c was older
        assert len(waits) == 1
        tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(waits) == waits._weight == 0
        with pytest.raises(TimeoutError):
            async with waits.waiting(0.01):
                await asyncio.sleep(5)

    asyncio.run(test())
