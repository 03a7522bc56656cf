"""The prefix forest: objects, their parents, and the matches of a chain.

A record is *reachable* if it is complete and its parent, if any, is reachable; otherwise it is
*detached*. Each record caches this. An event that may detach descendants (a removal, a lost
segment) counts as a *break*; one that may make them reachable (a parent stored again) as a *mend*.
``record.checked`` is the count at the last check:

    breaks              reachable, unless there was a break since
    -(breaks + mends)   detached, unless there was a break or a mend since

A match after a break walks its chain once, any other match costs O(log n) probes, evicting a leaf
costs nothing, and no step visits the descendants of a changed record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError
from kvstore.limits import Key, Namespace
from kvstore.master.state.disk_index import DiskIndex
from kvstore.master.state.missing_objects import MissingObjects
from kvstore.master.state.object_events import Event, removed, stored
from kvstore.master.state.records import Namespaces, NamespaceTable, ObjectRecord
from kvstore.master.state.snapshot_scan import SnapshotScan
from kvstore.master.state.tenants import UnlimitedTenancy

RING_STEPS = 150_000
"""Detached records that one step checks for cycles: 4 ms. 512 blocks put in one call, each with a
child and below the previous one, take 131,000."""


class ChainMatch(NamedTuple):
    matched: int
    """Number of leading keys that are reachable."""
    holding: list[ObjectRecord]
    """Records whose leases protect all matched ones: only the tip, if the keys are a chain."""
    records: list[ObjectRecord]


NO_MATCH = ChainMatch(0, [], [])


class Forest:
    """Namespaces and their records. Independent of memory; not thread-safe."""

    def __init__(self, counters: Counter[str] | None = None) -> None:
        self.namespaces = Namespaces()
        self.breaks = 1
        self.mends = 0
        self.steps = 0
        """Records visited or deleted so far; background work measures its slices by it."""
        self._ring_steps = RING_STEPS
        self.objects = 0
        """Records with bytes, in all namespaces."""
        self.missing = MissingObjects(Counter() if counters is None else counters)
        self.tenants = UnlimitedTenancy()
        self.disks = DiskIndex(self.namespaces)
        """The copies on disks, which are told of the objects that leave and enter memory."""
        self.events: list[Event] | None = None
        """Events that the shell has not taken yet; None without subscribers."""

    def collect_events(self) -> None:
        self.events = self.disks.events = []

    def begin_step(self) -> None:
        """Reset the budget for cycle checks."""
        self._ring_steps = RING_STEPS

    # --- finding ------------------------------------------------------------------------------

    def table(self, namespace: str) -> NamespaceTable | None:
        return self.namespaces.tables.get(namespace)

    def get(self, namespace: str, key: Key) -> ObjectRecord | None:
        table = self.namespaces.tables.get(namespace)
        return None if table is None else table.get(key)

    def is_reachable(self, record: ObjectRecord) -> bool:
        """Return whether all ancestors are complete. Drops the bytes of lost ancestors."""
        breaks = self.breaks
        if record.checked == breaks:
            return True
        segment, parent = record.segment, record.parent
        if segment is not None and segment.alive and (parent is None or parent.checked == breaks):
            record.checked = breaks
            self.steps += 1
            return True
        detached = -(breaks + self.mends)
        if record.checked == detached:
            return False
        walked: list[ObjectRecord] = []
        cut_off = 0  # number of walked records at or below a missing one
        at: ObjectRecord | None = record
        while at is not None and at.checked != breaks:
            if at.checked == detached:
                cut_off = len(walked)
                break
            walked.append(at)
            segment = at.segment
            if segment is None or not (segment.alive or at.complete):
                cut_off = len(walked)
                if segment is not None and at.children:
                    self.drop_bytes(at)
            at = at.parent
        self.steps += len(walked)
        for index, visited in enumerate(walked):
            if index >= cut_off:
                visited.checked = breaks
            elif not visited.lost:  # else it must be checked again once it has children
                visited.checked = detached
        return not cut_off

    def match(
        self, table: NamespaceTable, keys: Sequence[Key], *, records: bool = False
    ) -> ChainMatch:
        """Return the number of leading ``keys`` that are reachable, and the records to lease.

        An exponential, then binary search: O(log n) probes for the blocks of one chain, whose
        matched blocks are always a prefix. Keys whose depths do not grow by one each are not one
        chain, and are scanned one by one. Depths are hints, sufficient for keys that determine
        their ancestors (hashes of prefixes). Only ``records``, which walks over each record,
        verifies the ancestors.
        """
        first = table.get(keys[0]) if keys else None
        if first is None or not self.is_reachable(first):
            return NO_MATCH
        breaks, depth = self.breaks, first.depth
        good, bad, step = 0, len(keys), 1
        tip = first
        while good + 1 < bad:
            galloping = bad == len(keys)
            probe = min(good + step, bad - 1) if galloping else (good + bad) // 2
            record = table.get(keys[probe])
            if record is not None and (record.checked == breaks or self.is_reachable(record)):
                if record.depth != depth + probe:
                    return self._scan(table, keys)
                good, tip = probe, record
                step *= 2
            else:
                bad = probe
        if not (records or table.bent):
            return ChainMatch(good + 1, [tip], [])
        path = self._path(tip, list(islice(keys, good + 1)))
        return ChainMatch(good + 1, [tip], path) if path else self._scan(table, keys)

    def _path(self, tip: ObjectRecord, keys: list[Key]) -> list[ObjectRecord]:
        """Return the records of ``keys`` if they are the tip and its ancestors, else []."""
        path: list[ObjectRecord] = []
        at: ObjectRecord | None = tip
        for key in reversed(keys):
            if at is None or at.key != key:
                return []
            path.append(at)
            at = at.parent
        path.reverse()
        return path

    def _scan(self, table: NamespaceTable, keys: Sequence[Key]) -> ChainMatch:
        """Match key by key, and correct the depths of chains whose blocks arrived out of order."""
        holding: list[ObjectRecord] = []
        records: list[ObjectRecord] = []
        for key in keys:
            record = table.get(key)
            if record is None or not self.is_reachable(record):
                break
            records.append(record)
            if holding and record.parent is holding[-1]:
                record.depth = holding[-1].depth + 1
                holding[-1] = record
            else:
                holding.append(record)
        return ChainMatch(len(records), holding, records)

    def records(self) -> Iterator[ObjectRecord]:
        for table in self.namespaces.values():
            yield from table

    def scan(self, namespace: str) -> SnapshotScan:
        if not namespace:
            return SnapshotScan(self.namespaces.values(), self.disks)
        table = self.namespaces.tables.get(namespace)
        return SnapshotScan([] if table is None else [table], self.disks)

    # --- changing -----------------------------------------------------------------------------

    def ensure(self, namespace: Namespace, key: Key) -> ObjectRecord:
        """Return the record of the key, created if absent; the caller must make it used."""
        table = self.ensure_table(namespace)
        return table.get(key) or table.add(key)

    def ensure_table(self, namespace: Namespace) -> NamespaceTable:
        """Return the table of the namespace, created if absent; the caller must add a record."""
        table = self.namespaces.tables.get(namespace)
        if table is None:
            table = NamespaceTable(namespace, self.tenants.match(namespace))
            self.namespaces.tables[namespace] = table
        return table

    def link(self, record: ObjectRecord, parent: ObjectRecord | None) -> ObjectRecord | None:
        """Make ``parent`` the parent of an incomplete record. Return the previous parent, if any,
        which has one child fewer. Raise InvalidArgumentError at a cycle, without a change."""
        before = record.parent
        if before is parent:
            return None
        if record.children and parent is not None:
            self._check_cycle(record, parent)
        if record.children and before is not None:
            self.namespaces.tables[record.namespace].bent = True
        record.parent = parent
        record.depth = 0 if parent is None else parent.depth + 1
        if parent is not None:
            parent.children += 1
        if before is not None:
            before.children -= 1
        return before

    def _check_cycle(self, record: ObjectRecord, parent: ObjectRecord) -> None:
        """Raise as ``link``. An incomplete record has no reachable descendants."""
        if self.is_reachable(parent):
            return
        at: ObjectRecord | None = parent
        while at is not None and at.checked != self.breaks:
            if at is record:
                raise InvalidArgumentError(
                    f"key {record.key!r} would become its own ancestor",
                    advice="A chain runs from its root to its tip; check the order of keys.",
                    key=record.key.hex(),
                )
            if not self._ring_steps:
                raise InvalidArgumentError(
                    f"key {record.key!r} has too many ancestors without a root",
                    advice="Put a chain from its root.",
                    key=record.key.hex(),
                )
            self._ring_steps -= 1
            self.steps += 1
            at = at.parent

    def mark_complete(self, record: ObjectRecord, size: int) -> None:
        """Record new bytes, which may make descendants reachable."""
        record.checked = 0
        record.size = size
        table = self.namespaces.of(record)
        table.objects += 1
        self.objects += 1
        table.size += size
        if table.tenant is not None:
            table.tenant.objects += 1
        if record.children:
            self.mends += 1
        if self.disks:
            self.disks.object_entered(record.namespace, record.key)
        events = self.events
        if events is not None:
            events.append(stored(record))

    def drop_bytes(self, record: ObjectRecord) -> bool:
        """Drop the record's bytes, which detaches its descendants. Return whether it did."""
        breaks = False
        on_disk = bool(self.disks) and self.disks.object_left(record)
        if record.lost:  # its segment's death counted as the break
            self.missing.on_object_departed(record)
        elif record.children:
            self.breaks += 1
            breaks = True
        record.segment = None
        record.more = ()
        record.checked = 0
        table = self.namespaces.of(record)
        table.objects -= 1
        self.objects -= 1
        table.size -= record.size
        if table.tenant is not None:
            table.tenant.objects -= 1
        events = self.events
        if events is not None:
            if on_disk:
                events.append(stored(record, on_disk=True))
            else:
                events.append(removed(record.namespace, record.key))
        return breaks

    def forget(self, record: ObjectRecord) -> ObjectRecord | None:
        """Delete a record without bytes, writer and children; return its parent, if any."""
        assert record.segment is None
        assert not record.writer
        assert not record.children
        self.steps += 1
        table = self.namespaces.of(record)
        table.drop(record)
        self.namespaces.drop_if_empty(table)
        parent = record.parent
        record.parent = None
        if parent is not None:
            parent.children -= 1
        return parent
