"""Chooses which objects of a draining node to move next.

The master finds the objects and grants space elsewhere; the client that asked copies them. A moved
object is a new version, as after an overwrite: the old bytes stay until their leases end, no view
confuses the two, and after a restart the newer one wins.

A pass looks at all objects twice: first at leaves, with the ancestors that move with them; then at
the remaining blocks, whose chain is long or whose leaves are elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import NamedTuple

from kvstore.master.state.forest import Forest
from kvstore.master.state.records import MountedSegment, ObjectRecord, shards_from

STEPS_MAX = 20_000
"""Records that one call looks at: about 4 ms. The ancestors of its last leaf may be more."""

LINE_MAX = 16_384
"""Ancestors of one leaf that are looked at; the second look finds those further up."""

_POSITION_BITS = 32
_SECOND_LOOK = 1 << 63


class DrainPage(NamedTuple):
    """Some of the objects on the segments of a node."""

    records: dict[ObjectRecord, bool]
    """Objects, each parent before its children, all with the same number of replicas. True: the
    look found the object itself (once in a pass); False: it is an ancestor of such an object."""
    skipped: int
    """Objects that are being replaced at this moment."""
    next_cursor: int
    """Where the next page begins; 0: this is the last page."""


def page(
    forest: Forest, segments: Collection[MountedSegment], cursor: int, limit: int, bytes_max: int
) -> DrainPage:
    """Objects on ``segments``, from where the last page ended (0: from the beginning). This pass
    may miss objects that come or go meanwhile; the next pass does not.

    A chain that is too long for one page is on the next page again, without its moved objects.
    """
    tables = forest.namespaces.values()
    look = cursor & _SECOND_LOOK
    first, position = divmod(cursor ^ look, 1 << _POSITION_BITS)
    chosen: dict[ObjectRecord, bool] = {}
    size = skipped = replicas = 0
    steps_max = forest.steps + STEPS_MAX
    for index, shard in enumerate(shards_from(tables, first), first):
        for record in islice(shard.values(), position, None):
            here = look | index << _POSITION_BITS | position
            if forest.steps >= steps_max:
                return DrainPage(chosen, skipped, here)
            forest.steps += 1
            position += 1
            if bool(record.children) != bool(look) or not _lies_on(segments, record):
                continue
            if record.writer:
                skipped += 1
                continue
            _inherit(forest, segments, record)
            for each in _line(segments, record):
                if each not in chosen:
                    count = _replicas(each)
                    size += each.size
                    full = len(chosen) >= limit or size > bytes_max
                    if chosen and (full or count != replicas):
                        return DrainPage(chosen, skipped, here)
                    replicas = count
                    chosen[each] = False
            chosen[record] = True
        position = 0
    return DrainPage(chosen, skipped, 0 if look else _SECOND_LOOK)


def _inherit(forest: Forest, segments: Collection[MountedSegment], record: ObjectRecord) -> None:
    """Passes the record's last use on to its ancestors, which a match does not update."""
    above = record.parent
    for _ in range(LINE_MAX):
        if above is None or above.last_used_ms >= record.last_used_ms:
            break
        if not _lies_on(segments, above):
            break
        forest.steps += 1
        above.last_used_ms = record.last_used_ms
        above = above.parent


def _line(segments: Collection[MountedSegment], record: ObjectRecord) -> list[ObjectRecord]:
    """The record and its ancestors as far as they are on ``segments``, root first, so that each can
    follow its parent to one segment."""
    line = [record]
    above = record.parent
    for _ in range(LINE_MAX):
        if above is None or above.writer or not _lies_on(segments, above):
            break
        line.append(above)
        above = above.parent
    return line[::-1]


def _lies_on(segments: Collection[MountedSegment], record: ObjectRecord) -> bool:
    if not record.complete:
        return False
    if not record.more:
        return record.segment in segments
    return any(segment in segments for segment, _ in record.extents())


def _replicas(record: ObjectRecord) -> int:
    return sum(segment.alive for segment, _ in record.extents())
