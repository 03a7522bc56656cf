"""A robust mutex in the superblock: its word tells clients whether the owner of a segment lives.

Memory of a device ends with its process, and clients that copy from it get no error. When a thread
ends, the kernel first marks its robust mutexes, then releases the memory map and the files, with
which the driver frees memory. So the memory existed during a copy if the word says so afterwards.

The C library must be glibc, which has the word at the start of the mutex.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any, Final

from kvstore.errors import StartupError
from kvstore.memory.pages import map_at

MUTEX_BYTES: Final = 64
"""The size of a ``pthread_mutex_t`` on any processor, at most."""

_OF_THREAD: Final = 0x3FFF_FFFF
"""Bits of the thread's number, which the kernel clears."""
_SHARED: Final = 1
_ROBUST: Final = 1


def is_owner_alive(word: int) -> bool:
    """Whether the thread that acquired the futex lives, by its first 32 bits."""
    return bool(word & _OF_THREAD)


def acquire_owner_futex(fd: int, offset: int) -> int:
    """Locks the mutex at ``offset`` of a file; returns its address, for ``release_owner_futex``.

    Maps the page a second time, at an address that no Python object owns: the interpreter unmaps
    objects before the thread ends, and the kernel could not mark the mutex then.

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


def release_owner_futex(address: int) -> bool:
    """Unlocks the mutex. False: another thread holds it."""
    try:
        _call("pthread_mutex_unlock", ctypes.c_void_p(address))
    except OSError:
        return False
    _call("munmap", ctypes.c_void_p(address & -mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE))
    return True


def _call(name: str, *arguments: Any) -> None:
    error = getattr(ctypes.CDLL(None), name)(*arguments)
    if error:
        raise OSError(error, name)
