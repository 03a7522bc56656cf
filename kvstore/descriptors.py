"""Descriptors: each connection takes one, and a process without any can neither accept nor log."""

from __future__ import annotations

import os
import resource
from typing import Final

RESERVE: Final = 256
"""Descriptors for everything but clients' connections: files, listeners, pipes, libraries."""

STDERR: Final = 2


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


def keep_standard() -> None:
    """Opens ``/dev/null`` in the place of closed standard input, output and error. Without that
    (cron, ``>&-``) the next socket takes the number, and what a library prints goes to a peer."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def open_now() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # one is of the listing itself
