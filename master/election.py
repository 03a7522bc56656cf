"""One of several masters leads: does what the ``Role`` says, by etcd, in the master's loop."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final, Protocol

from kvstore.errors import KVStoreError
from kvstore.etcd.client import Etcd, Leader
from kvstore.master.role import (
    Action,
    Campaign,
    Grant,
    KeepAlive,
    Lead,
    Look,
    Revoke,
    Role,
    Seen,
    StepDown,
    Wait,
    Watch,
)

log = logging.getLogger("kvstore.master")

CALL_S: Final = 2.0
"""How long etcd may take to answer a master that stands by."""

REVOKE_S: Final = 1.0
"""The same for the end of a lease, which comes by itself if this does not reach etcd."""

WATCH_S: Final = 3.0
"""After so long of watching the key is read again, in case the way to etcd was cut meanwhile."""


class Terms(Protocol):
    """What serves, in this process, while it leads."""

    def begin(self, epoch: int, until: float) -> None:
        """Serve under ``epoch``, with nothing from before, before ``until`` only."""

    def extend(self, until: float) -> bool:
        """The lease was kept: it may serve longer. False: its time had passed before, and it has
        stopped by itself, for good."""
        ...

    def end(self, leader: str) -> None:
        """Serve no more; ``leader`` is the one to name, if one is known. May come twice."""


class Election:
    """Takes part for as long as ``run`` does; ``resign`` leaves."""

    def __init__(self, etcd: Etcd, address: str, lease_ms: int, terms: Terms) -> None:
        """``address``: what clients and nodes are told of us when we lead."""
        self.leader_known = asyncio.Event()
        """Set once somebody, we or another one, was seen to lead."""
        self._etcd = etcd
        self._address = address
        self._ttl_s = -(-lease_ms // 1000)
        self._terms = terms
        self._role = Role()
        self._named: str | None = None
        """The leader that was last logged."""
        self._etcd_fails = False
        self._counters = {"elections_won": 0, "leads_lost": 0, "etcd_failures": 0}

    def counters(self) -> dict[str, int]:
        """``elections_won``, ``leads_lost`` (steps down, but for resigning), ``etcd_failures``."""
        return dict(self._counters)

    async def run(self) -> None:
        """Until cancelled; then ``resign``."""
        while True:
            action = self._role.next(time.monotonic())
            try:
                await self._do(action)
            except KVStoreError as error:
                self._failed(error)
            else:
                if self._etcd_fails and not isinstance(action, Wait | Revoke | StepDown):
                    self._etcd_fails = False
                    log.info("etcd_reachable place=%s", self._etcd.place.shown)

    async def resign(self) -> None:
        """Lead no more, and let another one lead at once."""
        self._terms.end("")
        leading, epoch = self._role.leading, self._role.epoch
        lease_id = self._role.resign()
        if lease_id:
            await self._revoke(lease_id)
        if leading:
            log.info("resigned epoch=%d", epoch)

    async def _do(self, action: Action) -> None:
        role, etcd = self._role, self._etcd
        deadline = time.monotonic() + CALL_S
        match action:
            case Wait(until):
                await asyncio.sleep(max(until - time.monotonic(), 0.0))
            case Look():
                sight = await etcd.look(deadline)
                role.saw(_seen(sight.leader), sight.revision)
                self._stand_by()
            case Watch(revision):
                await etcd.watch_for_end(revision, time.monotonic() + WATCH_S)
                role.changed()
            case Grant():
                lease = await etcd.grant(self._ttl_s, deadline)
                role.granted(lease.lease_id, lease.ttl_s)
            case Campaign(lease_id):
                leader = await etcd.campaign(lease_id, self._address, deadline)
                epoch = 0
                if leader.lease_id == lease_id:
                    least = max(role.epoch + 1, time.time_ns() // 1_000_000)
                    epoch = await etcd.new_epoch(leader, least, deadline)
                role.campaigned(Seen(*leader), epoch)
                self._stand_by()
            case KeepAlive(lease_id, keep_by):
                ttl_s = await etcd.keep_alive(lease_id, keep_by)
                sight = await etcd.look(keep_by)
                role.kept(ttl_s, _seen(sight.leader))
                if not self._terms.extend(role.until):
                    role.stopped()
            case Revoke(lease_id):
                await self._revoke(lease_id)
            case Lead(epoch):
                self._counters["elections_won"] += 1
                self._named = None
                self.leader_known.set()
                self._terms.begin(epoch, role.until)
                log.info("leading epoch=%d address=%s", epoch, self._address)
            case StepDown(why):
                self._counters["leads_lost"] += 1
                self._terms.end("")
                log.warning("stepped_down epoch=%d why=%s", role.epoch, why)

    def _stand_by(self) -> None:
        """Names the leader to whoever asks us. Nobody is sent back to us, who do not lead."""
        leader = self._role.leader
        if leader is None:
            return
        self.leader_known.set()
        address = leader.address if leader.address != self._address else ""
        if address != self._named:
            self._named = address
            log.info("standing_by leader=%s", address or "unknown")
        self._terms.end(address)

    def _failed(self, error: KVStoreError) -> None:
        self._counters["etcd_failures"] += 1
        if not self._etcd_fails:
            self._etcd_fails = True
            log.warning("etcd_unreachable leading=%s reason=%s", self._role.leading, error)
        self._role.failed(time.monotonic())

    async def _revoke(self, lease_id: int) -> None:
        try:
            await self._etcd.revoke(lease_id, time.monotonic() + REVOKE_S)
        except KVStoreError as error:
            log.debug("lease_not_revoked reason=%s", error)


def _seen(leader: Leader | None) -> Seen | None:
    return None if leader is None else Seen(*leader)
