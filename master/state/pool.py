"""Memory and forest together: what it takes to give an object bytes, and to take them away.

``Pool`` keeps these in step: an object's extents, its place in the eviction order, the counts of
its namespace, and the forest. It knows nothing of puts, leases' lengths, nodes' streams or calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.master.state.eviction import LRU, EvictionPolicy
from kvstore.master.state.forest import Forest
from kvstore.master.state.placement import preferred
from kvstore.master.state.records import Extent, ObjectRecord, Segment
from kvstore.memory.header import extent_bytes

EVICTIONS_PER_STEP = 512
"""An allocation that must evict more goes on in the next step of the loop: about 5 ms each."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """An allocation that found no room. Nothing of it was taken."""

    missing_bytes: int
    retry_at_ms: int | None
    """When it may succeed at the earliest without anything else happening; None: unknown."""
    goes_on: bool = False
    """Room was made but the step's budget is spent: try again at once."""


class Pool:
    """All mounted segments and the objects on them."""

    def __init__(self, policy: Callable[[], EvictionPolicy] = LRU) -> None:
        self.forest = Forest()
        self.segments: dict[int, Segment] = {}
        """Those alive, by id."""
        self.counters: Counter[str] = Counter()
        self.new_policy = policy
        self._sizes: dict[int, int] = {}

    # --- objects ------------------------------------------------------------------------------

    def link(self, record: ObjectRecord, parent: ObjectRecord | None) -> None:
        """As ``Forest.link``; a parent with children is no candidate for eviction."""
        before = self.forest.link(record, parent)
        if parent is not None and parent.ticket:
            self._policy_of(parent).discard(parent)
        if before is not None:
            self.settle(before, record.last_used_ms)

    def store(
        self,
        record: ObjectRecord,
        extents: list[Extent],
        size: int,
        version: tuple[int, int],
        now_ms: int,
    ) -> None:
        """``record`` is complete now. It must not hold bytes (``strip`` it first)."""
        assert record.segment is None
        assert record.ticket == 0
        record.segment, record.offset = extents[0]
        record.more = tuple(extents[1:])
        record.size = self._sizes.setdefault(size, size)
        record.epoch, record.counter = version
        record.last_used_ms = now_ms
        table = record.namespace
        table.objects += 1
        table.size += size
        if not record.children:
            self._policy_of(record).add(record)

    def strip(self, record: ObjectRecord) -> list[Extent]:
        """Take its bytes away; returns the extents, which are still allocated."""
        extents = record.extents()
        if record.ticket:
            self._policy_of(record).discard(record)
        if record.complete:  # otherwise its segment's death was the break
            self.forest.cut(record)
        record.segment = None
        record.more = ()
        record.checked = 0
        table = record.namespace
        table.objects -= 1
        table.size -= record.size
        return extents

    def settle(self, record: ObjectRecord, used_ms: int) -> None:
        """Something that kept ``record`` went: forget it, or make it a candidate, and so upward.

        Recency is inherited: a parent that becomes a leaf counts as used when its child was.
        """
        at: ObjectRecord | None = record
        while at is not None and not at.children:
            if at.segment is not None:
                if at.complete:
                    if not at.ticket:
                        self._rehome(at)
                        at.last_used_ms = max(at.last_used_ms, used_ms)
                        self._policy_of(at).add(at)
                    return
                self.release(self.strip(at), at.size)
            if at.writer:
                return
            at = self.forest.forget(at)

    def evict(self, record: ObjectRecord) -> None:
        used_ms, size = record.last_used_ms, record.size
        self.release(self.strip(record), size)
        self.settle(record, used_ms)
        self.counters["evicted_objects"] += 1
        self.counters["evicted_bytes"] += size

    def release(self, extents: Iterable[Extent], size: int) -> None:
        """Free the extents of a payload of ``size`` bytes, where their segments are alive."""
        self.free(extents, extent_bytes(size))

    def free(self, extents: Iterable[Extent], length: int) -> None:
        for segment, offset in extents:
            if segment.alive:
                segment.allocator.free(offset, length)

    def _rehome(self, record: ObjectRecord) -> None:
        """Replicas on dead segments are forgotten; the first one alive decides the candidacy."""
        if any(not segment.alive for segment, _ in record.extents()):
            alive = [extent for extent in record.extents() if extent[0].alive]
            record.segment, record.offset = alive[0]
            record.more = tuple(alive[1:])

    @staticmethod
    def _policy_of(record: ObjectRecord) -> EvictionPolicy:
        assert record.segment is not None
        return record.segment.candidates

    # --- segments -----------------------------------------------------------------------------

    def mount(self, segment: Segment) -> None:
        self.segments[segment.segment_id] = segment

    def unmount(self, segment: Segment) -> None:
        """It is gone, at once, from every answer; ``sweep_dead`` clears away what it held."""
        segment.alive = False
        del self.segments[segment.segment_id]
        self.forest.breaks += 1

    def sweep_dead(self, segment: Segment, count: int) -> bool:
        """Forget up to ``count`` objects of a dead segment; False when none is left to do."""
        for record in segment.candidates.after(0, count):
            if not record.ticket:
                continue  # went along with one before
            segment.candidates.discard(record)
            if record.complete:
                self._rehome(record)
                self._policy_of(record).add(record)
            else:
                self.counters["lost_objects"] += 1
                self.settle(record, record.last_used_ms)
        return len(segment.candidates) > 0

    def sweep_detached(self, segment: Segment, ticket: int, steps: int) -> int | None:
        """Let detached leaves be evicted first, and forget the bytes of their lost ancestors.

        Looks at the candidates behind ``ticket``, at about ``steps`` records in all; returns the
        ticket to go on behind, None at the end.
        """
        breaks = self.forest.breaks
        records = segment.candidates.after(ticket, steps) if segment.alive else []
        for record in records:
            ticket = record.ticket
            detached = False
            at: ObjectRecord | None = record
            while at is not None and at.checked != breaks:
                steps -= 1
                if not at.complete:
                    detached = True
                    if at.segment is not None:
                        self.release(self.strip(at), at.size)
                at = at.parent
            if detached:
                segment.candidates.discard(record)
                segment.candidates.add(record, detached=True)
            else:
                self.forest.reachable(record)
            if steps <= 0:
                return ticket
        return None

    # --- room ---------------------------------------------------------------------------------

    def allocate(
        self,
        sizes: Sequence[int],
        *,
        replicas: int,
        usable: list[Segment],
        near: Segment | None,
        host: str,
        now_ms: int,
    ) -> list[list[Extent]] | Shortage:
        """Extents for payloads of ``sizes`` bytes, each on ``replicas`` distinct nodes; all or
        none. Evicts what is not leased where it must.

        ``usable`` are the segments to choose from; ``replicas`` must not exceed their nodes.
        """
        lengths = [extent_bytes(size) for size in sizes]
        together = self._allocate_together(lengths, replicas, usable, near, host)
        if together is not None:
            return together
        taken: list[list[Extent]] = []
        budget = EVICTIONS_PER_STEP
        for index, length in enumerate(lengths):
            extents: list[Extent] = []
            taken.append(extents)
            while len(extents) < replicas:
                without = {segment.node.name for segment, _ in extents}
                order = preferred(usable, near=near, host=host, without=without)
                extent = self._allocate_free(order, length)
                while extent is None and budget > 0:
                    victim = self._victim(order, now_ms)
                    if victim is None:
                        break
                    budget -= 1
                    emptied = [segment for segment, _ in victim.extents() if segment in order]
                    self.evict(victim)
                    extent = self._allocate_free(emptied, length)
                if extent is None:
                    for done, its_length in zip(taken, lengths, strict=False):
                        self.free(done, its_length)
                    return Shortage(
                        missing_bytes=sum(lengths[index:]) * replicas
                        - sum(segment.allocator.free_bytes for segment in order),
                        retry_at_ms=self._next_lease_end_ms(order),
                        goes_on=budget == 0,
                    )
                extents.append(extent)
                near = near or extent[0]
        return taken

    def _allocate_together(
        self,
        lengths: list[int],
        replicas: int,
        usable: list[Segment],
        near: Segment | None,
        host: str,
    ) -> list[list[Extent]] | None:
        """One free range per replica for the whole batch: one node serves it, one search finds
        it. None when there is no such range; nothing is taken then."""
        total = sum(lengths)
        runs: list[Extent] = []
        for _ in range(replicas):
            without = {segment.node.name for segment, _ in runs}
            run = self._allocate_free(
                preferred(usable, near=near, host=host, without=without), total
            )
            if run is None:
                self.free(runs, total)
                return None
            runs.append(run)
        taken: list[list[Extent]] = []
        at = 0
        for length in lengths:
            taken.append([(segment, offset + at) for segment, offset in runs])
            at += length
        return taken

    @staticmethod
    def _allocate_free(order: Iterable[Segment], length: int) -> Extent | None:
        for segment in order:
            offset = segment.allocator.allocate(length)
            if offset is not None:
                return segment, offset
        return None

    @staticmethod
    def _victim(order: Iterable[Segment], now_ms: int) -> ObjectRecord | None:
        """The one to evict among the candidates of these segments."""
        heads = (segment.candidates.peek(now_ms) for segment in order)
        return min(
            (head for head in heads if head is not None),
            key=lambda head: head.ticket,
            default=None,
        )

    @staticmethod
    def _next_lease_end_ms(order: Iterable[Segment]) -> int | None:
        ends = (segment.candidates.next_lease_end_ms() for segment in order)
        return min((end for end in ends if end is not None), default=None)

    # --- checking -----------------------------------------------------------------------------

    def check_invariants(self, others: Iterable[tuple[Segment, int, int]]) -> None:
        """``others``: extents that objects do not own, as (segment, offset, length)."""
        self.forest.check_invariants()
        used: dict[int, list[tuple[int, int]]] = {key: [] for key in self.segments}
        leaves: dict[int, set[ObjectRecord]] = {}
        for record in self.forest.records():
            for segment, offset in record.extents():
                if segment.alive:
                    used[segment.segment_id].append((offset, extent_bytes(record.size)))
            if record.segment is not None and not record.children:
                leaves.setdefault(id(record.segment), set()).add(record)
            if record.ticket:
                assert record.segment is not None, "a candidate without bytes"
                assert not record.children, "a candidate with children"
        for segment, offset, length in others:
            if segment.alive:
                used[segment.segment_id].append((offset, length))
        for segment in self.segments.values():
            segment.allocator.check_invariants()
            segment.candidates.check_invariants()
            assert set(segment.candidates) == leaves.get(id(segment), set()), "candidates"
            ranges = sorted(used[segment.segment_id] + segment.allocator.holes())
            reached = segment.allocator.start
            for offset, length in ranges:
                assert offset == reached, f"{segment}: bytes lost or given twice at {reached}"
                reached += length
            assert reached == segment.allocator.end, "bytes lost at the end of the segment"
