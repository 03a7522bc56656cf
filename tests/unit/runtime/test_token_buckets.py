from __future__ import annotations

import pytest

from kvstore.runtime.token_buckets import TokenBuckets


@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        ([("a", 0.0)] * 4, [0, 0, None, None]),  # the burst
        ([("a", 0.0), ("b", 0.0)] * 3, [0, 0, 0, 0, None, None]),  # each key has its own
        ([*[("a", 0.0)] * 4, ("a", 9.9), ("a", 10.0)], [0, 0, None, None, None, 3]),
        ([*[("a", 0.0)] * 2, *[("a", 99.0)] * 3], [0, 0, 0, 0, None]),  # no more than the burst
        (
            [*[("a", 0.0)] * 3, ("b", 0.0), ("c", 0.0), ("a", 0.0)],
            [0, 0, None, 0, 0, 0],
        ),  # all forgotten
    ],
)
def test_what_is_refused_and_how_often_it_was(
    takes: list[tuple[str, float]], expected: list[int | None]
) -> None:
    buckets = TokenBuckets(2, 0.1, keys_max=2)
    assert [buckets.take(key, now) for key, now in takes] == expected
    assert len(buckets) <= 2
