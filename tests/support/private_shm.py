"""Processes that run tests do not see the shared memory of other programs.

What a test leaves behind in ``/dev/shm`` cannot be distinguished from what a store of this host or
a test of another process uses there. So each process that runs tests gets a ``/dev/shm`` of its
own: a mount namespace, which needs root. Without root the tests share the host's, and do not check
what is left there (``leaks.py``).
"""

from __future__ import annotations

import ctypes

import pytest

CLONE_NEWNS = 0x0002_0000
MS_REC = 0x4000
MS_PRIVATE = 0x0004_0000
MS_NOSUID_NODEV = 0x6


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of several that run tests. Not by the environment, which a pytest
    that a test starts has from its worker."""
    return hasattr(config, "workerinput")


def give_process_its_own_shared_memory() -> bool:
    """For the calling thread, and for the threads and processes that it starts from now on.

    Returns:
        Whether ``/dev/shm`` is that of this process alone now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    private = ctypes.c_ulong(MS_REC | MS_PRIVATE)
    tmpfs = (b"kvstore-tests", b"/dev/shm", b"tmpfs", ctypes.c_ulong(MS_NOSUID_NODEV), b"mode=1777")
    return bool(
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, private, None) == 0
        and libc.mount(*tmpfs) == 0
    )
