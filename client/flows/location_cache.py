"""Caches of a client: segments, and the locations of leased objects.

During an object's lease its extents keep their bytes, so another get needs no call. The client
counts a lease from before its request, on its own clock, less a margin: no two clocks are compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstore.calls import CAPABILITY_BYTES, HEADER_MAC_BYTES, Grants, Placements, SegmentInfo
from kvstore.client.leases.read_leases import ReadLease
from kvstore.errors import KVStoreError
from kvstore.limits import AVOID_MAX, Key, Namespace
from kvstore.native import steps
from kvstore.runtime.clock import uptime

AVOID_FIRST_S = 2.0
"""Time to avoid a silent node: longer than the timeout that detects it. Doubles on each repeat."""

AVOID_QUICK_S = 0.25
"""The same after a fast failure: a retry is cheap, and the node may have restarted."""

AVOID_LONGEST_S = 10.0

FAILED_MAX = 1_024


class Replica(NamedTuple):
    segment: SegmentInfo
    offset: int
    """Offset of the header's first byte."""
    capability: bytes = b""
    """For the extent; empty: the master issues none."""

    @property
    def location(self) -> tuple[SegmentInfo, int]:
        """The identity of the replica: each reply of the master has another capability."""
        return self.segment, self.offset


class LeasedLocation(NamedTuple):
    size: int
    """Payload bytes."""
    epoch: int
    counter: int
    replicas: tuple[Replica, ...]
    until: float
    """``uptime()`` at which the lease ends for this client."""
    lease: ReadLease | None = None
    """The lease, of which a read releases one share; None: it ends by time."""


def capability_of_each(column: bytes, extents: int) -> list[bytes]:
    """Split the column into one capability per extent; empty ones, if it is empty."""
    if not column:
        return [b""] * extents
    return [column[at : at + CAPABILITY_BYTES] for at in range(0, len(column), CAPABILITY_BYTES)]


def writable_of_each(grants: Grants) -> Sequence[bytes]:
    """Return for each extent its capability, followed by the header MAC (``WriteRow``)."""
    capabilities = capability_of_each(grants.capabilities, len(grants.segments))
    stamps = grants.header_macs
    if not stamps:
        return capabilities
    starts = range(0, len(stamps), HEADER_MAC_BYTES)
    return [
        capability + stamps[at : at + HEADER_MAC_BYTES]
        for capability, at in zip(capabilities, starts, strict=True)
    ]


class PlacementCache:
    """Leased locations by namespace and key; bounded; any thread (each step is one dict call)."""

    def __init__(self, capacity: int, clock: Callable[[], float] = uptime) -> None:
        self._capacity = capacity
        self._clock = clock
        self._placed: OrderedDict[tuple[Namespace, Key], LeasedLocation] = OrderedDict()

    def get(self, namespace: Namespace, key: Key) -> LeasedLocation | None:
        placed = self._placed.get((namespace, key))
        if placed is not None and placed.until <= self._clock():
            self.forget(namespace, key)
            return None
        if placed is not None and placed.lease is not None:
            return self._placed.pop((namespace, key), None)  # for this read only
        return placed

    def remember(
        self, namespace: Namespace, keys: Iterable[Key], placed: Iterable[LeasedLocation | None]
    ) -> None:
        """Store the location of each key's object; None: a miss."""
        if not self._capacity:
            return
        known = self._placed
        for key, row in zip(keys, placed, strict=True):
            if row is not None:
                # Reinserted, so that the dictionary is sorted by lease end.
                known.pop((namespace, key), None)
                known[namespace, key] = row
        while len(known) > self._capacity:
            try:
                known.popitem(last=False)
            except KeyError:  # another thread has emptied it
                return

    def forget(self, namespace: Namespace, key: Key) -> None:
        self._placed.pop((namespace, key), None)

    def clear(self) -> None:
        self._placed.clear()

    def __len__(self) -> int:
        return len(self._placed)


def is_silent(error: KVStoreError) -> bool:
    """Return whether the node did not reply at all, which took a timeout to detect."""
    return bool(error.fields.get("silent_ms"))


class SegmentFailure(NamedTuple):
    segment: SegmentInfo
    error: KVStoreError
    at: float
    until: float
    pause_s: float

    @property
    def is_silent(self) -> bool:
        return is_silent(self.error)


