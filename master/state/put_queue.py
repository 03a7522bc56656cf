"""Queue of puts that wait for space, served in order.

With tenants, each has its own order: a put blocked by a quota does not block other tenants.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore import calls
from kvstore.calls.tenants import tenant_text
from kvstore.errors import BusyError, KVStoreError
from kvstore.master.state import no_space_report
from kvstore.master.state.background_jobs import SERVE
from kvstore.master.state.effects import DeferredReply, SendReply
from kvstore.master.state.evictor import EVICTIONS_PER_STEP, AllocationFailure
from kvstore.master.state.grants import WaitingPut
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.tenant import PUT_SHARE, Tenant

SERVED_PER_STEP = 512
"""Keys of waiting puts that one step processes, at least one put; see ``PUT_COUNTS_FOR``."""

PUT_COUNTS_FOR = 16
"""Cost of a put in keys, in addition to its own."""

Wanting = calls.PutStart | calls.Allocate
TryGrant = Callable[[int, Wanting], calls.Grants | AllocationFailure]


class WaitingPuts:
    def __init__(self, common: StateContext) -> None:
        self._common = common
        self._jobs = common.jobs
        self._queue = common.waiting
        self._stuck: dict[Tenant | None, AllocationFailure] = {}
        """Shortage of each tenant's first put, if it failed since space was last freed."""
        self._rooms = 0

    def add(self, now_ms: int, request: Wanting, wait_ms: int) -> DeferredReply:
        """Queue a put. Raise BusyError if too many puts are waiting."""
        common = self._common
        if len(self._queue) >= common.rules.waiting_puts_max:
            raise BusyError(
                f"the limit of puts waiting for space is reached: {len(self._queue)}",
                advice="Add memory (kvstore-node --memory), or put less at a time.",
                waiting_puts=len(self._queue),
            )
        owner = common.pool.tenant_of(request.namespace)
        if owner is not None:
            limit = owner.share_of(common.rules.waiting_puts_max)
            if owner.waiting >= limit:
                owner.refused += 1
                raise BusyError(
                    f"{tenant_text(owner.name)} has reached its limit of puts waiting for space: "
                    f"{owner.waiting}",
                    advice="Put less at a time, or raise the tenant's share of puts.",
                    waiting_puts=owner.waiting,
                    tenant=owner.name,
                    quota=PUT_SHARE,
                )
            owner.waiting += 1
        reply_id = common.new_reply_id()
        self._queue.append(WaitingPut(reply_id, request, now_ms + wait_ms, owner))
        common.counters["queued_puts"] += 1
        return DeferredReply(reply_id)

    def cancel(self, reply_id: int) -> None:
        for waiting in self._queue:
            if waiting.reply_id == reply_id:
                self._drop(waiting)
                self._jobs.note(SERVE, bool(self._queue))  # the next one may need less
                return

    def _drop(self, put: WaitingPut) -> None:
        self._queue.remove(put)
        if put.tenant is not None:
            put.tenant.waiting -= 1
        self._stuck.pop(put.tenant, None)  # its next put may need less

    def serve(self, now_ms: int, grant: TryGrant) -> None:
        """Grant waiting puts in order; if one must wait, skip its tenant's (without tenants: all).
        Reject expired ones. A further step continues after enough work."""
        common, jobs = self._common, self._jobs
        if not jobs.due & SERVE or self._rooms != common.rooms:  # a tick, or more space is free
            self._stuck.clear()
        self._rooms = common.rooms
        jobs.note(SERVE, False)
        served = 0
        lacking: dict[Tenant | None, AllocationFailure] = {}
        evicted_max = common.counters["evicted_objects"] + EVICTIONS_PER_STEP
        for put in list(self._queue):
            if put.tenant in self._stuck:
                continue
            if jobs.due & SERVE:
                break
            result: calls.Grants | AllocationFailure | KVStoreError
            try:
                result = grant(now_ms, put.request)
            except KVStoreError as error:
                result = error
            if isinstance(result, AllocationFailure):
                lacking[put.tenant] = result
                if result.may_retry:  # try this put first again
                    jobs.due |= SERVE
                else:
                    self._stuck[put.tenant] = result
            else:
                self._drop(put)
                self._reply(now_ms, put, result)
            served += PUT_COUNTS_FOR + _keys_of(put.request)
            if served >= SERVED_PER_STEP or common.counters["evicted_objects"] >= evicted_max:
                jobs.due |= SERVE
        self._reject_expired(now_ms, self._stuck | lacking)
        if not self._queue:
            jobs.note(SERVE, False)

    def _reply(self, now_ms: int, put: WaitingPut, result: calls.Grants | KVStoreError) -> None:
        common = self._common
        if isinstance(result, calls.Grants) and (
            earlier := common.wipes_before_grant(put.request, result)
        ):
            effects, _ = common.reclaim.wipe([], now_ms, put.reply_id, result, earlier)
            common.effects += effects
        else:
            common.effect(SendReply(put.reply_id, result))

    def _reject_expired(self, now_ms: int, lacking: dict[Tenant | None, AllocationFailure]) -> None:
        """Reject expired puts. ``lacking``: what each tenant's first put lacks, if tried."""
        for put in [put for put in self._queue if put.deadline_ms <= now_ms]:
            missing = self._shortage(put, lacking.get(put.tenant))
            self._drop(put)
            self._jobs.due |= SERVE  # the next one may need less
            self._common.counters["refused_no_space"] += 1
            error = no_space_report.refusal_error(self._common, now_ms, put.request, missing)
            self._common.counters[f"refused_{error.fields['cause']}"] += 1
            self._common.effect(SendReply(put.reply_id, error))

    def _shortage(self, put: WaitingPut, found: AllocationFailure | None) -> AllocationFailure:
        """Return what a rejected put lacks. ``found``: what the first put of its tenant lacked."""
        requested_bytes = no_space_report.asked_bytes(put.request)
        if found is None:
            return AllocationFailure(requested_bytes)
        is_first = next(waiting for waiting in self._queue if waiting.tenant is put.tenant) is put
        return found if is_first else AllocationFailure(requested_bytes, quota=found.quota)

    def blocked_by_pins(self, until_ms: int, request: Wanting) -> bool:
        """Return whether no end of a lease or TTL helps: pins hold too much until ``until_ms``."""
        pool = self._common.pool
        capacity = sum(segment.capacity for segment in pool.segments.values())
        return (
            pool.pins.objects > 0
            and not pool.pins.unsettled
            and min(pool.pins.ends.next_ms, pool.lifetimes.next_ms) > until_ms
            and no_space_report.asked_bytes(request) > capacity - pool.pins.size
        )


def _keys_of(request: Wanting) -> int:
    return len(request.keys) if isinstance(request, calls.PutStart) else 1
