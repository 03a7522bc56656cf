"""The prefix forest: which objects are there, what their parents are, how far a chain reaches.

A record is *reachable* when it is complete and has no parent or a reachable one; otherwise it is
*detached*. That is not stored but remembered. What can cut a chain in its middle (a removal, a lost
segment) counts a *break*, what can make descendants whole (a parent that is stored again) counts a
*mend*. ``record.checked`` says at which of these counts the record was last looked at:

    breaks              reachable, unless there was a break since
    -(breaks + mends)   detached, unless there was a break or a mend since

So a match after a break walks its chain once, every other match costs O(log n) probes, evicting a
leaf costs nothing, and nobody visits the descendants of what comes or goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError
from kvstore.limits import Key, Namespace
from kvstore.master.state.records import NamespaceTable, ObjectRecord


class Match(NamedTuple):
    matched: int
    """Leading keys that are reachable."""
    holding: list[ObjectRecord]
    """Those whose lease holds all of them: one, the tip, when the keys are a chain."""
    records: list[ObjectRecord]
    """Of all of them, where asked for."""


NO_MATCH = Match(0, [], [])


class Forest:
    """Namespaces and their records. Knows nothing of memory; not thread-safe, like all of the
    state."""

    def __init__(self, counters: Counter[str] | None = None) -> None:
        self.namespaces: dict[str, NamespaceTable] = {}
        self.breaks = 1
        self.mends = 0
        self.steps = 0
        """Records walked over or forgotten so far: how background work measures its slices."""
        self._counters: Counter[str] = Counter() if counters is None else counters

    # --- finding ------------------------------------------------------------------------------

    def table(self, namespace: str) -> NamespaceTable | None:
        return self.namespaces.get(namespace)

    def get(self, namespace: str, key: Key) -> ObjectRecord | None:
        table = self.namespaces.get(namespace)
        return None if table is None else table.get(key)

    def reachable(self, record: ObjectRecord) -> bool:
        """Whether a root leads to it. Forgets the bytes of lost ancestors that it meets."""
        breaks = self.breaks
        if record.checked == breaks:
            return True
        segment, parent = record.segment, record.parent
        if segment is not None and segment.alive and (parent is None or parent.checked == breaks):
            record.checked = breaks
            self.steps += 1
            return True
        detached = -(breaks + self.mends)
        walked: list[ObjectRecord] = []
        cut_off = 0  # how many of those have something missing at or above them
        at: ObjectRecord | None = record
        while at is not None and at.checked != breaks:
            if at.checked == detached:
                cut_off = len(walked)
                if not walked:
                    return False
                break
            walked.append(at)
            segment = at.segment
            if segment is None or not (segment.alive or at.complete):
                cut_off = len(walked)
                if segment is not None and at.children:
                    self.empty(at)
            at = at.parent
        for index, seen in enumerate(walked):
            seen.checked = detached if index < cut_off else breaks
        self.steps += len(walked)
        return not cut_off

    def match(self, table: NamespaceTable, keys: Sequence[Key], *, records: bool = False) -> Match:
        """How many leading ``keys`` are reachable, and what holds them.

        Galloping, then bisecting: O(log n) probes for the blocks of one chain, of which the
        matched ones are always a prefix. Depths that do not grow by one per key say that the keys
        are not one chain; those are scanned, one probe per key. Depths are hints, exact enough for
        keys of which each determines those before it (hashes of prefixes). Only a look at each
        record proves that the keys are the tip's ancestors, and ``records`` takes it.
        """
        first = table.get(keys[0]) if keys else None
        if first is None or not self.reachable(first):
            return NO_MATCH
        breaks, depth = self.breaks, first.depth
        good, bad, step = 0, len(keys), 1
        tip = first
        while good + 1 < bad:
            galloping = bad == len(keys)
            probe = min(good + step, bad - 1) if galloping else (good + bad) // 2
            record = table.get(keys[probe])
            if record is not None and (record.checked == breaks or self.reachable(record)):
                if record.depth != depth + probe:
                    return self._scan(table, keys)
                good, tip = probe, record
                step *= 2
            else:
                bad = probe
        if not (records or table.bent):
            return Match(good + 1, [tip], [])
        path = self._path(tip, list(islice(keys, good + 1)))
        return Match(good + 1, [tip], path) if path else self._scan(table, keys)

    def _path(self, tip: ObjectRecord, keys: list[Key]) -> list[ObjectRecord]:
        """The records of ``keys``, if they are the tip and its ancestors; else nothing."""
        path: list[ObjectRecord] = []
        at: ObjectRecord | None = tip
        for key in reversed(keys):
            if at is None or at.key != key:
                return []
            path.append(at)
            at = at.parent
        path.reverse()
        return path

    def _scan(self, table: NamespaceTable, keys: Sequence[Key]) -> Match:
        """Key by key; puts right the depths of chains whose blocks arrived out of order."""
        holding: list[ObjectRecord] = []
        records: list[ObjectRecord] = []
        for key in keys:
            record = table.get(key)
            if record is None or not self.reachable(record):
                break
            records.append(record)
            if holding and record.parent is holding[-1]:
                record.depth = holding[-1].depth + 1
                holding[-1] = record
            else:
                holding.append(record)
        return Match(len(records), holding, records)

    def records(self) -> Iterator[ObjectRecord]:
        for table in self.namespaces.values():
            yield from table

    # --- changing -----------------------------------------------------------------------------

    def ensure(self, namespace: Namespace, key: Key) -> ObjectRecord:
        """The record of that key, made if it is not there; the caller gives it reason to stay."""
        table = self.ensure_table(namespace)
        return table.get(key) or table.add(key)

    def ensure_table(self, namespace: Namespace) -> NamespaceTable:
        """That namespace's, made if it is not there; the caller adds a record."""
        table = self.namespaces.get(namespace)
        if table is None:
            table = self.namespaces[namespace] = NamespaceTable(namespace)
        return table

    def link(self, record: ObjectRecord, parent: ObjectRecord | None) -> ObjectRecord | None:
        """Make ``parent`` the parent of a record that is not complete.

        Returns:
            The parent that has one child fewer now, if there was another.

        Raises:
            InvalidArgumentError: that would close a ring; nothing changed.
        """
        before = record.parent
        if before is parent:
            return None
        if record.children:
            at = parent
            while at is not None:
                if at is record:
                    raise InvalidArgumentError(
                        f"key {record.key!r} would become its own ancestor",
                        advice="A chain runs from its root to its tip; check the order of keys.",
                        key=record.key.hex(),
                    )
                at = at.parent
        if record.children and before is not None:
            self.namespaces[record.namespace].bent = True
        record.parent = parent
        record.depth = 0 if parent is None else parent.depth + 1
        if parent is not None:
            parent.children += 1
        if before is not None:
            before.children -= 1
        return before

    def fill(self, record: ObjectRecord, size: int) -> None:
        """A record was given bytes: what hangs on it may be whole."""
        record.checked = 0
        record.size = size
        table = self.namespaces[record.namespace]
        table.objects += 1
        table.size += size
        if record.children:
            self.mends += 1

    def empty(self, record: ObjectRecord) -> None:
        """Take a record's bytes away: what hangs on it is detached."""
        if record.lost:  # its segment's death was the break
            self._counters["lost_objects"] += 1
        elif record.children:
            self.breaks += 1
        record.segment = None
        record.more = ()
        record.checked = 0
        table = self.namespaces[record.namespace]
        table.objects -= 1
        table.size -= record.size

    def forget(self, record: ObjectRecord) -> ObjectRecord | None:
        """Drop a record that has no bytes, writer or children; its parent, one child fewer."""
        assert record.segment is None
        assert not record.writer
        assert not record.children
        self.steps += 1
        table = self.namespaces[record.namespace]
        table.drop(record)
        if not table.records:
            del self.namespaces[table.name]
        parent = record.parent
        record.parent = None
        if parent is not None:
            parent.children -= 1
        return parent

    # --- checking -----------------------------------------------------------------------------

    def check_invariants(self, unsettled: Collection[ObjectRecord] = ()) -> None:
        """``unsettled``: records that may have no reason to stay any more."""
        children: dict[ObjectRecord, int] = {}
        for name, table in self.namespaces.items():
            records = list(table)
            assert table.name == name
            assert table.records == len(records) > 0
            assert table.objects == sum(record.segment is not None for record in records)
            assert table.size == sum(r.size for r in records if r.segment is not None)
            for record in records:
                assert record.namespace == name
                assert table.get(record.key) is record
                kept = record.segment or record.writer or record.children
                assert kept or record in unsettled, "a record without reason"
                if record.parent is not None:
                    assert record.parent.namespace == name
                    assert table.get(record.parent.key) is record.parent, "a lost parent"
                    children[record.parent] = children.get(record.parent, 0) + 1
        detached = -(self.breaks + self.mends)
        whole: dict[ObjectRecord | None, bool] = {None: True}
        for record in self.records():
            assert record.children == children.get(record, 0)
            walked: list[ObjectRecord] = []
            at: ObjectRecord | None = record
            while at is not None and at not in whole:
                walked.append(at)
                assert len(walked) <= self.namespaces[record.namespace].records, "a ring of parents"
                at = at.parent
            for seen in reversed(walked):
                whole[seen] = whole[seen.parent] and seen.complete
            if record.checked in (self.breaks, detached):
                assert whole[record] == (record.checked == self.breaks), "remembered wrongly"
