"""Processor time of other processes, to the nanosecond: polling counts, sleeping does not."""

from __future__ import annotations

import time
from pathlib import Path

Shares = dict[str, float]
"""Processor time of one system, by process: ``client``, ``master``, ``storage``."""

_ALL_THREADS = 2
"""CPUCLOCK_SCHED of Linux's ``posix-timers_types.h``: the clock of a process with its threads,
also those that have ended."""


def processor_seconds(pid: int) -> float:
    """Seconds that a process and its living descendants have used, in user and system mode.

    Raises:
        OSError: there is no such process.
    """
    # The clock id that glibc's clock_getcpuclockid makes.
    used = time.clock_gettime((~pid << 3) | _ALL_THREADS)
    return used + sum(processor_seconds(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in threads for child in each.read_text().split()]
