"""Descriptors: each connection takes one, and a process without any can neither accept nor log."""

from __future__ import annotations

import os
import resource
from typing import Final

RESERVE: Final = 256
"""Descriptors for everything but clients' connections: files, listeners, pipes, libraries."""


def allow(wanted: int) -> int:
    """Raises this process's limit to ``wanted`` descriptors, as far as the hard limit lets. Returns
    the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def open_now() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # one is of the listing itself
