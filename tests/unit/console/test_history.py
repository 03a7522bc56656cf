"""The last hour, and what is read from it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.calls import ClusterStatus, Counter, NamespaceStatus, NodeStatus, SegmentStatus
from kvstore.console.diagnostics.history import (
    EVERY_S,
    POINTS_MAX,
    HistoryPoints,
    HistorySample,
    added,
    sample,
)
from kvstore.runtime.histograms import Histogram, quantile

EVERY_MS = int(EVERY_S * 1000)


def histogram(*values: float) -> tuple[list[int], float]:
    made = Histogram()
    for value in values:
        made.add(value)
    return made.counts, made.total


def measured(calls: int = 0, took_us: float = 100.0, **changes: Any) -> dict[str, Any]:
    return {
        "leads": True, "epoch": 7, "counters": {"connections_stalled": 1},
        "calls": {
            "Lookup": (calls, 0, histogram(*[took_us] * calls)),
            "Status": (1000, 0, histogram(*[1e6] * 1000)),
        },
        "eviction_age_ms": histogram(), "late_us": histogram(),
    } | changes  # fmt: skip


def status(**counters: int) -> ClusterStatus:
    segments = [SegmentStatus(4, 1000, 300, 500, "x"), SegmentStatus(5, 1000, 100, 900, "y")]
    counted = [Counter(*each) for each in counters.items()]
    nodes = [NodeStatus("a", "h", "alive", "1:2", 0, segments)]
    return ClusterStatus(7, "1", 0, nodes, [NamespaceStatus("n", 3, 30)], counted)


def taken(*samples: HistorySample) -> HistoryPoints:
    history = HistoryPoints()
    for each in samples:
        history.add(each)
    return history


def test_a_point_holds_what_happened_between_two_samples() -> None:
    history = taken(
        sample(0, measured(calls=10), status(matched_objects=100, missed_objects=5)),
        sample(EVERY_MS, measured(calls=30), status(matched_objects=150, missed_objects=5)),
    )
    columns = history.as_columns(EVERY_MS)
    assert columns["at_ms"] == [EVERY_MS]
    assert columns["matched_per_s"] == [5.0]
    assert columns["missed_per_s"] == [0.0]
    assert columns["calls_per_s"] == [2.0], "what watches is left out"
    assert 64e-6 <= columns["call_p50_s"][0] <= 128e-6
    assert columns["eviction_age_s"] == [None], "nothing was evicted"
    assert (columns["used_bytes"], columns["size_bytes"]) == ([400], [2000])
    assert columns["objects"] == [3]
    (lookup,) = columns.pop("calls")
    assert (lookup["call"], lookup["per_s"]) == ("Lookup", 2.0)
    assert 64e-6 <= lookup["p50_s"] <= lookup["p99_s"] <= 128e-6
    lengths = {len(values) for values in columns.values() if isinstance(values, list)}
    assert lengths == {1}


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (sample(EVERY_MS, measured(epoch=8), status()), "another term counts from 0"),
        (sample(EVERY_MS, measured(leads=False), None), "it stands by"),
        (sample(EVERY_MS, measured(), None), "the store could not be asked"),
        (sample(4 * EVERY_MS, measured(), status()), "a gap"),
        (sample(-5, measured(), status()), "the clock was set back"),
    ],
)
def test_no_point_is_made_where_the_difference_means_nothing(
    second: HistorySample, why: str
) -> None:
    history = taken(sample(0, measured(), status(matched_objects=9)), second)
    assert history.as_columns(EVERY_MS)["at_ms"] == [], why
    assert second.leads == (why not in ("it stands by", "the store could not be asked"))


def test_an_hour_is_kept_and_no_more() -> None:
    history = HistoryPoints()
    for number in range(POINTS_MAX + 50):
        history.add(sample(number * EVERY_MS, measured(), status(corrupt_replicas=number)))
    now_ms = (POINTS_MAX + 49) * EVERY_MS
    assert len(history.as_columns(now_ms)["at_ms"]) == POINTS_MAX
    assert added(history.lately(now_ms, 60.0))["corrupt_replicas"] == 7
    assert history.lately(now_ms + 3_700_000, 3600.0) == []


def test_quantiles_lie_within_their_bucket() -> None:
    assert quantile([0] * 28, 0.5) is None
    counts, _ = histogram(0.0, 0.5)
    assert 0 <= (quantile(counts, 0.5) or 0) <= 1
    counts, _ = histogram(*[100.0] * 99, 5000.0)
    assert 64 <= (quantile(counts, 0.5) or 0) <= 128
    assert 64 <= (quantile(counts, 0.99) or 0) <= 128
    assert 4096 <= (quantile(counts, 1.0) or 0) <= 8192
    counts, _ = histogram(1e30)
    assert (quantile(counts, 0.99) or 0) > 1 << 26, "the last bucket has no upper bound"
