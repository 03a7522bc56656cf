"""A reader of a master's events: it must know what is visible, after each step."""

from __future__ import annotations

from kvstore.master.state.master_state import MasterState
from kvstore.master.state.object_events import REMOVED_SIZE, SnapshotScan

Name = tuple[str, bytes]


class EventFollower:
    """Two readers: one has read all events; the other one began with a survey, a record a step."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._sizes: dict[Name, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._survey: SnapshotScan = self._state.snapshot("")
        self._surveyed: dict[Name, int] = {}

    def follow(self) -> None:
        """Called after each step of the state."""
        for event in self._state.take_events(1 << 30):
            size = self._sizes.pop(event[:2], REMOVED_SIZE)
            if event[3] == REMOVED_SIZE:
                assert size != REMOVED_SIZE, f"{event} is gone, and was not there"
                self._surveyed.pop(event[:2], None)
            else:
                assert size == REMOVED_SIZE, f"{event} was there before"
                self._sizes[event[:2]] = self._surveyed[event[:2]] = event[3]
        self._surveyed.update((row[:2], row[3]) for row in self._survey.take(1))
        records = [r for r in self._state.forest.records() if r.segment is not None]
        with_bytes = {(r.namespace, bytes(r.key)): r.size for r in records}
        assert self._sizes == with_bytes, "the events tell of other objects than there are"
        if self._survey.done:
            complete = {(r.namespace, bytes(r.key)) for r in records if r.complete}
            assert complete <= self._surveyed.keys(), "the survey has missed objects"
            assert self._surveyed.items() <= with_bytes.items(), "the survey lists what is gone"
            self._begin()
