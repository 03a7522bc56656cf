"""A word in shared memory that says whether the owner of a segment lives.

Memory of a device ends with its process, and the kernel frees it without a sign to those who copy
from it. The owner therefore holds a robust mutex in the superblock. When a thread ends, however it
ends, the kernel first marks the mutexes that the thread holds, and only then closes the files of
its process; the driver of a device frees memory when its files are closed. So memory was there
during a copy if the word says so after the copy.

The C library must be glibc, because the word is where glibc has it: at the beginning.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any, Final

from kvstore.errors import StartupError

MUTEX_BYTES: Final = 64
"""As much as a ``pthread_mutex_t`` takes on any processor."""

_OF_THREAD: Final = 0x3FFF_FFFF
"""Bits of the word that hold the thread's number; the kernel clears them."""
_SHARED: Final = 1
_ROBUST: Final = 1


def is_held(word: int) -> bool:
    """Whether the thread that has called ``hold`` lives; ``word``: the first 32 bits."""
    return bool(word & _OF_THREAD)


def hold(memory: mmap.mmap, offset: int) -> None:
    """Makes the word at ``offset`` (a multiple of 64) say that this thread lives. ``let_go`` is due
    before ``memory`` is unmapped, and in this thread.

    Raises:
        StartupError: this system has no such mutexes.
    """
    try:
        attributes = (ctypes.c_char * MUTEX_BYTES)()
        _call("pthread_mutexattr_init", attributes)
        _call("pthread_mutexattr_setpshared", attributes, _SHARED)
        _call("pthread_mutexattr_setrobust", attributes, _ROBUST)
        _call("pthread_mutex_init", _at(memory, offset), attributes)
        _call("pthread_mutex_lock", _at(memory, offset))
    except (OSError, AttributeError) as error:
        raise StartupError(f"this system has no robust mutexes: {error}") from error
    word = int.from_bytes(memory[offset : offset + 4], "little")
    if word & _OF_THREAD != threading.get_native_id():
        raise StartupError("a node with --device needs the C library glibc")


def let_go(memory: mmap.mmap, offset: int) -> bool:
    """Makes the word say that the owner is gone. False: another thread called ``hold``, so the
    memory must stay mapped."""
    try:
        _call("pthread_mutex_unlock", _at(memory, offset))
    except OSError:
        return False
    return True


def _at(memory: mmap.mmap, offset: int) -> Any:
    return ctypes.byref(ctypes.c_char.from_buffer(memory, offset))


def _call(name: str, *arguments: Any) -> None:
    error = getattr(ctypes.CDLL(None), name)(*arguments)
    if error:
        raise OSError(error, name)
