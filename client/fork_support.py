"""Clients in a forked process.

A child cannot use its parent's connections, threads and locks: two processes that send on one
connection break it for both, a fork does not copy threads, and a thread of the parent may hold a
lock for ever. So right after a fork, before any other code runs in the child, each client starts
again with its own number, connections and threads, and without the parent's leases. It only closes
its copies of shared descriptors; it sends, shuts down, revokes and stops nothing.
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
    """Calls the client's ``_reset_after_fork`` in every child, as long as the client exists; it
    takes no lock that existed before the fork. If it fails, ``_close_after_fork`` refuses all
    calls."""
    _clients.add(client)


def leak_deliberately(parents: object) -> None:
    """Keeps an object of the parent for ever, because its destructor would do more than free
    memory."""
    _kept.append(parents)


def _in_child() -> None:
    for client in list(_clients):
        try:
            client._reset_after_fork()
        except Exception:
            client._close_after_fork()
            log.exception("client_not_usable_after_fork pid=%d", os.getpid())


os.register_at_fork(after_in_child=_in_child)
