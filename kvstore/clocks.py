"""The clock of promises and deadlines.

A host that is suspended (a laptop, a virtual machine that is moved) does not count that time on
CLOCK_MONOTONIC. Others do: leases end, grants expire, another master is elected. So everything
that compares the time with a promise of another process asks ``uptime``, and so does everything
that compares a deadline with it: there is one clock, and values of two are never compared. How long
the kernel is told to wait is a difference of two of its values.

``time.monotonic`` measures how long something of ours took, and times what promises others nothing.
A master counts what *it* promises on it: if its host is suspended, it keeps its promises longer.
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
"""Seconds since this host has started, suspended or not. Costs what ``time.monotonic`` does (60
and 45 ns), but for kernels before 5.3, which have to be called for it."""
