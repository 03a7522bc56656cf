"""Records in the order of their positions, next to a sorted list."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import islice

import pytest

from kvstore.limits import Key, Namespace
from kvstore.master.state.eviction import RUN_MAX, SortedRecordQueue
from kvstore.master.state.records import ObjectRecord
from tests.support.invariants import check_invariants

SPACE = Namespace("n")


def record(position: int) -> ObjectRecord:
    made = ObjectRecord(SPACE, Key(b"k"))
    made.position = position
    return made


def positions(order: SortedRecordQueue) -> list[int]:
    return [each.position for each in order.after(-1)]


@pytest.mark.parametrize("latest", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("removed", [0.1, 0.45])
def test_is_sorted_whatever_comes_and_goes(latest: float, removed: float) -> None:
    chance = random.Random(f"{latest} {removed}")
    order = SortedRecordQueue()
    records: dict[int, ObjectRecord] = {}
    for step in range(6 * RUN_MAX):
        if records and chance.random() < removed:
            gone = records.pop(chance.choice(list(records)) if step % 2 else min(records))
            order.remove(gone)
        else:
            position = chance.randrange(1, 1 << 100)
            if chance.random() < latest:
                position = (1 << 100) + step
            records[position] = record(position)
            order.add(records[position])
        if step % 512 == 0:
            check_invariants(order)
            assert positions(order) == sorted(records)
    check_invariants(order)
    inorder = sorted(records)
    assert positions(order) == inorder
    for position in (0, inorder[0], inorder[0] + 1, inorder[len(inorder) // 2], inorder[-1]):
        after = bisect_right(inorder, position)
        found = [each.position for each in islice(order.after(position), 2 * RUN_MAX)]
        assert found == inorder[after : after + 2 * RUN_MAX]
    for position in chance.sample(inorder, len(inorder)):
        order.remove(records[position])
    assert order.first() is None
    check_invariants(order)


def test_the_first_is_the_one_with_the_lowest_position() -> None:
    order = SortedRecordQueue()
    three, one = record(3), record(1)
    order.add(three)
    assert order.first() is three
    order.add(one)
    assert order.first() is one
    order.remove(one)
    assert order.first() is three


def test_what_is_not_there_cannot_be_removed() -> None:
    order = SortedRecordQueue()
    order.add(record(2))
    with pytest.raises((AssertionError, IndexError)):
        order.remove(record(2))
    assert positions(order) == [2]
