"""What a core file must not hold, and other processes of the same user must not read: keys.

Only for processes of our own commands. A library does not decide this for the program that it is
in: the memory of an engine is its own.
"""

from __future__ import annotations

import ctypes
import logging
import os

log = logging.getLogger("kvstore.runtime")

_SET_DUMPABLE = 4
"""``PR_SET_DUMPABLE`` of ``prctl``."""


def hide_memory() -> None:
    """From now on the kernel writes no core file of this process, and lets only root trace it or
    look into ``/proc/PID/mem``, ``environ`` and ``fd``. Programs that this process starts are not
    hidden.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        log.warning("memory_not_hidden reason=%s", os.strerror(ctypes.get_errno()))
