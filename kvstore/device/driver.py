"""What kvstore needs of an accelerator's driver.

A driver queues copies and says when they have ended. It decides nothing: ``kvstore.device.device``
and its callers say what is copied, in which pieces, and after which other work.
"""

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
    """A moment in the work of a device. Opaque."""


class Direction(enum.Enum):
    """Which of kvstore's two streams on a device does a copy. Neither stream waits for the other,
    nor for those on which an engine computes."""

    SAVE = "save"
    """Out of the device; at the lowest priority."""
    LOAD = "load"
    """Into the device; requests wait for it."""


class DeviceDriver(Protocol):
    """The driver of one device. Threads: any; no call changes the thread's current device.

    Every method raises ``DeviceError`` when the driver refuses or the device has failed.
    """

    @property
    def name(self) -> str:
        """As torch names the device: ``cuda:0``."""
        ...

    def record_event(self, stream: int | None = None) -> Event:
        """The moment at which the work that was queued on a stream until now has ended.

        Args:
            stream: the driver's handle of a stream; None: the one on which this thread computes.
        """
        ...

    def is_done(self, event: Event) -> bool:
        """Whether that moment has passed. Does not wait."""
        ...

    def copy(self, way: Direction, to: Numbers, source: Numbers, sizes: Numbers) -> Event:
        """Queues copies, which run in any order, and returns the moment at which all have ended.
        The arrays may be changed afterwards, the memory only after that moment.

        Args:
            to: one address per copy. One side of each copy at least is on this device; the other is
                too, or is host memory of one ``lock`` or ``locked_memory``.
        """
        ...

    def copy_ordinary(self, way: Direction, to: Numbers, source: Numbers, sizes: Numbers) -> Event:
        """As ``copy``, for host memory that is not page-locked: slower, and may wait for the copy
        to end."""
        ...

    def lock(self, address: int, size: int) -> bool:
        """Page-locks host memory, so that the device can copy it. False: the system refuses."""
        ...

    def unlock(self, address: int) -> None:
        """Undoes a ``lock``. No copy of that memory is under way."""
        ...

    def locked_memory(self, size: int) -> memoryview:
        """New page-locked memory of the host."""
        ...

    def release(self, memory: memoryview) -> None:
        """Gives ``locked_memory`` back; no copy of it is under way, and nothing refers to it."""
        ...

    def empty(self, size: int) -> torch.Tensor:
        """New memory of the device: a one-dimensional tensor of uint8. No work that was queued
        before uses it. When it is freed, work on this thread's current stream may still use it;
        for work on other streams, its owner calls ``Tensor.record_stream``."""
        ...

    def tensor_over(self, address: int, size: int, keep: object) -> torch.Tensor:
        """A one-dimensional tensor of uint8 over memory of the device, which is not copied.

        Args:
            keep: an object that lives as long as the tensor, and whatever shares its storage.
        """
        ...

    def allocate(self, size: int) -> int:
        """The address of new memory of the device, which other processes may ``open``. Its content
        is undefined, and it ends with this process."""
        ...

    def free(self, address: int) -> None:
        """Gives ``allocate``d memory back. No copy of it is under way, and no other process has it
        open."""
        ...

    def export(self, address: int) -> str:
        """A handle of ``allocate``d memory for other processes of this host: printable text, which
        begins with the identity of the device."""
        ...

    def open(self, handle: str) -> int:
        """The address in this process of memory that another process has exported. It stays mapped
        until ``close``; what it holds after its owner's end is undefined."""
        ...

    def close(self, address: int) -> None:
        """Undoes ``open``. No copy of the memory is under way."""
        ...
