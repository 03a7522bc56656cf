"""The copies of objects on the disks of nodes, and the order in which they are evicted.

A copy is not a replica of an ``ObjectRecord``: clients cannot read it, and it stays when the record
is evicted from memory. So the records describe memory alone, and a copy costs less than a record.

Copies are evicted in the order in which their objects left memory, where leaves leave before their
ancestors, with a second chance for those that were used since. The copy of an object in memory is
not evicted. Each tenant has a queue on each disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, final

from kvstore.limits import Key, Namespace
from kvstore.master.state.object_events import Event, removed
from kvstore.master.state.records import (
    HITS_MAX,
    MountedSegment,
    Namespaces,
    NamespaceTable,
    ObjectRecord,
    StaleExtents,
)

DISK_RESERVE_SHIFT: Final = 6
DISK_RESERVE_BYTES_MAX: Final = 4 << 30
"""A full disk keeps a 64th of its space free, at most so many bytes, for the next writes."""

RATE_MS: Final = 20
"""The shortest time over which the rate of a disk is measured."""

MS_PER_DAY: Final = 86_400_000

BURST_S: Final = 0.05
"""What the rate of a disk allows is written in bursts of this many seconds."""


@final
class DiskCopy:
    """The copy of one version of an object."""

    __slots__ = (
        "brought_by",
        "counter",
        "disk",
        "epoch",
        "hits",
        "key",
        "namespace",
        "offset",
        "parent",
        "queued_ms",
        "size",
        "used_ms",
        "voids",
    )

    def __init__(
        self,
        disk: Disk,
        offset: int,
        namespace: Namespace,
        key: Key,
        parent: Key | None,
        size: int,
        epoch: int,
        counter: int,
        used_ms: int,
    ) -> None:
        self.disk = disk
        self.offset = offset
        self.namespace = namespace
        self.key = key
        self.parent = parent
        self.size = size
        self.epoch = epoch
        self.counter = counter
        self.used_ms = used_ms
        """The last use that found no copy in memory, or when the object left memory."""
        self.queued_ms = used_ms
        """``used_ms`` when the copy got its place in the queue."""
        self.voids = 0
        """Earlier places in the queue, which do not count."""
        self.hits = 0
        """``ObjectRecord.hits`` when the object left memory."""
        self.brought_by = 0
        """Token of the grant that brings it to memory; 0: none."""

    @property
    def in_memory(self) -> bool:
        """Whether its object is in memory, too."""
        return self in self.disk.in_memory

    def stored_event(self) -> Event:
        return self.namespace, self.key, self.parent or b"", self.size, 0, True


class WriteBudget:
    """Bytes that may be written to a disk: at a rate, and on average over days."""

    def __init__(
        self, capacity: int, per_s: int, per_day: int, now_ms: int, *, first_fill: bool = False
    ) -> None:
        """``first_fill``: of a new file, whose first fill is free."""
        self._per_s = per_s
        self._per_day = per_day
        self._capacity = max(capacity, 1)
        self._second = float(per_s)
        """Bytes that the rate allows now."""
        self._is_spent = False
        self._days = self._capacity * (2.0 if first_fill else 1.0)
        """Bytes that the average allows now."""
        self._filled_ms = now_ms

    def _fill(self, now_ms: int) -> None:
        passed_ms = max(0, now_ms - self._filled_ms)
        self._filled_ms = now_ms
        self._second = min(float(self._per_s), self._second + self._per_s * passed_ms / 1_000)
        earned = self._per_day * passed_ms / MS_PER_DAY
        self._days = max(self._days, min(float(self._capacity), self._days + earned))

    def may_write(self, now_ms: int) -> bool:
        """Whether the rate allows a write now. Once it is spent, it does not until a burst may be
        written: an order for each object would cost more than the writes."""
        self._fill(now_ms)
        if self._second <= 0:
            self._is_spent = True
        elif self._second >= self._per_s * BURST_S:
            self._is_spent = False
        return not self._per_s or not self._is_spent

    def level(self) -> float:
        """The part of the disk's size that may still be written: 1 at first, and if nothing limits
        the days."""
        return 1.0 if not self._per_day else min(1.0, max(0.0, self._days / self._capacity))

    def spend(self, size: int) -> None:
        self._second -= size
        self._days -= size


class Disk:
    """One mounted disk."""

    def __init__(self, segment: MountedSegment, now_ms: int) -> None:
        limits = segment.offer.disk
        assert limits is not None
        self.segment = segment
        self.queues: dict[int, deque[DiskCopy]] = {}
        """By number of the tenant (0: there are no tenants): the copies of objects that are not in
        memory, the next to evict first. Dropped ones stay until they are met."""
        self.in_memory: dict[DiskCopy, None] = {}
        """Those of objects in memory."""
        self.objects = 0
        self.payload_bytes = 0
        self.budget = WriteBudget(
            segment.capacity, limits.write_bytes_per_s, limits.write_bytes_per_day, now_ms,
            first_fill=segment.offer.fresh,
        )  # fmt: skip
        self.writing_bytes = 0
        self.bringing_bytes = 0
        self.bring_bytes_per_ms = 0.0
        """Smoothed; 0: not measured."""
        self._measured_ms = now_ms
        self._measured_bytes = 0
        """What has arrived in memory since then."""
        self._was_idle = True
        """Whether nothing was on its way at the beginning of this measurement."""
        self.failures: deque[int] = deque(maxlen=3)
        """Times of the last errors."""
        self.is_failed = False
        """Whether it is not used any more until its node offers it again."""
        self.written_bytes = self.brought_bytes = 0
        self.written_objects = self.brought_objects = 0

    def note_ordered(self, now_ms: int) -> None:
        """Begin a measurement: nothing was on its way to memory."""
        self._measured_ms, self._measured_bytes, self._was_idle = now_ms, 0, True

    def note_brought(self, now_ms: int, size: int) -> None:
        """Count an object that has arrived in memory, for the rate."""
        self.brought_objects += 1
        self.brought_bytes += size
        self._measured_bytes += size
        passed_ms = now_ms - self._measured_ms
        rate = self._measured_bytes / max(passed_ms, RATE_MS)
        old = self.bring_bytes_per_ms
        if passed_ms >= RATE_MS:
            self.bring_bytes_per_ms = rate if not old else old + (rate - old) / 4
            self._measured_ms, self._measured_bytes, self._was_idle = now_ms, 0, False
        elif self._was_idle and 0 < old < rate:
            self.bring_bytes_per_ms = rate  # it is at least as fast

    def note_late(self, now_ms: int) -> None:
        """Lower the rate to what arrives now: a query has waited in vain."""
        rate = max(self._measured_bytes, 1) / max(now_ms - self._measured_ms, RATE_MS)
        self.bring_bytes_per_ms = min(rate, self.bring_bytes_per_ms or rate)

    @property
    def readable(self) -> bool:
        """Also while its inventory is loading: what is known is read."""
        return self.segment.alive and not self.is_failed

    @property
    def usable(self) -> bool:
        return self.readable and self.segment.inventory_complete

    @property
    def lacks_reserve(self) -> bool:
        segment = self.segment
        free = segment.allocator.free_bytes + segment.wiping_bytes
        reserve = min(segment.capacity >> DISK_RESERVE_SHIFT, DISK_RESERVE_BYTES_MAX)
        return self.usable and free < reserve


class DiskIndex:
    """All copies on disks that are alive, in the tables of their namespaces."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self.disks: dict[int, Disk] = {}
        """By segment id."""
        self._of_node: dict[str, list[Disk]] = {}
        self._dead: deque[Disk] = deque()
        """Disks whose copies are still in the tables, where they count as absent."""
        self._count = 0
        self.events: list[Event] | None = None
        """That of the forest."""

    def __bool__(self) -> bool:
        return self._count > 0

    def mount(self, segment: MountedSegment, now_ms: int) -> Disk:
        disk = self.disks[segment.segment_id] = Disk(segment, now_ms)
        self._of_node.setdefault(segment.node.name, []).append(disk)
        return disk

    def of_node(self, name: str) -> list[Disk]:
        return self._of_node.get(name, [])

    def unmount(self, segment: MountedSegment) -> None:
        segment.alive = False
        disk = self.disks.pop(segment.segment_id)
        of_node = self._of_node[segment.node.name]
        of_node.remove(disk)
        if not of_node:
            del self._of_node[segment.node.name]
        self._dead.append(disk)

    @property
    def has_dead(self) -> bool:
        return bool(self._dead)

    def drop_dead(self, count: int) -> None:
        """Drop up to ``count`` copies of dead disks."""
        while self._dead and count > 0:
            disk = self._dead[0]
            while count > 0 and (disk.queues or disk.in_memory):
                count -= 1
                if disk.in_memory:
                    self.drop(next(iter(disk.in_memory)))
                    continue
                number, queue = next(iter(disk.queues.items()))
                copy = queue.popleft()
                if not queue:
                    del disk.queues[number]
                if self.holds(copy):
                    self.drop(copy)
            if not disk.queues and not disk.in_memory:
                self._dead.popleft()

    def get(self, namespace: str, key: Key) -> DiskCopy | None:
        """The copy of an object, on a disk that is mounted."""
        table = self._namespaces.tables.get(namespace)
        copy: DiskCopy | None = None if table is None else table.copies.get(key)
        return copy if copy is not None and copy.disk.segment.alive else None

    def get_readable(self, namespace: str, key: Key) -> DiskCopy | None:
        """The copy of an object, on a disk that can be read."""
        copy = self.get(namespace, key)
        return copy if copy is not None and copy.disk.readable else None

    def some_of(self, tables: Iterable[NamespaceTable], count: int) -> list[DiskCopy]:
        """Up to ``count`` copies of these namespaces."""
        found: list[DiskCopy] = []
        for table in tables:
            if table.copies.count and len(found) < count:
                found += islice(table.copies, count - len(found))
        return found

    def holds(self, copy: DiskCopy) -> bool:
        """Whether the copy was not dropped."""
        table = self._namespaces.tables.get(copy.namespace)
        return table is not None and table.copies.get(copy.key) is copy

    def add(self, copy: DiskCopy, table: NamespaceTable) -> None:
        """Add the copy of an object in memory that has no other one, to the table of its
        namespace."""
        other: DiskCopy | None = table.copies.get(copy.key)
        if other is not None:
            assert not other.disk.segment.alive, "a second copy"
            self.drop(other)
        table.copies.add(copy.key, copy)
        self._count_copy(table, copy, 1)
        copy.disk.in_memory[copy] = None

    def drop(self, copy: DiskCopy) -> None:
        """Forget a copy, whose extent stays allocated."""
        table = self._namespaces.tables[copy.namespace]
        table.copies.drop(copy.key)
        self._count_copy(table, copy, -1)
        disk, events = copy.disk, self.events
        if copy.in_memory:
            del disk.in_memory[copy]
        elif events is not None:
            events.append(removed(copy.namespace, copy.key))
        queue = disk.queues.get(_number_of(table))
        if queue is not None and len(queue) > 2 * disk.objects + 1_024:
            del disk.queues[_number_of(table)]
            if valid := [each for each in queue if not self._is_void(each)]:
                disk.queues[_number_of(table)] = deque(valid)
        self._namespaces.drop_if_empty(table)

    def _count_copy(self, table: NamespaceTable, copy: DiskCopy, by: int) -> None:
        disk = copy.disk
        self._count += by
        disk.objects += by
        disk.payload_bytes += by * copy.size
        length = by * disk.segment.extent_bytes(copy.size)
        table.disk_bytes += length
        if table.tenant is not None:
            table.tenant.disk_bytes += length

    def found_alone(self, copy: DiskCopy, used_ms: int) -> None:
        """Called when an inventory has an added copy whose object is not in memory. It is the next
        to evict: nodes report the newest objects first."""
        self._leave(copy, used_ms, first=True)
        if self.events is not None:
            self.events.append(copy.stored_event())

    def object_left(self, record: ObjectRecord) -> bool:
        """Called when an object leaves memory, before its record loses its bytes. Return whether
        there is a copy."""
        copy = self.get(record.namespace, record.key)
        if copy is None:
            return False
        if copy.in_memory:
            copy.hits = record.hits & HITS_MAX
            self._leave(copy, record.last_used_ms)
        return True

    def object_entered(self, namespace: str, key: Key) -> None:
        """Called when an object is stored in memory."""
        copy: DiskCopy | None = self._namespaces.tables[namespace].copies.get(key)
        if copy is not None and not copy.in_memory:
            copy.disk.in_memory[copy] = None
            copy.voids += 1

    def _leave(self, copy: DiskCopy, used_ms: int, *, first: bool = False) -> None:
        copy.used_ms = copy.queued_ms = used_ms
        del copy.disk.in_memory[copy]
        self._queue(copy, first=first)

    def _queue(self, copy: DiskCopy, *, first: bool = False) -> None:
        number = _number_of(self._namespaces.tables[copy.namespace])
        queue = copy.disk.queues.setdefault(number, deque())
        if first:
            queue.appendleft(copy)
        else:
            queue.append(copy)

    def next_victim(self, disk: Disk, steps: int, tenant: int = -1) -> DiskCopy | None:
        """Take the next copy to evict from the queues of a disk. None: none, or not within so many
        steps. The caller drops it.

        Args:
            tenant: number of the tenant whose copy to evict. -1: the one whose next copy left
                memory first.
        """
        queues = disk.queues
        for _ in range(steps):
            number = tenant
            if tenant < 0 and queues:
                number = min([(queue[0].queued_ms, of) for of, queue in queues.items()])[1]
            queue = queues.get(number)
            if queue is None:
                return None
            copy = queue.popleft()
            if not queue:
                del queues[number]
            if self._is_void(copy):
                continue
            is_misplaced = number != _number_of(self._namespaces.tables[copy.namespace])
            if not is_misplaced and copy.used_ms == copy.queued_ms and not copy.brought_by:
                return copy
            copy.queued_ms = copy.used_ms
            self._queue(copy)
        return None

    def _is_void(self, copy: DiskCopy) -> bool:
        """Whether the place of this copy that was met in its queue does not count."""
        if not self.holds(copy):
            return True
        if copy.voids:
            copy.voids -= 1
            return True
        return False


def _number_of(table: NamespaceTable) -> int:
    return 0 if table.tenant is None else table.tenant.number


def stale_extents(copy: DiskCopy) -> StaleExtents:
    name = copy.namespace, copy.key
    extents = [(copy.disk.segment, copy.offset)]
    return StaleExtents(name, copy.size, copy.epoch, copy.counter, extents)
