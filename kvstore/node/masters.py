"""Where a node looks for its master: one place, several in turn, or what an etcd says."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from kvstore.addresses import ETCD_SCHEME, parse_etcd
from kvstore.errors import KVStoreError, NotLeaderError
from kvstore.etcd.finding import find_leader

LOCATE_S: Final = 2.0
"""How long etcd may take to say who leads."""

HOPS_MAX: Final = 3
"""How often a node goes straight to whom it was sent, before it pauses in between."""


class Masters:
    """The place to try next. One loop's thread."""

    def __init__(self, places: str) -> None:
        """``places``: ``host:port,...`` or ``etcd://...``, as ``NodeConfig.master`` has them."""
        self._etcd = parse_etcd(places) if places.startswith(ETCD_SCHEME) else None
        self._addresses = [] if self._etcd else places.split(",")
        self._turn = 0
        self._leader = ""
        self._hops = 0

    @property
    def several(self) -> bool:
        """Whether another one may lead when this one is silent."""
        return len(self._addresses) != 1

    async def find(self) -> str:
        """The address to try.

        Raises:
            NotLeaderError: nobody leads now.
            EtcdUnreachableError, PermissionDeniedError, StartupError: as ``find_leader``.
        """
        if self._leader:
            leader, self._leader = self._leader, ""
            return leader
        if self._etcd is None:
            return self._addresses[self._turn % len(self._addresses)]
        leader = await asyncio.to_thread(find_leader, self._etcd, time.monotonic() + LOCATE_S)
        if not leader:
            raise NotLeaderError("nobody leads now", leader="")
        return leader

    def joined(self) -> None:
        """That was the right one; it is the first to be tried again."""
        self._hops = 0

    def failed(self, address: str, error: KVStoreError) -> bool:
        """``address`` (empty: none was found) was of no use; whether to try the next one at once,
        because somebody said that it leads."""
        self._turn += 1
        leader = str(error.fields.get("leader", "")) if isinstance(error, NotLeaderError) else ""
        if not leader or leader == address or self._hops >= HOPS_MAX:
            self._hops = 0
            return False
        self._hops += 1
        self._leader = leader
        return True
