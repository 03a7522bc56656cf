"""Announces a master to the others of its etcd, and notices those that ended without stopping."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final

from kvstore.errors import KVStoreError
from kvstore.master.cluster_events import ClusterEventLog
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.client import MASTERS_MAX, Etcd
from kvstore.runtime.formatting import sanitize

log = logging.getLogger("kvstore.master")

EVERY_S: Final = 2.0
LEASE_S: Final = 8
"""TTL of an announcement, several ``EVERY_S``."""

STOPPED: Final = "stopped"
"""Note of a master that was asked to stop."""


class PeerMasters:
    """The masters that announce themselves in one etcd. Owns ``etcd``."""

    def __init__(self, etcd: Etcd, address: str, notices: ClusterEventLog) -> None:
        """``address``: this master's own."""
        self.lost: dict[str, None] = {}
        """Addresses of masters that ended without stopping and have no successor, in that order."""
        self._etcd = etcd
        self._address = address
        self._notices = notices
        self.running: set[str] = set()
        """Addresses of the masters that announce themselves, without this one."""
        self._lease_id = 0

    async def run(self) -> None:
        """Announce this master until cancelled; then call ``stop``."""
        level = logging.WARNING
        while True:
            try:
                await self._announce(uptime() + EVERY_S)
                level = logging.WARNING
            except KVStoreError as error:
                log.log(level, "not_announced reason=%s", error)
                level = logging.DEBUG
            await asyncio.sleep(EVERY_S)

    async def stop(self, *, as_asked: bool) -> None:
        """``as_asked``: whether others may take this for an end that an operator wants."""
        if self._lease_id and as_asked:
            with contextlib.suppress(KVStoreError):
                deadline = uptime() + EVERY_S
                await self._etcd.announce(self._address, STOPPED, self._lease_id, deadline)
        await self._etcd.close()

    async def _announce(self, deadline: float) -> None:
        etcd = self._etcd
        if not self._lease_id or not await etcd.keep_alive(self._lease_id, deadline):
            self._lease_id = (await etcd.grant(LEASE_S, deadline)).lease_id
            await etcd.announce(self._address, "", self._lease_id, deadline)
        notes = await etcd.announced(deadline)
        if notes.pop(self._address, None) is None:
            self._lease_id = 0
        self.observe(notes)

    def observe(self, notes: Mapping[str, str]) -> None:
        """Compare the announcements of other masters with the previous ones. A master that begins
        replaces the one that was lost first."""
        running = {address for address, note in notes.items() if note != STOPPED}
        for address in self.running - running - notes.keys():
            self.lost[address] = None
            shown = sanitize(address, 100)
            log.warning("master_lost address=%s", shown)
            self._notices.add("master_lost", {"address": shown})
        for address in running - self.running:
            self.lost.pop(address if address in self.lost else next(iter(self.lost), ""), None)
        for address in list(self.lost)[:-MASTERS_MAX]:
            del self.lost[address]
        self.running = running
