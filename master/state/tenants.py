"""Tenants: their namespaces, the bytes that they hold, and their quotas.

The bytes of a tenant are the extents, on living segments, of its objects (with replicas and
headers), of its puts and allocations in progress, and of abandoned ones in quarantine. The table of
a namespace counts its part by segment, so that it moves to another tenant in one step when the
rules change; an allocation moves with its next renewal. Copies for drains and repair belong to no
tenant until they are stored.

A tenant is above its limit only if the limit was lowered, or if a namespace or a returning node
brought objects. Its next put evicts its own objects until it is within the limit again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

from kvstore.calls.tenants import TenantMatcher, TenantRule
from kvstore.errors import InvalidArgumentError
from kvstore.limits import Namespace
from kvstore.master.state.grants import AllocationGrant, Grant, GrantListener, PutGrant
from kvstore.master.state.records import (
    Extent,
    MountedSegment,
    Namespaces,
    NamespaceTable,
    ObjectRecord,
)
from kvstore.master.state.tenant import Tenant

TENANTS_PER_TERM_MAX = 1 << 10
"""Tenants of one term, those that are gone included: each may have queues on each segment."""

SHORT_MS = 30_000
"""The time after which a pool that is smaller than the guarantees is logged: nodes that are started
together join one by one."""


class UnlimitedTenancy(GrantListener):
    """The tenancy of a master without tenants: counts nothing and limits nothing."""

    guarantee = 0
    unnamed: Tenant | None = None

    @property
    def moving(self) -> bool:
        """Whether tables have to move to other tenants."""
        return False

    def __iter__(self) -> Iterator[Tenant]:
        return iter(())

    def match(self, namespace: str) -> Tenant | None:
        """The tenant of a namespace by the rules, for a new table."""
        return None

    def of(self, namespace: str) -> Tenant | None:
        return None

    def of_record(self, record: ObjectRecord) -> Tenant | None:
        return None

    def is_misplaced(self, record: ObjectRecord) -> bool:
        """Whether a candidate is still in the order of the tenant that it had before."""
        return False

    def may_grow(self, record: ObjectRecord, length: int) -> bool:
        """Whether ``length`` bytes more stay within the limit of the record's tenant."""
        return True

    def count_extents(self, record: ObjectRecord, extents: list[Extent], length: int) -> None:
        """Count extents that the tenant of this record holds from now on. ``length``: bytes of
        each; negative: it holds them no more. Extents on dead segments count nothing."""

    def segment_died(self, segment_id: int) -> None:
        pass

    def pinned(self, namespace: Namespace, size: int) -> None:
        """Count ``size`` bytes more, or fewer, that pins hold."""

    def change(self, rules: Sequence[TenantRule], matcher: TenantMatcher) -> None:
        """Follow these rules from now on. Bounds hold at once; tables that belong to another
        tenant now move in slices (``move_some``).

        Raises:
            InvalidArgumentError: too many tenants have come and gone in this term. All is as
                before then.
        """
        raise AssertionError("this master has no tenants")

    def move_some(self, count: int, pinned: dict[Namespace, tuple[int, int]]) -> None:
        """Give up to ``count`` tables to the tenant that they belong to. ``pinned``: objects and
        bytes that pins hold, by namespace."""

    def is_short(self, now_ms: int) -> bool:
        """Whether to say now that the pool is smaller than the guarantees: once each time."""
        return False


