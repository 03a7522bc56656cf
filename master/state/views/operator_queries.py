"""Read-only queries of operators: status, listing, one object, traffic."""

from __future__ import annotations

from itertools import islice

from kvstore import calls
from kvstore.calls import NO_PLACEMENTS, NO_VERSION, Version
from kvstore.calls.tenants import UNBOUNDED
from kvstore.master.state import liveness
from kvstore.master.state.disk_index import Disk, DiskCopy
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.membership import describe
from kvstore.master.state.records import MountedSegment, ObjectRecord, shards_from
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.traffic import ClientRow, NamespaceTrafficRecord

LIST_ROWS_MAX = 1_000
_POSITION_BITS = 32
LIST_STEPS_MAX = 10_000
"""Records that one call examines, with the ancestors of detached ones: about 3 ms."""

DESCRIBED_MAX = 1_024
"""Maximum number of segments in a reply; clients request the others again."""

STATUS_ROWS_MAX = 1_000
"""Segments and namespaces per status reply: 3 ms, and as long to encode them."""

TRAFFIC_ROWS_MAX = 1_000
"""Clients and keys per traffic reply, after which no further namespace is added."""

_NAMESPACES = 1 << 63
"""Bit of a cursor that has passed the nodes."""


class OperatorQueries:
    def __init__(self, common: StateContext) -> None:
        self._common = common

    def status(self, now_ms: int, request: calls.Status) -> calls.ClusterStatus:
        common = self._common
        nodes: list[calls.NodeStatus] = []
        namespaces: list[calls.NamespaceStatus] = []
        cursor = request.cursor
        remaining = STATUS_ROWS_MAX
        if not cursor & _NAMESPACES:
            known = common.membership.nodes
            for node in islice(known.values(), cursor, None):
                if remaining <= 0:
                    break
                cursor += 1
                nodes.append(_node(common, node, now_ms))
                remaining -= len(nodes[-1].segments)
            if cursor >= len(known):
                cursor = _NAMESPACES
        if cursor & _NAMESPACES:
            cursor = _namespaces(common, cursor ^ _NAMESPACES, max(0, remaining), namespaces)
        return calls.ClusterStatus(
            epoch=common.epoch,
            version=common.version,
            uptime_ms=now_ms - common.started_ms,
            nodes=sorted(nodes),
            namespaces=sorted(namespaces),
            counters=[] if request.cursor else sorted(_counters(common)),
            next_cursor=cursor,
            cluster=common.cluster,
            departed=[] if request.cursor else common.forest.missing.list_departed(now_ms),
            tenants=[] if request.cursor else _tenants(common),
        )

    def list_objects(self, now_ms: int, request: calls.ListObjects) -> calls.ListObjectsReply:
        common = self._common
        if request.namespace:
            table = common.forest.table(request.namespace)
            tables = [] if table is None else [table]
        else:
            tables = common.forest.namespaces.values()
        # The cursor holds the index of the next dictionary and its number of visited records.
        first, position = divmod(request.cursor, 1 << _POSITION_BITS)
        common.forest.begin_step()
        limit = max(1, min(request.limit, LIST_ROWS_MAX))
        rows: list[calls.ObjectRow] = []
        steps_max = common.forest.steps + LIST_STEPS_MAX
        for index, shard in enumerate(shards_from(tables, first, copies=True), first):
            for each in islice(shard.values(), position, None):
                if len(rows) == limit or common.forest.steps >= steps_max:
                    return calls.ListObjectsReply(rows, index << _POSITION_BITS | position)
                position += 1
                common.forest.steps += 1
                if not each.key.startswith(request.prefix):
                    continue
                if isinstance(each, DiskCopy):
                    if each.disk.readable and not each.in_memory:
                        rows.append(_copy_row(each))
                elif common.pool.is_stored(each, now_ms) or (
                    each.writer and common.disks.get_readable(each.namespace, each.key) is None
                ):
                    rows.append(_row(common, each, now_ms))
            position = 0
        return calls.ListObjectsReply(rows, 0)

    def stat_object(self, now_ms: int, request: calls.StatObject) -> calls.ObjectDetail:
        common = self._common
        common.forest.begin_step()
        record = common.forest.get(request.namespace, request.key)
        is_stored = record is not None and common.pool.is_stored(record, now_ms)
        copy = common.disks.get_readable(request.namespace, request.key)
        disk = "" if copy is None else copy.disk.segment.node.name
        if copy is not None and not is_stored:
            return calls.ObjectDetail(
                row=_copy_row(copy),
                parent=copy.parent or b"",
                children=0,
                version=Version(copy.epoch, copy.counter),
                idle_ms=now_ms - copy.used_ms,
                placements=NO_PLACEMENTS,
                epoch=common.epoch,
                disk=disk,
            )
        if record is None or not (is_stored or record.writer):
            return calls.ObjectDetail(None, b"", 0, NO_VERSION, 0, NO_PLACEMENTS)
        return calls.ObjectDetail(
            row=_row(common, record, now_ms),
            parent=b"" if record.parent is None else record.parent.key,
            children=record.children,
            version=Version(record.epoch, record.counter),
            idle_ms=now_ms - record.last_used_ms,
            placements=common.placements([record if is_stored else None], now_ms),
            epoch=common.epoch,
            disk=disk,
        )

    def traffic(self, now_ms: int, request: calls.Traffic) -> calls.TrafficReport:
        common, known = self._common, self._common.traffic
        cursor, spaces = request.cursor, known.spaces(request.namespace)
        remaining = TRAFFIC_ROWS_MAX
        namespaces: list[calls.NamespaceTraffic] = []
        while cursor < len(spaces) and remaining > 0:
            row = _traffic(common, spaces[cursor], now_ms)
            namespaces.append(row)
            cursor += 1
            remaining -= 1 + len(row.writers) + len(row.readers) + len(row.misses)
        return calls.TrafficReport(
            epoch=common.epoch,
            uptime_ms=now_ms - common.started_ms,
            namespaces=namespaces,
            next_cursor=cursor if cursor < len(spaces) else 0,
        )

    def describe_segments(
        self, now_ms: int, request: calls.DescribeSegments
    ) -> calls.DescribeSegmentsReply:
        del now_ms
        known = self._common.pool.segments
        ids = islice(dict.fromkeys(i for i in request.segment_ids if i in known), DESCRIBED_MAX)
        return calls.DescribeSegmentsReply(self._common.epoch, [describe(known[i]) for i in ids])


