"""The caller's registered memory, by address: engines pass addresses, not buffers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.client.values import Payload
from kvstore.errors import InvalidArgumentError
from kvstore.memory.regions import Region, Regions

if TYPE_CHECKING:
    from kvstore.device.device import Device

_NO_BYTES = memoryview(b"")


class RegisteredBuffers:
    def __init__(self) -> None:
        self._regions = Regions()
        self._devices: dict[int, Device] = {}
        """The device of a region, by the region's address; absent for host memory."""
        self._changing = threading.Lock()

    def add(self, memory: memoryview) -> None:
        """Register host memory. Raises InvalidArgumentError: it overlaps registered memory."""
        if memory.nbytes:
            self._add(Region.of(memory), None)

    def add_of(self, device: Device, start: int, size: int) -> None:
        self._add(Region(start, start + size, _NO_BYTES), device)

    def _add(self, region: Region, device: Device | None) -> None:
        with self._changing:
            if self._regions.overlap(region):
                raise InvalidArgumentError(
                    "this memory is registered already, partly or completely"
                )
            if device is not None:
                self._devices[region.start] = device
            self._regions.add(region)

    def take(self, start: int) -> memoryview | None:
        """Unregister the memory at this address; returns host memory, otherwise None."""
        with self._changing:
            region = self._regions.take(start)
            is_of_host = self._devices.pop(start, None) is None
        return region.memory if region is not None and is_of_host else None

    def at(self, address: int, size: int) -> memoryview:
        """Return host memory of one region. Raises InvalidArgumentError: it is none."""
        region = self._region_containing(address, size)
        if region.start in self._devices:
            raise InvalidArgumentError(
                f"{size} bytes at {address:#x} are memory of {self._devices[region.start].name}, "
                "which this call cannot use",
                advice="Put and get complete values there.",
            )
        return region.memory[address - region.start : address - region.start + size]

    def payload(self, addresses: Sequence[int], sizes: Sequence[int]) -> Payload:
        """Return runs of one device or of the host as one value. Raises InvalidArgumentError."""
        if len(addresses) != len(sizes):
            raise InvalidArgumentError(f"{len(addresses)} addresses and {len(sizes)} sizes")
        parts = [part for part in zip(addresses, sizes, strict=True) if part[1]]
        devices = {self._devices.get(self._region_containing(*part).start) for part in parts}
        if len(devices) > 1:
            raise InvalidArgumentError(
                "the runs of a value are in different memories",
                advice="Put the parts that are in different memories under keys of their own.",
            )
        device = devices.pop() if devices else None
        if device is None:
            return [self.at(*part) for part in parts]
        from kvstore.device.memory import DeviceMemory

        return DeviceMemory(device, *np.ascontiguousarray(np.array(parts, np.int64).T))

    def _region_containing(self, address: int, size: int) -> Region:
        region = self._regions.holding(address, size) if size >= 0 else None
        if region is None:
            raise InvalidArgumentError(
                f"{size} bytes at {address:#x} are not within memory that was registered",
                advice="register(address, size) first, once for each of the engine's buffers.",
            )
        return region
