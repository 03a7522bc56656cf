"""Allocates memory for new objects, and evicts others where there is too little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvstore.master.state.evictor import AllocationFailure, EvictionConstraint, Evictor
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.memory_pool import MemoryPool
from kvstore.master.state.records import Extent, MountedSegment, ObjectRecord, StaleExtents
from kvstore.master.state.tenant import LIMIT, Tenant
from kvstore.master.state.tenants import TenantAccounting
from kvstore.memory.header import extent_bytes

EVICT: Final = 0
KEEP: Final = 1
STOP: Final = 2
"""What ``before`` of ``evict_ahead`` returns."""

BeforeEviction = Callable[[int, ObjectRecord], int]


def evict_ahead(
    pool: MemoryPool,
    segment: MountedSegment,
    count: int,
    now_ms: int,
    before: BeforeEviction,
) -> tuple[list[StaleExtents], bool]:
    """Evict up to ``count`` objects, until the reserve of a full segment is free or being wiped.
    Returns their stale extents, which are still allocated, and whether more must be evicted.

    ``before``: on a node with a disk, called with the time and each victim. EVICT: evict it; KEEP:
    it has been deferred; STOP: evict no more at present, unless less than an eighth of the reserve
    is free. Puts would soon evict these objects themselves, and wait for the wipes.
    """
    evicted: list[StaleExtents] = []
    evictor = Evictor(pool, (), now_ms)
    reserve, allocator = segment.reserve_bytes, segment.allocator
    is_urgent = allocator.free_bytes + segment.wiping_bytes < reserve // 8
    for _ in range(count):
        missing = reserve - allocator.free_bytes - segment.wiping_bytes
        head = evictor.find_head(segment)
        if head is None or missing <= 0 or extent_bytes(head.size) > reserve:
            segment.takers.clear()
            return evicted, False
        decision = before(now_ms, head) if segment.has_disk else EVICT
        if decision == STOP and not (is_urgent and missing > reserve * 3 // 4):
            return evicted, False
        if decision == KEEP:
            continue
        evictor.cause = TenantAccounting.main_consumer(segment, extent_bytes(head.size))
        evicted.append(StaleExtents.of(head))
        evictor.evict(head)
        for other, _ in evicted[-1].extents:
            other.wiping_bytes += extent_bytes(evicted[-1].size)
    return evicted, True


def allocate(
    pool: MemoryPool,
    sizes: Sequence[int],
    *,
    replicas: int,
    usable: list[MountedSegment],
    near: MountedSegment | None,
    host: str,
    now_ms: int,
    victims: EvictionConstraint | None = None,
    owner: Tenant | None = None,
    everywhere: Sequence[MountedSegment] = (),
) -> tuple[list[list[Extent]] | AllocationFailure, list[StaleExtents]]:
    """Allocate extents for payloads of ``sizes`` bytes, all or none. Evicts unleased objects
    if it must, and also returns the stale extents of these: their bytes are free in the allocator,
    but no client may write there before the caller has had their headers wiped.

    Args:
        sizes: at least one.
        replicas: the number of distinct nodes for each payload; fewer if fewer have a segment
            that could hold the largest payload.
        usable: the segments to choose from, and to evict from.
        near: the first choice, if it is one of the usable segments.
        host: the host whose segments are the second choice.
        now_ms: leases that end later protect their objects.
        victims: what may be evicted; None: anything.
        owner: the tenant whose limit holds, and who may lose its own objects; None: copies.
        everywhere: segments from which objects of ``owner`` may go so that it keeps its limit.
    """
    lengths = [extent_bytes(size) for size in sizes]
    longest, total = max(lengths), sum(lengths)
    roomy = [segment for segment in usable if segment.capacity >= longest]
    if not roomy:
        return AllocationFailure(total * replicas), []
    near = near if near in roomy else None
    if replicas > 1:
        replicas = min(replicas, len({segment.node for segment in roomy}))
    own: list[StaleExtents] = []
    if owner is not None:
        short, own = evict_to_limit(pool, owner, total * replicas, everywhere, now_ms)
        if short is not None:
            return short, own
    together = _allocate_together(pool, lengths, replicas, roomy, near, host)
    if together is not None:
        return together, own
    capacities: Counter[JoinedNode] = Counter()
    for segment in roomy:
        capacities[segment.node] += segment.capacity
    space = sum(min(capacity, total) for capacity in capacities.values())
    if space < total * replicas:  # it can never fit, so nothing is evicted for it
        return AllocationFailure(total * replicas - space), own
    order = list(_preferred(roomy, near=near, host=host))
    missing = total * replicas - sum(segment.allocator.free_bytes for segment in order)
    evictor = Evictor(pool, usable, now_ms, victims, owner)
    evictor.evicted = own
    while missing > 0:
        freed = evictor.next(order)
        if freed is None:
            return evictor.shortage(missing), evictor.evicted
        missing -= sum(length for segment, length in freed if segment.capacity >= longest)
    together = _allocate_together(pool, lengths, replicas, roomy, near, host)
    if together is None:
        return _allocate_apart(pool, lengths, replicas, order, evictor), evictor.evicted
    return together, evictor.evicted


def evict_to_limit(
    pool: MemoryPool, owner: Tenant, wanted: int, segments: Sequence[MountedSegment], now_ms: int
) -> tuple[AllocationFailure | None, list[StaleExtents]]:
    """Evict the tenant's own objects, in their order, until it may take ``wanted`` bytes more.
    Returns also what was evicted, as ``allocate`` does."""
    missing = owner.bytes_to_evict(wanted)
    if missing <= 0:
        return None, []
    if wanted > owner.limit_bytes:
        return AllocationFailure(missing, quota=LIMIT, is_permanent=True), []
    evictor = Evictor(pool, segments, now_ms, None, owner, own_only=True)
    while missing > 0:
        if evictor.next(segments) is None:
            return evictor.shortage(missing), evictor.evicted
        missing = owner.bytes_to_evict(wanted)
    return None, evictor.evicted


def _allocate_together(
    pool: MemoryPool,
    lengths: list[int],
    replicas: int,
    usable: list[MountedSegment],
    near: MountedSegment | None,
    host: str,
) -> list[list[Extent]] | None:
    """Allocate one free range per replica for the whole batch, so that one node serves the
    batch. Returns None, and takes nothing, if there is no such range."""
    total = sum(lengths)
    runs: list[Extent] = []
    for _ in range(replicas):
        order = _preferred(usable, near=near, host=host)
        run = _allocate_free(_without(order, runs), total)
        if run is None:
            pool.free(runs, total)
            return None
        runs.append(run)
    taken: list[list[Extent]] = []
    at = 0
    for length in lengths:
        taken.append([(segment, offset + at) for segment, offset in runs])
        at += length
    return taken


def _allocate_apart(
    pool: MemoryPool,
    lengths: list[int],
    replicas: int,
    order: Sequence[MountedSegment],
    evictor: Evictor,
) -> list[list[Extent]] | AllocationFailure:
    """Allocate payload by payload. Evicts further where free ranges are too small."""
    taken: list[list[Extent]] = []
    for length in lengths:
        extents: list[Extent] = []
        taken.append(extents)
        while len(extents) < replicas:
            allowed = _without(order, extents) if extents else order
            extent = _allocate_free(allowed, length)
            while extent is None:
                freed = evictor.next(allowed)
                if freed is None:
                    largest = max(segment.allocator.largest_free for segment in allowed)
                    for done, its_length in zip(taken, lengths, strict=False):
                        pool.free(done, its_length)
                    return evictor.shortage(length - largest)
                emptied = [segment for segment, _ in freed if segment in allowed]
                extent = _allocate_free(emptied, length)
            extents.append(extent)
    return taken


def _allocate_free(order: Iterable[MountedSegment], length: int) -> Extent | None:
    for segment in order:
        if segment.allocator.largest_free >= length:
            offset = segment.allocator.allocate(length)
            assert offset is not None
            return segment, offset
    return None


def _without(order: Iterable[MountedSegment], taken: list[Extent]) -> list[MountedSegment]:
    """The segments on nodes that have none of the ``taken`` extents."""
    nodes = [segment.node for segment, _ in taken]
    return [segment for segment in order if segment.node not in nodes]


def _preferred(
    segments: Iterable[MountedSegment], *, near: MountedSegment | None, host: str
) -> Iterator[MountedSegment]:
    """Yield ``segments`` in order of preference: the parent's (``near``, one of them or None),
    those on the writer's host, those with the most free space.

    If one node holds a complete chain, a load of it is one request, and the death of the node costs
    one chain instead of parts of many.
    """
    if near is not None:
        yield near  # it usually has space, and then the caller stops here
    yield from sorted(
        (segment for segment in segments if segment is not near),
        key=lambda segment: (
            segment.node.host != host,
            -segment.allocator.free_bytes,
            segment.segment_id,
        ),
    )
