"""Discovery of the master: by one address, several in turn, or etcd."""

from __future__ import annotations

import asyncio
from typing import Final

from kvstore.errors import KVStoreError, NotLeaderError
from kvstore.runtime.addresses import ETCD_SCHEME, parse_etcd
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.leader_lookup import find_leader

LOCATE_S: Final = 2.0
"""How long etcd may take to name the leader."""

HOPS_MAX: Final = 3
"""Consecutive redirections that a node follows without a pause."""


class MasterDiscovery:
    """Chooses the master to try next. Use it in one event loop's thread."""

    def __init__(self, addresses: str) -> None:
        """``addresses``: as ``NodeConfig.master``, ``host:port,...`` or ``etcd://...``."""
        self._etcd = parse_etcd(addresses) if addresses.startswith(ETCD_SCHEME) else None
        self._addresses = [] if self._etcd else addresses.split(",")
        self._turn = 0
        self._leader = ""
        self._hops = 0

    @property
    def several(self) -> bool:
        """Whether another master may lead when this one is silent."""
        return len(self._addresses) != 1

    async def find(self) -> str:
        """The address to try next.

        Raises:
            NotLeaderError: no master leads now.
            EtcdUnreachableError, PermissionDeniedError, StartupError: as ``find_leader``.
        """
        if self._leader:
            leader, self._leader = self._leader, ""
            return leader
        if self._etcd is None:
            return self._addresses[self._turn % len(self._addresses)]
        leader = await asyncio.to_thread(find_leader, self._etcd, uptime() + LOCATE_S)
        if not leader:
            raise NotLeaderError("no master leads now", leader="")
        return leader

    def joined(self) -> None:
        """The last address was the leader's: ``find`` returns it first again."""
        self._hops = 0

    def failed(self, address: str, error: KVStoreError) -> bool:
        """Records that ``address`` (empty: none was found) has failed. Returns whether to try the
        next one without a pause, because a master named it as the leader."""
        self._turn += 1
        leader = str(error.fields.get("leader", "")) if isinstance(error, NotLeaderError) else ""
        if not leader or leader == address or self._hops >= HOPS_MAX:
            self._hops = 0
            return False
        self._hops += 1
        self._leader = leader
        return True
