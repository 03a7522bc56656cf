"""File descriptors: a process without free ones can neither accept connections nor log."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from typing import Final

RESERVE: Final = 256
"""File descriptors for everything except clients' connections: files, listeners, pipes,
libraries."""

NONE_LEFT: Final = (errno.EMFILE, errno.ENFILE)
"""The error numbers if this process, or the host, has no free file descriptors."""

STDERR: Final = 2


def raise_limit(wanted: int) -> int:
    """Raise this process's limit to ``wanted`` file descriptors, as far as the hard limit allows;
    return the result."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def keep_standard() -> None:
    """Open ``/dev/null`` as standard input, output and error where they are closed (cron, ``>&-``).
    Otherwise the next socket takes the number, and a peer receives what a library prints."""
    for fd in range(STDERR + 1):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number


def sockets() -> Iterator[socket.socket]:
    """Yield every socket of this process, as a duplicate that the next step closes."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with duplicate:
            yield duplicate


def open_now() -> int | None:
    """Return the number of open file descriptors; None: no free one to count them. Since Linux 6.2
    in microseconds, before with some 10 ms per thousand."""
    try:
        listing = os.open("/proc/self/fd", os.O_RDONLY)
        try:
            counted = os.fstat(listing).st_size - 1  # one belongs to the listing
            return counted if counted >= 0 else len(os.listdir("/proc/self/fd")) - 2
        finally:
            os.close(listing)
    except OSError as error:
        if error.errno not in NONE_LEFT:
            raise
        return None
