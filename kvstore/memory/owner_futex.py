"""A word in shared memory that says whether the owner of a segment lives.

Memory of a device ends with its process, and the kernel frees it without a sign to those who copy
from it. The owner therefore holds a robust mutex in the superblock. When a thread ends, however it
ends, the kernel first marks the mutexes that the thread holds, and only then gives up the memory
map and the files of its process, with which the driver of a device frees memory. So memory was
there during a copy if the word says so after the copy.

The C library must be glibc, which keeps the word at the beginning of the mutex.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any, Final

from kvstore.errors import StartupError
from kvstore.memory.pages import map_at

MUTEX_BYTES: Final = 64
"""As much as a ``pthread_mutex_t`` takes on any processor."""

_OF_THREAD: Final = 0x3FFF_FFFF
"""Bits of the word that hold the thread's number; the kernel clears them."""
_SHARED: Final = 1
_ROBUST: Final = 1


def is_owner_alive(word: int) -> bool:
    """Whether the thread that has called ``acquire_owner_futex`` lives; ``word``: the first 32
    bits."""
    return bool(word & _OF_THREAD)


def acquire_owner_futex(fd: int, offset: int) -> int:
    """Makes the word at ``offset`` of a file say that this thread lives; returns what
    ``release_owner_futex`` takes.

    The page is mapped a second time, at an address that no object of Python owns: if the mapping
    went before the thread, as objects do when the interpreter ends, the kernel could not mark it.

    Args:
        offset: a multiple of 64, in the file's first page.

    Raises:
        StartupError: this system has no such mutexes.
    """
    try:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        page = map_at(None, mmap.PAGESIZE, access, mmap.MAP_SHARED, fd)
        attributes = (ctypes.c_char * MUTEX_BYTES)()
        _call("pthread_mutexattr_init", attributes)
        _call("pthread_mutexattr_setpshared", attributes, _SHARED)
        _call("pthread_mutexattr_setrobust", attributes, _ROBUST)
        _call("pthread_mutex_init", ctypes.c_void_p(page + offset), attributes)
        _call("pthread_mutex_lock", ctypes.c_void_p(page + offset))
    except (OSError, AttributeError) as error:
        raise StartupError(f"this system has no robust mutexes: {error}") from error
    if ctypes.c_uint32.from_address(page + offset).value & _OF_THREAD != threading.get_native_id():
        release_owner_futex(page + offset)
        raise StartupError("a node with --device needs the C library glibc")
    return page + offset


def release_owner_futex(held: int) -> bool:
    """Makes the word say that the owner is gone. False: another thread called
    ``acquire_owner_futex``."""
    try:
        _call("pthread_mutex_unlock", ctypes.c_void_p(held))
    except OSError:
        return False
    _call("munmap", ctypes.c_void_p(held & -mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE))
    return True


def _call(name: str, *arguments: Any) -> None:
    error = getattr(ctypes.CDLL(None), name)(*arguments)
    if error:
        raise OSError(error, name)
