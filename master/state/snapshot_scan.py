"""A snapshot of visible objects that is consistent with their events."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.master.state.disk_index import DiskCopy, DiskIndex
from kvstore.master.state.object_events import Event, stored
from kvstore.master.state.records import NamespaceTable, ObjectRecord, shards_from


class SnapshotScan:
    """Lists the visible objects in steps, while they change.

    Of the objects without an event since the snapshot began, exactly the visible ones are listed.
    Of the others any may be listed: applied in order with the events, the rows give the exact set.
    ``ListObjects`` does not promise that: its cursor counts dictionary entries, and skips objects
    when earlier entries are deleted.

    It references the objects of one dictionary at a time. Objects that are added later, or moved
    when the table is divided, are listed with another dictionary or have an event.
    """

    def __init__(self, tables: list[NamespaceTable], disks: DiskIndex) -> None:
        self._disks = disks
        self._visible = _visible(tables)
        self.done = False

    def take(self, steps: int) -> list[Event]:
        rows: list[Event] = []
        for _ in range(steps):
            each = next(self._visible, None)
            if each is None:
                self.done = True
                break
            if isinstance(each, DiskCopy):
                if not each.in_memory and self._disks.holds(each):
                    rows.append(each.stored_event())
            elif each.complete:
                rows.append(stored(each))
        return rows


def _visible(tables: list[NamespaceTable]) -> Iterator[ObjectRecord | DiskCopy]:
    for shard in shards_from(tables, 0, copies=True):
        yield from list(shard.values())
