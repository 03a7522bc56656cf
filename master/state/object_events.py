"""Object events, and a snapshot of visible objects that is consistent with them.

An object is *visible* from ``Forest.mark_complete`` to ``Forest.drop_bytes``; those of a dead node
until background work finds them.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.master.state.records import NamespaceTable, ObjectRecord

REMOVED_SIZE = -1

Event = tuple[str, bytes, bytes, int, int]
"""Namespace, key, parent key (or empty), payload bytes, depth as far as known. Of a removed object:
namespace, key, empty, ``REMOVED_SIZE``, 0. A plain tuple, because calls make thousands."""


def stored(record: ObjectRecord) -> Event:
    parent = record.parent
    parent_key = b"" if parent is None else parent.key
    return record.namespace, record.key, parent_key, record.size, record.depth


def removed(record: ObjectRecord) -> Event:
    return record.namespace, record.key, b"", REMOVED_SIZE, 0


class SnapshotScan:
    """Lists the visible objects in steps, while they change.

    Of the objects without an event since the snapshot began, exactly the visible ones are listed.
    Of the others any may be listed: applied in order with the events, the rows give the exact set.
    ``ListObjects`` does not promise that: its cursor counts dictionary entries, and skips objects
    when earlier entries are deleted.

    It references the records of one dictionary at a time. Records that are added later, or moved
    when the table is divided, are listed with another dictionary or have an event.
    """

    def __init__(self, tables: list[NamespaceTable]) -> None:
        self._records = _records(tables)
        self.done = False

    def take(self, steps: int) -> list[Event]:
        rows: list[Event] = []
        for _ in range(steps):
            record = next(self._records, None)
            if record is None:
                self.done = True
                break
            if record.complete:
                rows.append(stored(record))
        return rows


def _records(tables: list[NamespaceTable]) -> Iterator[ObjectRecord]:
    for table in tables:
        for shard in table.shards:
            yield from list(shard.values())
