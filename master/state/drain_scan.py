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
_SECOND_SCAN = 1 << 63


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
    second_scan = cursor & _SECOND_SCAN
    first, position = divmod(cursor ^ second_scan, 1 << _POSITION_BITS)
    chosen: dict[ObjectRecord, bool] = {}
    size = skipped = replicas = 0
    steps_max = forest.steps + STEPS_MAX
    for index, shard in enumerate(shards_from(tables, first), first):
        for record in islice(shard.values(), position, None):
            cursor_now = second_scan | index << _POSITION_BITS | position
            if forest.steps >= steps_max:
                return DrainPage(chosen, skipped, cursor_now)
            forest.steps += 1
            position += 1
            if bool(record.children) != bool(second_scan) or not _is_on(segments, record):
                continue
            if record.writer:
                skipped += 1
                continue
            _propagate_use(forest, segments, record)
            for block in _local_chain(segments, record):
                if block not in chosen:
                    count = _replicas(block)
                    size += block.size
                    is_full = len(chosen) >= limit or size > bytes_max
                    if chosen and (is_full or count != replicas):
                        return DrainPage(chosen, skipped, cursor_now)
                    replicas = count
                    chosen[block] = False
            chosen[record] = True
        position = 0
    return DrainPage(chosen, skipped, 0 if second_scan else _SECOND_SCAN)


def _propagate_use(
    forest: Forest, segments: Collection[MountedSegment], record: ObjectRecord
) -> None:
    """Propagate the record's last use to its ancestors, which a match does not update."""
    ancestor = record.parent
    for _ in range(LINE_MAX):
        if ancestor is None or ancestor.last_used_ms >= record.last_used_ms:
            break
        if not _is_on(segments, ancestor):
            break
        forest.steps += 1
        ancestor.last_used_ms = record.last_used_ms
        ancestor = ancestor.parent


def _local_chain(segments: Collection[MountedSegment], record: ObjectRecord) -> list[ObjectRecord]:
    """Return the record and its ancestors on ``segments``, root first, for placement in order."""
    chain = [record]
    ancestor = record.parent
    for _ in range(LINE_MAX):
        if ancestor is None or ancestor.writer or not _is_on(segments, ancestor):
            break
        chain.append(ancestor)
        ancestor = ancestor.parent
    return chain[::-1]


def _is_on(segments: Collection[MountedSegment], record: ObjectRecord) -> bool:
    if not record.complete:
        return False
    if not record.more:
        return record.segment in segments
    return any(segment in segments for segment, _ in record.extents())


def _replicas(record: ObjectRecord) -> int:
    return sum(segment.alive for segment, _ in record.extents())
