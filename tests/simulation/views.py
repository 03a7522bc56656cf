"""Views and allocations of a simulated client: the rules of ``kvstore.client.views``, without its
thread and its clock. They end when the simulated program lets go, not with the last reference."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from kvstore import calls
from kvstore.client.values import Bytes1D
from kvstore.client.views import RENEW_PAUSE_S, Granted, Named
from kvstore.errors import KVStoreError
from kvstore.limits import DEFAULT_NAMESPACE, Namespace

POLL_S = 0.05
"""How often the renewer looks for new leases, which the real one is woken for."""

Ask = Callable[[calls.Request, float], Awaitable[calls.Reply]]


class SimLease:
    """As ``Lease``, on the client's own clock."""

    def __init__(
        self, held: Named | Granted, until: float, array: Bytes1D, clock: Callable[[], float]
    ) -> None:
        self.what = held
        self.array = array
        self.snapshot = array.tobytes() if isinstance(held, Named) else b""
        self.uuid = b""
        self.offset = 0
        """Of the extent; set by the client, who made the mapping."""
        self.until = until
        self.holders = 1
        self.renew_at = 0.0
        self._clock = clock
        self._kept = True
        self._plan_renewal()

    @property
    def held(self) -> bool:
        if self._kept and self._clock() >= self.until:
            self._kept = False
        return self._kept

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.until - self._clock()) if self.held else 0.0

    def extend(self, until: float) -> None:
        if self.held and until > self.until:
            self.until = until
            self._plan_renewal()

    def become(self, named: Named, until: float) -> None:
        self.what = named
        self.snapshot = self.array.tobytes()
        self.until = until
        self._plan_renewal()

    def _plan_renewal(self) -> None:
        now = self._clock()
        self.renew_at = now + max((self.until - now) / 3, RENEW_PAUSE_S)


class SimViews:
    """As ``Views``."""

    def __init__(self, ask: Ask, *, lease_margin_s: float, clock: Callable[[], float]) -> None:
        self.leases: dict[int, SimLease] = {}
        self.mapped: dict[int, tuple[bytes, int]] = {}
        """uuid and extent's offset of what was mapped, by the address of its payload."""
        self._ask = ask
        self._margin_s = lease_margin_s
        self._clock = clock

    def add(self, array: Bytes1D, held: Named | Granted, until: float) -> SimLease:
        address = array.ctypes.data
        lease = self.leases.get(address)
        if lease is not None and lease.what == held and lease.held:
            lease.holders += 1
            lease.extend(until)
            return lease
        lease = self.leases[address] = SimLease(held, until, array, self._clock)
        lease.uuid, lease.offset = self.mapped[address]
        return lease

    def of(self, view: memoryview) -> SimLease | None:
        return self.leases.get(int(np.frombuffer(view, np.uint8).ctypes.data))

    def allocation(self, data: memoryview) -> SimLease | None:
        if not data.nbytes:
            return None
        lease = self.leases.get(int(np.frombuffer(data, np.uint8).ctypes.data))
        return lease if lease is not None and isinstance(lease.what, Granted) else None

    async def let_go(self, lease: SimLease) -> None:
        """The program drops what it holds."""
        lease.holders -= 1
        if lease.holders:
            return
        address = lease.array.ctypes.data
        if self.leases.get(address) is lease:
            del self.leases[address]
        if isinstance(lease.what, Granted):
            try:
                await self._ask(calls.PutRevoke(lease.what.epoch, [lease.what.token], True), 1.0)
            except KVStoreError:
                pass  # its deadline gives it up

    def pause_s(self) -> float:
        """How long the renewer sleeps."""
        wake_at = [lease.renew_at for lease in self.leases.values() if lease.held]
        return max(0.001, min([*wake_at, self._clock() + POLL_S]) - self._clock())

    async def renew(self) -> None:
        soon = self._clock() + RENEW_PAUSE_S
        due = [lease for lease in self.leases.values() if lease.renew_at <= soon and lease.held]
        named: dict[Namespace, list[tuple[SimLease, Named]]] = {}
        granted: dict[int, list[tuple[SimLease, Granted]]] = {}
        for lease in due:
            if isinstance(lease.what, Named):
                named.setdefault(lease.what.namespace, []).append((lease, lease.what))
            else:
                granted.setdefault(lease.what.epoch, []).append((lease, lease.what))
        for namespace, objects in named.items():
            request = calls.Renew(
                namespace,
                [what.key for _, what in objects],
                [what.epoch for _, what in objects],
                [what.counter for _, what in objects],
                0,
                (),
            )
            await self._renew_batch(request, [lease for lease, _ in objects])
        for epoch, allocations in granted.items():
            tokens = [what.token for _, what in allocations]
            request = calls.Renew(DEFAULT_NAMESPACE, (), (), (), epoch, tokens)
            await self._renew_batch(request, [lease for lease, _ in allocations])

    async def _renew_batch(self, request: calls.Renew, leases: list[SimLease]) -> None:
        asked = self._clock()
        patience = min(lease.seconds_left for lease in leases)
        try:
            renewed = await self._ask(request, max(0.05, patience / 2))
        except KVStoreError:
            return
        assert isinstance(renewed, calls.Renewed)
        held = (*renewed.keys_held, *renewed.tokens_held)
        promised_ms = renewed.lease_ms if request.keys else renewed.deadline_ms
        for lease, still in zip(leases, held, strict=True):
            if still:
                lease.extend(asked + promised_ms / 1000 - self._margin_s)
