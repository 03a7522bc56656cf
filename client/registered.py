"""The caller's memory that was registered, by address: what engines hand over are addresses."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError
from kvstore.memory.raw import address_of


class _Region(NamedTuple):
    start: int
    stop: int
    memory: memoryview
    """Flat; keeps a buffer alive that was registered as one."""


class RegisteredMemory:
    """Disjoint regions of this process's memory. Threads: any."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        """In the order of their addresses; replaced as a whole, so that readers take no lock."""
        self._changing = threading.Lock()

    def add(self, memory: memoryview) -> None:
        """Raises InvalidArgumentError: it overlaps what is registered."""
        if not memory.nbytes:
            return
        start = address_of(memory)
        region = _Region(start, start + len(memory), memory)
        with self._changing:
            after = bisect_right(self._regions, region.start, key=_start)
            beside = self._regions[max(0, after - 1) : after + 1]
            if any(each.start < region.stop and region.start < each.stop for each in beside):
                raise InvalidArgumentError("this memory is registered already, in part or whole")
            regions = self._regions.copy()
            insort(regions, region, key=_start)
            self._regions = regions

    def take(self, start: int) -> memoryview | None:
        """The memory that was registered at this address, which is not any more; None: none was."""
        with self._changing:
            found = [each.memory for each in self._regions if each.start == start]
            self._regions = [each for each in self._regions if each.start != start]
        return found[0] if found else None

    def at(self, address: int, size: int) -> memoryview:
        """``size`` bytes at this address, within one region.

        Raises:
            InvalidArgumentError: they are not.
        """
        regions = self._regions
        index = bisect_right(regions, address, key=_start) - 1
        if index >= 0 and size >= 0:
            start, stop, memory = regions[index]
            if address + size <= stop:
                return memory[address - start : address - start + size]
        raise InvalidArgumentError(
            f"{size} bytes at {address:#x} are not within memory that was registered",
            advice="register(address, size) first, once for each of the engine's buffers.",
        )


def _start(region: _Region) -> int:
    return region.start
