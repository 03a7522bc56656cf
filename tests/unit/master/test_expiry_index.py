"""Ends of pins and lifetimes: never early, late by less than a step."""

from __future__ import annotations

import pytest

from kvstore.limits import Key
from kvstore.master.state.expiry_index import NO_END_MS, STEP_MS, ExpiryIndex
from kvstore.master.state.records import ObjectRecord
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import NAMESPACE


def record(name: str = "a") -> ObjectRecord:
    return ObjectRecord(NAMESPACE, Key(name.encode()))


@pytest.mark.parametrize("end_ms", [1, STEP_MS - 1, STEP_MS, STEP_MS + 1, 1_000])
def test_an_end_is_not_early_and_late_by_less_than_a_step(end_ms: int) -> None:
    ends, a = ExpiryIndex(), record()
    ends.set(a, end_ms)

    rounded_ms = ends.expiry_of(a)
    assert end_ms <= rounded_ms < end_ms + STEP_MS
    assert not ends.ended(a, rounded_ms - 1)
    assert ends.ended(a, rounded_ms)
    assert ends.pop_expired(rounded_ms - 1) is None
    assert ends.pop_expired(rounded_ms) is a
    check_invariants(ends)


def test_the_next_end_is_the_earliest() -> None:
    ends, a, b, c = ExpiryIndex(), record("a"), record("b"), record("c")
    assert ends.next_ms == NO_END_MS
    for each, end_ms in ((a, 2 * STEP_MS), (b, STEP_MS), (c, 3 * STEP_MS)):
        ends.set(each, end_ms)
        check_invariants(ends)
    assert ends.next_ms == STEP_MS

    assert ends.pop_expired(2 * STEP_MS) is b
    assert ends.pop_expired(2 * STEP_MS) is a
    assert ends.pop_expired(2 * STEP_MS) is None
    assert ends.next_ms == 3 * STEP_MS
    assert ends.pop_expired(3 * STEP_MS) is c
    assert ends.pop_expired(3 * STEP_MS) is None
    assert (len(ends), ends.next_ms) == (0, NO_END_MS)
    check_invariants(ends)


def test_a_record_has_one_end() -> None:
    ends, a, b = ExpiryIndex(), record("a"), record("b")
    ends.set(b, STEP_MS)
    ends.set(a, STEP_MS)
    ends.set(a, 5 * STEP_MS)

    assert (ends.expiry_of(a), len(ends)) == (5 * STEP_MS, 2)
    assert ends.pop_expired(4 * STEP_MS) is b
    assert ends.pop_expired(4 * STEP_MS) is None
    check_invariants(ends)
    ends.drop(a)
    assert (ends.expiry_of(a), len(ends), ends.next_ms) == (0, 0, NO_END_MS)
    check_invariants(ends)
