"""Histograms whose bounds are powers of two, so that counting costs one ``bit_length``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

BUCKETS: Final = 28
"""Bucket ``i`` counts values from ``2**(i-1)`` to below ``2**i``, bucket 0 those below 1, the last
one all larger ones: of microseconds, above 67 s; of milliseconds, above 18 h."""


class Histogram:
    """Counts of non-negative values. One thread."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.total += value * times
        bucket = int(value).bit_length()
        self.counts[bucket if bucket < BUCKETS else -1] += times


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the quantile ``share``, with values spread evenly within a bucket; None: no values."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            low, high = (1 << index) >> 1, 1 << index
            return low + (high - low) * (wanted - below) / count
        below += count
    return float(1 << len(counts))


def cumulative(counts: Sequence[int], unit: float = 1.0) -> list[tuple[str, int]]:
    """Return the buckets for Prometheus: each bound, multiplied by ``unit``, and the count of
    values below."""
    bounds = [*(repr((1 << index) * unit) for index in range(BUCKETS - 1)), "+Inf"]
    return list(zip(bounds, accumulate(counts), strict=True))
