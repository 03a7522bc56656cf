"""Pins: which objects must not be evicted, until when, and how much memory they hold.

A pin of an object holds its ancestors, too, because only leaves are evicted. So the memory of those
is counted with it, each once, however many pins hold it:

    count    asked for by a client, until an end, or held by a counted record below, or both

What is counted is in a side table: an object that no pin holds costs nothing.
"""

from __future__ import annotations

from collections import deque

from kvstore.limits import Namespace
from kvstore.master.state.ends import Ends
from kvstore.master.state.records import TABLE_SHARDS, ObjectRecord
from kvstore.memory.header import extent_bytes


class _Pin:
    """What is counted of one record."""

    __slots__ = ("above", "below", "dropped", "record", "size")

    def __init__(self, record: ObjectRecord) -> None:
        self.record = record
        self.size = 0
        """Bytes of memory: header, payload and padding of each replica."""
        self.above: _Pin | None = None
        """Of the parent that the record had when it was pinned."""
        self.below = 0
        """Pins whose ``above`` this is."""
        self.dropped = False
        """Whether it is not counted any more, because its object is gone."""


class Pins:
    """All pins of a master."""

    def __init__(self) -> None:
        self.ends = Ends()
        """Of what clients asked for."""
        self._shards: list[dict[ObjectRecord, _Pin]] = [{} for _ in range(TABLE_SHARDS)]
        self._held: dict[Namespace, tuple[int, int]] = {}
        """Objects and bytes."""
        self._ending: deque[_Pin] = deque()
        """Pins whose end came, or has come for all below them; they are still counted."""
        self.objects = 0
        """Counted ones, of all namespaces."""
        self.size = 0
        """Bytes of memory that those have."""

    def held(self, namespace: Namespace) -> tuple[int, int]:
        """Objects of this namespace that pins hold, and their bytes of memory."""
        return self._held.get(namespace, (0, 0))

    def holds(self, record: ObjectRecord) -> bool:
        """Whether it is counted."""
        return bool(self.objects) and record in self._shards[hash(record) % TABLE_SHARDS]

    def pin(self, record: ObjectRecord, end_ms: int) -> None:
        """``record`` is complete. Of two ends the later one holds."""
        if not self.holds(record):
            self._count(record)
        self.ends.set(record, max(end_ms, self.ends.of(record)))

    def _count(self, record: ObjectRecord) -> None:
        """It, and its ancestors that are not counted yet."""
        pin = self._new(record)
        above = record.parent
        while above is not None and above.complete:
            known = self._shards[hash(above) % TABLE_SHARDS].get(above)
            pin.above = self._new(above) if known is None else known
            pin.above.below += 1
            if known is not None:
                break
            pin, above = pin.above, above.parent

    def _new(self, record: ObjectRecord) -> _Pin:
        pin = self._shards[hash(record) % TABLE_SHARDS][record] = _Pin(record)
        self._add(record.namespace, 1, 0)
        self._measure(pin)
        return pin

    def _measure(self, pin: _Pin) -> None:
        size = bytes_held(pin.record)
        self._add(pin.record.namespace, 0, size - pin.size)
        pin.size = size

    def _add(self, namespace: Namespace, objects: int, size: int) -> None:
        self.objects += objects
        self.size += size
        before = self.held(namespace)
        now = before[0] + objects, before[1] + size
        if now[0]:
            self._held[namespace] = now
        else:
            self._held.pop(namespace, None)

    def unpin(self, record: ObjectRecord) -> bool:
        """Ends the pin that was asked for; ``settle`` takes the count back. Returns whether there
        was one."""
        if not self.ends.of(record):
            return False
        self.ends.drop(record)
        self._ending.append(self._shards[hash(record) % TABLE_SHARDS][record])
        return True

    def end_next(self, now_ms: int) -> ObjectRecord | None:
        """The record of a pin whose end has come; None: there is none."""
        record = self.ends.pop_ended(now_ms)
        if record is not None:
            self._ending.append(self._shards[hash(record) % TABLE_SHARDS][record])
        return record

    @property
    def unsettled(self) -> bool:
        """Whether ``settle`` has something to do."""
        return bool(self._ending)

    def settle(self, steps: int) -> bool:
        """Takes back the count of what no pin holds any more, of ``steps`` records at most. Returns
        whether more are left."""
        while self._ending and steps > 0:
            steps -= 1
            pin = self._ending.popleft()
            if not (pin.dropped or pin.below or self.ends.of(pin.record)):
                self.drop(pin.record)
        return bool(self._ending)

    def drop(self, record: ObjectRecord) -> None:
        """Called when an object is gone, or held by no pin any more."""
        if not self.holds(record):
            return
        pin = self._shards[hash(record) % TABLE_SHARDS].pop(record)
        self.ends.drop(record)
        pin.dropped = True
        self._add(record.namespace, -1, -pin.size)
        above, pin.above = pin.above, None
        if above is not None:
            above.below -= 1
            if not above.below:
                self._ending.append(above)

    def replaced(self, record: ObjectRecord) -> None:
        """Called when it has other bytes: a pin stays on its object through an overwrite."""
        if self.holds(record):
            self._measure(self._shards[hash(record) % TABLE_SHARDS][record])

    def check_invariants(self) -> None:
        self.ends.check_invariants()
        pins = {record: pin for shard in self._shards for record, pin in shard.items()}
        below: dict[int, int] = {}
        for pin in pins.values():
            if pin.above is not None:
                below[id(pin.above)] = below.get(id(pin.above), 0) + 1
        ending = set(map(id, self._ending))
        held: dict[Namespace, tuple[int, int]] = {}
        for record, pin in pins.items():
            assert pin.record is record
            assert not pin.dropped
            assert pin.below == below.get(id(pin), 0)
            assert pin.below or self.ends.of(record) or id(pin) in ending, "held by no pin"
            objects, size = held.get(record.namespace, (0, 0))
            held[record.namespace] = objects + 1, size + pin.size
        assert self._held == held
        assert (self.objects, self.size) == (len(pins), sum(pin.size for pin in pins.values()))


def bytes_held(record: ObjectRecord) -> int:
    """Bytes of memory on segments that are alive."""
    return extent_bytes(record.size) * sum(segment.alive for segment, _ in record.extents())
