"""Chooses memory for writers, grants it under a token with a deadline, and takes it back.

The writers are puts, allocations, and copies of objects (for draining or repair).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore import calls
from kvstore.calls.tenants import tenant_text
from kvstore.errors import BusyError
from kvstore.master.state import liveness, space_allocation
from kvstore.master.state.background_sweep import BackgroundSweeper
from kvstore.master.state.effects import LogClusterEvent
from kvstore.master.state.evictor import AllocationFailure, EvictionConstraint
from kvstore.master.state.grants import (
    AllocationGrant,
    CopyGrant,
    Grant,
    ObjectGrant,
)
from kvstore.master.state.records import Extent, MountedSegment, Name, ObjectRecord
from kvstore.master.state.repair_queue import RepairQueue
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.tenant import PUT_SHARE, Tenant
from kvstore.master.state.tenants import TenantAccounting
from kvstore.memory.header import extent_bytes

PUTS_PER_TICK = 512
"""Puts that one tick expires, and extents that it frees: delay does no harm, a long tick does."""


class GrantManager:
    """See the module."""

    def __init__(
        self, common: StateContext, sweeping: BackgroundSweeper, repairs: RepairQueue
    ) -> None:
        self._common = common
        self._pending = common.pending
        self._sweeping = sweeping
        self._repairs = repairs
        self.copies: dict[Name, list[CopyGrant]] = {}
        """Copies under way, by the object that is copied. Other parts only read this."""

    # --- granting -----------------------------------------------------------------------------

    def reserve(
        self,
        now_ms: int,
        sizes: list[int],
        replicas: int,
        *,
        near: MountedSegment | None = None,
        host: str = "",
        victims: EvictionConstraint | None = None,
        avoid: Sequence[bytes] = (),
        here_only: bool = False,
        owner: Tenant | None = None,
    ) -> list[list[Extent]] | AllocationFailure:
        """Allocates extents for these payloads. ``Pool.allocate`` describes the other arguments.

        Args:
            avoid: segments (uuid) that the writer cannot reach.
            here_only: whether only segments of ``host`` may be used.
            owner: the tenant of the put; None for copies, and for a master without tenants.

        Raises:
            BusyError: too many puts are under way, of all or of this tenant.
        """
        common = self._common
        if len(self._pending) + len(sizes) > common.rules.pending_puts_max:
            raise BusyError(
                f"{len(self._pending)} puts are under way, at most "
                f"{common.rules.pending_puts_max} are allowed",
                advice="Finish or revoke some first.",
                pending_puts=len(self._pending),
            )
        if owner is not None:
            self._check_puts(owner, len(sizes))
        alive = common.membership.alive_segments(now_ms)
        everywhere = usable = [segment for segment in alive if segment.usable(now_ms)]
        if avoid:
            usable = [segment for segment in usable if segment.offer.uuid not in avoid]
        if here_only:
            usable = [segment for segment in usable if segment.node.host == host]
        taken, evicted = space_allocation.allocate(
            common.pool,
            sizes,
            replicas=replicas,
            usable=usable,
            near=near,
            host=host,
            now_ms=now_ms,
            victims=victims,
            owner=owner,
            everywhere=everywhere,
        )
        if evicted:
            for residue in evicted:
                for segment, _ in residue.extents:
                    segment.pressed = True
            common.effects += common.reclaim.clean(evicted)
        if owner is not None and not isinstance(taken, AllocationFailure):
            TenantAccounting.record_allocation(owner, taken, [extent_bytes(size) for size in sizes])
        if victims is None:  # else the drain would evict more than it needs, even moved objects
            for segment in usable:
                self._sweeping.note_allocation(segment)
        if host and not isinstance(taken, AllocationFailure):
            for segment, _ in taken[0]:  # most often all are on one segment
                liveness.record_writer(segment.node, host, now_ms)
        return taken

    def _check_puts(self, owner: Tenant, count: int) -> None:
        """Raises BusyError: the tenant has its share of the puts under way."""
        bound = owner.share_of(self._common.rules.pending_puts_max)
        if owner.pending + count > bound:
            owner.refused += 1
            raise BusyError(
                f"{tenant_text(owner.name)} has {owner.pending} puts under way, at most {bound} "
                "are allowed",
                advice="Finish or revoke some first.",
                pending_puts=owner.pending,
                tenant=owner.name,
                quota=PUT_SHARE,
            )

    def evict_to_limit(self, now_ms: int, owner: Tenant, wanted: int) -> AllocationFailure | None:
        """Evicts objects of this tenant until it may take ``wanted`` bytes more."""
        common = self._common
        alive = common.membership.alive_segments(now_ms)
        usable = [segment for segment in alive if segment.usable(now_ms)]
        short, evicted = space_allocation.evict_to_limit(common.pool, owner, wanted, usable, now_ms)
        if evicted:
            common.effects += common.reclaim.clean(evicted)
        return short

    def allocation(
        self, now_ms: int, request: calls.Allocate, extents: list[Extent], owner: Tenant | None
    ) -> AllocationGrant:
        token = self._pending.take_tokens(1) + 1
        deadline_ms = now_ms + self._common.rules.put_deadline_ms
        put = AllocationGrant(
            token, extents, request.size, deadline_ms, request.client_number, request.namespace,
            owner,
        )  # fmt: skip
        self._pending.add(put)
        self._note_allocation(put)
        return put

    def copy(
        self,
        now_ms: int,
        record: ObjectRecord,
        extents: list[Extent],
        client_number: int,
        *,
        repairs: bool = False,
        missing: int = 0,
    ) -> CopyGrant:
        """Grants a copy of this object, which is complete; see ``CopyGrant``."""
        token = self._pending.take_tokens(1) + 1
        deadline_ms = now_ms + self._common.rules.put_deadline_ms
        put = CopyGrant(token, record, extents, deadline_ms, client_number, repairs, missing)
        self._pending.add(put)
        self.copies.setdefault((record.namespace, record.key), []).append(put)
        return put

    def reply(self, outcomes: bytes, puts: Sequence[Grant]) -> calls.Grants:
        return calls.Grants(
            epoch=self._common.epoch,
            deadline_ms=self._common.rules.put_deadline_ms,
            outcomes=outcomes,
            replicas=len(puts[0].extents) if puts else 0,
            tokens=[put.token for put in puts],
            segments=[segment.segment_id for put in puts for segment, _ in put.extents],
            offsets=[offset for put in puts for _, offset in put.extents],
        )

    def find_grant(self, now_ms: int, epoch: int, token: int) -> Grant | None:
        """The put of ``token``; None if the token is not valid any more."""
        put = self._pending.get(token) if epoch == self._common.epoch else None
        return put if put is not None and now_ms <= put.deadline_ms else None

    def renew(self, now_ms: int, put: Grant) -> None:
        self._pending.renew(put, now_ms + self._common.rules.put_deadline_ms)
        self._note_allocation(put)

    def _note_allocation(self, put: Grant) -> None:
        if isinstance(put, AllocationGrant):
            for segment, _ in put.extents:
                until_ms = put.deadline_ms + self._common.rules.quarantine_ms
                segment.allocated_until_ms = until_ms

    # --- ending -------------------------------------------------------------------------------

    def end(self, put: Grant) -> None:
        """Invalidates the token; the caller takes care of the extents. May be called twice."""
        self._pending.pop(put.token)
        if isinstance(put, CopyGrant):
            self._copy_ended(put)

    def abandon(self, put: Grant, now_ms: int) -> None:
        """Gives up a put whose writer may still write: wipes its extents and quarantines them."""
        self.end(put)
        residue = put.stale_extents(self._common.epoch)
        self.quarantine(put, max(now_ms, put.deadline_ms))
        self._common.wipe([residue._replace(writers=put.writers(), kept=True)])
        self.detach_from_record(put)

    def quarantine(self, put: Grant, writes_until_ms: int) -> None:
        """Keeps the put's extents from use until its writer has certainly stopped."""
        until_ms = writes_until_ms + self._common.rules.quarantine_ms
        self._pending.quarantine(put, put.stale_extents(self._common.epoch), until_ms)

    def release_copies(self, puts: Sequence[CopyGrant]) -> None:
        """Frees and wipes the extents of copies that are not stored, and whose writers are done."""
        for put in puts:
            self.end(put)
            self._common.pool.free(put.extents, put.length)
        self._common.wipe([put.stale_extents(self._common.epoch) for put in puts])

    def detach_from_record(self, put: Grant) -> None:
        """Notes that the put does not write its object any more. Drops the record of the object if
        nothing needs it."""
        if isinstance(put, ObjectGrant) and put.record.writer == put.token:
            put.record.writer = 0
            if put.record.segment is None:
                self._common.pool.delete_if_unused(put.record)
        self._common.space_freed()

    def wipe_again(self, token: int) -> None:
        """Called when the writer of an abandoned put is done. It may have written a header through
        shared memory since the first wiping, and the next master must not find that."""
        residue = self._pending.quarantined(token)
        if residue is not None:
            self._common.wipe([residue._replace(kept=True)])

    def expire(self, now_ms: int) -> None:
        """Abandons puts whose deadline has passed, and frees extents whose quarantine is over."""
        common = self._common
        expired = list(islice(self._pending.pop_expired(now_ms), PUTS_PER_TICK))
        for put in expired:
            self.abandon(put, now_ms)
        if expired:
            common.counters["expired_puts"] += len(expired)
            size = sum(put.size for put in expired)
            common.effect(LogClusterEvent("puts_expired", {"puts": len(expired), "bytes": size}))
        over = list(islice(self._pending.pop_quarantined(now_ms), PUTS_PER_TICK))
        for residue in over:
            common.pool.free(residue.extents, extent_bytes(residue.size))
            self._common.space_freed()
        common.effects += common.reclaim.clean(over)

    # --- copies -------------------------------------------------------------------------------

    def copied(self, namespace: str) -> list[Name]:
        """The objects that are being copied; "": of all namespaces."""
        return [name for name in self.copies if not namespace or name[0] == namespace]

    def end_copies(self, now_ms: int, name: Name) -> None:
        """Abandons the copies of this object and wipes them; removals wait for that wiping."""
        for put in self.copies.get(name, ())[:]:
            self.abandon(put, now_ms)

    def unexpired(self, put: CopyGrant) -> bool:
        """Whether the copied object is still stored, in the version that is copied."""
        record = put.record
        return (
            self._common.forest.get(record.namespace, record.key) is record
            and record.complete
            and (record.epoch, record.counter) == put.copied
        )

    def _copy_ended(self, put: CopyGrant) -> None:
        name = put.record.namespace, put.record.key
        puts = self.copies.get(name, [])
        if put not in puts:
            return
        puts.remove(put)
        if not puts:
            del self.copies[name]
        if put.repairs:
            self._repairs.ended(put.size)
