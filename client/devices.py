"""``ClientDevices``: creates one ``Device`` per GPU, and finds values in its memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.device import staging_ring
from kvstore.device.device import Device
from kvstore.device.drivers import driver_of, full_name
from kvstore.device.memory import DeviceMemory, memory_of
from kvstore.errors import DeviceError

if TYPE_CHECKING:
    import torch


class ClientDevices:
    """The devices of one client. Threads: any."""

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}
        self._changing = threading.Lock()

    def of(self, name: str) -> Device:
        """Return a device by its torch name, such as ``cuda:0``. Raises DeviceError."""
        name = full_name(name)
        device = self._devices.get(name)
        if device is None:
            with self._changing:
                device = self._devices.get(name)
                if device is None:
                    device = Device(driver_of(name), ring_bytes=staging_ring.RING_BYTES)
                    self._devices[name] = device
        return device

    def memory_of(self, value: torch.Tensor) -> DeviceMemory | None:
        """Return the memory of a contiguous device tensor; None: kvstore cannot copy it."""
        location = value.device
        if location.type != "cuda":
            return None
        try:
            device = self.of(f"cuda:{location.index or 0}")
        except DeviceError:  # another kind of accelerator: torch copies
            return None
        return memory_of(device, value)

    def sweep(self) -> None:
        for device in list(self._devices.values()):
            device.locks.sweep()

    def close(self) -> None:
        """Release page-locked memory once no call is in progress."""
        for device in self._devices.values():
            device.close()
