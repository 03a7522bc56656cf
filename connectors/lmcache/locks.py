"""Leases on objects from their lookup by LMCache's daemon until it unlocks them.

A load releases the lease of its objects. If several requests have locked an object, its lease is
renewed for the others within ``RENEW_S``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.connectors.common.guarded_client import GuardedCall, GuardedClient
from kvstore.errors import KVStoreError
from kvstore.runtime.tasks import CLOSE_S, join_all, start_thread

RENEW_S: Final = 3.0
"""Maximum renewal interval; the default lease (``--lease-ms``) is 10 s."""

HELD_S_MAX: Final = 60.0
"""Maximum age of a lock after its last lookup. Without this limit, a dead controller would fill the
pool with objects that cannot be evicted."""


@dataclass
class _Lock:
    namespace: str
    name: bytes
    count: int
    since: float
    renewed: float


class LookupLocks:
    """Counts the locks on each object, and renews the leases of locked objects by looking them up
    again. A lease that cannot be renewed costs a miss, never wrong bytes. Threads: any."""

    def __init__(self, guard: GuardedClient, log: logging.Logger) -> None:
        self._guard = guard
        self._log = log
        self._changing = threading.Condition()
        self._locks: dict[Hashable, _Lock] = {}
        self._closed = False
        self._thread = start_thread("kvstore-lmcache-locks", self._renew_forever)

    def __len__(self) -> int:
        return len(self._locks)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._locks

    def add(self, namespace: str, found: Sequence[tuple[Hashable, bytes]]) -> None:
        """Lock objects that have just been leased, given by LMCache's key and the store's key."""
        now = time.monotonic()
        with self._changing:
            for key, name in found:
                lock = self._locks.get(key)
                if lock is None:
                    self._locks[key] = _Lock(namespace, name, 1, now, now)
                else:
                    lock.namespace, lock.name = namespace, name
                    lock.count += 1
                    lock.since = lock.renewed = now

    def remove(self, keys: Sequence[Hashable]) -> None:
        """Release one lock on each object; ignore objects that are not locked."""
        unlocked: dict[str, list[bytes]] = {}
        with self._changing:
            for key in keys:
                lock = self._locks.get(key)
                if lock is not None:
                    lock.count -= 1
                    if lock.count <= 0:
                        del self._locks[key]
                        unlocked.setdefault(lock.namespace, []).append(lock.name)
        for namespace, names in unlocked.items():
            self._guard.client.release(names, namespace=namespace)

    def close(self) -> None:
        with self._changing:
            self._closed = True
            self._changing.notify()
        join_all([self._thread], CLOSE_S)

    def _renew_forever(self) -> None:
        while True:
            with self._changing:
                if self._changing.wait_for(lambda: self._closed, RENEW_S / 2):
                    return
                due = self._due(time.monotonic())
            for namespace, names in due.items():
                try:
                    GuardedCall(self._guard).lookup(names, namespace)
                except KVStoreError as error:
                    self._log.debug("leases of %d objects not renewed: %s", len(names), error)

    def _due(self, now: float) -> dict[str, list[bytes]]:
        """Return the keys to look up again, by namespace. Drops locks older than ``HELD_S_MAX``."""
        due: dict[str, list[bytes]] = {}
        for key, lock in list(self._locks.items()):
            if now - lock.since > HELD_S_MAX:
                del self._locks[key]
            elif now - lock.renewed > RENEW_S / 2:
                lock.renewed = now
                due.setdefault(lock.namespace, []).append(lock.name)
        return due
