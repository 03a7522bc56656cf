"""The moves of a write in an order that a one-sided engine can keep.

An engine moves the ranges of a batch in any order, but the moves of one object need theirs: its
header is wiped before its payload is written, and written after it. So a write consists of *waves*,
each ended before the next begins: all first moves of objects, all payloads, all headers. (An
object's moves are those up to one with ``prepare``.) A call whose ranges overlap otherwise is done
in its order.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.transport.base import Move


def waves(moves: Sequence[Move]) -> list[list[Move]]:
    """All moves, in groups that may each move in any order; in each they are in their order."""
    objects: list[list[Move]] = [[]]
    for move in moves:
        objects[-1].append(move)
        if move.prepare is not None:
            objects.append([])
    if not _are_apart(objects):
        return _in_order(moves)
    firsts: list[Move] = []
    middles: list[Move] = []
    lasts: list[Move] = []
    for each in objects:
        if each and each[-1].prepare is not None:
            lasts.append(each.pop())
            if len(each) > 1:
                firsts.append(each.pop(0))
        middles += each
    return [wave for wave in (firsts, middles, lasts) if wave]


def _are_apart(objects: Sequence[Sequence[Move]]) -> bool:
    """Whether no two ranges overlap, but for the first and the last of one object."""
    ranges = []
    for number, each in enumerate(objects):
        is_whole = bool(each) and each[-1].prepare is not None
        for index, move in enumerate(each):
            is_edge = is_whole and index in (0, len(each) - 1)
            ranges.append((move.offset, move.offset + len(move.buffer), number, is_edge))
    ranges.sort()
    end, owner, owner_is_edge = -1, -1, False
    for start, stop, number, is_edge in ranges:
        if start < end and start < stop and not (number == owner and is_edge and owner_is_edge):
            return False
        if stop > end:
            end, owner, owner_is_edge = stop, number, is_edge
    return True


def _in_order(moves: Sequence[Move]) -> list[list[Move]]:
    result: list[list[Move]] = []
    taken: list[tuple[int, int]] = []
    for move in moves:
        start, stop = move.offset, move.offset + len(move.buffer)
        overlaps = any(start < other_stop and other < stop for other, other_stop in taken)
        if not result or overlaps or move.prepare is not None:
            result.append([])
            taken = []
        result[-1].append(move)
        taken.append((start, stop))
        if move.prepare is not None:
            result.append([])
            taken = []
    return [wave for wave in result if wave]
