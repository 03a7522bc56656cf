"""Decides whether a node's report of a later epoch ends the term, and under which epoch it goes on.

A node that lies can end a term, but not more often than once in ``OUTRUN_S``, and it cannot use up
the epochs: see ``kvstore.limits.EPOCH_AHEAD_MAX``.
"""

from __future__ import annotations

from random import Random
from typing import Final

from kvstore.limits import plausible_epoch_max
from kvstore.runtime.token_buckets import TokenBuckets

EPOCH_STEP_MAX: Final = 1 << 20
"""The next epoch is above the reported one by a random number up to this. Another node may have
joined a master of a later epoch, which this node does not know: that epoch must not recur."""

OUTRUN_S: Final = 60.0
"""After a report has ended a term, no report ends the next one for so long. Every client stops for
a second or two when a term ends. Honest nodes report more than one epoch only if they knew
different masters after a clock had been put back; the second report waits for so long."""


class SupersededEpochs:
    """The reports to one master process, over its whole life."""

    def __init__(self, random: Random, *, every_s: float = OUTRUN_S) -> None:
        self._random = random
        self._ends = TokenBuckets(1, 1 / every_s, keys_max=1)

    def ends_term(self, own: int, epoch: int, now_s: float) -> bool:
        """Called when a node reports ``epoch`` to the master of the epoch ``own``. Returns whether
        the term ends now."""
        return epoch > own and self._ends.take("", now_s) is not None

    def next_epoch(self, epoch: int, wall_clock_ms: int) -> int:
        """The epoch of a term above the reported ``epoch``: one that the next master believes."""
        room = min(EPOCH_STEP_MAX, plausible_epoch_max(wall_clock_ms) - epoch)
        return max(epoch + self._random.randint(1, max(1, room)), wall_clock_ms)
