"""Density: evicts the object that promises the fewest hits per second of memory.

Objects are classed by how often they were used, evicted times included. Per class the policy learns
the distribution of the time until the next use. The worth of an object is the best, over how long
to go on keeping it, of P(used meanwhile) / E[time kept]: an index after Gittins (J. R. Stat. Soc. B
41, 1979), as hit density in LHD (Beckmann et al., NSDI 2018), with a stopping time.

Each class is an LRU list; the victim is the least worth of the lists' ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from kvstore.master.state.eviction import LruPolicy, NewPolicy
from kvstore.master.state.records import HITS_MAX, ObjectRecord

CLASSES: Final = 4
"""By uses: 1, 2, 3, 4 and more."""

BINS: Final = 34
"""Of the time between two uses: below 1 s, then two per octave, the last from 18 h."""

SETTLE_AFTER: Final = 256
"""Observations after which the worths are computed again (0.1 ms)."""

MEMORY: Final = 1 << 16
"""Observations after which the older ones count half."""

GHOSTS_MAX: Final = 1 << 16
"""Evicted objects whose uses are remembered."""

_BASE_BITS: Final = 200
_WEIGHT_SCALE: Final = 1e12

_KNOWN: Final = HITS_MAX + 1
"""The bit of ``hits`` for objects whose first use the learner has seen."""


def _bin_of(gap_ms: int) -> int:
    if gap_ms < 1_000:
        return 0
    return min(BINS - 1, (gap_ms * gap_ms // 1_000_000).bit_length())


def _edge_ms(index: int) -> float:
    return 0.0 if index == 0 else 1_000.0 * 2.0 ** ((index - 1) / 2)


class DensityLearner:
    """What one master has learned; shared by the policies of its segments and tenants."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._again = [[0.0] * BINS for _ in range(CLASSES)]
        self._uses = [0.0] * CLASSES
        self.worths = [[0.0] * BINS for _ in range(CLASSES)]
        """By class and bin of the age: hits per ms from now on."""
        self._unsettled = 0
        self._ghosts: dict[int, tuple[int, int]] = {}

    def on_first_use(self, record: ObjectRecord) -> None:
        """Called when an object was put: it may have been evicted before."""
        self.now_ms = max(self.now_ms, record.last_used_ms)
        ghost = self._ghosts.pop(hash((record.namespace, record.key)), None)
        if ghost is not None:
            hits, used_ms = ghost
            record.hits = min(HITS_MAX, hits + 1)
            self._again[hits][_bin_of(record.last_used_ms - used_ms)] += 1.0
        self._count(record.hits & HITS_MAX)

    def on_use(self, hits: int, gap_ms: int, now_ms: int) -> None:
        """Called when an object that had ``hits`` is used again."""
        self.now_ms = max(self.now_ms, now_ms)
        self._again[hits][_bin_of(gap_ms)] += 1.0
        self._count(min(HITS_MAX, hits + 1))

    def on_evict(self, record: ObjectRecord) -> None:
        self._ghosts[hash((record.namespace, record.key))] = (
            record.hits & HITS_MAX,
            record.last_used_ms,
        )
        if len(self._ghosts) > GHOSTS_MAX:
            del self._ghosts[next(iter(self._ghosts))]

    def _count(self, hits: int) -> None:
        self._uses[hits] += 1.0
        self._unsettled += 1
        if self._unsettled >= SETTLE_AFTER:
            self._settle()

    def _settle(self) -> None:
        self._unsettled = 0
        for number, again in enumerate(self._again):
            seen, spent = [0.0], [0.0]
            for index, count in enumerate(again):
                seen.append(min(0.999, seen[-1] + count / (self._uses[number] + 1.0)))
                length = _edge_ms(index + 1) - _edge_ms(index)
                spent.append(spent[-1] + (1.0 - (seen[-1] + seen[-2]) / 2.0) * length)
            self.worths[number] = [
                max(
                    [
                        (seen[end] - seen[start]) / (spent[end] - spent[start])
                        for end in range(start + 1, BINS + 1)
                    ]
                )
                for start in range(BINS)
            ]
        if sum(self._uses) > MEMORY:
            self._uses = [count / 2.0 for count in self._uses]
            self._again = [[count / 2.0 for count in row] for row in self._again]


class DensityPolicy:
    """See the module."""

    learns_uses = True

    def __init__(self, learner: DensityLearner) -> None:
        self._learner = learner
        self._lists = [LruPolicy((number + 1) << _BASE_BITS) for number in range(CLASSES)]

    def used(self, record: ObjectRecord, now_ms: int) -> None:
        hits = record.hits & HITS_MAX
        self._learner.on_use(hits, now_ms - record.last_used_ms, now_ms)
        record.hits += hits < HITS_MAX

    def insert(self, record: ObjectRecord) -> None:
        if not record.hits & _KNOWN:
            self._learner.on_first_use(record)
            record.hits |= _KNOWN
        self._lists[record.hits & HITS_MAX].insert(record)

    def remove(self, record: ObjectRecord, *, evicted: bool) -> None:
        self._lists[(record.position >> _BASE_BITS) - 1].remove(record, evicted=evicted)
        if evicted:
            self._learner.on_evict(record)

    def first(self) -> ObjectRecord | None:
        found: ObjectRecord | None = None
        lowest = 0.0
        for queue in self._lists:
            for record in (queue.first(), queue.last()):
                if record is not None:
                    worth = self._worth(record)
                    if (
                        found is None
                        or worth < lowest
                        or (worth == lowest and record.last_used_ms < found.last_used_ms)
                    ):
                        found, lowest = record, worth
        return found

    def hit(self, record: ObjectRecord) -> bool:
        number = (record.position >> _BASE_BITS) - 1
        queue = self._lists[number]
        if number == record.hits & HITS_MAX and queue.weight(record) > record.last_used_ms:
            return False
        queue.remove(record, evicted=False)
        self.insert(record)
        return True

    def weight(self, record: ObjectRecord) -> int:
        return int(self._worth(record) * _WEIGHT_SCALE)

    def after(self, position: int) -> Iterator[ObjectRecord]:
        return chain.from_iterable([queue.after(position) for queue in self._lists])

    def _worth(self, record: ObjectRecord) -> float:
        age_ms = self._learner.now_ms - record.last_used_ms
        return self._learner.worths[record.hits & HITS_MAX][_bin_of(age_ms)]


def density() -> NewPolicy:
    learner = DensityLearner()
    return lambda: DensityPolicy(learner)
