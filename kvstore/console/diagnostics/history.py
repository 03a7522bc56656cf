"""The last hour of a master in points of ten seconds, for charts and warnings of the dashboard.

Pure. A point is the difference to the previous sample. The first sample of a term, or after a gap,
makes no point.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvstore.calls import ClusterStatus
from kvstore.runtime.histograms import BUCKETS, quantile

EVERY_S: Final = 10.0
POINTS_MAX: Final = 360

RECENT_S: Final = 600.0
"""Time span for the statistics of single calls, in seconds."""

UNSEEN: Final = ("Status", "Join")
"""Calls that are not counted: monitoring makes most of the calls to an idle store."""

Counts = Sequence[int]


class HistorySample(NamedTuple):
    """The counters of a master since its start, or since its term began. As a point: their increase
    since the previous sample."""

    at_ms: int
    """Wall clock, milliseconds since 1970."""
    epoch: int
    leads: bool
    counters: dict[str, int]
    calls: int
    us_by_call: dict[str, Counts]
    """Latency histograms by call; a point has those with calls."""
    call_us: Counts
    """A histogram, as are ``ages_ms`` and ``late_us``."""
    ages_ms: Counts
    late_us: Counts
    used: int
    size: int
    objects: int
    seconds: float = 0.0
    """Length of a point; 0 for a sample."""


def sample(at_ms: int, measured: Mapping[str, Any], status: ClusterStatus | None) -> HistorySample:
    """
    Args:
        measured: the master's reply to ``measures``.
        status: None if it is not known.
    """
    calls = {name: row for name, row in measured["calls"].items() if name not in UNSEEN}
    return HistorySample(
        at_ms=at_ms,
        epoch=measured["epoch"],
        leads=measured["leads"] and status is not None,
        counters={**(dict(status.counters) if status else {}), **measured["counters"]},
        calls=sum(count for count, _, _ in calls.values()),
        us_by_call={name: row[2][0] for name, row in calls.items()},
        call_us=[sum(column) for column in zip(*(row[2][0] for row in calls.values()))]
        or [0] * BUCKETS,
        ages_ms=measured["eviction_age_ms"][0],
        late_us=measured["late_us"][0],
        used=status.used if status else 0,
        size=status.size if status else 0,
        objects=sum(row.objects for row in status.namespaces) if status else 0,
    )


class HistoryPoints:
    """The points of the last hour. A standby adds none."""

    def __init__(self) -> None:
        self._points: deque[HistorySample] = deque(maxlen=POINTS_MAX)
        self._before: HistorySample | None = None

    def add(self, now: HistorySample) -> None:
        """Take a sample, and add a point if the previous sample is recent enough."""
        before, self._before = self._before, now if now.leads else None
        if before is None or not now.leads or before.epoch != now.epoch:
            return
        seconds = (now.at_ms - before.at_ms) / 1000
        if not 0 < seconds <= 3 * EVERY_S:
            return  # the clock was set, or samples are missing
        counters = {
            name: _grown(before.counters.get(name, 0), number)
            for name, number in now.counters.items()
        }
        nothing = [0] * BUCKETS
        grown = (
            (name, _all_grown(before.us_by_call.get(name, nothing), us))
            for name, us in now.us_by_call.items()
        )
        self._points.append(
            now._replace(
                seconds=seconds,
                counters=counters,
                calls=_grown(before.calls, now.calls),
                us_by_call={name: us for name, us in grown if any(us)},
                call_us=_all_grown(before.call_us, now.call_us),
                ages_ms=_all_grown(before.ages_ms, now.ages_ms),
                late_us=_all_grown(before.late_us, now.late_us),
            )
        )

    def lately(self, now_ms: int, within_s: float) -> list[HistorySample]:
        """Return the points of the last ``within_s`` seconds."""
        return [point for point in self._points if now_ms - point.at_ms <= within_s * 1000]

    def as_columns(self, now_ms: int) -> dict[str, Any]:
        """Return lists of equal length, one for each quantity: rates per second, times in seconds.
        None: no such event in this interval."""
        points = self.lately(now_ms, POINTS_MAX * EVERY_S + EVERY_S)

        def rate(name: str) -> list[float]:
            return [round(point.counters.get(name, 0) / point.seconds, 3) for point in points]

        def spread(counts: Sequence[Counts], share: float, unit: float) -> list[float | None]:
            return [_rounded(quantile(count, share), unit) for count in counts]

        took = [point.call_us for point in points]
        return {
            "every_s": EVERY_S,
            "at_ms": [point.at_ms for point in points],
            "matched_per_s": rate("matched_objects"),
            "missed_per_s": rate("missed_objects"),
            "stored_per_s": rate("stored_objects"),
            "stored_bytes_per_s": rate("stored_bytes"),
            "evicted_per_s": rate("evicted_objects"),
            "calls_per_s": [round(point.calls / point.seconds, 3) for point in points],
            "call_p50_s": spread(took, 0.5, 1e-6),
            "call_p99_s": spread(took, 0.99, 1e-6),
            "eviction_age_s": spread([point.ages_ms for point in points], 0.5, 1e-3),
            "used_bytes": [point.used for point in points],
            "size_bytes": [point.size for point in points],
            "objects": [point.objects for point in points],
            "calls": self._by_call(now_ms),
        }

    def _by_call(self, now_ms: int) -> list[dict[str, Any]]:
        """Return the calls of the last ten minutes, the most frequent first."""
        points = self.lately(now_ms, RECENT_S)
        seconds = sum(each.seconds for each in points)
        taken: dict[str, Counts] = {}
        for point in points:
            for name, us in point.us_by_call.items():
                known = taken.get(name)
                taken[name] = us if known is None else [sum(pair) for pair in zip(known, us)]
        rows = [
            {
                "call": name,
                "per_s": round(sum(us) / seconds, 3),
                "p50_s": _rounded(quantile(us, 0.5), 1e-6),
                "p99_s": _rounded(quantile(us, 0.99), 1e-6),
            }
            for name, us in taken.items()
        ]
        return sorted(rows, key=lambda row: -row["per_s"])


def added(points: Sequence[HistorySample]) -> Mapping[str, int]:
    """Return the increase of each counter in these points."""
    total = Counter[str]()
    for point in points:
        total.update(point.counters)
    return total


def spread_of(counts: Sequence[Counts], share: float) -> float | None:
    """Return the quantile of several histograms together."""
    return quantile([sum(column) for column in zip(*counts)], share)


def _rounded(value: float | None, unit: float) -> float | None:
    return None if value is None else float(f"{value * unit:.4g}")


def _grown(before: int, now: int) -> int:
    return max(0, now - before)


def _all_grown(before: Counts, now: Counts) -> Counts:
    return [max(0, after - one) for one, after in zip(before, now)]
