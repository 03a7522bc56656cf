"""Events of objects that became visible or are gone, and a listing that fits into their order.

An object is *visible* from when its record gets bytes (``Forest.mark_complete``) until they are
taken (``Forest.drop_bytes``). Objects of a node that died are gone when the background work finds
them."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.master.state.records import NamespaceTable, ObjectRecord

GONE_SIZE = -1

Event = tuple[str, bytes, bytes, int, int]
"""Namespace, key, key of the parent (empty: none), payload bytes, depth as far as known. Of an
object that is gone: namespace, key, empty, ``GONE_SIZE``, 0. A plain tuple: thousands are made per
call, and the shell hands them on as they are."""


def stored(record: ObjectRecord) -> Event:
    parent = record.parent
    above = b"" if parent is None else parent.key
    return record.namespace, record.key, above, record.size, record.depth


def removed(record: ObjectRecord) -> Event:
    return record.namespace, record.key, b"", GONE_SIZE, 0


class SnapshotScan:
    """Lists the visible objects in steps, while they change.

    An object without an event since the survey began is listed if it is visible, and only then. Of
    the others it may list any: applied in order with the events, the rows give the exact set. Pages
    of ``ListObjects`` do not promise that: a cursor counts entries of a dictionary, and skips
    objects when earlier entries are deleted.

    It holds on to the records of one dictionary at a time. Records that are added to the dictionary
    later, or moved because the table is divided, are listed with another one or have an event.
    """

    def __init__(self, tables: list[NamespaceTable]) -> None:
        self._records = _records(tables)
        self.done = False

    def take(self, steps: int) -> list[Event]:
        """Lists visible objects: looks at up to ``steps`` records."""
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
