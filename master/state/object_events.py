"""Object events.

An object is *visible* while it is in memory (``Forest.mark_complete`` to ``Forest.drop_bytes``) or
on a disk (``DiskIndex``); those of a dead node until background work finds them.
"""

from __future__ import annotations

from kvstore.limits import Key
from kvstore.master.state.records import ObjectRecord

REMOVED_SIZE = -1

Event = tuple[str, bytes, bytes, int, int, bool]
"""Namespace, key, parent key (or empty), payload bytes, depth as far as known, and whether it is on
a disk only. Of a removed object: namespace, key, empty, ``REMOVED_SIZE``, 0, False. A plain tuple,
because calls make thousands."""


def stored(record: ObjectRecord, *, on_disk: bool = False) -> Event:
    parent = record.parent
    parent_key = b"" if parent is None else parent.key
    return record.namespace, record.key, parent_key, record.size, record.depth, on_disk


def removed(namespace: str, key: Key) -> Event:
    return namespace, key, b"", REMOVED_SIZE, 0, False
