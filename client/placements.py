"""What a client remembers: segments it has met, and where leased objects are.

While an object's lease lives its extents keep their bytes, so the next get of it asks nobody. A
lease is counted from the moment before the question was asked, on this process's monotonic clock,
less a margin: no two clocks are ever compared, and a promise never looks longer than it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import NamedTuple

from kvstore.calls import Placements, SegmentInfo
from kvstore.limits import Key, Namespace

AVOID_SECONDS = 1.0
"""A node that just failed is tried last for so long; by then the master knows, too."""


class Replica(NamedTuple):
    segment: SegmentInfo
    offset: int
    """Of the extent: the header's first byte."""


class Placed(NamedTuple):
    """Where a complete object is, and how long that is promised."""

    size: int
    """Payload bytes."""
    epoch: int
    counter: int
    replicas: tuple[Replica, ...]
    until: float
    """``time.monotonic()`` at which the promise ends for us."""


_REPLICA: Callable[[Iterable[object]], Replica] = partial(tuple.__new__, Replica)
_PLACED: Callable[[Iterable[object]], Placed] = partial(tuple.__new__, Placed)
"""Of a tuple of their fields; half of what a call with the fields costs."""


class PlacementCache:
    """Leased placements by namespace and key; bounded; any thread (each step is one dict call)."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._placed: dict[tuple[Namespace, Key], Placed] = {}

    def get(self, namespace: Namespace, key: Key) -> Placed | None:
        placed = self._placed.get((namespace, key))
        if placed is not None and placed.until <= self._clock():
            self.forget(namespace, key)
            return None
        return placed

    def remember(self, namespace: Namespace, key: Key, placed: Placed) -> None:
        if not self._capacity:
            return
        known = self._placed
        # Out and in again, so that the order of the dict is the order of lease ends.
        known.pop((namespace, key), None)
        known[namespace, key] = placed
        while len(known) > self._capacity:
            try:
                known.pop(next(iter(known)), None)
            except (StopIteration, RuntimeError):  # another thread is at it
                return

    def forget(self, namespace: Namespace, key: Key) -> None:
        self._placed.pop((namespace, key), None)

    def clear(self) -> None:
        self._placed.clear()

    def __len__(self) -> int:
        return len(self._placed)


class SegmentTable:
    """Segments by epoch and id: a number of one epoch may name another segment in the next.

    One epoch is remembered, the last that was asked for. Any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: tuple[int, dict[int, SegmentInfo]] = 0, {}
        self._failed: dict[bytes, float] = {}  # uuid -> until when to avoid it

    def of(self, epoch: int) -> dict[int, SegmentInfo]:
        """What is known of this epoch's segments, by id; add to it what is learnt. It stays of that
        epoch, also when another thread meets the next one."""
        known_epoch, known = self._of
        if known_epoch != epoch:
            known = {}
            self._of = epoch, known
        return known

    def forget(self, segment: SegmentInfo) -> bool:
        """Ask about it anew; whether it was of the epoch that is remembered."""
        _, known = self._of
        if known.get(segment.segment_id) is not segment:
            return False
        known.pop(segment.segment_id, None)
        return True

    def failed(self, segment: SegmentInfo) -> None:
        """Reads or writes there failed: avoid it for a while."""
        self._failed[segment.uuid] = self._clock() + AVOID_SECONDS

    def avoided(self, segment: SegmentInfo) -> bool:
        until = self._failed.get(segment.uuid)
        if until is None:
            return False
        if until <= self._clock():
            self._failed.pop(segment.uuid, None)
            return False
        return True

    def rows(
        self, known: Mapping[int, SegmentInfo], placements: Placements, until: float
    ) -> Iterator[Placed | None]:
        """One entry per row; None for a miss, or when no replica's segment is mounted any more.

        Replicas that failed a moment ago come last.

        Args:
            known: segments of the epoch that ``placements`` are of.
        """
        sizes, epochs, counters, replica_counts, segments, offsets = placements
        if replica_counts.count(1) == len(replica_counts):  # the rule: made without a step each
            infos = list(map(known.get, segments))
            if None not in infos:
                replicas = zip(map(_REPLICA, zip(infos, offsets, strict=True)), strict=True)
                columns = zip(sizes, epochs, counters, replicas, repeat(until), strict=False)
                yield from map(_PLACED, columns)
                return
        at = 0
        for size, epoch, counter, count in zip(
            sizes, epochs, counters, replica_counts, strict=True
        ):
            if count == 1:
                segment = known.get(segments[at])
                one = segment and (Replica(segment, offsets[at]),)
                at += 1
                yield Placed(size, epoch, counter, one, until) if one else None
                continue
            several = []
            for index in range(at, at + count):
                segment = known.get(segments[index])
                if segment is not None:
                    several.append(Replica(segment, offsets[index]))
            at += count
            if not several:
                yield None
                continue
            if len(several) > 1 and self._failed:
                several.sort(key=lambda replica: self.avoided(replica.segment))
            yield Placed(size, epoch, counter, tuple(several), until)
