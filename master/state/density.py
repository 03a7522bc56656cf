"""Density: evicts the object that promises the fewest hits per second of memory.

Objects are classed by how often they were used, evicted times included, and by what their clients
say of them. Per class the policy learns the distribution of the time until the next use. The worth
of an object is the best, over how long to go on keeping it, of P(used meanwhile) / E[time kept]: an
index after Gittins (J. R. Stat. Soc. B 41, 1979), as hit density in LHD (Beckmann et al., NSDI
2018), with a stopping time. So a hint is worth what hints of its tenant have been worth.

Each class is an LRU list; the victim is the least worth of the lists' ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from kvstore.master.state.eviction import LruPolicy, NewPolicy
from kvstore.master.state.records import HITS_MAX, ObjectRecord

USE_CLASSES: Final = HITS_MAX + 1
"""By uses: 1, 2, 3, 4 and more."""

CLASSES: Final = 3 * USE_CLASSES
"""Those without a hint, then the retained ones, then those that are over or demoted."""

EXPECTED_USES: Final = 16.0
"""Uses of retained objects that count as seen at the start, nine of ten followed by another one
about a minute later. Objects that are over count as never used again."""

EXPECTED_BIN: Final = 12

BINS: Final = 34
"""Of the time between two uses: below 1 s, then two per octave, the last from 18 h."""

UPDATE_AFTER: Final = 1_024
"""Observations after which the worths are computed again (0.2 ms)."""

MEMORY: Final = 1 << 16
"""Observations after which the older ones count half."""

GHOSTS_MAX: Final = 1 << 16
"""Evicted objects whose uses are remembered."""

PREFERRED: Final = 0.8
"""Another object is evicted instead of the least recently used one only if it promises less than
this part of its hits: estimates err, above all where the popular objects change."""

_BASE_BITS: Final = 200
_WORTH_SCALE: Final = 1e12
_TIME_BITS: Final = 50

_KNOWN: Final = HITS_MAX + 1
"""The bit of ``hits`` for objects whose first use the learner has seen. Above it is the hint with
which their last use is counted."""

_HINT_SHIFT: Final = _KNOWN.bit_length()


def _bin_of(gap_ms: int) -> int:
    if gap_ms < 1_000:
        return 0
    return min(BINS - 1, (gap_ms * gap_ms // 1_000_000).bit_length())


def _edge_ms(index: int) -> float:
    return 0.0 if index == 0 else 1_000.0 * 2.0 ** ((index - 1) / 2)


def _hint_of(record: ObjectRecord) -> int:
    """0: none; 1: retained; 2: over or demoted."""
    hint = record.hint
    return 0 if hint == 0 else 1 if hint > 0 else 2


def _class_of(record: ObjectRecord) -> int:
    return (record.hits & HITS_MAX) + USE_CLASSES * (record.hits >> _HINT_SHIFT)


class DensityLearner:
    """What one master has learned of one tenant's objects; shared by the policies of its
    segments."""

    def __init__(self, ghosts: dict[int, tuple[int, int]]) -> None:
        """``ghosts``: class and last use of evicted objects, the oldest first; those of all
        tenants."""
        self.now_ms = 0
        self._again = [[0.0] * BINS for _ in range(CLASSES)]
        self._uses = [0.0] * CLASSES
        for number in range(USE_CLASSES, 2 * USE_CLASSES):
            self._uses[number] = EXPECTED_USES
            self._again[number][EXPECTED_BIN] = 0.9 * EXPECTED_USES
        self.worths = [[0.0] * BINS for _ in range(CLASSES)]
        """By class and bin of the age: hits per ms from now on."""
        self._pending = 0
        self._ghosts = ghosts
        self._update_worths()

    def observe(self, record: ObjectRecord) -> None:
        """Count the first use of an object, which may have been evicted before, and its hint."""
        if not record.hits & _KNOWN:
            self.now_ms = max(self.now_ms, record.last_used_ms)
            if self._ghosts:
                ghost = self._ghosts.pop(hash((record.namespace, record.key)), None)
                if ghost is not None:
                    number, used_ms = ghost
                    self._again[number][_bin_of(record.last_used_ms - used_ms)] += 1.0
                    record.hits = min(HITS_MAX, number % USE_CLASSES + 1)
            record.hits = _KNOWN | record.hits & HITS_MAX
            self._count(record.hits & HITS_MAX)
        hint, counted = _hint_of(record), _class_of(record)
        if hint != record.hits >> _HINT_SHIFT:
            record.hits = record.hits & HITS_MAX | _KNOWN | hint << _HINT_SHIFT
            self._uses[counted] -= 1.0
            self._uses[_class_of(record)] += 1.0

    def on_use(self, record: ObjectRecord, now_ms: int) -> None:
        """Called when an object is used again."""
        self.observe(record)
        self.now_ms = max(self.now_ms, now_ms)
        self._again[_class_of(record)][_bin_of(now_ms - record.last_used_ms)] += 1.0
        hits = min(HITS_MAX, (record.hits & HITS_MAX) + 1)
        record.hits = hits | _KNOWN
        self._count(hits)

    def on_evict(self, record: ObjectRecord) -> None:
        key = hash((record.namespace, record.key))
        self._ghosts[key] = _class_of(record), record.last_used_ms
        if len(self._ghosts) > GHOSTS_MAX:
            del self._ghosts[next(iter(self._ghosts))]

    def _count(self, hits: int) -> None:
        self._uses[hits] += 1.0
        self._pending += 1
        if self._pending >= UPDATE_AFTER:
            self._update_worths()

    def _update_worths(self) -> None:
        self._pending = 0
        for number, again in enumerate(self._again):
            if not self._uses[number]:
                continue
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
    learns_hints = True

    def __init__(self, learner: DensityLearner) -> None:
        self._learner = learner
        self._lists = [LruPolicy(base=(number + 1) << _BASE_BITS) for number in range(CLASSES)]

    def used(self, record: ObjectRecord, now_ms: int) -> None:
        self._learner.on_use(record, now_ms)

    def insert(self, record: ObjectRecord) -> None:
        self._learner.observe(record)
        self._lists[_class_of(record)].insert(record)

    def remove(self, record: ObjectRecord, *, evicted: bool) -> None:
        self._lists[(record.position >> _BASE_BITS) - 1].remove(record, evicted=evicted)
        if evicted:
            self._learner.on_evict(record)

    def first(self) -> ObjectRecord | None:
        found: ObjectRecord | None = None
        ends: list[ObjectRecord | None] = []
        for queue in self._lists:
            record = queue.first()
            if record is None:
                continue
            if queue.rank(record) <= record.last_used_ms:
                return record  # used since: ``hit`` moves it, and shows what is behind it
            if found is None or record.last_used_ms < found.last_used_ms:
                found = record
            ends += (record, queue.last())
        if found is not None:
            lowest = self._worth(found) * PREFERRED
            for record in ends:
                if record is not None and (worth := self._worth(record)) < lowest:
                    found, lowest = record, worth
        return found

    def hit(self, record: ObjectRecord) -> bool:
        number = (record.position >> _BASE_BITS) - 1
        queue = self._lists[number]
        if number == _class_of(record) and queue.rank(record) > record.last_used_ms:
            return False
        queue.remove(record, evicted=False)
        self.insert(record)
        return True

    def rank(self, record: ObjectRecord) -> int:
        worth = int(self._worth(record) * _WORTH_SCALE)
        return worth << _TIME_BITS | record.last_used_ms

    def oldest_ms(self) -> int:
        return min([queue.oldest_ms() for queue in self._lists])

    def after(self, position: int) -> Iterator[ObjectRecord]:
        return chain.from_iterable([queue.after(position) for queue in self._lists])

    def _worth(self, record: ObjectRecord) -> float:
        age_ms = self._learner.now_ms - record.last_used_ms
        return self._learner.worths[_class_of(record)][_bin_of(age_ms)]


def density() -> NewPolicy:
    learners: dict[int, DensityLearner] = {}
    ghosts: dict[int, tuple[int, int]] = {}

    def new_policy(tenant: int) -> DensityPolicy:
        if tenant not in learners:
            learners[tenant] = DensityLearner(ghosts)
        return DensityPolicy(learners[tenant])

    return new_policy
