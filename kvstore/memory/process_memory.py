"""Memory of this process by address, as engines pass it."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from kvstore.errors import InvalidArgumentError

_CUDA: Final = "libcuda.so.1"
_CU_MEMORY_TYPE, _CU_IS_MANAGED, _CU_ORDINAL = 2, 8, 9
_CU_DEVICE: Final = 2
"""Numbers of the CUDA driver's ``CUpointer_attribute`` and ``CUmemorytype``."""


def address_of(memory: memoryview) -> int:
    """The address of the first byte, also of read-only memory; 0 for memory of no bytes."""
    import numpy as np  # imported by every client anyway, and not by a node

    return int(np.frombuffer(memory, np.uint8).ctypes.data) if memory.nbytes else 0


def memory_at(address: int, size: int) -> memoryview:
    """A flat memoryview of memory at an address, read-only if mapped so. Does not keep it alive.

    Raises:
        InvalidArgumentError: not a range of addresses, or memory that the processor cannot read: of
            a device, or not mapped at all.
    """
    if size <= 0 or not 0 < address <= (1 << 64) - size:
        raise InvalidArgumentError(f"{size} bytes at {address:#x} are no memory")
    if cuda_device_at(address):
        raise InvalidArgumentError(
            f"{size} bytes at {address:#x} are memory of a CUDA device, which the processor cannot "
            "copy",
            advice="Register the engine's host memory, and let the engine copy between the two.",
        )
    unreadable, is_writable = _mapped(address, size)
    if unreadable is not None:
        raise InvalidArgumentError(
            f"{size} bytes at {address:#x}: address {unreadable:#x} is not readable host memory "
            "(GPU memory, or not mapped)",
            advice="Register host memory, and keep it allocated until unregister() has returned.",
        )
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return memory if is_writable else memory.toreadonly()


def _mapped(address: int, size: int) -> tuple[int | None, bool]:
    """The first address of the range that cannot be read, or None; and whether all of it can be
    written. Without ``/proc`` the range counts as readable and writable."""
    at, is_writable = address, True
    try:
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                span, how, *_ = line.split(maxsplit=2)
                start, stop = (int(each, 16) for each in span.split(b"-"))
                if stop <= at:
                    continue
                if start > at or not how.startswith(b"r"):
                    return at, False
                is_writable &= how.startswith(b"rw")
                at = stop
                if at >= address + size:
                    return None, is_writable
    except OSError:
        return None, True
    return at, False


def cuda_device_at(address: int) -> str:
    """The CUDA device (``cuda:0``) of memory that the processor cannot use; empty: it can."""
    try:
        cuda = ctypes.CDLL(_CUDA, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return ""
    is_device = _cuda_says(cuda, _CU_MEMORY_TYPE, address) == _CU_DEVICE
    if not is_device or _cuda_says(cuda, _CU_IS_MANAGED, address):
        return ""
    return f"cuda:{_cuda_says(cuda, _CU_ORDINAL, address)}"


def _cuda_says(cuda: ctypes.CDLL, attribute: int, address: int) -> int:
    """An attribute of the address; 0 also if the driver does not know the address."""
    value = ctypes.c_uint(0)
    error = cuda.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address))
    return 0 if error else value.value
