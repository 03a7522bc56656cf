"""Lists of copies as arrays: a batch of 1,000 blocks of 64 pages is 64,000 copies. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvstore.device.driver import Numbers


class CopyList(NamedTuple):
    """Pairs of runs of equal size: one run on the device, the other usually in host memory."""

    device: Numbers
    other: Numbers
    """Addresses, usually of the host."""
    sizes: Numbers
    """Bytes; none is 0."""


def merged(copies: CopyList) -> CopyList:
    """Merge copies that are contiguous on both sides."""
    device, other, sizes = copies
    if len(sizes) < 2:
        return copies
    begins = np.ones(len(sizes), bool)
    begins[1:] = (device[1:] != device[:-1] + sizes[:-1]) | (other[1:] != other[:-1] + sizes[:-1])
    if begins.all():
        return copies
    at = np.flatnonzero(begins)
    return CopyList(device[at], other[at], np.add.reduceat(sizes, at))


def split_at_windows(copies: CopyList, base: int, window: int) -> CopyList:
    """Split copies at multiples of ``window`` bytes from ``base``, the units of page locks."""
    device, other, sizes = copies
    first = (other - base) // window
    parts = (other + sizes - 1 - base) // window - first + 1
    if parts.max(initial=1) == 1:
        return copies
    row = np.repeat(np.arange(len(sizes)), parts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    border = base + (first[row] + number) * window
    begin = np.maximum(other[row], border)
    end = np.minimum(other[row] + sizes[row], border + window)
    return CopyList(device[row] + (begin - other[row]), begin, end - begin)
