"""Copies of objects between nodes: the flows of ``move_page`` and ``repair_page``.

An object of a draining node gets a new version; an additional replica keeps its version.
``put_end`` rejects both if the object was removed or replaced during the copy, so the copy only
verifies what it read and needs no lease. Without one, the object can be evicted meanwhile: wrong
bytes are bad memory only if the header is still there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64

from kvstore import calls
from kvstore.calls import NO_VERSION, PutOutcome, SegmentInfo, Version
from kvstore.client.flows.location_cache import capability_of_each, writable_of_each
from kvstore.client.flows.object_transfers import ObjectWrites
from kvstore.client.flows.steps import Context, Flow, Transfer, ask, carry_out, describe
from kvstore.client.flows.write_objects import revoke
from kvstore.errors import KVStoreError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES, Header, unpack
from kvstore.transport.common import RangeCopy, extent_of

log = logging.getLogger("kvstore.client")

OBJECTS_MAX = 128
"""Maximum objects per call. The master allocates, and evicts, for each: some 10 ms."""

BYTES_MAX = 64 << 20
"""Bytes per call, unless one object is larger: the client buffers them."""

REPAIRED_BYTES_MAX = 16 << 20
"""The same for ``repair_page``: a node's process may have little more memory than its segment."""


class MoveProgress(NamedTuple):
    next_cursor: int
    """Start of the next step; 0: the pass is complete."""
    objects: int
    size: int
    failed: int
    """Objects that could not be moved now: replaced, removed, or a node did not reply."""
    remaining: int
    """Objects for which other nodes have no space without disallowed evictions."""
    remaining_size: int
    evicted: int
    """Less recently used objects on other nodes, evicted to free space."""
    corrupt: int
    """Objects that do not match their checksum; they stay where they are."""


@dataclass(slots=True)
class _Copy:
    namespace: Namespace
    key: Key
    size: int
    version: tuple[int, int]
    new_version: tuple[int, int]
    token: int
    source: tuple[int, int, bytes]
    """Segment, offset and capability of the extent."""
    targets: list[tuple[int, int, bytes]]
    """The same; the capability is followed by the header MAC, if there is one."""
    head: bytearray
    data: bytearray
    hasher: xxh3_64
    header: Header | None = None


def move_page(
    context: Context, node: str, cursor: int, evict_up_to: Version = NO_VERSION
) -> Flow[MoveProgress]:
    """Move some objects of a draining node (``calls.StartMoves``). Raises InvalidArgumentError."""
    request = calls.StartMoves(
        node, cursor, OBJECTS_MAX, BYTES_MAX, context.segments.avoid(), context.client_number,
        evict_up_to=evict_up_to,
    )  # fmt: skip
    return (yield from _copy(context, request))


def repair_page(context: Context, node: str) -> Flow[MoveProgress]:
    """Copy objects that need replicas to other nodes. Raises InvalidArgumentError."""
    avoid = context.segments.avoid()
    request = calls.StartMoves(
        node, 0, OBJECTS_MAX, REPAIRED_BYTES_MAX, avoid, context.client_number, repair=True
    )
    return (yield from _copy(context, request))


def _copy(context: Context, request: calls.StartMoves) -> Flow[MoveProgress]:
    started = context.clock()
    reply = yield from ask(request, calls.StartMovesReply)
    grants = reply.grants
    deadline = started + grants.deadline_ms / 1000 - context.lease_margin_s
    copies = _copies(reply)
    ids = [segment for copy in copies for segment, _, _ in (copy.source, *copy.targets)]
    # A copy: other threads forget segments that failed, and describe them again.
    segments = dict((yield from describe(context, grants.epoch, ids)))
    corrupt = yield from _read(context, copies, segments, deadline)
    ready = [copy for copy in copies if copy.header is not None]
    unread = [copy.token for copy in copies if copy.header is None]
    if unread:
        yield from revoke(grants.epoch, unread)
    moved = yield from _write(context, ready, segments, grants.epoch, deadline)
    for copy in copies:
        context.placements.forget(copy.namespace, copy.key)
    return MoveProgress(
        next_cursor=reply.next_cursor,
        objects=len(moved),
        size=sum(copy.size for copy in moved),
        failed=reply.skipped + len(copies) - len(moved) - corrupt,
        remaining=reply.remaining,
        remaining_size=reply.remaining_bytes,
        evicted=reply.evicted,
        corrupt=corrupt,
    )


def _copies(reply: calls.StartMovesReply) -> list[_Copy]:
    sources, grants = reply.sources, reply.grants
    readable = capability_of_each(sources.capabilities, len(sources.segments))
    writable = writable_of_each(grants)
    copies: list[_Copy] = []
    at = 0
    for row, token in enumerate(grants.tokens):
        width = grants.replicas
        own_rows = slice(row * width, (row + 1) * width)
        columns = grants.segments[own_rows], grants.offsets[own_rows], writable[own_rows]
        targets = zip(*columns, strict=True)
        size = sources.sizes[row]
        version = sources.epochs[row], sources.counters[row]
        copies.append(
            _Copy(
                namespace=reply.namespaces[row],
                key=reply.keys[row],
                size=size,
                version=version,
                new_version=version if reply.keeps_version else (grants.epoch, token),
                token=token,
                source=(sources.segments[at], sources.offsets[at], readable[at]),
                targets=list(targets),
                head=bytearray(HEADER_BYTES),
                data=bytearray(size),
                hasher=xxh3_64(),
            )
        )
        at += sources.replicas[row]
    return copies


