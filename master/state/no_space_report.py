"""Explains why a put finds no space: which nodes are usable, which are not, and until when."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.calls import Allocate, PutStart, no_space_messages
from kvstore.errors import NoSpaceError
from kvstore.master.state import liveness
from kvstore.master.state.evictor import AllocationFailure
from kvstore.master.state.membership import Membership
from kvstore.master.state.memory_pool import MemoryPool
from kvstore.master.state.records import MountedSegment
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.tenant import GUARANTEE, LIMIT, Tenant
from kvstore.memory.header import extent_bytes

_LOOPBACK = ("127.", "localhost:", "[::1]", "0.0.0.0:", "[::]")


def refusal_error(
    common: StateContext, now_ms: int, request: PutStart | Allocate, found: AllocationFailure
) -> NoSpaceError:
    """Return the error of a rejected put, counted for its tenant if a quota rejects it."""
    owner = common.pool.tenant_of(request.namespace)
    if owner is None or not found.quota:
        return no_space_error(common, now_ms, request, found)
    if found.quota == GUARANTEE:
        owner.refused += 1
        return no_space_messages.guarantee_error(
            owner.name, asked_bytes(request), found.missing_bytes
        )
    return quota_error(common, owner, asked_bytes(request), found)


def quota_error(
    common: StateContext, owner: Tenant, requested: int, found: AllocationFailure
) -> NoSpaceError:
    assert found.quota == LIMIT
    owner.refused += 1
    return no_space_messages.over_bound(
        owner.name,
        requested,
        owner.size,
        owner.limit_bytes,
        found.missing_bytes,
        owner.pinned_bytes,
    )


def no_space_error(
    common: StateContext, now_ms: int, request: PutStart | Allocate, found: AllocationFailure
) -> NoSpaceError:
    """Return the error of a put that found no space; ``found`` says how much is missing."""
    by_cause: dict[str, list[MountedSegment]] = {}
    for segment in common.pool.segments.values():
        cause = _cause(segment, common.membership, now_ms, request)
        by_cause.setdefault(cause, []).append(segment)
    groups = [
        _group(common.pool, cause, by_cause[cause], now_ms, request.host)
        for cause in no_space_messages.CAUSES
        if cause in by_cause
    ]
    requested, writing, pinned = asked_bytes(request), len(common.pending), common.pool.pins.size
    return no_space_messages.no_space(
        groups, request.host, requested, found.missing_bytes, writing, pinned
    )


def _cause(
    segment: MountedSegment, membership: Membership, now_ms: int, request: PutStart | Allocate
) -> str:
    """Return the reason that the segment has no space for this put; LEASED if it is only full."""
    node = segment.node
    if request.local_only and node.host != request.host:
        return no_space_messages.NOT_HERE
    if segment.offer.is_opaque and isinstance(request, Allocate):
        return no_space_messages.ON_DEVICE
    if segment.offer.uuid in request.avoid_segments:
        return no_space_messages.AVOIDED
    if node.draining:
        return no_space_messages.DRAINING
    if membership.state_of(node, now_ms) != liveness.ALIVE:
        return no_space_messages.SUSPECT
    return no_space_messages.LEASED if segment.usable(now_ms) else no_space_messages.RESTARTED


def _group(
    pool: MemoryPool, cause: str, segments: Sequence[MountedSegment], now_ms: int, host: str
) -> no_space_messages.SegmentGroup:
    better = [_better_ms(pool, segment, cause, now_ms) - now_ms for segment in segments]
    local = [
        s.offer.address
        for s in segments
        if s.node.host != host and s.offer.address.startswith(_LOOPBACK)
    ]
    return no_space_messages.SegmentGroup(
        cause,
        nodes={segment.node.name: segment.offer.address for segment in segments},
        capacity=sum(segment.capacity for segment in segments),
        free=sum(segment.allocator.free_bytes for segment in segments),
        largest_free=max(segment.allocator.largest_free for segment in segments),
        ready_ms=max(0, min(segment.usable_at_ms for segment in segments) - now_ms),
        better_ms=min((ms for ms in better if ms > 0), default=0),
        silent_ms=min(now_ms - segment.node.last_heartbeat_ms for segment in segments),
        local=local[0] if local else "",
    )


def _better_ms(pool: MemoryPool, segment: MountedSegment, cause: str, now_ms: int) -> int:
    """When the cause may end by itself; 0: unknown."""
    if cause == no_space_messages.LEASED:
        return pool.candidates[segment].next_lease_end_ms(now_ms) or 0
    return segment.usable_at_ms if cause == no_space_messages.RESTARTED else 0


def asked_bytes(request: PutStart | Allocate) -> int:
    if isinstance(request, Allocate):
        return extent_bytes(request.size)
    return sum(map(extent_bytes, request.sizes)) * request.replicas
