"""Values in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.device.copies import CopyList, merged
from kvstore.device.device import Device
from kvstore.device.driver import Event, Numbers
from kvstore.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

_NONE: Final = np.empty(0, np.int64)


class DeviceMemory:
    """Runs of device memory: a payload, or memory to fill. Immutable; does not own the memory."""

    __slots__ = ("addresses", "after", "device", "keep", "nbytes", "sizes")

    def __init__(
        self,
        device: Device,
        addresses: Numbers,
        sizes: Numbers,
        after: Sequence[Event] = (),
        keep: object = None,
        nbytes: int | None = None,
    ) -> None:
        """Describe memory of a device.

        Args:
            addresses: of the runs, in the sequence of the payload.
            sizes: of the runs, in bytes; none is 0.
            after: events before which kvstore must not touch the memory; none: the end of the work
                queued on the call's stream before the call (``Client.put``).
            keep: an object that owns the memory.
            nbytes: the sum of ``sizes``, if it is known.
        """
        self.device = device
        self.addresses = addresses
        self.sizes = sizes
        self.after = after
        self.keep = keep
        self.nbytes = int(sizes.sum()) if nbytes is None else nbytes

    def __len__(self) -> int:
        return self.nbytes

    def first(self, size: int) -> DeviceMemory:
        """Return the first ``size`` bytes of this memory, which has as many."""
        if size == self.nbytes:
            return self
        if not 0 < size < self.nbytes:
            raise InvalidArgumentError(f"{size} of {self.nbytes} bytes")
        ends = np.cumsum(self.sizes)
        count = int(np.searchsorted(ends, size)) + 1
        sizes = self.sizes[:count].copy()
        sizes[-1] -= ends[count - 1] - size
        return DeviceMemory(self.device, self.addresses[:count], sizes, self.after, self.keep, size)

    @property
    def overlaps_itself(self) -> bool:
        sequence = np.argsort(self.addresses)
        starts = self.addresses[sequence]
        return bool((starts[:-1] + self.sizes[sequence][:-1] > starts[1:]).any())

    @staticmethod
    def joined(memories: Sequence[DeviceMemory]) -> DeviceMemory:
        """Concatenate memories of one device."""
        if len(memories) == 1:
            return memories[0]
        addresses = np.concatenate([memory.addresses for memory in memories])
        sizes = np.concatenate([memory.sizes for memory in memories])
        events = [event for memory in memories for event in memory.after]
        return DeviceMemory(memories[0].device, addresses, sizes, events, list(memories))


def memory_of(device: Device, tensor: torch.Tensor) -> DeviceMemory:
    """Return the memory of a contiguous tensor on this device, which is kept alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return DeviceMemory(device, _NONE, _NONE)
    return DeviceMemory(device, np.array([tensor.data_ptr()]), np.array([size]), (), tensor, size)


def layout_copies(values: Sequence[DeviceMemory], places: Sequence[int]) -> CopyList:
    """Build the copies between values and a contiguous run of addresses elsewhere for each."""
    device = np.concatenate([value.addresses for value in values])
    sizes = np.concatenate([value.sizes for value in values])
    counts = np.fromiter((len(value.sizes) for value in values), np.int64, len(values))
    starts = np.cumsum(sizes) - sizes
    firsts = np.cumsum(counts) - counts
    shift = np.asarray(places, np.int64) - starts[firsts]
    return merged(CopyList(device, starts + np.repeat(shift, counts), sizes))
