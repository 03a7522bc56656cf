"""Protection of keys from core files and from other processes of the same user.

Only for processes of our own commands, not for programs that use the library.
"""

from __future__ import annotations

import ctypes
import logging
import os

log = logging.getLogger("kvstore.runtime")

_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Disable core files of this process, and access of users except root to ``ptrace`` and to
    ``/proc/PID/mem``, ``environ`` and ``fd``. Child programs are not affected."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        log.warning("memory_not_hidden reason=%s", os.strerror(ctypes.get_errno()))
