"""A simulated etcd, as masters need it to elect a leader: leases on its own clock, one key, a
revision.

Its memory outlives its process, as a log on a disk would; a restart gives every lease its whole
time again, as etcd's does. Requests and replies may be late, cut off or lost, like any other.
"""

from __future__ import annotations

from typing import Any

from kvstore.errors import EtcdUnreachableError
from kvstore.master.role import LeaderKey
from tests.simulation.network import BrokenStreamError, End, Network
from tests.simulation.scheduler import MS, SECOND, Future, Process, TimedOutError

TTL_S = 0.6
"""Of the leader's lease: a fifth of 3 s."""


class Store:
    """What etcd has on its disk."""

    def __init__(self) -> None:
        self.revision = 1
        self.leader: LeaderKey | None = None
        self.leases: dict[int, float] = {}
        """TTL by id."""
        self.next_lease = 1
        self.epoch = 0
        """The last that was given out."""


class Etcd:
    """One etcd process."""

    def __init__(self, process: Process, store: Store, rate: float) -> None:
        self.process = process
        self._store = store
        self._rate = rate
        self._started_us = process.scheduler.now_us
        self._expires = {each: self.now + ttl_s for each, ttl_s in store.leases.items()}
        self._watchers: list[Future[None]] = []
        process.spawn("expire", self._expire_forever())

    @property
    def now(self) -> float:
        """Seconds, on its clock."""
        return (self.process.scheduler.now_us - self._started_us) * self._rate / 1e6

    def accept(self, port: str, end: End) -> None:
        self.process.spawn(port, self._serve(end))

    async def _serve(self, end: End) -> None:
        try:
            operation, *arguments = await end.receive()
            if operation == "watch":
                if self._store.revision <= arguments[0]:
                    changed: Future[None] = Future()
                    self._watchers.append(changed)
                    await changed
                end.send(True)
            else:
                end.send(getattr(self, f"_{operation}")(*arguments))
        except BrokenStreamError:
            return

    def _look(self) -> tuple[LeaderKey | None, int]:
        return self._store.leader, self._store.revision

    def _grant(self, ttl_s: float) -> tuple[int, float]:
        store = self._store
        lease_id, store.next_lease = store.next_lease, store.next_lease + 1
        store.leases[lease_id] = ttl_s
        self._expires[lease_id] = self.now + ttl_s
        return lease_id, ttl_s

    def _keep_alive(self, lease_id: int) -> float:
        ttl_s = self._store.leases.get(lease_id, 0.0)
        if ttl_s:
            self._expires[lease_id] = self.now + ttl_s
        return ttl_s

    def _campaign(self, lease_id: int, address: str) -> LeaderKey | None:
        """Who leads now; None: there is no such lease."""
        store = self._store
        if store.leader is None:
            if lease_id not in store.leases:
                return None
            self._changed()
            store.leader = LeaderKey(address, lease_id, store.revision)
        return store.leader

    def _new_epoch(self, leader: LeaderKey, least: int) -> int:
        """For the leader that is entered still; 0: another one is."""
        store = self._store
        if store.leader != leader:
            return 0
        store.epoch = max(store.epoch + 1, least)
        return store.epoch

    def _revoke(self, lease_id: int) -> bool:
        store = self._store
        store.leases.pop(lease_id, None)
        self._expires.pop(lease_id, None)
        if store.leader is not None and store.leader.lease_id == lease_id:
            store.leader = None
            self._changed()
        return True

    def _changed(self) -> None:
        self._store.revision += 1
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.set(None)

    async def _expire_forever(self) -> None:
        while True:
            await self.process.sleep(20 * MS)
            for lease_id in [each for each, until in self._expires.items() if until <= self.now]:
                self._revoke(lease_id)


class EtcdStub:
    """The way of one master to it."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._network = network

    async def ask(self, timeout_us: int, *request: Any) -> Any:
        """Raises EtcdUnreachableError: it may have been done."""
        end = self._network.connect(self._process, "etcd", "etcd")
        try:
            end.send(request)
            return await end.receive(max(1, timeout_us))
        except (BrokenStreamError, TimedOutError):
            raise EtcdUnreachableError("no answer") from None
        finally:
            end.close()


ASK_US = SECOND * 2 // 5
WATCH_US = SECOND * 3 // 5