class SegmentTable:
    """Segments by id, of the last requested epoch; ids differ between epochs. Threads: any."""

    def __init__(self, clock: Callable[[], float] = uptime) -> None:
        self._clock = clock
        self._of: tuple[int, dict[int, SegmentInfo]] = 0, {}
        self._failed: dict[bytes, SegmentFailure] = {}

    def of(self, epoch: int) -> dict[int, SegmentInfo]:
        """Return the known segments of this epoch, by id; callers add new ones."""
        known_epoch, known = self._of
        if known_epoch != epoch:
            known = {}
            self._of = epoch, known
        return known

    def forget(self, segment: SegmentInfo) -> int:
        """Drop the segment, so that it is looked up again; returns its epoch, or 0."""
        epoch, known = self._of
        if known.get(segment.segment_id) is not segment:
            return 0
        known.pop(segment.segment_id, None)
        return epoch

    @property
    def failing(self) -> bool:
        return bool(self._failed)

    def failed(self, segment: SegmentInfo, error: KVStoreError) -> None:
        """Avoid a segment for a while after a failed read or write."""
        now, before = self._clock(), self._failed.get(segment.uuid)
        silent = is_silent(error)
        pause_s = AVOID_FIRST_S if silent else AVOID_QUICK_S
        if before is not None:
            if now < before.until:
                return  # this call began before the segment was avoided
            if silent and before.is_silent and now < before.until + before.pause_s:
                pause_s = min(2 * before.pause_s, AVOID_LONGEST_S)
        while len(self._failed) >= FAILED_MAX:
            self._failed.pop(next(iter(self._failed), b""), None)
        self._failed.pop(segment.uuid, None)
        self._failed[segment.uuid] = SegmentFailure(segment, error, now, now + pause_s, pause_s)

    def avoided(self, segment: SegmentInfo) -> bool:
        failed = self._failed.get(segment.uuid)
        return failed is not None and self._clock() < failed.until

    def failures(self) -> list[SegmentFailure]:
        """Return the avoided segments, latest first; forgets expired ones."""
        now = self._clock()
        failures = []
        for uuid, failed in list(self._failed.items()):
            if now < failed.until:
                failures.append(failed)
            elif now >= failed.until + failed.pause_s:
                self._failed.pop(uuid, None)
        return failures[::-1]

    def avoid(self) -> Sequence[bytes]:
        """Return the silent segments (uuids), which new objects avoid."""
        if not self._failed:
            return ()
        silent = [failed for failed in self.failures() if failed.is_silent]
        return tuple(failed.segment.uuid for failed in silent[:AVOID_MAX])

    def met(self, segment: SegmentInfo) -> None:
        """Forget failures of earlier mounts, when the master has described the segment."""
        failed = self._failed.get(segment.uuid)
        if failed is not None and failed.segment.generation != segment.generation:
            self._failed.pop(segment.uuid, None)

    def reachable(self, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """Drop silent replicas, which would be slow to fail again; sorts other failed ones last."""
        now = self._clock()
        good: list[Replica] = []
        last: list[Replica] = []
        for replica in replicas:
            failed = self._failed.get(replica.segment.uuid)
            if failed is None or now >= failed.until:
                good.append(replica)
            elif not failed.is_silent:
                last.append(replica)
        return good + last

    def rows(
        self,
        known: Mapping[int, SegmentInfo],
        placements: Placements,
        until: float,
    ) -> list[LeasedLocation | None]:
        """Return one location per row, recently failed replicas last; None: there is none."""
        sizes, epochs, counters, replica_counts, segments, offsets, column = placements
        capabilities = capability_of_each(column, len(segments))
        if replica_counts.count(1) == len(replica_counts):  # the usual case: no loop in Python
            infos = list(map(known.get, segments))
            if None not in infos:
                replicas = list(
                    zip(steps.records(Replica, infos, offsets, capabilities), strict=True)
                )
                ends, leases = [until] * len(sizes), [None] * len(sizes)
                return steps.records(
                    LeasedLocation, sizes, epochs, counters, replicas, ends, leases
                )
        rows: list[LeasedLocation | None] = []
        at = 0
        for size, epoch, counter, count in zip(
            sizes, epochs, counters, replica_counts, strict=True
        ):
            several = []
            for index in range(at, at + count):
                segment = known.get(segments[index])
                if segment is not None:
                    several.append(Replica(segment, offsets[index], capabilities[index]))
            at += count
            if len(several) > 1 and self._failed:
                several.sort(key=lambda replica: self.avoided(replica.segment))
            row = LeasedLocation(size, epoch, counter, tuple(several), until)
            rows.append(row if several else None)
        return rows
