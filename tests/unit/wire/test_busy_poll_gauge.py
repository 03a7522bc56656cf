"""Polling stops where it does not pay, and is tried again."""

from __future__ import annotations

from kvstore.wire.busy_poll_gauge import (
    HIT,
    MISS,
    MISSES_MAX,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    PREEMPTED,
    BusyPollGauge,
)


class Host:
    """A clock, and whether somebody else wants the cores."""

    def __init__(self) -> None:
        self.now = 100.0
        self.is_crowded = False
        self.gauge = BusyPollGauge(lambda: self.now, lambda: self.is_crowded)

    def polls(self, waits: int, outcome: int, step_s: float = 0.0) -> int:
        """Attempts among ``waits`` waits, all with this outcome."""
        count = 0
        for _ in range(waits):
            self.now += step_s
            if self.gauge.should_poll():
                count += 1
                self.gauge.record(outcome)
        return count


def test_it_goes_on_as_long_as_it_helps() -> None:
    assert Host().polls(100, HIT) == 100


def test_attempts_in_vain_become_rare_but_never_cease() -> None:
    host = Host()
    assert host.polls(1 << MISSES_MAX, MISS) <= MISSES_MAX
    assert host.polls(10 << MISSES_MAX, MISS) >= 9


def test_lost_time_slices_become_rare() -> None:
    """Calls of 0.1 ms, and another process that takes each core that is yielded to it."""
    host = Host()
    assert host.polls(100_000, PREEMPTED, 1e-4) <= 12, "in 10 s"
    assert host.polls(100_000, PREEMPTED, 1e-4) <= 10 / PAUSE_MAX_S + 1
    host.now += 2 * PAUSE_MAX_S
    assert host.polls(100, HIT, PAUSE_MAX_S / 50) == 100, "the other process has ended"
    assert host.polls(1, PREEMPTED) == 1
    host.now += PAUSE_MIN_S
    assert host.gauge.should_poll(), "the next pause is short"


def test_a_crowded_host_is_not_polled_on() -> None:
    host = Host()
    host.is_crowded = True
    assert host.polls(1_000, PREEMPTED, PAUSE_MIN_S) == 0
    host.is_crowded = False
    assert host.polls(1_000, HIT, PAUSE_MIN_S) >= 999
