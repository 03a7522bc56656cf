"""What the simulator reads inside ``MasterState``: only this module uses private attributes."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.calls import NO_VERSION, Version
from kvstore.limits import Key, Namespace
from kvstore.master.state import repair_queue
from kvstore.master.state.grants import CopyGrant, DiskGrant, ObjectGrant, PutGrant
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.records import MountedSegment, ObjectRecord
from kvstore.memory.header import extent_bytes
from tests.support.invariants import granted_ranges, removed_ranges

Name = tuple[Namespace, Key]


def complete_objects(state: MasterState) -> dict[Name, Version]:
    return {
        (record.namespace, record.key): Version(record.epoch, record.counter)
        for record in state.forest.records()
        if record.complete
    }


def extents_of(state: MasterState, name: Name) -> list[tuple[MountedSegment, int]]:
    record = state.forest.get(*name)
    extents = [] if record is None else record.extents()
    return [(segment, offset) for segment, offset in extents if segment.segment_id]


def mounted(state: MasterState, uuid: bytes) -> MountedSegment | None:
    for segment in state.pool.segments.values():
        if segment.offer.uuid == uuid:
            return segment
    return None


def mounted_uuids(state: MasterState | None) -> set[bytes]:
    if state is None:
        return set()
    disks = [disk.segment for disk in state.common.disks.disks.values()]
    return {segment.offer.uuid for segment in (*state.pool.segments.values(), *disks)}


def is_on_disk(state: MasterState, name: Name) -> bool:
    return state.common.disks.get_readable(*name) is not None


def newest_mark(state: MasterState | None) -> Version:
    return NO_VERSION if state is None else state.marks._newest


def pending_extents(state: MasterState) -> Iterator[tuple[int, MountedSegment, int, int]]:
    """(token, segment, offset, length) of every grant that can still end."""
    for put in state.pending:
        for segment, offset in put.extents:
            yield put.token, segment, offset, put.length


def repairs(state: MasterState) -> Iterator[CopyGrant]:
    """Copies under way that are to be further replicas."""
    return (put for put in state.pending if isinstance(put, CopyGrant) and put.repairs)


def is_repair(state: MasterState, token: int) -> bool:
    put = state.pending.get(token)
    return isinstance(put, CopyGrant) and put.repairs


def is_copy(state: MasterState, token: int) -> bool:
    """Of an object that is there: for a repair, or because its node is drained."""
    return isinstance(state.pending.get(token), CopyGrant)


def moved_to(state: MasterState, name: Name) -> list[Version]:
    """Versions that the moves under way of an object would give it."""
    copies = state.granting.copies.get(name, ())
    return [
        Version(state.epoch, put.token)
        for put in copies
        if isinstance(put, CopyGrant) and not put.repairs
    ]


def could_be_repaired(state: MasterState, now_ms: int) -> list[ObjectRecord]:
    """Objects that lack a replica for which there is room."""
    usable = [s for s in state.membership.alive_segments(now_ms) if s.usable(now_ms)]
    found = []
    for record in state.forest.records():
        if not repair_queue.missing(record) or record.writer:
            continue
        length = extent_bytes(record.size)
        on = [segment.node for segment, _ in record.extents() if segment.alive]
        if any(
            segment.node not in on
            and segment.allocator.largest_free >= length
            and segment.allocator.free_bytes - length
            >= segment.capacity >> repair_queue.SPARE_SHIFT
            for segment in usable
        ):
            found.append(record)
    return found


def is_pending(state: MasterState, version: Version) -> bool:
    """Whether the put of that version can still end."""
    return version.epoch == state.epoch and state.pending.get(version.counter) is not None


def replaced_by(state: MasterState, token: int) -> Name | None:
    """The complete object that this put overwrites if it ends now."""
    put = state.pending.get(token)
    if not isinstance(put, ObjectGrant) or not put.record.complete or is_repair(state, token):
        return None
    return put.record.namespace, put.record.key


def put_by(state: MasterState, token: int) -> Name | None:
    """The object that this put stores; None: it is a copy, or has ended."""
    put = state.pending.get(token)
    if not isinstance(put, PutGrant):
        return None
    return put.record.namespace, put.record.key


def waiting(state: MasterState) -> int:
    """Puts that wait for room."""
    return len(state.common.waiting)


def owner_of(
    state: MasterState, segment: MountedSegment, start: int, length: int, version: Version
) -> str:
    """Whose bytes these are: "writer" when they are of the put of ``version``."""
    stop = start + length
    for token, its_segment, offset, size in pending_extents(state):
        if its_segment is segment and offset < stop and start < offset + size:
            put = state.pending.get(token)
            written = Version(state.epoch, token)
            if isinstance(put, DiskGrant) or (isinstance(put, CopyGrant) and put.repairs):
                written = put.copied
            mine = version == written and offset <= start and stop <= offset + size
            return "writer" if mine else f"put {token}"
    for its_segment, offset, size in granted_ranges(state.pending):
        if its_segment is segment and offset < stop and start < offset + size:
            return "quarantine"
    for its_segment, offset, size in removed_ranges(state.reclaim):
        if its_segment is segment and offset < stop and start < offset + size:
            return "removed"
    for record in state.forest.records():
        for its_segment, offset in record.extents():
            if (
                its_segment is segment
                and offset < stop
                and start < offset + extent_bytes(record.size)
            ):
                return f"object {record.key!r} {record.epoch}.{record.counter}"
    return "free"


def leftovers(state: MasterState) -> dict[str, int]:
    """What must be nothing once everybody has been still for long enough."""
    objects = sum(
        extent_bytes(record.size)
        for record in state.forest.records()
        for segment, _ in record.extents()
        if segment.alive
    )
    segments = state.pool.segments.values()
    used = sum(segment.capacity - segment.allocator.free_bytes for segment in segments)
    return {
        "pending_puts": len(state.pending),
        "waiting_puts": len(state.common.waiting),
        "not_free_yet": sum(
            1 for _ in (*granted_ranges(state.pending), *removed_ranges(state.reclaim))
        ),
        "sweeps": len(state.sweeping._sweeps),
        "lost_bytes": used - objects,
    }


def outline(state: MasterState) -> tuple[int, ...]:
    """Changes whenever a tick has done something that sends nothing."""
    segments = state.pool.segments.values()
    return (
        len(segments),
        sum(segment.allocator.free_bytes + segment.quarantined_bytes for segment in segments),
        sum(segment.reclaim_bytes for segment in segments),
        len(state.pending),
        len(state.common.waiting),
        state.forest.objects,
        state.forest.breaks,
        state.common.jobs.due,
    )