def _read(
    context: Context,
    copies: Sequence[_Copy],
    segments: Mapping[int, SegmentInfo],
    deadline: float,
) -> Flow[int]:
    """Set ``data`` and (if valid) ``header`` of each copy; returns the corrupt objects' number."""
    transfers = _reads(copies, segments, deadline, payload=True)
    failed = yield from carry_out(context, transfers)
    wrong: list[_Copy] = []
    for copy in copies:
        segment_id = copy.source[0]
        if segment_id in failed or segment_id not in transfers:
            continue
        header = _present_header(copy, segments)
        if header is None:
            continue  # removed or replaced before
        if header.payload_checksum == copy.hasher.intdigest():
            copy.header = header
        else:
            wrong.append(copy)
    return (yield from _count_corrupt(context, wrong, segments, deadline)) if wrong else 0


def _reads(
    copies: Sequence[_Copy],
    segments: Mapping[int, SegmentInfo],
    deadline: float,
    *,
    payload: bool,
) -> dict[int, Transfer]:
    """Build the reads per segment: every header and, with ``payload``, the payload after it."""
    transfers: dict[int, Transfer] = {}
    for copy in copies:
        segment_id, offset, capability = copy.source
        if segment_id not in segments:
            continue
        extent = extent_of(offset, copy.size, capability)
        transfer = transfers.setdefault(
            segment_id, Transfer(segments[segment_id], [], False, deadline)
        )
        transfer.moves.append(RangeCopy(offset, memoryview(copy.head), extent=extent))
        if payload and copy.size:
            payload_at, data = offset + HEADER_BYTES, memoryview(copy.data)
            transfer.moves.append(RangeCopy(payload_at, data, copy.hasher, extent))
    return transfers


def _present_header(copy: _Copy, segments: Mapping[int, SegmentInfo]) -> Header | None:
    """Return the header that was read, if it is that of the version to copy."""
    segment_id, offset, _ = copy.source
    header = unpack(copy.head, segments[segment_id].seed, offset)
    if header is None or (header.epoch, header.counter) != copy.version:
        return None
    return header


def _count_corrupt(
    context: Context,
    wrong: Sequence[_Copy],
    segments: Mapping[int, SegmentInfo],
    deadline: float,
) -> Flow[int]:
    """Count the objects that are still stored, whose memory is bad."""
    failed = yield from carry_out(context, _reads(wrong, segments, deadline, payload=False))
    corrupt = 0
    for copy in wrong:
        if copy.source[0] not in failed and _present_header(copy, segments) is not None:
            corrupt += 1
            log.warning("corrupt_object namespace=%s key=%s", copy.namespace, copy.key.hex())
            context.count("corrupt_objects")
    return corrupt


def _write(
    context: Context,
    copies: Sequence[_Copy],
    segments: Mapping[int, SegmentInfo],
    epoch: int,
    deadline: float,
) -> Flow[list[_Copy]]:
    """Write the copies and end their puts; returns the copies that succeeded."""
    transfers: dict[tuple[int, Namespace], ObjectWrites] = {}
    for copy in copies:
        assert copy.header is not None
        parent, descriptor = copy.header.parent or b"", copy.header.descriptor
        views = [memoryview(copy.data)] if copy.size else []
        for segment_id, offset, capability in copy.targets:
            if segment_id in segments:
                group = segment_id, copy.namespace
                if group not in transfers:
                    segment = segments[segment_id]
                    transfers[group] = ObjectWrites(segment, copy.namespace, deadline)
                transfers[group].rows.append((
                    offset, copy.size, *copy.new_version, copy.key, views, parent, descriptor,
                    capability,
                ))  # fmt: skip
    failed = yield from carry_out(context, transfers)
    lost: dict[int, list[KVStoreError]] = {}  # by segment
    for (segment_id, _), error in failed.items():
        lost.setdefault(segment_id, []).append(error)
    written = []
    for copy in copies:
        on = {segment_id for segment_id, _, _ in copy.targets}
        if on <= segments.keys() and not on & lost.keys():
            written.append(copy)
        else:
            reasons = [error for segment_id in on for error in lost.get(segment_id, ())]
            yield from revoke(epoch, [copy.token], reasons)
    if not written:
        return []
    ended = yield from ask(calls.PutEnd(epoch, [copy.token for copy in written]), calls.PutEndReply)
    return [
        copy
        for copy, outcome in zip(written, ended.outcomes, strict=True)
        if outcome == PutOutcome.STORED
    ]
