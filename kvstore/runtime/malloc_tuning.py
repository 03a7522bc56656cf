"""Retention of freed memory in servers.

A call with thousands of keys needs buffers of some 100 KiB. By default glibc may return memory of
that size to the kernel when it is freed, so that each call costs a page fault per 4 KiB.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3

KEPT_BYTES: Final = 32 << 20
"""Free bytes at the end of the heap that are not returned."""

HEAP_BYTES: Final = 4 << 20
"""The largest buffer allocated on the heap."""


def keep_freed_memory() -> None:
    """Set the thresholds of glibc, in processes of our own commands; no effect with other C
    libraries."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, HEAP_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
