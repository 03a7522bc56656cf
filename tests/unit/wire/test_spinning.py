"""Polling stops where it is in vain, and is tried again."""

from __future__ import annotations

from kvstore.wire.spinning import MISSES_MAX, SpinGauge


def polls(gauge: SpinGauge, waits: int) -> int:
    """Attempts among ``waits`` waits, all in vain."""
    count = 0
    for _ in range(waits):
        if gauge.pays():
            count += 1
            gauge.missed()
    return count


def test_it_goes_on_as_long_as_it_helps() -> None:
    gauge = SpinGauge()
    for _ in range(100):
        assert gauge.pays()
        gauge.hit()


def test_attempts_in_vain_become_rare_but_never_cease() -> None:
    gauge = SpinGauge()
    assert polls(gauge, 1 << MISSES_MAX) <= MISSES_MAX
    assert polls(gauge, 10 << MISSES_MAX) >= 9


def test_one_success_restores_it() -> None:
    gauge = SpinGauge()
    polls(gauge, 500)
    while not gauge.pays():
        pass
    gauge.hit()
    assert gauge.pays()
    gauge.missed()
    assert polls(gauge, 4) == 1
