"""Pins: objects that must not be evicted, their ends, and the memory they hold.

A pin also holds the ancestors of its object, because only leaves are evicted; their memory counts
as pinned. An object counts once, however many pins hold it: a client's pin, counted descendants, or
both.

The path above a pin stays known even if one of its objects is missing: its ancestors are still not
evicted. A missing object does not count until it is put again. Objects without pins cost nothing.
"""

from __future__ import annotations

from collections import deque

from kvstore.limits import Namespace
from kvstore.master.state.background_jobs import EXPIRE, BackgroundJobs
from kvstore.master.state.expiry_index import ExpiryIndex
from kvstore.master.state.records import TABLE_SHARDS, ObjectRecord
from kvstore.master.state.tenants import UnlimitedTenancy
from kvstore.memory.header import extent_bytes


class _PinnedRecord:
    __slots__ = ("above", "below", "dropped", "objects", "record", "size")

    def __init__(self, record: ObjectRecord) -> None:
        self.record = record
        self.objects = 0
        """1: the object counts; 0: it is missing."""
        self.size = 0
        """Bytes of memory: header, payload and padding of each replica."""
        self.above: _PinnedRecord | None = None
        """Pin of the parent that the record had when it was pinned."""
        self.below = 0
        """Number of pins whose ``above`` this is."""
        self.dropped = False
        """Whether this was removed from the table."""


