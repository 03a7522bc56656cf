"""Best-fit allocator of one segment; free neighbours are merged immediately.

Free extents are indexed by size, and by both ends (boundary tags) to find the neighbours of a freed
extent. Used extents are recorded only by their owners (objects, pending puts, wipe requests), which
saves a hundred bytes per object.

Invariant: no two free extents touch or overlap, and all lie within ``[start, end)``.
"""

from __future__ import annotations

from sortedcontainers import SortedList


class Allocator:
    """Allocates ranges of ``[start, end)``; the caller chooses the granularity."""

    def __init__(self, start: int, end: int, *, empty: bool = True) -> None:
        """``empty``: the complete range is free; otherwise nothing is, until ``free`` is called."""
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
        """Allocate ``length`` bytes and return the offset; None: no free range fits."""
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
        """Free a used range, or a part of one, and merge it with free neighbours."""
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
