"""How long objects are kept: by pins, until which they are not evicted, and by lifetimes, after
which they are gone.

An object whose lifetime is over is in no answer from that moment on (``Ends.ended``). Its memory is
taken back in slices, before a put evicts anything.
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
"""Objects that one call may add to the pinned ones: the named objects and their ancestors."""

EXPIRED_PER_STEP = 256
"""Objects that one step takes back after their lifetime: 2 ms."""

ENDED_PER_STEP = 1_024
"""Pins that one step ends, and pins that it stops counting: 1 ms for either."""

HIDE_STEPS = 4_096
"""Records without bytes that one step forgets with the expired ones; the background work forgets
the rest."""


class RetentionManager:
    """See the module."""

    def __init__(self, common: StateContext, granting: GrantManager) -> None:
        self._common = common
        self._pool = common.pool
        self._pins = common.pool.pins
        self._lifetimes = common.pool.lifetimes
        self._granting = granting

    # --- calls --------------------------------------------------------------------------------

    def pin(self, now_ms: int, request: calls.Pin) -> calls.PinReply:
        """Pins all stored objects among the keys, or none.

        Raises:
            NoSpaceError: the namespace, or all namespaces together, would exceed their share of
                pinned memory.
            InvalidArgumentError: the objects have too many ancestors that are not pinned.
        """
        table = self._common.forest.table(request.namespace)
        found = [] if table is None else self._found(now_ms, table, request.keys)
        self._check_bound(request, found)
        pinned = bytearray(len(request.keys))
        self._common.changing = True
        for index, record in enumerate(found):
            if record is not None:
                self._pins.pin(record, now_ms + request.hold_ms)
                pinned[index] = 1
        return calls.PinReply(bytes(pinned))

    def _found(
        self, now_ms: int, table: NamespaceTable, keys: Sequence[Key]
    ) -> list[ObjectRecord | None]:
        return [
            record if record is not None and self._pool.is_stored(record, now_ms) else None
            for record in table.get_many(keys)
        ]

    def _check_bound(self, request: calls.Pin, found: list[ObjectRecord | None]) -> None:
        added: dict[ObjectRecord, int] = {}
        for record in found:
            at = record
            while at is not None and at not in added and not self._pins.holds(at):
                if len(added) == PIN_STEPS:
                    raise InvalidArgumentError(
                        f"more than {PIN_STEPS} ancestors would be pinned with these keys",
                        advice="Pin the chain in several calls, from its root.",
                    )
                added[at] = bytes_held(at) if at.complete else 0
                at = at.parent
        wanted = sum(added.values())
        if not wanted:
            return
        owner = self._pool.tenant_of(request.namespace)
        if owner is not None:
            self._check_tenant(owner, wanted)
        rules, (_, own) = self._common.rules, self._pins.pinned_in(request.namespace)
        who = f"namespace {request.namespace} has"
        self._check_share(who, own, wanted, rules.pinned_max)
        share = max(rules.pinned_max, rules.pinned_all_max)
        self._check_share("all have", self._pins.size, wanted, share)

    def _check_tenant(self, owner: Tenant, wanted: int) -> None:
        """Raises NoSpaceError."""
        before, bound = owner.pinned_bytes, owner.pinned_max
        missing = before + wanted - bound
        if missing > 0:
            owner.refused += 1
            self._common.counters["refused_pins"] += 1
            raise NoSpaceError(
                f"not pinned: {tenant_text(owner.name)} has {format_size_short(before)} pinned, "
                f"and {format_size_short(wanted)} exceed its limit, {format_size_short(bound)}",
                advice="Unpin others or let their pins end, or raise the tenant's pin_limit.",
                cause="pins",
                missing_bytes=missing,
                pinned_bytes=before,
                pinned_bytes_max=bound,
                tenant=owner.name,
                quota=PIN_LIMIT,
            )

    def _check_share(self, who: str, before: int, wanted: int, share: float) -> None:
        """Raises NoSpaceError."""
        capacity = sum(segment.capacity for segment in self._pool.segments.values())
        bound = int(capacity * share)
        if before + wanted > bound:
            self._common.counters["refused_pins"] += 1
            raise NoSpaceError(
                f"not pinned: {who} {format_size_short(before)} pinned, and "
                f"{format_size_short(wanted)} more exceed the limit, {format_size_short(bound)} "
                f"of the pool's {format_size_short(capacity)}",
                advice="Unpin others or let their pins end, add a node, or raise the master's "
                "--pinned-max.",
                cause="pins",
                missing_bytes=before + wanted - bound,
                pinned_bytes=before,
                pinned_bytes_max=bound,
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
        """Stops counting objects that no pin holds any more: a slice of them."""
        self._pins.release_ended(ENDED_PER_STEP)
        self._common.space_freed()  # it can be evicted

    # --- lifetimes ----------------------------------------------------------------------------

    def expire_before_put(self, now_ms: int, namespace: str, keys: list[Key]) -> None:
        """Called before a put takes memory. Takes back expired objects: those under the put's keys,
        then others."""
        if now_ms < self._lifetimes.next_ms:
            return
        table = self._common.forest.table(namespace)
        if table is not None:
            records = [record for record in table.get_many(keys) if record is not None]
            self._take_back(now_ms, [r for r in records if self._lifetimes.ended(r, now_ms)])
        self.expire(now_ms)

    def expire(self, now_ms: int) -> None:
        """Takes back a slice of the expired objects, and ends a slice of the pins that are over."""
        ended: list[ObjectRecord] = []
        while now_ms >= self._lifetimes.next_ms and len(ended) < EXPIRED_PER_STEP:
            record = self._lifetimes.pop_expired(now_ms)
            if record is not None:
                ended.append(record)
        self._take_back(now_ms, ended)
        pins = 0
        while now_ms >= self._pins.ends.next_ms and pins < ENDED_PER_STEP:
            pins += self._pins.end_next(now_ms) is not None
        if pins or self._pins.unsettled:
            self._release_ended()
        goes_on = now_ms >= min(self._lifetimes.next_ms, self._pins.ends.next_ms)
        self._common.jobs.note(EXPIRE, goes_on or self._pins.unsettled)

    def _take_back(self, now_ms: int, ended: list[ObjectRecord]) -> None:
        """Hides ended objects. The memory of a leaf without a lease is free at once; the memory of
        others is free one lease later, as if they had been removed."""
        common, pool = self._common, self._pool
        freed: list[StaleExtents] = []
        leased: list[StaleExtents] = []
        steps_max = common.forest.steps + HIDE_STEPS
        for record in ended:
            if not record.complete:  # its node went before its end: it is not missing any more
                if record.segment is not None:
                    pool.remove(record, steps_max)
                common.forest.missing.forget(record.namespace, record.key)
                continue
            self._granting.end_copies(now_ms, (record.namespace, record.key))
            residue = StaleExtents.of(record, forbid=True)
            is_read = record.children or record.lease_until_ms > now_ms
            pool.remove(record, steps_max)
            if is_read:
                leased.append(residue)
            else:
                freed.append(residue)
                pool.free(residue.extents, extent_bytes(residue.size))
            common.counters["expired_objects"] += 1
            common.counters["expired_bytes"] += residue.size
        if freed:
            common.effects += common.reclaim.clean(freed)
            self._common.space_freed()
        if leased:
            common.reply_when_wiped(now_ms, leased, calls.ReportCorruptReply(len(leased)))
