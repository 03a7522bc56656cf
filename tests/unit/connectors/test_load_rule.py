"""When an engine loads what is stored, and when it computes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.vllm.scheduler.load_rule import (
    PREFILLS_MIN,
    PROBE_DECISIONS,
    LinearFit,
    LoadRule,
)

PER_TOKEN_S = 0.001
"""Of computing."""


def measured(*, disk_s: float = 0.0, all_or_none: bool = False) -> LoadRule:
    """Computes 1,000 tokens a second, loads ten times as many, and ``disk_s`` more for each token
    on a disk."""
    rule = LoadRule(is_on=True, all_or_none=all_or_none)
    for index in range(PREFILLS_MIN):
        tokens = 1_000 + 100 * index
        rule.prefilled(0, tokens, tokens * PER_TOKEN_S)
        rule.loaded(tokens, 0, tokens * PER_TOKEN_S / 10, is_complete=True)
        rule.loaded(tokens, tokens, tokens * (PER_TOKEN_S / 10 + disk_s), is_complete=True)
    return rule


@given(
    st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.floats(0, 0.1), st.floats(1e-7, 1e-2),
    st.floats(1e-7, 1e-1), st.lists(st.integers(256, 20_000), min_size=8, max_size=30, unique=True),
    st.tuples(*[st.integers(0, 20_000)] * 3),
)  # fmt: skip
def test_a_load_never_takes_longer_than_computing(
    a: float, b: float, t0: float, memory_s: float, disk_s: float, lengths: list[int],
    ends: tuple[int, int, int],
) -> None:  # fmt: skip
    """With an engine that keeps to the formula."""
    rule = LoadRule(is_on=True, all_or_none=False)
    computed, in_memory, tokens = sorted(ends)

    def load_s(end: int) -> float:
        if end <= computed:
            return 0.0
        return t0 + (end - computed) * memory_s + max(0, end - in_memory) * disk_s

    def compute_s(first: int) -> float:
        return a * (tokens - first) + b * (tokens**2 - first**2)

    for length in lengths:
        rule.prefilled(0, length, a * length + b * length**2)
        rule.loaded(length, 0, t0 + length * memory_s, is_complete=True)
        rule.loaded(length, length, t0 + length * (memory_s + disk_s), is_complete=True)
    end = rule.choose(computed, in_memory, tokens)
    best_s = min(load_s(each) + compute_s(each) for each in (computed, in_memory, tokens))
    assert load_s(end) + compute_s(end) <= max(1.01 * best_s, 0.021)


def test_a_slow_disk_is_left_alone_and_tried_again_from_time_to_time() -> None:
    rule = measured(disk_s=0.003)
    assert rule.choose(0, 2_000, 2_000) == 2_000
    assert rule.choose(0, 500, 2_000) == 500, "what is in memory"
    assert rule.choose(0, 0, 2_000) == 0
    chosen = [rule.choose(0, 0, 2_000) for _ in range(2 * PROBE_DECISIONS)]
    assert chosen.count(2_000) == 2
    probes = 0
    while not rule.loads_disks:  # and each probe shows that it is fast now
        probes += rule.choose(0, 0, 2_000) == 2_000
        rule.loaded(2_000, 2_000, 0.4, is_complete=True)
    assert 2 <= probes <= 8


def test_a_hit_of_states_is_loaded_whole_or_not() -> None:
    assert measured(disk_s=0.003, all_or_none=True).choose(0, 500, 2_000) == 0
    assert measured(disk_s=0.0003, all_or_none=True).choose(0, 500, 2_000) == 2_000


def test_estimates_that_are_close_do_not_change_the_decision_each_time() -> None:
    rule = measured(disk_s=0.00085)  # 0.95 of computing
    assert rule.choose(0, 0, 2_000) == 2_000
    for _ in range(20):
        rule.loaded(2_000, 2_000, 2.1, is_complete=True)
    assert rule.choose(0, 0, 2_000) == 0
    for _ in range(30):
        rule.loaded(2_000, 2_000, 1.9, is_complete=True)
    assert rule.choose(0, 0, 2_000) == 0
    for _ in range(30):
        rule.loaded(2_000, 2_000, 1.5, is_complete=True)
    assert rule.choose(0, 0, 2_000) == 2_000


def test_a_failed_load_counts_if_it_took_long() -> None:
    rule = measured()
    rule.loaded(2_000, 2_000, 0.0, is_complete=False)
    assert rule.choose(0, 0, 2_000) == 2_000
    for _ in range(3):
        rule.loaded(2_000, 2_000, 5.0, is_complete=False)
    assert rule.choose(0, 0, 2_000) == 0


@pytest.mark.parametrize("is_on", [False, True])
def test_all_is_loaded_without_measurements_and_by_choice(is_on: bool) -> None:
    rule = LoadRule(is_on=is_on, all_or_none=False)
    for _ in range(PREFILLS_MIN - is_on):
        rule.prefilled(0, 1_000, 0.1)
        rule.prefilled(990, 1_000, 0.1)
        rule.loaded(1_000, 1_000, 9.0, is_complete=True)
    assert rule.choose(0, 0, 1_000) == 1_000


@pytest.mark.parametrize("point", [(2.0, 1.0), (1.0, 3.0), (0.5, 0.25)])
def test_a_fit_of_equal_points_repeats_them(point: tuple[float, float]) -> None:
    fit = LinearFit(0.9)
    assert fit.at(*point) == 0.0
    for _ in range(3):
        fit.add(*point, 5.0)
    assert fit.at(*point) == pytest.approx(5.0)
