"""The places of a door: one identity leaves some to the next, however many it wants."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from kvstore.auth.shares import Shares
from kvstore.errors import BusyError

PLACES = 60


@pytest.fixture
def shares() -> Iterator[Shares]:
    shares = Shares("door", PLACES)
    yield shares
    shares.check_invariants()


def takes(shares: Shares, who: str, most: int = 2 * PLACES) -> int:
    """How many places this identity gets, of ``most`` that it wants."""
    for got in range(most):
        try:
            shares.enter(who)
        except BusyError:
            return got
    return most


def test_one_identity_gets_half(shares: Shares) -> None:
    assert takes(shares, "a") == PLACES // 2
    assert shares.refused() == {"a": 1}


@pytest.mark.parametrize("count", [2, 3, 5, 11])
def test_greedy_ones_leave_as_much_as_each_of_them_holds(shares: Shares, count: int) -> None:
    greedy = [f"greedy-{number}" for number in range(count)]
    held = dict.fromkeys(greedy, 0)
    while before := sum(held.values()) or -1:
        for each in greedy:
            held[each] += takes(shares, each, most=1)
        if sum(held.values()) == before:
            break
    assert set(held.values()) == {PLACES // (count + 1)}
    assert takes(shares, "late") > 0


def test_any_order_keeps_the_rule(shares: Shares) -> None:
    chance = random.Random(7)
    held = dict.fromkeys("abcd", 0)
    for _ in range(5_000):
        who = chance.choice("abcd")
        free = PLACES - sum(held.values())
        if held[who] and chance.random() < 0.45:
            shares.leave(who)
            held[who] -= 1
            continue
        is_let_in = takes(shares, who, most=1) == 1
        assert is_let_in == (held[who] < free)
        held[who] += is_let_in
        shares.check_invariants()


def test_a_refusal_says_whose_and_why(shares: Shares, caplog: pytest.LogCaptureFixture) -> None:
    takes(shares, "decode-7", most=PLACES // 2)
    with caplog.at_level(logging.WARNING), pytest.raises(BusyError) as caught:
        shares.enter("decode-7")
    assert str(caught.value).startswith("door: decode-7 holds 30 of 60 places, and 30 are free")
    assert "share_refused door=door identity=decode-7 held=30 free=30 count=1" in caplog.text
