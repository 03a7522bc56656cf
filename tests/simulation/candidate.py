"""One of several master processes: the production ``ElectionStateMachine``, and a ``Master`` while
it leads.

Stands in for ``kvstore.master.election.Election`` and ``kvstore.master.main``: carries out the
role's actions on the simulated etcd. A process that does not lead answers who does.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import KVStoreError, NotLeaderError
from kvstore.master.role import (
    AcquireLease,
    BecomeLeader,
    Campaign,
    ElectionStateMachine,
    KeepAlive,
    ReadLeader,
    ReleaseLease,
    StepDown,
    WaitUntil,
    WatchLeader,
)
from kvstore.master.superseded_epochs import SupersededEpochs
from kvstore.wire.status import encode_error
from tests.simulation.etcd import ASK_US, TTL_S, WATCH_US, EtcdStub
from tests.simulation.master import Master
from tests.simulation.network import BrokenStreamError, End
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import Process
from tests.support.invariants import check_invariants


class Candidate:
    """One process. ``new_master`` begins a term: epoch, until when, what the clock says."""

    def __init__(
        self, process: Process, oracle: Oracle, etcd: EtcdStub, rate: float,
        new_master: Callable[[Process, int, Callable[[], float]], Master],
        outruns: SupersededEpochs,
    ) -> None:  # fmt: skip
        self.process = process
        self.master: Master | None = None
        self._oracle = oracle
        self._etcd = etcd
        self._rate = rate
        self._new_master = new_master
        self._role = ElectionStateMachine()
        self._outruns = outruns
        process.spawn("election", self._run())

    def clock(self) -> float:
        return self.process.scheduler.now_us * self._rate / 1e6

    @property
    def leads(self) -> bool:
        return self.master is not None and self.process.alive and self.master.leads

    def accept(self, port: str, end: End) -> None:
        if self.master is not None:
            self.master.accept(port, end)
        else:
            self.process.spawn(port, self._refuse(end))

    async def _refuse(self, end: End) -> None:
        leader = self._role.leader
        address = leader.address if leader is not None else ""
        address = "" if address == f"{self.process.name}:1" else address
        try:
            await end.receive()
            end.send(("error", encode_error(NotLeaderError("stands by", leader=address))))
        except BrokenStreamError:
            return

    def _outrun(self, epoch: int) -> None:
        if not self._outruns.ends_term(self._role.epoch, epoch, self.clock()):
            return
        self._role.on_epoch_superseded(epoch)
        if self.master is not None:
            self.master.cease()

    async def _run(self) -> None:
        while True:
            action = self._role.next_action(self.clock())
            try:
                await self._do(action)
            except KVStoreError:
                self._role.on_etcd_failed(self.clock())
            check_invariants(self._role)

    async def _do(self, action: object) -> None:
        role, etcd = self._role, self._etcd
        match action:
            case WaitUntil(until):
                await self._sleep(until - self.clock())
            case ReadLeader():
                role.on_leader_read(*await etcd.ask(ASK_US, "look"))
            case WatchLeader(revision):
                try:
                    await etcd.ask(WATCH_US, "watch", revision)
                finally:
                    role.on_leader_changed()
            case AcquireLease():
                role.on_lease_granted(*await etcd.ask(ASK_US, "grant", TTL_S))
            case Campaign(lease_id):
                leader = await etcd.ask(ASK_US, "campaign", lease_id, f"{self.process.name}:1")
                if leader is None:
                    role.on_etcd_failed(self.clock())
                    return
                epoch = 0
                if leader.lease_id == lease_id:
                    least = max(role.epoch + 1, role.epoch_least, int(self.clock() * 1000))
                    epoch = await etcd.ask(ASK_US, "new_epoch", leader, least)
                    if not epoch:
                        role.on_etcd_failed(self.clock())
                        return
                role.campaigned(leader, epoch)
            case KeepAlive(lease_id, keep_by):
                left_us = int((keep_by - self.clock()) * 1e6)
                ttl_s = await etcd.ask(left_us, "keep_alive", lease_id)
                left_us = int((keep_by - self.clock()) * 1e6)
                seen, _ = await etcd.ask(left_us, "look")
                role.on_lease_kept(ttl_s, seen)
                if self.master is None or not self.master.extend(role.until):
                    role.on_service_stopped()
            case ReleaseLease(lease_id):
                try:
                    await etcd.ask(ASK_US, "revoke", lease_id)
                except KVStoreError:
                    pass
            case BecomeLeader(epoch):
                self._oracle.note(f"{self.process.name} leads epoch={epoch}")
                self.master = self._new_master(self.process, epoch, self.clock)
                self.master.leads_until = role.until
                self.master.outrun = self._outrun
            case StepDown(why):
                self._oracle.note(f"{self.process.name} steps down: {why}")
                if self.master is not None:
                    self.master.cease()
                self.master = None

    async def _sleep(self, seconds: float) -> None:
        await self.process.sleep(max(0, int(seconds * 1e6 / self._rate) + 1))