def _tenants(common: StateContext) -> list[calls.TenantStatus]:
    rows = [
        calls.TenantStatus(
            name=tenant.name,
            bytes=tenant.size,
            guarantee_bytes=tenant.guarantee,
            limit_bytes=0 if tenant.limit_bytes == UNBOUNDED else tenant.limit_bytes,
            disk_bytes=tenant.disk_bytes,
            disk_limit_bytes=0 if tenant.disk_limit == UNBOUNDED else tenant.disk_limit,
            pinned=tenant.pinned_bytes,
            pinned_max=0 if tenant.pinned_max == UNBOUNDED else tenant.pinned_max,
            objects=tenant.objects,
            evicted_by_own=tenant.evicted_by_own,
            evicted_by_others=tenant.evicted_by_others,
            refused=tenant.refused,
            namespaces=tenant.namespaces,
        )
        for tenant in common.pool.tenants
        if not tenant.retired or tenant.size or tenant.disk_bytes
    ]
    return sorted(rows)


def _counters(common: StateContext) -> list[calls.Counter]:
    pool = common.pool
    counters = {
        **common.counters,
        "under_replicated_objects": pool.short_objects,
        "missing_objects": common.forest.missing.objects,
        "pinned_objects": pool.pins.objects,
        "pinned_bytes": pool.pins.size,
        "dead_nodes": common.membership.dead_nodes,
        "departed_nodes": common.membership.departed_nodes,
    }
    return [calls.Counter(name, value) for name, value in counters.items()]


def _namespaces(
    common: StateContext, position: int, remaining: int, rows: list[calls.NamespaceStatus]
) -> int:
    """Add up to ``remaining`` rows. Return the next cursor; 0: none."""
    known, pins = common.forest.namespaces.tables, common.pool.pins
    for table in islice(known.values(), position, min(position + remaining, len(known))):
        pinned, copies = pins.pinned_in(table.name), table.copies.count
        rows.append(calls.NamespaceStatus(table.name, table.objects, table.size, *pinned, copies))
    return _NAMESPACES | position + remaining if position + remaining < len(known) else 0


