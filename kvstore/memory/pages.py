"""Pages of a mapping: pre-faulting, huge pages, locking, and binding to a NUMA node.

The first access to a page is a minor fault: a get from a fresh mapping ran at 10 GB/s instead of
32, a put at 3 instead of 40 (``docs/memory.md``). The calls use ctypes, which releases the GIL
(``mmap.madvise`` does not), so threads can clear pages in parallel.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final

POPULATE_READ: Final = 22
"""Map the pages that exist. Shared memory needs no second fault for writing."""
POPULATE_WRITE: Final = 23
"""Also allocate and clear missing pages."""

_REFUSED: Final = (errno.EINVAL, errno.EPERM, errno.ENOSYS)
_HUGEPAGE: Final = 14
_LOCK_ON_FAULT: Final = 1
_BIND: Final = 2
_MBIND_NUMBERS: Final = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259}
"""Numbers of the system call ``mbind``, for which libc has no function."""


@cache
def _function(name: str) -> Callable[..., int]:
    function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    return function


def _at(memory: mmap.mmap | memoryview, start: int = 0) -> Any:
    """A pointer into ``memory``, which keeps it mapped."""
    return ctypes.byref(ctypes.c_char.from_buffer(memory, start))


def _call(name: str, *arguments: Any) -> None:
    if _function(name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def populate(memory: mmap.mmap | memoryview, start: int, length: int, advice: int) -> bool:
    """Maps ``length`` bytes from ``start``, both multiples of the page size. Returns False if the
    kernel (before 5.14) lacks this call, or refuses it.

    Raises:
        OSError: the kernel cannot provide the pages.
    """
    try:
        _call("madvise", _at(memory, start), ctypes.c_size_t(length), advice)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def map_at(address: int | None, length: int, access: int, flags: int, fd: int) -> int:
    """Calls libc's ``mmap``, for mappings that no Python object owns. Raises OSError."""
    map_pages: Any = ctypes.CDLL(None, use_errno=True).mmap
    map_pages.restype = ctypes.c_void_p
    map_pages.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    mapped: int | None = map_pages(address, length, access, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return mapped


def zero(memory: mmap.mmap | memoryview, start: int, length: int) -> None:
    ctypes.memset(_at(memory, start), 0, length)


def prefer_huge(memory: mmap.mmap) -> None:
    """Requests huge pages for later allocations; the kernel may provide none (``huge_bytes``)."""
    try:
        _call("madvise", _at(memory), ctypes.c_size_t(len(memory)), _HUGEPAGE)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise


def lock_on_fault(memory: mmap.mmap) -> None:
    """Locks pages in memory from their first access on, as long as they are mapped.

    Raises:
        OSError: EPERM or ENOMEM, beyond the limit of locked memory; then nothing is locked.
    """
    _call("mlock2", _at(memory), ctypes.c_size_t(len(memory)), _LOCK_ON_FAULT)


def bind(memory: mmap.mmap, numa_node: int) -> None:
    """Binds new pages of the mapping, of any process, to one NUMA node.

    Raises:
        OSError: this process may not use the node (EINVAL), or the kernel lacks the call (ENOSYS).
    """
    number = _MBIND_NUMBERS.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known on {os.uname().machine}")
    words = (ctypes.c_ulong * (numa_node // 64 + 1))()
    words[numa_node // 64] = 1 << numa_node % 64
    bits = ctypes.c_ulong(64 * len(words) + 1)  # the kernel reads one bit less
    length = ctypes.c_size_t(len(memory))
    _call("syscall", ctypes.c_long(number), _at(memory), length, _BIND, words, bits, 0)


def huge_bytes(memory: mmap.mmap) -> int:
    """The bytes of a mapping in huge pages. Costs some milliseconds per GiB of small pages."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    here = False
    found = 0
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                start, _, end = name.partition("-")
                here = int(start, 16) < address + len(memory) and address < int(end, 16)
            elif here and name in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
                found += int(rest.split()[0]) << 10
    return found
