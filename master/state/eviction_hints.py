"""Hints of clients on objects: what is retained is evicted last, what is over first.

A hint is one number of the record, so that objects without one cost nothing more:

* ``until_ms``: retained until then, or until the next use;
* ``-(said_ms + 1 << 1 | over)``: over, or demoted, unless it was used after ``said_ms``;
* 0: none.
"""

from __future__ import annotations

from kvstore.master.state.records import ObjectRecord


def dismissed(now_ms: int, *, over: bool) -> int:
    """Return the hint of an object that is over, or demoted: not used again soon."""
    return -(now_ms + 1 << 1 | over)


def is_over(record: ObjectRecord) -> bool:
    """Whether this object, which has a negative hint, is over: not only demoted."""
    return bool(-record.hint & 1)


def has_ended(record: ObjectRecord, now_ms: int) -> bool:
    """Whether the object's hint says nothing any more: its time has passed, or it was used."""
    hint = record.hint
    if hint < 0:
        return record.last_used_ms >= -hint >> 1
    return hint <= now_ms
