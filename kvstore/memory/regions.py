"""Disjoint regions of this process's memory, by address."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.memory.process_memory import address_of


class Region(NamedTuple):
    start: int
    stop: int
    memory: memoryview
    """Flat; keeps a buffer alive that was registered as one."""

    @classmethod
    def of(cls, memory: memoryview) -> Region:
        start = address_of(memory)
        return cls(start, start + len(memory), memory)

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop


class Regions:
    """Regions in the order of their addresses. Readers need no lock; ``add``, ``take`` do."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        """Replaced, never changed."""

    def add(self, region: Region) -> None:
        """``region`` must overlap none of the others."""
        regions = self._regions.copy()
        insort(regions, region, key=_start)
        self._regions = regions

    def take(self, start: int) -> Region | None:
        """Removes and returns the region at ``start``; None: there is none."""
        found = [region for region in self._regions if region.start == start]
        self._regions = [region for region in self._regions if region.start != start]
        return found[0] if found else None

    def overlap(self, region: Region) -> bool:
        after = bisect_right(self._regions, region.start, key=_start)
        beside = self._regions[max(0, after - 1) : after + 1]
        return any(other.overlaps(region.start, region.stop) for other in beside)

    def holding(self, start: int, length: int) -> Region | None:
        """The region that contains all of these bytes; None: there is none."""
        regions = self._regions
        index = bisect_right(regions, start, key=_start) - 1
        if index < 0 or start + length > regions[index].stop:
            return None
        return regions[index]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def __bool__(self) -> bool:
        return bool(self._regions)


def _start(region: Region) -> int:
    return region.start
