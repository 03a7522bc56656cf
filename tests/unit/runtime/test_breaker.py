"""When somebody who keeps failing is left alone, and when it is tried again."""

from __future__ import annotations

import pytest

from kvstore.runtime.breaker import Breaker


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(failures_max=3, open_for=1_000)


def opened(breaker: Breaker, now_ms: int = 0) -> Breaker:
    for _ in range(3):
        breaker.begin(now_ms)
        breaker.failed(now_ms)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed(0)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(0)
    assert breaker.state(0) == "closed"
    breaker.failed(0)
    assert breaker.state(0) == breaker.state(999) == "open"
    assert not breaker.allows(999)


def test_then_one_request_tries_and_the_others_wait_for_what_it_finds(breaker: Breaker) -> None:
    opened(breaker)
    assert breaker.state(1_000) == "half_open"
    assert breaker.begin(1_000)
    assert not breaker.allows(1_000)
    breaker.succeeded()
    assert breaker.state(1_000) == "closed"
    assert not breaker.begin(1_000)
    assert breaker.allows(1_000)


def test_a_try_without_a_verdict_leaves_the_next_one_to_try(breaker: Breaker) -> None:
    opened(breaker)
    breaker.begin(1_000)
    breaker.on_abandoned()
    assert breaker.state(1_000) == "half_open"
    assert breaker.begin(1_000)


def test_it_stays_open_twice_as_long_each_time_but_not_for_ever() -> None:
    breaker = Breaker(failures_max=1, open_for=1.0, open_for_max=6.0)
    now, lengths = 0.0, []
    for _ in range(6):
        breaker.failed(now)
        length = next(s for s in (1, 2, 4, 6, 8, 16) if not breaker.is_open(now + s))
        assert breaker.is_open(now + length - 0.001)
        lengths.append(length)
        now += length
    assert lengths == [1, 2, 4, 6, 6, 6]
