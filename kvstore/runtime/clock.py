"""The clock of deadlines that other processes rely on.

CLOCK_MONOTONIC does not count the time in which the host is suspended (a laptop, a virtual machine
that is migrated). For other hosts that time passes: leases end, grants expire, another master is
elected. Code that compares the time with a promise of another process, or with a deadline derived
from one, reads ``uptime``. Waits of the kernel get a difference of two ``uptime`` values.

``time.monotonic`` measures durations within this process. A master uses it for its own promises: if
its host is suspended, it keeps them longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

uptime: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
"""Seconds since this host started, suspended time included. Takes 60 ns (``time.monotonic``: 45),
more on kernels before 5.3, where it is a system call."""


def uptime_ms() -> int:
    """Return ``uptime`` in milliseconds, with which nodes compare the expiry of capabilities."""
    return int(uptime() * 1000)
