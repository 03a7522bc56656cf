"""Views and allocations of a simulated client: the production ``ArrayTracker`` on its clock,
without the thread. Their arrays count as gone when the simulated program releases them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvstore import calls
from kvstore.client.leases.lease_table import (
    AllocationLease,
    Lease,
    LeasedExtent,
    Mounted,
    ObjectLease,
    Watched,
    What,
    found_at,
)
from kvstore.client.leases.views import ArrayTracker
from kvstore.client.values import Bytes1D
from kvstore.errors import KVStoreError
from kvstore.memory.header import HEADER_BYTES

POLL_S = 0.05
"""How often the renewer looks for new leases, which the real one is woken for."""

Ask = Callable[[calls.Request, float], Awaitable[calls.Reply]]


@dataclass(slots=True)
class LeaseSnapshot:
    """What the oracle wants to know of a lease."""

    array: Bytes1D
    uuid: bytes
    offset: int
    """Of the extent."""
    what: What
    snapshot: bytes
    """The bytes when it became what it is."""


class SimViews:
    """As ``Views``."""

    def __init__(self, ask: Ask, *, lease_margin_s: float, clock: Callable[[], float]) -> None:
        self.watch: Callable[[calls.SegmentInfo], Mounted] | None = None
        """As ``TransportSelector.watch``."""
        self.mapped: dict[int, tuple[bytes, int]] = {}
        """uuid and size of the segments that were mapped, by their address."""
        self._watches = ArrayTracker(clock)
        self._leases = self._watches.leases
        self._held: dict[Lease, LeaseSnapshot] = {}
        self._ask = ask
        self._margin_s = lease_margin_s

    def add(
        self,
        array: Bytes1D,
        held: ObjectLease | AllocationLease,
        until: float,
        mounted: Mounted,
        place: LeasedExtent | None = None,
        value: object = None,
    ) -> Lease:
        address = array.ctypes.data
        return self.add_many([(array, address, held, until, place, value)], mounted)[0]

    def add_many(
        self,
        arrays: Iterable[Watched],
        mounted: Mounted,
    ) -> list[Lease]:
        rows = list(arrays)
        leases = self._watches.add(rows, mounted)
        for lease, (array, address, held, _, _, _) in zip(leases, rows, strict=True):
            if lease not in self._held:
                flat = array.reshape(-1).view(np.uint8)
                self._held[lease] = LeaseSnapshot(
                    flat, *self._extent_at(address), held, flat.tobytes()
                )
        return leases

    def _extent_at(self, address: int) -> tuple[bytes, int]:
        """uuid and extent's offset of the payload at this address."""
        for base, (uuid, size) in self.mapped.items():
            if base < address < base + size:
                return uuid, address - base - HEADER_BYTES
        raise AssertionError("memory that is in no segment")

    def held(self) -> Iterator[tuple[Lease, LeaseSnapshot]]:
        """Leases that hold, with the snapshot of those that became objects."""
        for lease in self._leases:
            if lease.is_held:
                held = self._held[lease]
                if held.what != lease.what:
                    held.what, held.snapshot = lease.what, held.array.tobytes()
                yield lease, held

    def place(self, lease: Lease) -> LeaseSnapshot:
        return self._held[lease]

    def of(self, view: object) -> Lease | None:
        return self._watches.of(view)

    def allocation(self, data: memoryview) -> Lease | None:
        return self._watches.allocation(data)

    @property
    def allocated(self) -> int:
        return self._watches.allocated

    async def let_go(self, view: object, lease: Lease) -> None:
        """The program drops what it holds."""
        watch = self._watches._watch(view)
        assert watch is not None
        assert watch.lease is lease
        self._watches.let_go(watch)
        dropped: list[AllocationLease] = []
        self._watches.remove_dead(dropped)
        if not lease.holders:
            del self._held[lease]
        for lost in dropped:
            try:
                await self._ask(calls.PutRevoke(lost.epoch, [lost.token], True), 1.0)
            except KVStoreError:
                pass  # its deadline gives it up

    def pause_s(self) -> float:
        """How long the renewer sleeps."""
        now = self._leases.clock()
        return max(0.001, min(self._leases.wake_at() - now, POLL_S))

    async def _follow(self, lease: Lease) -> None:
        what, asked = lease.what, self._leases.clock()
        lease.plan_renewal()
        if not isinstance(what, ObjectLease) or not lease.is_held:
            return
        try:
            found = await self._ask(calls.Lookup(what.namespace, [what.key]), 1.0)
            assert isinstance(found, calls.LookupReply)
            segments = calls.DescribeSegments(found.placements.segments)
            described = await self._ask(segments, 1.0)
            assert isinstance(described, calls.DescribeSegmentsReply)
        except KVStoreError:
            return
        segment = found_at(lease, found, described)
        if segment is not None and self.watch is not None:
            until = asked + found.lease_ms / 1000 - self._margin_s
            lease.mounted_again(self.watch(segment), until)

    async def renew(self) -> None:
        for lease in self._leases.moved():
            await self._follow(lease)
        for renewal in self._leases.due():
            asked = self._leases.clock()
            try:
                renewed = await self._ask(renewal.request, renewal.patience_s)
            except KVStoreError as error:
                renewal.failed(error)
            else:
                assert isinstance(renewed, calls.RenewReply)
                renewal.on_reply(renewed, asked, self._margin_s)
