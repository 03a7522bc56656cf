"""Selects the objects of a draining node to move next.

The master selects objects and grants space; the requesting client copies them. A moved object is a
new version, as after an overwrite: the old bytes stay until their leases end, and after a restart
the newer version wins.

A pass scans all objects twice: first leaves with the ancestors that move with them, then the other
blocks, whose chain is long or whose leaves are on other nodes.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import NamedTuple

from kvstore.master.state.forest import Forest
from kvstore.master.state.records import MountedSegment, ObjectRecord, shards_from

STEPS_MAX = 20_000
"""Records that one call scans: about 4 ms, plus the ancestors of its last leaf."""

LINE_MAX = 16_384
"""Ancestors per leaf; the second scan finds the others."""

_POSITION_BITS = 32
_SECOND_LOOK = 1 << 63


class DrainPage(NamedTuple):
    """Some of the objects on the segments of a node."""

    records: dict[ObjectRecord, bool]
    """Objects, parents before children, all with the same number of replicas. True: scanned itself
    (once in a pass); False: an ancestor of such an object."""
    skipped: int
    next_cursor: int
    """Start of the next batch; 0: none."""


def page(
    forest: Forest, segments: Collection[MountedSegment], cursor: int, limit: int, bytes_max: int
) -> DrainPage:
    """Return objects on ``segments`` from a cursor on (0: from the beginning).

    The next pass finds objects that this one misses because of changes. A chain too long for one
    batch is in the next one again, without its moved objects.
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
    """Propagate the record's last use to its ancestors, which a match does not update."""
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
    """Return the record and its ancestors as far as they are on ``segments``, root first, so that
    each can be placed next to its parent."""
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
