"""The queue of puts that wait for room: served in order when there is some (``room_made``)."""

from __future__ import annotations

from collections.abc import Callable

from kvstore import calls
from kvstore.errors import BusyError, KVStoreError
from kvstore.master.state import shortage
from kvstore.master.state.common import Common
from kvstore.master.state.effects import Answer, Later
from kvstore.master.state.jobs import SERVE
from kvstore.master.state.pool import EVICTIONS_PER_STEP, Shortage
from kvstore.master.state.puts import WaitingPut

SERVED_PER_STEP = 512
"""Keys of waiting puts that one step serves, at least one put; see ``PUT_COUNTS_FOR``."""

PUT_COUNTS_FOR = 16
"""Keys that a put counts for, in addition to its own."""

Wanting = calls.PutStart | calls.Allocate


class WaitingPuts:
    """See the module."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._jobs = common.jobs
        self._queue = common.waiting
        self._tried_ms = common.started_ms

    def add(self, now_ms: int, request: Wanting, wait_ms: int) -> Later:
        """Lets a put wait. Raises BusyError: too many puts wait already."""
        common = self._common
        if len(self._queue) >= common.rules.waiting_puts_max:
            raise BusyError(
                f"{len(self._queue)} puts are waiting for space, the limit",
                advice="Add memory (kvstore-node --memory), or put less at a time.",
                waiting_puts=len(self._queue),
            )
        if not self._queue:
            self._tried_ms = now_ms
        ticket = common.ticket()
        self._queue.append(WaitingPut(ticket, request, now_ms + wait_ms))
        common.counters["waited_puts"] += 1
        return Later(ticket)

    def cancel(self, ticket: int) -> None:
        for waiting in self._queue:
            if waiting.ticket == ticket:
                self._queue.remove(waiting)
                self._jobs.note(SERVE, bool(self._queue))  # the next one may want less
                return

    def serve(self, now_ms: int, grant: Callable[[int, Wanting], calls.Grants | Shortage]) -> None:
        """Grants puts in their order, until one must go on waiting; refuses those whose time is up.
        Leaves the rest to the next step when this one has done enough."""
        common, jobs = self._common, self._jobs
        jobs.note(SERVE, False)
        self._tried_ms = now_ms
        served = 0
        missing: Shortage | None = None
        evicted_max = common.counters["evicted_objects"] + EVICTIONS_PER_STEP
        while self._queue and missing is None and not jobs.due & SERVE:
            request = self._queue[0].request
            result: calls.Grants | Shortage | KVStoreError
            common.forest.resumes = True
            try:
                result = grant(now_ms, request)
            except KVStoreError as error:
                result = error
            common.forest.resumes = False
            if isinstance(result, Shortage):
                missing = result
                jobs.note(SERVE, result.goes_on)
                break
            self._answer(now_ms, self._queue.popleft(), result)
            served += PUT_COUNTS_FOR + _keys_of(request)
            is_spent = common.counters["evicted_objects"] >= evicted_max
            jobs.note(SERVE, is_spent or served >= SERVED_PER_STEP)
        self._refuse_late(now_ms, missing)
        if not self._queue:
            jobs.note(SERVE, False)

    def _answer(self, now_ms: int, put: WaitingPut, result: calls.Grants | KVStoreError) -> None:
        common = self._common
        if isinstance(result, calls.Grants) and (earlier := common.unread(put.request, result)):
            effects, _ = common.reclaim.wipe([], now_ms, put.ticket, result, earlier)
            common.effects += effects
        else:
            common.effect(Answer(put.ticket, result))

    def _refuse_late(self, now_ms: int, missing: Shortage | None) -> None:
        """Refuses late puts. ``missing``: what the first in the queue lacks, if it was tried."""
        for put in [put for put in self._queue if put.deadline_ms <= now_ms]:
            if put is not self._queue[0] or missing is None:  # its turn did not come
                missing = Shortage(shortage.asked_bytes(put.request))
            self._queue.remove(put)
            self._jobs.due |= SERVE  # the next in the queue may want less
            self._common.counters["refused_no_space"] += 1
            error = shortage.explained(self._common, now_ms, put.request, missing)
            self._common.counters[f"refused_{error.fields['cause']}"] += 1
            self._common.effect(Answer(put.ticket, error))

    def only_pins_end(self, until_ms: int, request: Wanting) -> bool:
        """Whether pins hold so much until ``until_ms`` that the rest of the pool is too small for
        the request: no end of a lease, or of a lifetime, helps."""
        pool = self._common.pool
        capacity = sum(segment.capacity for segment in pool.segments.values())
        return (
            pool.pins.objects > 0
            and not pool.pins.unsettled
            and min(pool.pins.ends.next_ms, pool.lifetimes.next_ms) > until_ms
            and shortage.asked_bytes(request) > capacity - pool.pins.size
        )

    def next_ms(self) -> list[int]:
        """When a waiting put must be refused, or memory may become eligible by itself."""
        if not self._queue:
            return []
        changes = [*self._common.membership.trusted_again_ms()]
        for segment in self._common.pool.segments.values():
            changes += (segment.candidates.next_lease_end_ms() or 0, segment.usable_at_ms)
        refused_ms = min(put.deadline_ms for put in self._queue)
        return [refused_ms, *[time for time in changes if time > self._tried_ms]]

    def check_invariants(self) -> None:
        assert len(self._queue) <= self._common.rules.waiting_puts_max
        assert self._queue or not self._jobs.due & SERVE


def _keys_of(request: Wanting) -> int:
    return len(request.keys) if isinstance(request, calls.PutStart) else 1
