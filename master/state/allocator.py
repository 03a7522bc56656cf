"""Allocates the extents of one segment: best fit; free neighbours coalesce.

Free extents are kept twice: by size, to find the smallest that fits, and by both of their ends
(boundary tags), to find the neighbours of a freed extent without searching. Extents in use are
not recorded here: the objects, pending puts and wipings that own them are the record, which saves
a hundred bytes for each of millions of objects. Tests add both up.

Invariant: no two free extents touch or overlap, and all lie within ``[start, end)``.
"""

from __future__ import annotations

from sortedcontainers import SortedList


class Allocator:
    """Allocates byte ranges of ``[start, end)``; lengths are multiples of the caller's choosing."""

    def __init__(self, start: int, end: int, *, empty: bool = True) -> None:
        """``empty``: the whole range is free; otherwise nothing is, until ``free`` is called."""
        self.start = start
        self.end = end
        self.free_bytes = 0
        self.largest_free = 0
        self._by_size: SortedList[tuple[int, int]] = SortedList()  # (length, start)
        self._start_to_length: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        if empty and end > start:
            self._insert(start, end - start)
            self.free_bytes = end - start

    def allocate(self, length: int) -> int | None:
        """Takes a free range of ``length`` bytes, and returns its offset; None: there is none."""
        if length > self.largest_free:
            return None
        hole = next(self._by_size.irange((length, 0)))
        size, start = hole
        self._remove(start, size)
        if size > length:
            self._insert(start + length, size - length)
        self.free_bytes -= length
        return start

    def free(self, start: int, length: int) -> None:
        """Frees a range in use, or a part of one, and merges it with free neighbours at once."""
        end = start + length
        assert self.start <= start < end <= self.end, "freed a range outside the segment"
        self.free_bytes += length
        before = self._end_to_start.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._start_to_length.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        self._insert(start, end - start)

    def _insert(self, start: int, length: int) -> None:
        self._by_size.add((length, start))
        self.largest_free = max(self.largest_free, length)
        self._start_to_length[start] = length
        self._end_to_start[start + length] = start

    def _remove(self, start: int, length: int) -> None:
        self._by_size.remove((length, start))
        if length == self.largest_free:
            self.largest_free = self._by_size[-1][0] if self._by_size else 0
        del self._start_to_length[start]
        del self._end_to_start[start + length]
