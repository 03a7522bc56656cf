"""Histograms with bounds of powers of two."""

from __future__ import annotations

from functools import reduce
from operator import add

from hypothesis import given
from hypothesis import strategies as st

from kvstore.histograms import BUCKETS, Histogram, cumulative


@given(st.lists(st.floats(0, 1e12)))
def test_each_bound_says_how_many_values_are_below(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    rows = cumulative(histogram.counts)
    assert rows[-1] == ("+Inf", len(values))
    for bound, count in rows[:-1]:
        assert count == sum(value < float(bound) for value in values), bound
    assert histogram.total == reduce(add, values, 0.0)  # ``sum`` compensates since Python 3.12


def test_bounds_have_the_unit_that_is_asked_for() -> None:
    rows = cumulative([1] + [0] * (BUCKETS - 1), 1e-6)
    assert rows[0] == ("1e-06", 1)
    assert rows[10] == ("0.001024", 1)
    assert len(rows) == BUCKETS
