"""A reader of a master's events: it must know what is visible, after each step."""

from __future__ import annotations

from kvstore.master.state.master_state import MasterState
from kvstore.master.state.object_events import REMOVED_SIZE
from kvstore.master.state.snapshot_scan import SnapshotScan

Name = tuple[str, bytes]
Size = tuple[int, bool]
"""Bytes, and whether the object is on a disk only."""


class EventFollower:
    """Two readers: one has read all events; the other one began with a survey, a record a step."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._sizes: dict[Name, Size] = {}
        self._begin()

    def _begin(self) -> None:
        self._survey: SnapshotScan = self._state.snapshot("")
        self._surveyed: dict[Name, Size] = {}

    def follow(self) -> None:
        """Called after each step of the state."""
        for event in self._state.take_events(1 << 30):
            before = self._sizes.pop(event[:2], None)
            if event[3] == REMOVED_SIZE:
                assert before is not None, f"{event} is gone, and was not there"
                self._surveyed.pop(event[:2], None)
            else:
                size = event[3], event[5]
                assert before is None or before[1] != size[1], f"{event} was there before"
                self._sizes[event[:2]] = self._surveyed[event[:2]] = size
        self._surveyed.update((row[:2], (row[3], row[5])) for row in self._survey.take(1))
        forest = self._state.forest
        records = [r for r in forest.records() if r.segment is not None]
        copies = [c for t in forest.namespaces.values() for c in t.copies if not c.in_memory]
        on_disk = {(c.namespace, bytes(c.key)): (c.size, True) for c in copies}
        with_bytes = on_disk | {(r.namespace, bytes(r.key)): (r.size, False) for r in records}
        assert self._sizes == with_bytes, "the events tell of other objects than there are"
        if self._survey.done:
            complete = {(r.namespace, bytes(r.key)) for r in records if r.complete} | on_disk.keys()
            assert complete <= self._surveyed.keys(), "the survey has missed objects"
            assert self._surveyed.items() <= with_bytes.items(), "the survey lists what is gone"
            self._begin()
