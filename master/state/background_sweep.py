"""Background work in slices of a few milliseconds: evicts ahead of need on full segments, deletes
the records of dead segments, and marks detached leaves, which are evicted first."""

from __future__ import annotations

from collections import deque

from kvstore.master.state import space_allocation
from kvstore.master.state.background_jobs import EVICT, MOVE, SWEEP
from kvstore.master.state.candidates import SweepCursor
from kvstore.master.state.grants import ObjectGrant
from kvstore.master.state.records import MountedSegment, ObjectRecord, StaleExtents
from kvstore.master.state.space_allocation import BeforeEviction
from kvstore.master.state.state_context import StateContext

SWEEP_STEPS = 2_000
"""Records that one slice of background work looks at: 1 to 3 ms."""

EVICTIONS_AHEAD = 64
"""Objects that one slice evicts ahead of need: 1 to 2 ms."""


class BackgroundSweeper:
    """See the module."""

    def __init__(self, common: StateContext) -> None:
        self._common = common
        self.before_eviction: BeforeEviction
        """Writes objects to disks before they are evicted; set by ``DiskTier``."""
        self._pool = common.pool
        self._jobs = common.jobs
        self._pressed: dict[MountedSegment, None] = {}
        """Full segments with less than half of their reserve free."""
        self._sweeps: deque[tuple[MountedSegment, SweepCursor | None]] = deque()
        """Each segment to sweep, and where to continue; None: it is dead."""
        self._above_puts: list[ObjectRecord] = []
        """Parents of puts under way, from which the chains are still to be walked upward."""
        self._swept_breaks = common.forest.breaks

    def segment_died(self, segment: MountedSegment) -> None:
        """Has the records of a dead segment deleted, in slices."""
        self._sweeps.append((segment, None))
        self._jobs.due |= SWEEP

    def note_allocation(self, segment: MountedSegment) -> None:
        """Called after an allocation there: has objects evicted ahead of need if it is full."""
        if segment.pressed:
            free = segment.allocator.free_bytes + segment.wiping_bytes
            if free < segment.reserve_bytes // 2:
                self._pressed[segment] = None
                self._jobs.due |= EVICT

    def resume(self, segment: MountedSegment) -> None:
        """Continues to evict ahead of need: an object was written to a disk."""
        if segment.alive:
            self._pressed[segment] = None
            self._jobs.due |= EVICT

    # --- jobs ---------------------------------------------------------------------------------

    def evict_ahead(self, now_ms: int) -> None:
        segment = next(iter(self._pressed))
        evicted: list[StaleExtents] = []
        goes_on = False
        if segment.alive and segment.usable(now_ms) and not segment.node.draining:
            evicted, goes_on = space_allocation.evict_ahead(
                self._pool, segment, EVICTIONS_AHEAD, now_ms, self.before_eviction
            )
        if not goes_on:
            del self._pressed[segment]
            self._jobs.note(EVICT, bool(self._pressed))
        self._common.effects += self._common.reclaim.clean_ahead(evicted)

    def move_tables(self, now_ms: int) -> None:
        """Moves namespaces to their tenants by the changed rules, and then has all candidates
        checked, which may be in the queue of another tenant."""
        del now_ms
        tenants = self._pool.tenants
        tenants.move_some(SWEEP_STEPS, self._pool.pins.all_pinned())
        if not tenants.moving:
            self._jobs.note(MOVE, False)
            self._swept_breaks = -1
            self._jobs.due |= SWEEP
            self._common.space_freed()

    def delete_unused(self, now_ms: int) -> None:
        del now_ms
        self._pool.continue_deleting(SWEEP_STEPS)

    def sweep(self, now_ms: int) -> None:
        """Finds objects that are lost with their segment, and leaves that a break has detached.
        Begins at leaves, which are candidates or puts in progress: all records are above one."""
        del now_ms
        if self._above_puts:
            self._walk_above_puts()
        elif self._sweeps:
            self._sweep_on()
        else:
            self._swept_breaks = self._pool.forest.breaks
            self._sweeps.extend(
                (segment, SweepCursor()) for segment in self._pool.segments.values()
            )
            puts = [put for put in self._common.pending if isinstance(put, ObjectGrant)]
            above = [put.record.parent for put in puts]
            self._above_puts = [parent for parent in above if parent is not None]
        self._jobs.note(SWEEP, self._sweeps_more())

    def _sweeps_more(self) -> bool:
        is_swept = self._swept_breaks == self._pool.forest.breaks
        return bool(self._sweeps or self._above_puts) or not is_swept

    def _sweep_on(self) -> None:
        segment, cursor = self._sweeps[0]
        if cursor is None:
            if not self._pool.sweep_dead(segment, SWEEP_STEPS):
                self._sweeps.popleft()
            return
        further = self._pool.sweep_detached(segment, cursor, SWEEP_STEPS)
        if further is None:
            self._sweeps.popleft()
        else:
            self._sweeps[0] = (segment, further)

    def _walk_above_puts(self) -> None:
        """Takes the bytes of lost blocks above puts under way: no candidate may be below them."""
        forest = self._pool.forest
        steps_max = forest.steps + SWEEP_STEPS
        for _ in range(min(SWEEP_STEPS, len(self._above_puts))):
            forest.is_reachable(self._above_puts.pop())
            if forest.steps >= steps_max:
                return
