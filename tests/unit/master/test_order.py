"""Records in the order of their tickets, beside a sorted list."""

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


def record(ticket: int) -> ObjectRecord:
    made = ObjectRecord(SPACE, Key(b"k"))
    made.ticket = ticket
    return made


def tickets(order: SortedRecordQueue) -> list[int]:
    return [each.ticket for each in order]


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
            ticket = chance.randrange(1, 1 << 100)
            if chance.random() < latest:
                ticket = (1 << 100) + step
            records[ticket] = record(ticket)
            order.add(records[ticket])
        if step % 512 == 0:
            check_invariants(order)
            assert tickets(order) == sorted(records)
    check_invariants(order)
    assert len(order) == len(records)
    inorder = sorted(records)
    assert tickets(order) == inorder
    for ticket in (0, inorder[0], inorder[0] + 1, inorder[len(inorder) // 2], inorder[-1]):
        after = bisect_right(inorder, ticket)
        found = [each.ticket for each in islice(order.after(ticket), 2 * RUN_MAX)]
        assert found == inorder[after : after + 2 * RUN_MAX]
    for ticket in chance.sample(inorder, len(inorder)):
        order.remove(records[ticket])
    assert len(order) == 0
    assert order.first() is None
    check_invariants(order)


def test_the_first_is_the_one_with_the_lowest_ticket() -> None:
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
    assert tickets(order) == [2]
