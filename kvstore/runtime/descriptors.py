"""Descriptors: each connection takes one; a process with none left can neither accept nor log."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from typing import Final

RESERVE: Final = 256
"""Descriptors for everything but clients' connections: files, listeners, pipes, libraries."""

NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE)
"""What the system says if this process, or the whole host, has no descriptor left."""

STDERR: Final = 2


def raise_limit(wanted: int) -> int:
    """Raises this process's limit to ``wanted`` descriptors, as far as the hard limit lets. Returns
    the resulting limit."""
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
    for fd in range(STDERR + 1):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number


def sockets() -> Iterator[socket.socket]:
    """Every socket of this process, as a duplicate that is closed with the next step."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since
            continue
        with duplicate:
            yield duplicate


def open_now() -> int | None:
    """How many descriptors this process has open; None: none is left, with which to look."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # one is of the listing itself
    except OSError as error:
        if error.errno not in NONE_LEFT:
            raise
        return None
