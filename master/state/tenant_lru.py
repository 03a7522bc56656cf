"""The candidates of one segment, with one order (LRU) per tenant. Implements ``EvictionPolicy``.

A ticket tells in which order its record is, so a record stays where it is when its namespace moves
to another tenant; the sweep puts it into the right order later.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice

from kvstore.master.state.eviction import LruPolicy, queue_number_of
from kvstore.master.state.records import MOVES_PER_STEP, ObjectRecord
from kvstore.master.state.tenants import TenantAccounting


class PerTenantLru:
    """See the module."""

    def __init__(self, tenants: TenantAccounting) -> None:
        self._tenants = tenants
        self.orders: dict[int, LruPolicy] = {}
        """By the number of the tenant; no empty ones."""
        self.unfinished = False
        self.moved = 0

    def add(self, record: ObjectRecord, *, detached: bool = False) -> None:
        number = self._tenants.of_record(record).number
        order = self.orders.get(number)
        if order is None:
            order = self.orders[number] = LruPolicy(number)
        order.add(record, detached=detached)

    def discard(self, record: ObjectRecord) -> None:
        number = queue_number_of(record.ticket)
        order = self.orders[number]
        order.discard(record)
        if not len(order):
            del self.orders[number]

    def detached(self, record: ObjectRecord) -> bool:
        return bool(record.ticket & 1)

    def peek(self, now_ms: int, moves: int = MOVES_PER_STEP) -> ObjectRecord | None:
        """Of all tenants; an eviction asks the orders one by one."""
        first: ObjectRecord | None = None
        self.unfinished = False
        self.moved = 0
        for order in self.orders.values():
            head = order.peek(now_ms, moves - self.moved)
            self.moved += order.moved
            self.unfinished = self.unfinished or order.unfinished
            if head is not None and (first is None or head.ticket < first.ticket):
                first = head
        return first

    def defer(self, record: ObjectRecord, until_ms: int) -> None:
        self.orders[queue_number_of(record.ticket)].defer(record, until_ms)

    def lease_ended(self, record: ObjectRecord) -> None:
        self.orders[queue_number_of(record.ticket)].lease_ended(record)

    def next_lease_end_ms(self, after_ms: int = -1) -> int | None:
        ends: list[int] = []
        for order in self.orders.values():
            end_ms = order.next_lease_end_ms()
            if end_ms is not None and end_ms > after_ms:
                ends.append(end_ms)
        return min(ends, default=None)

    def __len__(self) -> int:
        return sum([len(order) for order in self.orders.values()])

    def __iter__(self) -> Iterator[ObjectRecord]:
        return self._from(-1)

    def after(self, ticket: int, count: int) -> list[ObjectRecord]:
        return list(islice(self._from(ticket), count))

    def _from(self, ticket: int) -> Iterator[ObjectRecord]:
        records = [order.records_after(ticket) for order in self.orders.values()]
        return merge(*records, key=lambda record: record.ticket)
