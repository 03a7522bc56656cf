"""Emptying a node: what of it to move next.

The master finds what lies there and grants room elsewhere; whoever asked copies. An object that
was moved is another version of itself, as after an overwrite: what was promised for the old bytes
holds until its leases end, no view takes the new ones for them, and a restart knows which is newer.

A pass looks at all objects twice: at leaves, with the ancestors that are to go with them; then at
the other blocks that are still there, because their chain is long or its leaves are elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import NamedTuple

from kvstore.master.state.forest import Forest
from kvstore.master.state.records import ObjectRecord, Segment

STEPS_MAX = 20_000
"""Records that one call looks at: about 4 ms. The ancestors of its last leaf may be more."""

_POSITION_BITS = 32
_SECOND_LOOK = 1 << 63


class Page(NamedTuple):
    """Some of what lies on the segments of a node."""

    records: dict[ObjectRecord, bool]
    """A parent before its children, all with as many replicas. Whether it was found itself, once
    in a pass; or it is an ancestor of one that was."""
    skipped: int
    """Objects that are being replaced at this moment."""
    next_cursor: int
    """0: there is no more."""


def page(
    forest: Forest, segments: Collection[Segment], cursor: int, limit: int, bytes_max: int
) -> Page:
    """What lies on ``segments``, from where the last page ended (0: from the beginning). What came
    or went meanwhile may be missed by this pass, not by the next.

    A chain that is too long for one page is found again by the next, without what has moved.
    """
    shards = [shard for table in forest.namespaces.values() for shard in table.shards]
    look = cursor & _SECOND_LOOK
    first, position = divmod(cursor ^ look, 1 << _POSITION_BITS)
    chosen: dict[ObjectRecord, bool] = {}
    size = skipped = replicas = 0
    steps_max = forest.steps + STEPS_MAX
    for index, shard in enumerate(shards[first:], first):
        for record in islice(shard.values(), position, None):
            here = look | index << _POSITION_BITS | position
            if forest.steps >= steps_max:
                return Page(chosen, skipped, here)
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
                        return Page(chosen, skipped, here)
                    replicas = count
                    chosen[each] = False
            chosen[record] = True
        position = 0
    return Page(chosen, skipped, 0 if look else _SECOND_LOOK)


def _inherit(forest: Forest, segments: Collection[Segment], record: ObjectRecord) -> None:
    """Its ancestors were used with it: a match leaves that to be known by eviction."""
    above = record.parent
    while above is not None and above.last_used_ms < record.last_used_ms:
        if not _lies_on(segments, above):
            break
        forest.steps += 1
        above.last_used_ms = record.last_used_ms
        above = above.parent


def _line(segments: Collection[Segment], record: ObjectRecord) -> list[ObjectRecord]:
    """It and its ancestors as far as they lie there, too, from above: so that each may follow its
    parent to one segment."""
    line = [record]
    above = record.parent
    while above is not None and _lies_on(segments, above):
        if above.writer:
            break
        line.append(above)
        above = above.parent
    return line[::-1]


def _lies_on(segments: Collection[Segment], record: ObjectRecord) -> bool:
    if not record.complete:
        return False
    if not record.more:
        return record.segment in segments
    return any(segment in segments for segment, _ in record.extents())


def _replicas(record: ObjectRecord) -> int:
    return sum(segment.alive for segment, _ in record.extents())
