"""Pins and TTLs. A pinned object is not evicted until its pin ends.

An expired object is not found any more (``ExpiryIndex.ended``); its memory is reclaimed in slices,
before a put evicts anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import calls
from kvstore.calls.no_space_messages import format_size_short
from kvstore.calls.tenants import tenant_text
from kvstore.errors import InvalidArgumentError, NoSpaceError
from kvstore.limits import Key
from kvstore.master.state.background_jobs import EXPIRE
from kvstore.master.state.grant_manager import GrantManager
from kvstore.master.state.pins import bytes_held
from kvstore.master.state.records import NamespaceTable, ObjectRecord, StaleExtents
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.tenant import PIN_LIMIT, Tenant
from kvstore.memory.header import extent_bytes

PIN_STEPS = 8_192
"""Objects that one call may add to the pinned ones, with their ancestors."""

EXPIRED_PER_STEP = 256
"""Expired objects that one step reclaims: 2 ms."""

ENDED_PER_STEP = 1_024
"""Pins that one step ends, and pins that it stops counting: 1 ms each."""

HIDE_STEPS = 4_096
"""Records without bytes that one step deletes with expired ones; background work does the rest."""


class RetentionManager:
    def __init__(self, common: StateContext, granting: GrantManager) -> None:
        self._common = common
        self._pool = common.pool
        self._pins = common.pool.pins
        self._lifetimes = common.pool.lifetimes
        self._granting = granting

    def pin(self, now_ms: int, request: calls.Pin) -> calls.PinReply:
        """Pin all stored objects among the keys, or none. Raise NoSpaceError beyond a limit of
        pinned memory, InvalidArgumentError for too many unpinned ancestors."""
        table = self._common.forest.table(request.namespace)
        found = [] if table is None else self._stored_records(now_ms, table, request.keys)
        self._check_limits(request, found)
        pinned = bytearray(len(request.keys))
        self._common.changing = True
        for index, record in enumerate(found):
            if record is not None:
                self._pins.pin(record, now_ms + request.hold_ms)
                pinned[index] = 1
        return calls.PinReply(bytes(pinned))

    def _stored_records(
        self, now_ms: int, table: NamespaceTable, keys: Sequence[Key]
    ) -> list[ObjectRecord | None]:
        return [
            record if record is not None and self._pool.is_stored(record, now_ms) else None
            for record in table.get_many(keys)
        ]

    def _check_limits(self, request: calls.Pin, found: list[ObjectRecord | None]) -> None:
        added: dict[ObjectRecord, int] = {}
        for record in found:
            ancestor = record
            while ancestor is not None and ancestor not in added and not self._pins.holds(ancestor):
                if len(added) == PIN_STEPS:
                    raise InvalidArgumentError(
                        f"these keys have more than {PIN_STEPS} ancestors to pin",
                        advice="Pin the chain in several calls, from its root.",
                    )
                added[ancestor] = bytes_held(ancestor) if ancestor.complete else 0
                ancestor = ancestor.parent
        size = sum(added.values())
        if not size:
            return
        tenant = self._pool.tenant_of(request.namespace)
        if tenant is not None:
            self._check_tenant(tenant, size)
        rules, (_, pinned_bytes) = self._common.rules, self._pins.pinned_in(request.namespace)
        subject = f"namespace {request.namespace} has"
        self._check_limit(subject, pinned_bytes, size, rules.pinned_max)
        share = max(rules.pinned_max, rules.pinned_all_max)
        self._check_limit("all have", self._pins.size, size, share)

    def _check_tenant(self, tenant: Tenant, size: int) -> None:
        current, limit = tenant.pinned_bytes, tenant.pinned_max
        missing = current + size - limit
        if missing > 0:
            tenant.refused += 1
            self._common.counters["refused_pins"] += 1
            raise NoSpaceError(
                f"not pinned: {tenant_text(tenant.name)} has {format_size_short(current)} pinned, "
                f"and {format_size_short(size)} exceed its limit, {format_size_short(limit)}",
                advice="Unpin other objects, wait for pins to end or raise the tenant's pin_limit.",
                cause="pins",
                missing_bytes=missing,
                pinned_bytes=current,
                pinned_bytes_max=limit,
                tenant=tenant.name,
                quota=PIN_LIMIT,
            )

    def _check_limit(self, subject: str, current: int, size: int, share: float) -> None:
        capacity = sum(segment.capacity for segment in self._pool.segments.values())
        limit = int(capacity * share)
        if current + size > limit:
            self._common.counters["refused_pins"] += 1
            raise NoSpaceError(
                f"not pinned: {subject} {format_size_short(current)} pinned, and "
                f"{format_size_short(size)} more exceed the limit, {format_size_short(limit)} "
                f"of the pool's {format_size_short(capacity)}",
                advice="Unpin other objects, wait for pins to end, add a node, or raise "
                "--pinned-max of the master.",
                cause="pins",
                missing_bytes=current + size - limit,
                pinned_bytes=current,
                pinned_bytes_max=limit,
            )

    def unpin(self, now_ms: int, request: calls.Unpin) -> calls.UnpinReply:
        table = self._common.forest.table(request.namespace)
        unpinned = bytearray(len(request.keys))
        self._common.changing = True
        for index, key in enumerate(request.keys):
            record = None if table is None else table.get(key)
            if record is not None and self._pins.unpin(record):
                unpinned[index] = self._pool.is_stored(record, now_ms)
                self._pool.lease_ended(record)
        if any(unpinned):
            self._release_ended()
        return calls.UnpinReply(bytes(unpinned))

    def _release_ended(self) -> None:
        self._pins.release_ended(ENDED_PER_STEP)
        self._common.space_freed()

    def expire_before_put(self, now_ms: int, namespace: str, keys: list[Key]) -> None:
        """Reclaim expired objects before a put allocates: first those of its keys, then others."""
        if now_ms < self._lifetimes.next_ms:
            return
        table = self._common.forest.table(namespace)
        if table is not None:
            records = [record for record in table.get_many(keys) if record is not None]
            self._reclaim_expired(now_ms, [r for r in records if self._lifetimes.ended(r, now_ms)])
        self.expire(now_ms)

    def expire(self, now_ms: int) -> None:
        """Reclaim a slice of the expired objects, and end a slice of the expired pins."""
        expired: list[ObjectRecord] = []
        while now_ms >= self._lifetimes.next_ms and len(expired) < EXPIRED_PER_STEP:
            record = self._lifetimes.pop_expired(now_ms)
            if record is not None:
                expired.append(record)
        self._reclaim_expired(now_ms, expired)
        pins = 0
        while now_ms >= self._pins.ends.next_ms and pins < ENDED_PER_STEP:
            pins += self._pins.end_next(now_ms) is not None
        if pins or self._pins.unsettled:
            self._release_ended()
        has_more = now_ms >= min(self._lifetimes.next_ms, self._pins.ends.next_ms)
        self._common.jobs.note(EXPIRE, has_more or self._pins.unsettled)

    def _reclaim_expired(self, now_ms: int, expired: list[ObjectRecord]) -> None:
        """Remove expired objects; free leaves without a lease now, others one lease later."""
        common, pool = self._common, self._pool
        freed: list[StaleExtents] = []
        leased: list[StaleExtents] = []
        steps_max = common.forest.steps + HIDE_STEPS
        for record in expired:
            if not record.complete:  # its node departed first
                if record.segment is not None:
                    pool.remove(record, steps_max)
                continue
            self._granting.end_copies(now_ms, (record.namespace, record.key))
            stale = StaleExtents.of(record, forbid=True)
            is_read = record.children or record.lease_until_ms > now_ms
            pool.remove(record, steps_max)
            if is_read:
                leased.append(stale)
            else:
                freed.append(stale)
                pool.free(stale.extents, extent_bytes(stale.size))
            common.counters["expired_objects"] += 1
            common.counters["expired_bytes"] += stale.size
        if freed:
            common.effects += common.reclaim.clean(freed)
            self._common.space_freed()
        if leased:
            common.reply_when_wiped(now_ms, leased, calls.ReportCorruptReply(len(leased)))
