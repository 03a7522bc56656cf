"""The caller's registered memory, by address: engines hand over addresses, not buffers."""

from __future__ import annotations

import threading

from kvstore.errors import InvalidArgumentError
from kvstore.memory.regions import Region, Regions


class RegisteredMemory:
    """Lends parts of registered memory. Threads: any."""

    def __init__(self) -> None:
        self._regions = Regions()
        self._changing = threading.Lock()

    def add(self, memory: memoryview) -> None:
        """Raises InvalidArgumentError: it overlaps registered memory."""
        if not memory.nbytes:
            return
        region = Region.of(memory)
        with self._changing:
            if self._regions.overlap(region):
                raise InvalidArgumentError("this memory is registered already, in part or whole")
            self._regions.add(region)

    def take(self, start: int) -> memoryview | None:
        """Unregisters and returns the memory that begins at this address; None: there is none."""
        with self._changing:
            region = self._regions.take(start)
        return None if region is None else region.memory

    def at(self, address: int, size: int) -> memoryview:
        """``size`` bytes at this address, within one region.

        Raises:
            InvalidArgumentError: they are not within one region.
        """
        region = self._regions.holding(address, size) if size >= 0 else None
        if region is None:
            raise InvalidArgumentError(
                f"{size} bytes at {address:#x} are not within memory that was registered",
                advice="register(address, size) first, once for each of the engine's buffers.",
            )
        return region.memory[address - region.start : address - region.start + size]
