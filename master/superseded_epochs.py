"""Decides whether a reported later epoch ends the term, and chooses the next epoch.

A lying node can end a term at most once in ``SUPERSEDED_S``, and cannot exhaust the epochs: see
``kvstore.limits.EPOCH_AHEAD_MAX``.
"""

from __future__ import annotations

from random import Random
from typing import Final

from kvstore.limits import plausible_epoch_max
from kvstore.runtime.token_buckets import TokenBuckets

EPOCH_STEP_MAX: Final = 1 << 20
"""Maximum random distance of the next epoch, in case another node knows a later one."""

SUPERSEDED_S: Final = 60.0
"""Minimum interval between terms ended by reports, because each stops every client for a second or
two. An honest node reports a second later epoch only after clocks were set back; it has to wait."""


class SupersededEpochs:
    def __init__(self, random: Random, *, every_s: float = SUPERSEDED_S) -> None:
        self._random = random
        self._ends = TokenBuckets(1, 1 / every_s, keys_max=1)

    def ends_term(self, own: int, epoch: int, now_s: float) -> bool:
        """Return whether a node's report of ``epoch`` ends the term of epoch ``own`` now."""
        return epoch > own and self._ends.take("", now_s) is not None

    def next_epoch(self, epoch: int, wall_clock_ms: int) -> int:
        """Return an epoch above the reported one that the next master accepts."""
        distance_max = min(EPOCH_STEP_MAX, plausible_epoch_max(wall_clock_ms) - epoch)
        return max(epoch + self._random.randint(1, max(1, distance_max)), wall_clock_ms)
