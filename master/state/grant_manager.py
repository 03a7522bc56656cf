"""Grants and reclaims the memory of puts, allocations and copies (drains and repairs)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    DiskGrant,
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
"""Puts that a tick expires, and extents that it frees: delay is harmless, a long tick is not."""


class GrantManager:
    def __init__(
        self, common: StateContext, sweeping: BackgroundSweeper, repairs: RepairQueue
    ) -> None:
        self._common = common
        self._pending = common.pending
        self._sweeping = sweeping
        self._repairs = repairs
        self.disk_grant_ended: Callable[[DiskGrant], None]
        """Called at the end of each; set by ``DiskTier``."""
        self.copies: dict[Name, list[ObjectGrant]] = {}
        """Copies in progress by their object; read-only for other parts."""

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
        only: Sequence[MountedSegment] | None = None,
    ) -> list[list[Extent]] | AllocationFailure:
        """Allocate extents for these payloads; see ``MemoryPool.allocate`` for the other arguments.

        Args:
            avoid: segments (uuid) that the writer cannot reach.
            here_only: use only segments of ``host``.
            owner: the tenant of the put; None for copies and without tenants.
            only: use only these segments.

        Raises:
            BusyError: too many pending puts, in total or of this tenant.
        """
        common = self._common
        if len(self._pending) + len(sizes) > common.rules.pending_puts_max:
            raise BusyError(
                f"{len(self._pending)} puts are pending; {len(sizes)} more exceed the limit of "
                f"{common.rules.pending_puts_max}",
                advice="Finish or revoke some first.",
                pending_puts=len(self._pending),
            )
        if owner is not None:
            self._check_puts(owner, len(sizes))
        alive = common.membership.alive_segments(now_ms)
        everywhere = usable = [segment for segment in alive if segment.usable(now_ms)]
        if avoid:
            usable = [segment for segment in usable if segment.offer.uuid not in avoid]
        if only is not None:
            usable = [segment for segment in usable if segment in only]
        if here_only:
            usable = [segment for segment in usable if segment.node.host == host]
        extents, evicted = space_allocation.allocate(
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
            for stale in evicted:
                for segment, _ in stale.extents:
                    segment.pressed = True
            common.effects += common.reclaim.clean(evicted)
        if owner is not None and not isinstance(extents, AllocationFailure):
            TenantAccounting.record_allocation(
                owner, extents, [extent_bytes(size) for size in sizes]
            )
        if victims is None:  # else a drain would evict too much, even moved objects
            for segment in usable:
                self._sweeping.note_allocation(segment)
        if host and not isinstance(extents, AllocationFailure):
            for segment, _ in extents[0]:  # usually all are on one segment
                liveness.record_writer(segment.node, host, now_ms)
        return extents

    def _check_puts(self, owner: Tenant, count: int) -> None:
        limit = owner.share_of(self._common.rules.pending_puts_max)
        if owner.pending + count > limit:
            owner.refused += 1
            raise BusyError(
                f"{tenant_text(owner.name)} has {owner.pending} pending puts; {count} more exceed "
                f"its limit of {limit}",
                advice="Finish or revoke some first.",
                pending_puts=owner.pending,
                tenant=owner.name,
                quota=PUT_SHARE,
            )

    def evict_to_limit(self, now_ms: int, owner: Tenant, wanted: int) -> AllocationFailure | None:
        """Evict objects of the tenant until ``wanted`` more bytes are within its limit."""
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
        token = self.new_token()
        deadline_ms = now_ms + self._common.rules.put_deadline_ms
        put = CopyGrant(token, record, extents, deadline_ms, client_number, repairs, missing)
        self.add_copy(put)
        return put

    def new_token(self) -> int:
        return self._pending.take_tokens(1) + 1

    def add_copy(self, put: CopyGrant | DiskGrant) -> None:
        self._pending.add(put)
        self.copies.setdefault((put.record.namespace, put.record.key), []).append(put)

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
        put = self._pending.get(token) if epoch == self._common.epoch else None
        if put is None or now_ms > put.deadline_ms or isinstance(put, DiskGrant):
            return None
        return put

    def renew(self, now_ms: int, put: Grant) -> None:
        self._pending.renew(put, now_ms + self._common.rules.put_deadline_ms)
        self._note_allocation(put)

    def _note_allocation(self, put: Grant) -> None:
        if isinstance(put, AllocationGrant):
            for segment, _ in put.extents:
                until_ms = put.deadline_ms + self._common.rules.quarantine_ms
                segment.allocated_until_ms = until_ms

    def end(self, put: Grant) -> None:
        """Invalidate the token; the caller releases the extents. Idempotent."""
        self._pending.pop(put.token)
        if isinstance(put, CopyGrant | DiskGrant):
            self._copy_ended(put)

    def abandon(self, put: Grant, now_ms: int) -> None:
        self.end(put)
        stale = put.stale_extents(self._common.epoch)
        if isinstance(put, DiskGrant):
            # The node wipes an extent once it has finished copying there, and a disk that hangs
            # must not delay puts on the same segment.
            self._common.wipe_ahead(stale)
        else:
            self.quarantine(put, max(now_ms, put.deadline_ms))
            self._common.wipe([stale._replace(writers=put.writers(), kept=True)])
        self.detach_from_record(put)

    def quarantine(self, put: Grant, writes_until_ms: int) -> None:
        """Keep the put's extents out of use until its writer has stopped."""
        until_ms = writes_until_ms + self._common.rules.quarantine_ms
        self._pending.quarantine(put, put.stale_extents(self._common.epoch), until_ms)

    def release_copies(self, puts: Sequence[CopyGrant | DiskGrant]) -> None:
        """Free and wipe the extents of unstored copies whose writers have finished."""
        for put in puts:
            self.end(put)
            self._common.pool.free(put.extents, put.length)
        self._common.wipe([put.stale_extents(self._common.epoch) for put in puts])

    def detach_from_record(self, put: Grant) -> None:
        """Remove the put from its record, and delete the record if it is unused."""
        if isinstance(put, ObjectGrant) and put.record.writer == put.token:
            put.record.writer = 0
            if put.record.segment is None:
                self._common.pool.delete_if_unused(put.record)
        self._common.space_freed()

    def wipe_again(self, token: int) -> None:
        """Wipe an abandoned put again after its writer has finished: shared memory may hold a
        header written after the first wipe."""
        stale = self._pending.quarantined(token)
        if stale is not None:
            self._common.wipe([stale._replace(kept=True)])

    def expire(self, now_ms: int) -> None:
        """Abandon puts whose deadline has passed; free extents whose quarantine has ended."""
        common = self._common
        expired = list(islice(self._pending.pop_expired(now_ms), PUTS_PER_TICK))
        for put in expired:
            self.abandon(put, now_ms)
        if expired:
            common.counters["expired_puts"] += len(expired)
            size = sum(put.size for put in expired)
            common.effect(LogClusterEvent("puts_expired", {"puts": len(expired), "bytes": size}))
        over = list(islice(self._pending.pop_quarantined(now_ms), PUTS_PER_TICK))
        for stale in over:
            common.pool.free_stale(stale)
            self._common.space_freed()
        common.effects += common.reclaim.clean(over)

    def copied(self, namespace: str) -> list[Name]:
        """Return the objects being copied; "": in all namespaces."""
        return [name for name in self.copies if not namespace or name[0] == namespace]

    def end_copies(self, now_ms: int, name: Name) -> None:
        """Abandon and wipe the copies of this object; removals wait for the wipe."""
        for put in self.copies.get(name, ())[:]:
            self.abandon(put, now_ms)

    def unexpired(self, put: CopyGrant) -> bool:
        record = put.record
        return (
            self._common.forest.get(record.namespace, record.key) is record
            and record.complete
            and (record.epoch, record.counter) == put.copied
        )

    def _copy_ended(self, put: CopyGrant | DiskGrant) -> None:
        name = put.record.namespace, put.record.key
        puts = self.copies.get(name, [])
        if put not in puts:
            return
        puts.remove(put)
        if not puts:
            del self.copies[name]
        if isinstance(put, DiskGrant):
            self.disk_grant_ended(put)
        elif put.repairs:
            self._repairs.ended(put.size)
