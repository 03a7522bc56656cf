"""How calls are timed, on a store that is a dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.bench.session import (
    CHAIN_BLOCKS,
    EXIST,
    GET,
    GET_DISK,
    MEMCPY,
    PUT,
    PUT_FULL,
    Session,
    StoreDriver,
    Work,
)
from kvstore.bench.timing import memory, percentile, require, timed
from kvstore.errors import InternalError, InvalidArgumentError, NoSpaceError

if TYPE_CHECKING:
    from kvstore.bench.timing import Bytes

SIZE = 4096
POOL = 64 << 20


class Shelf(StoreDriver):
    """A driver that keeps what it is given, and counts what it held at most."""

    def __init__(self) -> None:
        self.source, self.target = memory(64 * SIZE)
        self.held: dict[str, Bytes] = {}
        self.most = 0
        self.quiesced = 0
        self.damaged = False

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        def put(index: int) -> None:
            for number, key in enumerate(batches[index % len(batches)]):
                self.held[key] = self.source[number * size : (number + 1) * size].copy()
            self.most = max(self.most, len(self.held))

        def get(index: int) -> None:
            for number, key in enumerate(batches[index % len(batches)]):
                self.target[number * size : (number + 1) * size] = self.held[key]
            if self.damaged:
                self.target[0] ^= 1

        def exist(index: int) -> list[bool]:
            return [key in self.held for key in batches[index % len(batches)]]

        def check(result: Any) -> None:
            require(result is None or all(result), "was not there")

        return Work({PUT: put, GET: get, EXIST: exist}[op], check)

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self.held[key]

    def wait_until_free(self) -> None:
        self.quiesced += 1


def test_timing_takes_at_least_three_and_at_most_the_limit() -> None:
    seen: list[int] = []
    assert len(timed(lambda index: index, 0.0, 100, seen.append)) == 3
    assert seen == [0, 1, 2]
    assert len(timed(lambda index: index, 10.0, 5, seen.append)) == 5


def test_percentiles_are_samples() -> None:
    samples = [float(number) for number in range(100, 0, -1)]
    assert percentile(samples, 0.99) == 100
    assert percentile(samples, 0.0) == 1
    assert percentile([3.0], 0.5) == 3


@pytest.mark.parametrize("op", [PUT, GET])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_row_leaves_nothing_behind(op: str, batch: int) -> None:
    shelf = Shelf()
    assert len(Session(shelf, POOL).measure(op, SIZE, batch, 0.0)) == 3
    assert shelf.most > 0
    assert not shelf.held


@pytest.mark.parametrize("refuses", [False, True])
def test_what_a_full_pool_refuses_or_loses_is_not_found(refuses: bool) -> None:
    class Full(Shelf):
        """Has room for 500 objects. Beyond that it evicts the oldest one, or refuses the put."""

        def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
            def put(index: int) -> None:
                for key in batches[index]:
                    if refuses and len(self.held) == 500:
                        raise NoSpaceError("full")
                    self.held[key] = self.source[:size]
                while len(self.held) > 500:
                    del self.held[next(iter(self.held))]

            def get(index: int) -> list[object]:
                return [self.held.get(key) for key in batches[index]]

            return Work({PUT: put, GET: get}[op], lambda _: None)

    session = Session(Full(), 800 * SIZE)
    session.measure(PUT_FULL, SIZE, 8, 0.05)
    assert session.found == (0 if refuses else 1)


def test_foreign_bytes_are_noticed() -> None:
    shelf = Shelf()
    shelf.damaged = True
    with pytest.raises(InternalError, match="other bytes"):
        Session(shelf, POOL).measure(GET, SIZE, 1, 0.0)
    assert not shelf.held


def test_what_is_asked_for_is_there_and_stays() -> None:
    shelf = Shelf()
    session = Session(shelf, POOL)
    for batch in (1, CHAIN_BLOCKS):
        assert len(session.measure(EXIST, 0, batch, 0.0)) == 3
    assert len(shelf.held) == CHAIN_BLOCKS


def test_a_session_waits_for_memory_before_it_runs_out() -> None:
    shelf = Shelf()
    session = Session(shelf, 4 * SIZE * 64)
    for _ in range(4):
        session.measure(PUT, SIZE, 64, 0.0)
    assert shelf.quiesced == 3


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="more memory"):
        Session(Shelf(), SIZE * 64).measure(PUT, SIZE, 64, 0.0)


def test_one_memcpy_asks_nobody() -> None:
    shelf = Shelf()
    Session(shelf, POOL).measure(MEMCPY, SIZE, 64, 0.0)
    assert (shelf.source == shelf.target).all()
    assert not shelf.most


def test_three_times_the_memory_is_put_and_read_in_turn() -> None:
    shelf = Shelf()
    with_disk = Session(shelf, 64 * SIZE)
    assert with_disk.measure(GET_DISK, SIZE, 8, 0.01)
    assert shelf.most == 3 * 64
    shelf.damaged = True
    with pytest.raises(InternalError, match="other bytes"):
        with_disk.measure(GET_DISK, SIZE, 8, 0.01)
