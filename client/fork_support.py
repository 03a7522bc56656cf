"""Clients in a forked process.

A child cannot use its parent's connections, threads and locks. Right after a fork, before other
code runs in the child, each client resets itself: own number, connections and threads, and none of
the parent's leases. It closes its copies of shared file descriptors, but sends, shuts down, revokes
and stops nothing.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any, Final

log = logging.getLogger("kvstore.client")


_clients: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_kept: Final[list[object]] = []


def watch(client: object) -> None:
    """Reset the client in every child; takes no earlier lock. If it fails, calls are refused."""
    _clients.add(client)


def leak_deliberately(parents: object) -> None:
    """Keep an object of the parent forever: its destructor would do more than free memory."""
    _kept.append(parents)


def _in_child() -> None:
    for client in list(_clients):
        try:
            client._reset_after_fork()
        except Exception:
            client._close_after_fork()
            log.exception("client_not_usable_after_fork pid=%d", os.getpid())


os.register_at_fork(after_in_child=_in_child)
