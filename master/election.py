"""Leader election among several masters: runs ``ElectionStateMachine`` against etcd."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from kvstore.errors import ClusterMismatchError, KVStoreError
from kvstore.limits import EPOCH_AHEAD_MAX, plausible_epoch_max
from kvstore.master import times
from kvstore.master.role import (
    AcquireLease,
    Action,
    BecomeLeader,
    Campaign,
    ElectionStateMachine,
    KeepAlive,
    LeaderKey,
    ReadLeader,
    ReleaseLease,
    StepDown,
    WaitUntil,
    WatchLeader,
)
from kvstore.runtime.addresses import is_host_port
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.client import Etcd, LeaderEntry

log = logging.getLogger("kvstore.master")

CALL_S: Final = 2.0
"""Timeout of etcd calls of a standby."""

REVOKE_S: Final = 1.0
"""Timeout to revoke a lease, which expires anyway."""

WATCH_S: Final = 3.0
"""Maximum time of a watch, after which the leader's key is read again."""


class LeadershipListener(Protocol):
    """Serves calls in this process while this master leads."""

    def begin(self, epoch: int, until: float) -> None:
        """Serve under ``epoch`` with an empty state, until ``until`` at the latest."""

    def extend(self, until: float) -> bool:
        """Serve until ``until``. Return False if the term has already ended by itself."""
        ...

    def end(self, leader: str) -> None:
        """Stop serving. Replies name ``leader``, if known. Idempotent."""


class Election:
    """Takes part in the election while ``run`` runs, until ``resign``."""

    def __init__(
        self, etcd: Etcd, address: str, terms: LeadershipListener, *,
        cluster: str = "", may_lead: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """``address``: this master's own. ``cluster``: its name; empty: taken from etcd.
        ``may_lead``: as in ``ElectionStateMachine.next_action``."""
        self.cluster = cluster
        """Name of the cluster; etcd's once this master campaigns."""
        self.leader_known = asyncio.Event()
        """Set once any leader is known."""
        self._etcd = etcd
        self._address = address
        self._ttl_s = times.ETCD_LEASE_S
        self._terms = terms
        self._may_lead = may_lead
        self._role = ElectionStateMachine()
        self._named: str | None = None
        self._etcd_fails = False
        self._counters = {"elections_won": 0, "leadership_lost": 0, "etcd_failures": 0}

    def counters(self) -> dict[str, int]:
        """Return ``elections_won``, ``leadership_lost`` and ``etcd_failures``."""
        return self._counters

    async def run(self) -> None:
        """Take part until cancelled, then call ``resign``. Raise ClusterMismatchError if another
        cluster uses this etcd prefix."""
        while True:
            action = self._role.next_action(uptime(), may_lead=self._may_lead())
            try:
                await self._do(action)
            except ClusterMismatchError:
                raise
            except KVStoreError as error:
                self._failed(error)
            else:
                if self._etcd_fails and not isinstance(action, WaitUntil | ReleaseLease | StepDown):
                    self._etcd_fails = False
                    log.info("etcd_reachable place=%s", self._etcd.place.text)

    def step_down_below(self, epoch: int) -> None:
        """Step down because a node knows a later epoch; lead again only above it."""
        self._role.on_epoch_superseded(epoch)
        self._terms.end("")

    async def resign(self) -> None:
        """Step down permanently, and let another master lead immediately."""
        self._terms.end("")
        leading, epoch = self._role.is_leading, self._role.epoch
        lease_id = self._role.resign()
        if lease_id:
            await self._revoke(lease_id)
        if leading:
            log.info("resigned epoch=%d", epoch)

    async def _do(self, action: Action) -> None:
        role, etcd = self._role, self._etcd
        deadline = uptime() + CALL_S
        match action:
            case WaitUntil(until):
                await asyncio.sleep(max(until - uptime(), 0.0))
            case ReadLeader():
                await self._cluster(deadline)  # detects a mismatch before a takeover
                sight = await etcd.read_leader(deadline)
                role.on_leader_read(_to_leader_key(sight.leader), sight.revision)
                self._stand_by()
            case WatchLeader(revision):
                await etcd.watch_for_end(revision, uptime() + WATCH_S)
                role.on_leader_changed()
            case AcquireLease():
                lease = await etcd.grant(self._ttl_s, deadline)
                role.on_lease_granted(lease.lease_id, lease.ttl_s)
            case Campaign(lease_id):
                self.cluster = await self._cluster(deadline)
                leader = await etcd.campaign(lease_id, self._address, deadline)
                epoch = 0
                if leader.lease_id == lease_id:
                    now_ms = time.time_ns() // 1_000_000
                    # Another master may have accepted reported epochs by a clock that is ahead of
                    # ours.
                    accepted_max = plausible_epoch_max(now_ms) + EPOCH_AHEAD_MAX
                    epoch_min = max(role.epoch + 1, role.epoch_least, now_ms)
                    epoch = await etcd.new_epoch(leader, epoch_min, accepted_max, deadline)
                role.campaigned(LeaderKey(*leader), epoch)
                self._stand_by()
            case KeepAlive(lease_id, keep_by):
                ttl_s = await etcd.keep_alive(lease_id, keep_by)
                sight = await etcd.read_leader(keep_by)
                role.on_lease_kept(ttl_s, _to_leader_key(sight.leader))
                if not self._terms.extend(role.until):
                    role.on_service_stopped()
            case ReleaseLease(lease_id):
                await self._revoke(lease_id)
            case BecomeLeader(epoch):
                self._counters["elections_won"] += 1
                self._named = None
                self.leader_known.set()
                self._terms.begin(epoch, role.until)
                log.info("leading epoch=%d address=%s", epoch, self._address)
            case StepDown(why):
                self._counters["leadership_lost"] += 1
                self._terms.end("")
                log.warning("stepped_down epoch=%d why=%s", role.epoch, why)

    async def _cluster(self, deadline: float) -> str:
        name = await self._etcd.cluster_named(self.cluster, deadline)
        if self.cluster and name != self.cluster:
            raise ClusterMismatchError(
                f"{self._etcd.place.text} belongs to the cluster {name}, not to this "
                f"master's cluster {self.cluster}",
                advice="Give each cluster its own prefix (--etcd etcd://HOST/PREFIX), or all "
                "masters of one cluster the same --cluster. etcd stores the name as "
                f"{self._etcd.place.cluster_key.decode()}.",
                cluster=name,
                wanted=self.cluster,
            )
        return name

    def _stand_by(self) -> None:
        """Name the leader in replies, but never this master, which does not lead, nor a value of
        another program."""
        leader = self._role.leader
        if leader is None:
            return
        self.leader_known.set()
        is_other = leader.address != self._address and is_host_port(leader.address)
        address = leader.address if is_other else ""
        if address != self._named:
            self._named = address
            log.info("standby leader=%s", address or "unknown")
        self._terms.end(address)

    def _failed(self, error: KVStoreError) -> None:
        self._counters["etcd_failures"] += 1
        if not self._etcd_fails:
            self._etcd_fails = True
            log.warning("etcd_unreachable leading=%s reason=%s", self._role.is_leading, error)
        self._role.on_etcd_failed(uptime())

    async def _revoke(self, lease_id: int) -> None:
        try:
            await self._etcd.revoke(lease_id, uptime() + REVOKE_S)
        except KVStoreError as error:
            log.debug("lease_not_revoked reason=%s", error)


def _to_leader_key(leader: LeaderEntry | None) -> LeaderKey | None:
    return None if leader is None else LeaderKey(*leader)
