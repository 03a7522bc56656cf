"""What operators ask: the cluster at a glance, a listing, one object in detail. Reads only."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvstore import calls
from kvstore.calls import NO_PLACEMENTS, Version
from kvstore.master.state import liveness
from kvstore.master.state.liveness import Node
from kvstore.master.state.records import ObjectRecord, Segment

if TYPE_CHECKING:
    from kvstore.master.state.master_state import MasterState

LIST_ROWS_MAX = 10_000
_POSITION_BITS = 32
LIST_STEPS_MAX = 50_000
"""Records that one page may look at: a prefix may match few of them, and to say that one is
detached its ancestors are walked over. About 10 ms."""


def status(state: MasterState, now_ms: int) -> calls.ClusterStatus:
    nodes = [_node(state, node, now_ms) for node in state.membership.nodes.values()]
    namespaces = [
        calls.NamespaceStatus(table.name, table.objects, table.size)
        for table in state.forest.namespaces.values()
    ]
    return calls.ClusterStatus(
        epoch=state.epoch,
        version=state.version,
        uptime_ms=now_ms - state.started_ms,
        nodes=sorted(nodes),
        namespaces=sorted(namespaces),
        counters=sorted(state.counters.items()),
    )


def list_objects(state: MasterState, now_ms: int, request: calls.ListObjects) -> calls.Listed:
    if request.namespace:
        table = state.forest.table(request.namespace)
        tables = [] if table is None else [table]
    else:
        tables = list(state.forest.namespaces.values())
    shards = [shard for table in tables for shard in table.shards]
    # The cursor says which of the dictionaries is next, and how many of its records were seen.
    first, position = divmod(request.cursor, 1 << _POSITION_BITS)
    limit = max(1, min(request.limit, LIST_ROWS_MAX))
    rows: list[calls.ObjectRow] = []
    steps_max = state.forest.steps + LIST_STEPS_MAX
    for index, shard in enumerate(shards[first:], first):
        for record in islice(shard.values(), position, None):
            if len(rows) == limit or state.forest.steps >= steps_max:
                return calls.Listed(rows, index << _POSITION_BITS | position)
            position += 1
            state.forest.steps += 1
            if record.key.startswith(request.prefix) and (record.complete or record.writer):
                rows.append(_row(state, record, now_ms))
        position = 0
    return calls.Listed(rows, 0)


def stat_object(state: MasterState, now_ms: int, request: calls.StatObject) -> calls.ObjectDetail:
    record = state.forest.get(request.namespace, request.key)
    if record is None or not (record.complete or record.writer):
        return calls.ObjectDetail(None, b"", 0, Version(0, 0), 0, NO_PLACEMENTS)
    return calls.ObjectDetail(
        row=_row(state, record, now_ms),
        parent=b"" if record.parent is None else record.parent.key,
        children=record.children,
        version=Version(record.epoch, record.counter),
        idle_ms=now_ms - record.last_used_ms,
        placements=state.placements([record if record.complete else None], now_ms),
    )


def _row(state: MasterState, record: ObjectRecord, now_ms: int) -> calls.ObjectRow:
    if not record.complete:
        described = "being_written"
    else:
        described = "complete" if state.forest.reachable(record) else "detached"
    return calls.ObjectRow(
        namespace=record.namespace,
        key=record.key,
        size=record.size,
        replicas=sum(segment.alive for segment, _ in record.extents()),
        depth=record.depth,
        leased_ms=max(0, record.lease_until_ms - now_ms),
        state=described,
    )


def _node(state: MasterState, node: Node, now_ms: int) -> calls.NodeStatus:
    segments = state.membership.segments[node.name]
    described = state.membership.state_of(node, now_ms)
    if node.draining and described == liveness.ALIVE:
        described = "draining"
    return calls.NodeStatus(
        name=node.name,
        host=node.host,
        state=described,
        address=next((s.offer.address for s in segments if s.offer.address), ""),
        silent_ms=now_ms - node.heard_ms,
        segments=[_segment(segment) for segment in segments],
    )


def _segment(segment: Segment) -> calls.SegmentStatus:
    allocator = segment.allocator
    return calls.SegmentStatus(
        segment_id=segment.segment_id,
        size=segment.offer.size,
        used=segment.capacity - allocator.free_bytes,
        largest_free=allocator.largest_free,
        shm_name=segment.offer.shm_name,
    )
