"""File descriptors of a segment for processes of other users: one to read, one to read and write.

The kernel fixes the permissions of a file descriptor when it is opened. A read-only one cannot be
mapped writable. One that was opened under Landlock (Linux 6.2) without the permission to truncate
cannot shorten the file, which would kill processes that access the missing pages (SIGBUS). Seals of
a memfd do the same, but a memfd has no name under which the node's next start could find it.

A writer can make the file longer (``fallocate``), or free pages in it (``MADV_REMOVE``): they read
as zeros, or kill a process that accesses them while ``/dev/shm`` is full. The node's next start
repairs both. A process of the file's own user can open the file again, with all permissions.
"""

from __future__ import annotations

import ctypes
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

_CREATE_RULESET: Final = 444
_RESTRICT_SELF: Final = 446
"""Numbers of system calls, the same on all architectures, for which libc has no function."""

_TRUNCATE: Final = struct.pack("=Q", 1 << 14)
"""``struct landlock_ruleset_attr``: the one kind of access that needs a rule, and no rule is
added."""

_NO_NEW_PRIVS: Final = 38
_VERSION: Final = 1
_ABI_OF_TRUNCATE: Final = 3


class SharedDescriptors(NamedTuple):
    """File descriptors for other processes."""

    to_read: int
    to_write: int
    is_fixed: bool
    """Whether ``to_write`` cannot truncate; False: this kernel cannot forbid that."""

    def close(self) -> None:
        os.close(self.to_read)
        os.close(self.to_write)


def lend(fd: int) -> SharedDescriptors:
    """Opens the file of ``fd`` again, for the caller; lock and offset are not shared.

    Raises:
        OSError: the file cannot be opened again.
    """
    with ThreadPoolExecutor(1, "kvstore-lend") as thread:  # Landlock restricts it permanently
        return thread.submit(_open, f"/proc/self/fd/{fd}").result()


def _open(path: str) -> SharedDescriptors:
    to_read = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        is_fixed = _forbid_truncation()
        return SharedDescriptors(to_read, os.open(path, os.O_RDWR | os.O_CLOEXEC), is_fixed)
    except BaseException:
        os.close(to_read)
        raise


def _forbid_truncation() -> bool:
    """Forbids truncation by file descriptors that this thread opens from now on. False: the kernel
    does not support it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION) < _ABI_OF_TRUNCATE:
        return False
    ruleset = libc.syscall(_CREATE_RULESET, _TRUNCATE, ctypes.c_size_t(len(_TRUNCATE)), 0)
    if ruleset < 0:
        return False
    try:
        if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
            return False
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)
