"""Keeps memory that a server frees for its next call.

A call with thousands of keys needs buffers of some 100 KiB. glibc takes memory of that size from
the kernel, or from the end of its heap, and gives it back as soon as it is free: then each call
pays for a page fault per 4 KiB. Whether it does depends on what else is on the heap.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of ``mallopt``."""

KEPT_BYTES: Final = 32 << 20
"""Free bytes at the end of the heap that stay ours."""

HEAP_BYTES: Final = 4 << 20
"""The largest buffer that comes from the heap."""


def keep_freed_memory() -> None:
    """For processes of our own commands. Does nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, HEAP_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