@final
class TenantAccounting(UnlimitedTenancy):
    """All tenants of a master, and the one without a name."""

    def __init__(
        self,
        rules: Sequence[TenantRule],
        namespaces: Namespaces,
        segments: dict[int, MountedSegment],
    ) -> None:
        """``namespaces``, ``segments``: those of the pool, which are only read."""
        self._tables = namespaces
        self._segments = segments
        self.unnamed = Tenant(1, TenantRule(""))
        """Has the namespaces that fit no other tenant."""
        self._by_name: dict[str, Tenant] = {"": self.unnamed}
        self._numbered: list[Tenant] = [self.unnamed]
        self._matcher = TenantMatcher(())
        self._to_move: list[NamespaceTable] = []
        """Tables that may belong to another tenant since the rules changed."""
        self.guarantee = 0
        """Sum of all guarantees."""
        self._short_since_ms: int | None = None
        self._logged_short = False
        self.change(rules, TenantMatcher(rules))
        self._to_move.clear()

    # --- membership ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def match(self, namespace: str) -> Tenant:
        return self._by_name[self._matcher.of(namespace)]

    def of(self, namespace: str) -> Tenant:
        table = self._tables.tables.get(namespace)
        if table is None or table.tenant is None:
            return self.match(namespace)
        return table.tenant

    def of_record(self, record: ObjectRecord) -> Tenant:
        tenant = self._tables.of(record).tenant
        assert tenant is not None
        return tenant

    def is_misplaced(self, record: ObjectRecord) -> bool:
        return record.queue != self.of_record(record).number

    def may_grow(self, record: ObjectRecord, length: int) -> bool:
        return self.of_record(record).bytes_to_evict(length) <= 0

    # --- bytes --------------------------------------------------------------------------------

    def count_extents(self, record: ObjectRecord, extents: list[Extent], length: int) -> None:
        table = self._tables.of(record)
        tenant, held = table.tenant, table.held
        assert tenant is not None
        for segment, _ in extents:
            if segment.alive:
                number = segment.segment_id
                before = held.get(number, 0)
                if not before:
                    for other in [each for each in held if each not in self._segments]:
                        del held[other]  # died since
                left = before + length
                assert left >= 0, "more is given back than was taken"
                if left:
                    held[number] = left
                else:
                    del held[number]
                _add(tenant, number, length)

    def granted(self, put: Grant) -> None:
        """Count a put, or an allocation, that begins."""
        self._count(put, 1)

    def renewed(self, put: Grant) -> None:
        """Let an allocation follow its namespace, which may belong to another tenant now."""
        if isinstance(put, AllocationGrant):
            now = self.of(put.namespace)
            if now is not put.tenant:
                self._count(put, -1)
                put.tenant = now
                self._count(put, 1)

    def ended(self, put: Grant) -> None:
        self._count(put, -1)

    def owner(self, put: Grant) -> Tenant | None:
        if isinstance(put, PutGrant):
            return self.of_record(put.record)
        return put.tenant if isinstance(put, AllocationGrant) else None

    def on_quarantine(self, owner: Tenant, extents: Sequence[Extent], length: int) -> None:
        _add_all(owner, extents, length)

    def _count(self, put: Grant, by: int) -> None:
        if isinstance(put, PutGrant):
            table = self._tables.of(put.record)
            assert table.tenant is not None
            table.pending += by
            table.tenant.pending += by
            self.count_extents(put.record, put.extents, by * put.length)
        elif isinstance(put, AllocationGrant):
            assert put.tenant is not None
            put.tenant.pending += by
            _add_all(put.tenant, put.extents, by * put.length)

    def segment_died(self, segment_id: int) -> None:
        for tenant in self._numbered:
            tenant.size -= tenant.bytes_on.pop(segment_id, 0)

    def pinned(self, namespace: Namespace, size: int) -> None:
        self.of(namespace).pinned_bytes += size

    # --- evictions ahead of need --------------------------------------------------------------

    @staticmethod
    def record_allocation(owner: Tenant, taken: list[list[Extent]], lengths: Sequence[int]) -> None:
        """Count the extents that puts of this tenant took on full segments."""
        for extents, length in zip(taken, lengths, strict=True):
            for segment, _ in extents:
                if segment.pressed:
                    segment.takers[owner] = segment.takers.get(owner, 0) + length

    @staticmethod
    def main_consumer(segment: MountedSegment, length: int) -> Tenant | None:
        """The tenant for whose puts these bytes are evicted ahead of need: the one that took most
        since then. None: copies took them."""
        takers = segment.takers
        most: Tenant | None = None
        for tenant, taken in takers.items():
            if most is None or taken > takers[most]:
                most = tenant
        if most is not None:
            takers[most] -= length
        return most

    # --- other rules --------------------------------------------------------------------------

    def change(self, rules: Sequence[TenantRule], matcher: TenantMatcher) -> None:
        wanted = {rule.name: rule for rule in rules if rule.name}
        new = [rule for name, rule in wanted.items() if name not in self._by_name]
        if len(self._numbered) + len(new) > TENANTS_PER_TERM_MAX:
            raise InvalidArgumentError(
                "too many tenants have come and gone since this master leads",
                advice="Keep the names of tenants, or restart the master.",
            )
        for name, tenant in self._by_name.items():
            if name in wanted:
                tenant.follow(wanted[name])
            elif name:
                tenant.retire()
        for rule in new:
            tenant = self._by_name[rule.name] = Tenant(len(self._numbered) + 1, rule)
            self._numbered.append(tenant)
        self._matcher = matcher
        self.guarantee = sum([tenant.guarantee for tenant in self._by_name.values()])
        self._to_move = self._tables.values()

    @property
    def moving(self) -> bool:
        return bool(self._to_move)

    def move_some(self, count: int, pinned: dict[Namespace, tuple[int, int]]) -> None:
        for _ in range(min(count, len(self._to_move))):
            table = self._to_move.pop()
            before, now = table.tenant, self.match(table.name)
            if before is None or before is now or self._tables.tables.get(table.name) is not table:
                continue
            for number, size in table.held.items():
                if number in self._segments:
                    _add(before, number, -size)
                    _add(now, number, size)
            before.disk_bytes -= table.disk_bytes
            now.disk_bytes += table.disk_bytes
            before.objects -= table.objects
            now.objects += table.objects
            before.pending -= table.pending
            now.pending += table.pending
            _, size = pinned.get(table.name, (0, 0))
            before.pinned_bytes -= size
            now.pinned_bytes += size
            table.tenant = now

    def is_short(self, now_ms: int) -> bool:
        """Whether to log now that the pool is smaller than the guarantees: once each time."""
        capacity = sum([segment.capacity for segment in self._segments.values()])
        if not capacity or self.guarantee <= capacity:
            self._short_since_ms, self._logged_short = None, False
            return False
        if self._short_since_ms is None:
            self._short_since_ms = now_ms
        if self._logged_short or now_ms < self._short_since_ms + SHORT_MS:
            return False
        self._logged_short = True
        return True


def open_tenancy(
    rules: Sequence[TenantRule] | None, namespaces: Namespaces, segments: dict[int, MountedSegment]
) -> UnlimitedTenancy:
    """The tenancy of a master with these rules; None: without tenants."""
    if rules is None:
        return UnlimitedTenancy()
    return TenantAccounting(rules, namespaces, segments)


def _add_all(tenant: Tenant, extents: Iterable[Extent], length: int) -> None:
    """Count ``length`` bytes of each of these extents that is on a segment alive."""
    for segment, _ in extents:
        if segment.alive:
            _add(tenant, segment.segment_id, length)


def _add(tenant: Tenant, segment_id: int, size: int) -> None:
    tenant.size += size
    on = tenant.bytes_on
    held = on.get(segment_id, 0) + size
    if held:
        on[segment_id] = held
    else:
        del on[segment_id]
