"""When a store that does not answer is asked again."""

from __future__ import annotations

from kvstore.connectors.vllm.breaker import Breaker


def opened(at: float, **settings: float) -> Breaker:
    breaker = Breaker(**settings)  # type: ignore[arg-type]
    assert not breaker.failed(at)
    assert not breaker.failed(at)
    assert breaker.failed(at)
    return breaker


def test_it_is_closed_until_so_many_have_failed_in_a_row() -> None:
    breaker = Breaker()
    assert not breaker.failed(1.0)
    assert not breaker.failed(1.0)
    assert not breaker.is_open(1.0)
    breaker.succeeded()
    assert not breaker.failed(1.0)
    assert not breaker.failed(1.0)
    assert not breaker.is_open(1.0)
    assert breaker.opened == 0
    assert breaker.failed(1.0)
    assert breaker.is_open(1.0)
    assert breaker.opened == 1


def test_one_failure_is_enough_where_that_is_wanted() -> None:
    breaker = Breaker(failures_max=1)
    assert breaker.failed(5.0)
    assert breaker.is_open(5.5)


def test_it_lets_a_probe_through_when_its_time_is_over() -> None:
    breaker = opened(10.0, open_s=2.0)
    assert breaker.is_open(11.999)
    assert not breaker.is_open(12.0)


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = opened(10.0, open_s=2.0)
    breaker.succeeded()
    assert not breaker.is_open(10.0)
    assert not breaker.failed(12.0)
    assert not breaker.is_open(12.0)


def test_a_probe_that_fails_opens_it_again_and_says_nothing_new() -> None:
    breaker = opened(10.0, open_s=2.0)
    assert not breaker.failed(12.0)
    assert breaker.is_open(12.0)
    assert breaker.opened == 2


def test_it_stays_open_twice_as_long_each_time_but_not_for_ever() -> None:
    breaker = opened(0.0, open_s=1.0, open_max_s=6.0)
    now, lengths = 1.0, []
    for _ in range(5):
        assert not breaker.is_open(now)
        breaker.failed(now)
        length = next(s for s in (1, 2, 4, 6, 8, 16) if not breaker.is_open(now + s))
        assert breaker.is_open(now + length - 0.001)
        lengths.append(length)
        now += length
    assert lengths == [2, 4, 6, 6, 6]


def test_success_makes_the_next_time_short_again() -> None:
    breaker = opened(0.0, open_s=1.0, open_max_s=8.0)
    breaker.failed(1.0)
    breaker.failed(3.0)
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(20.0)
    assert breaker.is_open(20.9)
    assert not breaker.is_open(21.0)