class PinTable:
    def __init__(self, jobs: BackgroundJobs) -> None:
        self._jobs = jobs
        self.ends = ExpiryIndex()
        """Ends of the pins requested by clients."""
        self._shards: list[dict[ObjectRecord, _PinnedRecord]] = [{} for _ in range(TABLE_SHARDS)]
        self.tenants = UnlimitedTenancy()
        self._held: dict[Namespace, tuple[int, int]] = {}
        """Counted objects and bytes, by namespace."""
        self._ending: deque[_PinnedRecord] = deque()
        """Pins that have ended, or whose last pin below has; they may still be counted."""
        self.objects = 0
        self.size = 0
        """Bytes of memory of the counted objects."""
        self._count_all = 0
        """Number of records in the table, with those of missing objects."""
        self._shards_to_measure: list[int] = []
        """Shards whose records may have lost memory with a node."""
        self._to_measure: list[_PinnedRecord] = []

    def pinned_in(self, namespace: Namespace) -> tuple[int, int]:
        """Return the number of pinned objects in the namespace, and their bytes of memory."""
        return self._held.get(namespace, (0, 0))

    def all_pinned(self) -> dict[Namespace, tuple[int, int]]:
        return self._held

    def holds(self, record: ObjectRecord) -> bool:
        """Return whether the record is counted, or would be if it were not missing."""
        return bool(self._count_all) and record in self._shards[hash(record) % TABLE_SHARDS]

    def pin(self, record: ObjectRecord, end_ms: int) -> None:
        """Pin a complete record; the later of two ends holds."""
        if not self.holds(record):
            self._count(record)
        self.ends.set(record, max(end_ms, self.ends.expiry_of(record)))

    def _count(self, record: ObjectRecord) -> None:
        pin = self._new(record)
        above = record.parent
        while above is not None:
            known = self._shards[hash(above) % TABLE_SHARDS].get(above)
            pin.above = self._new(above) if known is None else known
            pin.above.below += 1
            if known is not None:
                break
            pin, above = pin.above, above.parent

    def _new(self, record: ObjectRecord) -> _PinnedRecord:
        pin = self._shards[hash(record) % TABLE_SHARDS][record] = _PinnedRecord(record)
        self._count_all += 1
        self._measure(pin)
        return pin

    def _measure(self, pin: _PinnedRecord) -> None:
        is_stored = pin.record.complete
        self._set(pin, int(is_stored), bytes_held(pin.record) if is_stored else 0)

    def _set(self, pin: _PinnedRecord, objects: int, size: int) -> None:
        self._add(pin.record.namespace, objects - pin.objects, size - pin.size)
        pin.objects, pin.size = objects, size

    def _add(self, namespace: Namespace, objects: int, size: int) -> None:
        self.objects += objects
        self.size += size
        self.tenants.pinned(namespace, size)
        before = self.pinned_in(namespace)
        now = before[0] + objects, before[1] + size
        if now[0]:
            self._held[namespace] = now
        else:
            self._held.pop(namespace, None)

    def unpin(self, record: ObjectRecord) -> bool:
        """End a client's pin, for ``release_ended``. Return whether there was one."""
        if not self.ends.expiry_of(record):
            return False
        self.ends.drop(record)
        self._release(self._shards[hash(record) % TABLE_SHARDS][record])
        return True

    def _release(self, pin: _PinnedRecord) -> None:
        self._ending.append(pin)
        self._jobs.due |= EXPIRE

    def end_next(self, now_ms: int) -> ObjectRecord | None:
        """End the next expired pin and return its record; None: there is none."""
        record = self.ends.pop_expired(now_ms)
        if record is not None:
            self._release(self._shards[hash(record) % TABLE_SHARDS][record])
        return record

    @property
    def unsettled(self) -> bool:
        """Whether ``release_ended`` has work."""
        return bool(self._ending or self._to_measure or self._shards_to_measure)

    def release_ended(self, steps: int) -> None:
        """Stop counting up to ``steps`` records that are no longer pinned."""
        while self._ending and steps > 0:
            steps -= 1
            pin = self._ending.popleft()
            if not (pin.dropped or pin.below or self.ends.expiry_of(pin.record)):
                self.drop(pin.record)
        while steps > 0 and (self._to_measure or self._shards_to_measure):
            steps -= 1
            if self._to_measure:
                self._measure_again(self._to_measure.pop())
            else:
                self._to_measure += self._shards[self._shards_to_measure.pop()].values()

    def segment_died(self) -> None:
        """Let ``release_ended`` measure all counted records again, in slices."""
        if self._count_all:
            self._shards_to_measure = list(range(TABLE_SHARDS))
            self._jobs.due |= EXPIRE

    def _measure_again(self, pin: _PinnedRecord) -> None:
        if pin.dropped:
            return
        if pin.record.complete:
            self._measure(pin)
        else:
            self.drop(pin.record)

    def drop(self, record: ObjectRecord) -> None:
        """Drop a removed or unpinned object; its entry stays while there are pins below."""
        if not self.holds(record):
            return
        shard = self._shards[hash(record) % TABLE_SHARDS]
        pin = shard[record]
        self.ends.drop(record)
        self._set(pin, 0, 0)
        if pin.below:
            return
        del shard[record]
        self._count_all -= 1
        pin.dropped = True
        above, pin.above = pin.above, None
        if above is not None:
            above.below -= 1
            if not above.below:
                self._release(above)

    def stored(self, record: ObjectRecord) -> None:
        """Measure a record with new bytes or replicas: a pin survives an overwrite."""
        if self.holds(record):
            self._measure(self._shards[hash(record) % TABLE_SHARDS][record])

    def linked(self, record: ObjectRecord) -> None:
        """Handle a missing object that is linked again: if its parent has changed, the previous
        ancestors are released and the new ones are not counted."""
        if not self.holds(record):
            return
        self.drop(record)  # the pin of a lost object does not pin the new one
        pin = self._shards[hash(record) % TABLE_SHARDS].get(record)
        if pin is None or pin.above is None or pin.above.record is record.parent:
            return
        above, pin.above = pin.above, None
        above.below -= 1
        if not above.below:
            self._release(above)


def bytes_held(record: ObjectRecord) -> int:
    """Return the bytes of memory on live segments."""
    return extent_bytes(record.size) * sum(segment.alive for segment, _ in record.extents())
