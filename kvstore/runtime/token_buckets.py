"""Rate limits for events, such as log lines and ends of terms."""

from __future__ import annotations

from collections.abc import Hashable


class TokenBuckets:
    """A token bucket per key. Pure: the caller passes the time, in seconds of a monotonic clock.
    Threads: any, without a lock; two at once may count as one."""

    def __init__(self, burst: float, per_s: float, keys_max: int) -> None:
        """
        Args:
            burst: events allowed at once; ``per_s``: events per second after that.
            keys_max: with more keys, all are reset.
        """
        self._burst = burst
        self._per_s = per_s
        self._keys_max = keys_max
        self._buckets: dict[Hashable, tuple[float, float, int]] = {}
        """Tokens after the last accepted event, its time, and refusals since."""

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: Hashable, now_s: float) -> int | None:
        """Return the number of refusals of this key since the last accepted event; None:
        refused."""
        bucket = self._buckets.get(key)
        if bucket is None and len(self._buckets) >= self._keys_max:
            self._buckets.clear()
        tokens, at_s, refused = bucket or (self._burst, now_s, 0)
        left = min(self._burst, tokens + (now_s - at_s) * self._per_s) - 1
        if left < 0:
            self._buckets[key] = tokens, at_s, refused + 1
            return None
        self._buckets[key] = left, now_s, 0
        return refused
