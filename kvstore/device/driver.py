"""The interface of accelerator drivers, which queue copies and report their end."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Numbers = NDArray[np.int64]
"""Addresses, or sizes in bytes; one-dimensional and contiguous."""


class Event(Protocol):
    """An opaque event in the work of a device."""


class Direction(enum.Enum):
    """kvstore's two streams on a device. They wait neither for each other nor for the engine's."""

    SAVE = "save"
    """From the device; at the lowest priority."""
    LOAD = "load"
    """To the device; requests wait for it."""


class DeviceDriver(Protocol):
    """The driver of one device. Threads: any; no call changes the thread's current device.

    Every method raises ``DeviceError`` when the driver refuses or the device has failed.
    """

    @property
    def name(self) -> str:
        """Name in torch: ``cuda:0``."""
        ...

    def record_event(self, stream: int | None = None) -> Event:
        """Return an event after the work on a stream so far; None: this thread's current stream."""
        ...

    def is_done(self, event: Event) -> bool:
        """Return whether the event has occurred. Does not wait."""
        ...

    def copy(self, way: Direction, to: Numbers, source: Numbers, sizes: Numbers) -> Event:
        """Queue copies, which run in any order, and return the event of their end.

        The arrays may be changed at once, the memory only after the event.

        Args:
            to: one address per copy. At least one side of each copy is on this device; the other is
                too, or is host memory of one ``lock`` or ``locked_memory``.
        """
        ...

    def copy_ordinary(self, way: Direction, to: Numbers, source: Numbers, sizes: Numbers) -> Event:
        """As ``copy``, for unlocked host memory: slower, and may wait for the copy to end."""
        ...

    def lock(self, address: int, size: int) -> bool:
        """Page-lock host memory, so that the device can copy it. False: the system refuses."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock memory. No copy of it is in progress."""
        ...

    def locked_memory(self, size: int) -> memoryview:
        """Allocate page-locked host memory."""
        ...

    def release(self, memory: memoryview) -> None:
        """Free ``locked_memory`` that no copy and no reference uses."""
        ...

    def empty(self, size: int) -> torch.Tensor:
        """Allocate a one-dimensional uint8 tensor that no earlier work uses.

        After it is freed, work on this thread's current stream may still use it; for other streams,
        its owner calls ``Tensor.record_stream``.
        """
        ...

    def tensor_over(self, address: int, size: int, keep: object) -> torch.Tensor:
        """Return a flat uint8 tensor over device memory. Its storage keeps ``keep`` alive."""
        ...

    def allocate(self, size: int) -> int:
        """Allocate memory, which others may ``open``, until the process ends."""
        ...

    def free(self, address: int) -> None:
        """Free ``allocate``d memory that no copy uses and no other process has open."""
        ...

    def export(self, address: int) -> str:
        """Return a printable handle for other processes; it begins with the device's identity."""
        ...

    def open(self, handle: str) -> int:
        """Map another process's memory until ``close``; undefined after its owner's end."""
        ...

    def close(self, address: int) -> None:
        """Unmap memory of ``open``. No copy of it is in progress."""
        ...
