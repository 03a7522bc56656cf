"""The prefix forest: the objects, their parents, and the reach of a chain.

A record is *reachable* when it is complete and has no parent or a reachable one; otherwise it is
*detached*. Each record caches this. An event that can cut a chain in its middle (a removal, a lost
segment) counts as a *break*; one that can make descendants reachable (a parent stored again) counts
as a *mend*. ``record.checked`` says at which of these counts the record was last looked at:

    breaks              reachable, unless there was a break since
    -(breaks + mends)   detached, unless there was a break or a mend since

So a match after a break walks its chain once, every other match costs O(log n) probes, evicting a
leaf costs nothing, and no step visits the descendants of a record that comes or goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError
from kvstore.limits import Key, Namespace
from kvstore.master.state.missing_objects import MissingObjects
from kvstore.master.state.object_events import Event, SnapshotScan, removed, stored
from kvstore.master.state.records import Namespaces, NamespaceTable, ObjectRecord
from kvstore.master.state.tenants import UnlimitedTenancy

RING_STEPS = 150_000
"""Records without a root that one step looks at to find out whether links would close a ring: 4 ms.
512 blocks that clients put at once, each of which has a child and hangs below the one before, take
131,000."""


class ChainMatch(NamedTuple):
    matched: int
    """Leading keys that are reachable."""
    holding: list[ObjectRecord]
    """Records whose lease protects all matched ones: only the tip, if the keys are a chain."""
    records: list[ObjectRecord]
    """All matched records, if requested."""


NO_MATCH = ChainMatch(0, [], [])


class Forest:
    """Namespaces and their records. Knows nothing of memory; not thread-safe, like all of the
    state."""

    def __init__(self, counters: Counter[str] | None = None) -> None:
        self.namespaces = Namespaces()
        self.breaks = 1
        self.mends = 0
        self.steps = 0
        """Records walked over or forgotten so far: how background work measures its slices."""
        self._ring_steps = RING_STEPS
        self.objects = 0
        """Records with bytes, of all namespaces."""
        self.missing = MissingObjects(Counter() if counters is None else counters)
        self.tenants = UnlimitedTenancy()
        self.events: list[Event] | None = None
        """Events that the shell has not taken yet; None: nobody wants events."""

    def begin_step(self) -> None:
        """Begins a step of the loop, with a new budget for rings."""
        self._ring_steps = RING_STEPS

    # --- finding ------------------------------------------------------------------------------

    def table(self, namespace: str) -> NamespaceTable | None:
        return self.namespaces.tables.get(namespace)

    def get(self, namespace: str, key: Key) -> ObjectRecord | None:
        table = self.namespaces.tables.get(namespace)
        return None if table is None else table.get(key)

    def is_reachable(self, record: ObjectRecord) -> bool:
        """Whether a path from a root leads to the record. Forgets the bytes of lost ancestors on
        the path."""
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
        cut_off = 0  # so many walked records have a missing record at or above them
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
        for index, seen in enumerate(walked):
            if index >= cut_off:
                seen.checked = breaks
            elif not seen.lost:  # else it must be looked at again once it has children
                seen.checked = detached
        return not cut_off

    def match(
        self, table: NamespaceTable, keys: Sequence[Key], *, records: bool = False
    ) -> ChainMatch:
        """How many leading ``keys`` are reachable, and which records' leases protect them.

        The search gallops, then bisects: O(log n) probes for the blocks of one chain, of which the
        matched ones are always a prefix. Depths that do not grow by one per key say that the keys
        are not one chain; those are scanned, one probe per key. Depths are hints, exact enough for
        keys of which each determines those before it (hashes of prefixes). Only a walk over each
        record proves that the keys are the tip's ancestors; ``records`` asks for that walk.
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
        """The records of ``keys``, if they are the tip and its ancestors; else an empty list."""
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
        """Matches key by key. Corrects the depths of chains whose blocks arrived out of order."""
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
        """Lists a namespace, or all for ``""``."""
        if not namespace:
            return SnapshotScan(self.namespaces.values())
        table = self.namespaces.tables.get(namespace)
        return SnapshotScan([] if table is None else [table])

    # --- changing -----------------------------------------------------------------------------

    def ensure(self, namespace: Namespace, key: Key) -> ObjectRecord:
        """The record of that key, created if missing; the caller must give it a reason to stay."""
        table = self.ensure_table(namespace)
        return table.get(key) or table.add(key)

    def ensure_table(self, namespace: Namespace) -> NamespaceTable:
        """The table of that namespace, created if missing; the caller must add a record."""
        table = self.namespaces.tables.get(namespace)
        if table is None:
            table = NamespaceTable(namespace, self.tenants.match(namespace))
            self.namespaces.tables[namespace] = table
        return table

    def link(self, record: ObjectRecord, parent: ObjectRecord | None) -> ObjectRecord | None:
        """Makes ``parent`` the parent of a record that is not complete.

        Returns:
            The previous parent, if there was one: it has one child fewer now.

        Raises:
            InvalidArgumentError: the link would close a ring; nothing changed.
        """
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
        """Raises as ``link``. A record that is not complete has no reachable descendants."""
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
                    f"key {record.key!r} is below too many blocks without a root",
                    advice="Put a chain from its root.",
                    key=record.key.hex(),
                )
            self._ring_steps -= 1
            self.steps += 1
            at = at.parent

    def mark_complete(self, record: ObjectRecord, size: int) -> None:
        """Called when a record got its bytes: its descendants may be reachable again."""
        self.missing.forget(record.namespace, record.key)
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
        events = self.events
        if events is not None:
            events.append(stored(record))

    def drop_bytes(self, record: ObjectRecord, end_ms: int = 0) -> bool:
        """Takes a record's bytes away: its descendants are detached. Returns whether that is a
        break. ``end_ms``: the end of its lifetime, which it loses; 0: it keeps it, or has none."""
        breaks = False
        if record.lost:  # its segment's death has counted as the break
            self.missing.on_object_departed(record, end_ms)
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
            events.append(removed(record))
        return breaks

    def forget(self, record: ObjectRecord) -> ObjectRecord | None:
        """Drops a record without bytes, writer and children; returns its parent, if it has one."""
        assert record.segment is None
        assert not record.writer
        assert not record.children
        self.steps += 1
        table = self.namespaces.of(record)
        table.drop(record)
        if not table.records:
            self.namespaces.drop(table.name)
        parent = record.parent
        record.parent = None
        if parent is not None:
            parent.children -= 1
        return parent