def _traffic(
    common: StateContext, space: NamespaceTrafficRecord, now_ms: int
) -> calls.NamespaceTraffic:
    table = common.forest.table(space.name)
    askers = space.askers.all()
    missed = sorted((row for row in askers if row.missed), key=lambda row: -row.missed_ms)
    misses: list[calls.MissedKey] = []
    for row in missed:
        client, _, address = row.name.rpartition(" ")
        record = None if table is None else table.get(row.missed)
        misses.append(
            calls.MissedKey(
                key=row.missed,
                client=client,
                address=address,
                idle_ms=now_ms - row.missed_ms,
                found=row.missed_at,
                requested=row.missed_of,
                present=record is not None and common.pool.is_stored(record, now_ms),
                evicted=common.traffic.had_evicted(space.name, row.missed, row.missed_ms),
            )
        )
    return calls.NamespaceTraffic(
        name=space.name,
        objects=0 if table is None else table.objects,
        size=0 if table is None else table.size,
        writers=[_client(row, now_ms) for row in space.putters.all()],
        readers=[_client(row, now_ms) for row in askers],
        misses=misses,
        queries=sum(row.questions for row in askers),
        queries_without_hit=sum(row.none for row in askers),
        queries_with_partial_hit=sum(row.partly for row in askers),
        evicted=space.evicted,
        evicted_ms=now_ms - space.evicted_ms if space.evicted else 0,
        evicted_idle_ms=max(0, space.evicted_idle_ms),
    )


def _client(row: ClientRow, now_ms: int) -> calls.ClientTraffic:
    client, _, address = row.name.rpartition(" ")
    return calls.ClientTraffic(
        client=client,
        address=address,
        first_ms=now_ms - row.first_ms,
        idle_ms=now_ms - row.last_ms,
        keys=row.keys,
        found=row.found,
        stored=row.stored,
        key=row.key,
        stored_bytes=row.stored_bytes,
    )


def _row(common: StateContext, record: ObjectRecord, now_ms: int) -> calls.ObjectRow:
    if not common.pool.is_stored(record, now_ms):
        state = "being_written"
    else:
        state = "complete" if common.forest.is_reachable(record) else "detached"
    return calls.ObjectRow(
        namespace=record.namespace,
        key=record.key,
        size=record.size,
        replicas=sum(segment.alive for segment, _ in record.extents()),
        depth=record.depth,
        leased_ms=max(0, record.lease_until_ms - now_ms),
        state=state,
    )


def _copy_row(copy: DiskCopy) -> calls.ObjectRow:
    """The row of an object on a disk only."""
    return calls.ObjectRow(copy.namespace, copy.key, copy.size, 0, 0, 0, "on_disk")


def _node(common: StateContext, node: JoinedNode, now_ms: int) -> calls.NodeStatus:
    segments = common.membership.segments[node.name]
    state = common.membership.state_of(node, now_ms)
    if node.draining and state == liveness.ALIVE:
        state = "draining"
    return calls.NodeStatus(
        name=node.name,
        host=node.host,
        state=state,
        address=next((s.offer.address for s in segments if s.offer.address), ""),
        silent_ms=now_ms - node.last_heartbeat_ms,
        segments=[_segment(segment, now_ms) for segment in segments if not segment.is_disk],
        version=node.version,
        unreachable=node.unreachable,
        shm_entry_missing=node.shm_entry_missing,
        stored_bytes=node.stored_bytes,
        read_bytes=node.read_bytes,
        written_bytes=node.written_bytes,
        disks=[_disk(disk) for disk in common.disks.of_node(node.name)],
    )


def _disk(disk: Disk) -> calls.DiskStatus:
    segment = disk.segment
    return calls.DiskStatus(
        segment_id=segment.segment_id,
        size=segment.offer.size,
        used=segment.capacity - segment.allocator.free_bytes,
        objects=disk.objects,
        copied=disk.payload_bytes,
        written=disk.written_bytes,
        brought=disk.brought_bytes,
        budget=int(disk.budget.level() * segment.capacity),
        failed=disk.is_failed,
        reports=not segment.inventory_complete,
    )


def _segment(segment: MountedSegment, now_ms: int) -> calls.SegmentStatus:
    allocator = segment.allocator
    return calls.SegmentStatus(
        segment_id=segment.segment_id,
        size=segment.offer.size,
        used=segment.capacity - allocator.free_bytes,
        largest_free=allocator.largest_free,
        shm_name=segment.offer.shm_name,
        pending=segment.pending_bytes,
        quarantined=segment.quarantined_bytes,
        reclaim=segment.reclaim_bytes,
        device=segment.offer.medium,
        ready_ms=max(0, segment.usable_at_ms - now_ms),
        reports=not segment.inventory_complete,
    )
