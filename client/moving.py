"""Moving what a draining node holds: the flow of ``move_some``.

    start_moves ──► read header and payload ──► right header, right checksum? ──► write ──► put_end
                                                     │ no: left where it is, given back

An object arrives under a new version. ``put_end`` refuses it when it was removed or replaced while
it was copied; so it is enough to check what was read, and nothing needs a lease.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64

from kvstore import calls
from kvstore.calls import PutOutcome, SegmentInfo
from kvstore.client.objects import ObjectWrites
from kvstore.client.putting import revoke
from kvstore.client.steps import Context, Flow, Transfer, ask, describe, unreachable
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES, Header, unpack
from kvstore.transport.base import Hasher, Move

log = logging.getLogger("kvstore.client")

OBJECTS_MAX = 128
"""Moved by one call: room for each is found, and made, on its own; some 10 ms of the master."""

BYTES_MAX = 64 << 20
"""Moved by one call, unless one object is larger: they are held in memory meanwhile."""


class Moved(NamedTuple):
    """What one step of a pass over a node's objects came to."""

    next_cursor: int
    """Where the next step begins; 0: the pass is over."""
    objects: int
    size: int
    """Payload bytes of those."""
    failed: int
    """Could not be moved now: being replaced, removed, or a node did not answer."""
    left: int
    """For which there is no room elsewhere that is not used more recently."""
    left_size: int
    evicted: int
    """Objects elsewhere that were used longer ago, and had to make room."""
    corrupt: int
    """Whose bytes are not what they were; they stay where they are."""


@dataclass(slots=True)
class _Copy:
    """One object on its way."""

    namespace: Namespace
    key: Key
    size: int
    version: tuple[int, int]
    """That it has now."""
    token: int
    source: tuple[int, int]
    """Segment and offset."""
    targets: list[tuple[int, int]]
    head: bytearray
    data: bytearray
    hasher: Hasher
    header: Header | None = None
    """Once it was read, and is right."""


def move_some(context: Context, node: str, cursor: int) -> Flow[Moved]:
    """Move some of what lies on a draining node.

    Raises:
        InvalidArgumentError: there is no such node, or it is not being drained.
        BusyError, MasterUnreachableError, DeadlineExceededError
    """
    started = context.clock()
    request = calls.StartMoves(node, cursor, OBJECTS_MAX, BYTES_MAX)
    reply = yield from ask(request, calls.MovesStarted)
    grants = reply.grants
    deadline = started + grants.deadline_ms / 1000 - context.lease_margin_s
    copies = _copies(reply)
    ids = [segment for copy in copies for segment, _ in (copy.source, *copy.targets)]
    segments = yield from describe(context, grants.epoch, ids)
    corrupt = yield from _read(context, copies, segments, deadline)
    ready = [copy for copy in copies if copy.header is not None]
    unread = [copy.token for copy in copies if copy.header is None]
    if unread:
        yield from revoke(grants.epoch, unread, settled=True)
    moved = yield from _write(context, ready, segments, grants.epoch, deadline)
    for copy in copies:
        context.placements.forget(copy.namespace, copy.key)
    return Moved(
        next_cursor=reply.next_cursor,
        objects=len(moved),
        size=sum(copy.size for copy in moved),
        failed=reply.skipped + len(copies) - len(moved) - corrupt,
        left=reply.left,
        left_size=reply.left_bytes,
        evicted=reply.evicted,
        corrupt=corrupt,
    )


def _copies(reply: calls.MovesStarted) -> list[_Copy]:
    sources, grants = reply.sources, reply.grants
    copies: list[_Copy] = []
    at = 0
    for row, token in enumerate(grants.tokens):
        width = grants.replicas
        places = slice(row * width, (row + 1) * width)
        targets = zip(grants.segments[places], grants.offsets[places], strict=True)
        size = sources.sizes[row]
        copies.append(
            _Copy(
                namespace=reply.namespaces[row],
                key=reply.keys[row],
                size=size,
                version=(sources.epochs[row], sources.counters[row]),
                token=token,
                source=(sources.segments[at], sources.offsets[at]),
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
    """Fill ``data`` and, where all is right, ``header``; returns how many are corrupt."""
    transfers: dict[int, Transfer] = {}
    for copy in copies:
        segment_id, offset = copy.source
        if segment_id not in segments:
            continue
        transfer = transfers.setdefault(
            segment_id, Transfer(segments[segment_id], [], False, deadline)
        )
        transfer.moves.append(Move(offset, memoryview(copy.head)))
        if copy.size:
            transfer.moves.append(Move(offset + HEADER_BYTES, memoryview(copy.data), copy.hasher))
    errors = (yield list(transfers.values())) if transfers else []
    assert isinstance(errors, list)
    failed = set()
    for (segment_id, transfer), error in zip(transfers.items(), errors, strict=True):
        if error is not None:
            failed.add(segment_id)
            yield from unreachable(context, transfer.segment, error)
    corrupt = 0
    for copy in copies:
        segment_id, offset = copy.source
        if segment_id in failed or segment_id not in transfers:
            continue
        header = unpack(copy.head, transfers[segment_id].segment.seed, offset)
        if header is None or (header.epoch, header.counter) != copy.version:
            continue  # removed meanwhile
        if header.payload_checksum != copy.hasher.intdigest():
            corrupt += 1
            log.warning("corrupt_object namespace=%s key=%s", copy.namespace, copy.key.hex())
            context.count("corrupt_objects")
            continue
        copy.header = header
    return corrupt


def _write(
    context: Context,
    copies: Sequence[_Copy],
    segments: Mapping[int, SegmentInfo],
    epoch: int,
    deadline: float,
) -> Flow[list[_Copy]]:
    """Write and end them; returns those that are where they were to go."""
    transfers: dict[tuple[int, Namespace], ObjectWrites] = {}
    for copy in copies:
        assert copy.header is not None
        parent, descriptor = copy.header.parent or b"", copy.header.descriptor
        views = [memoryview(copy.data)] if copy.size else []
        for segment_id, offset in copy.targets:
            if segment_id in segments:
                place = segment_id, copy.namespace
                if place not in transfers:
                    segment = segments[segment_id]
                    transfers[place] = ObjectWrites(segment, copy.namespace, deadline)
                transfers[place].rows.append((
                    offset, copy.size, epoch, copy.token, copy.key, views, parent, descriptor,
                ))  # fmt: skip
    errors = (yield list(transfers.values())) if transfers else []
    assert isinstance(errors, list)
    lost: dict[int, bool] = {}  # segments that failed; whether their moves are settled
    for ((segment_id, _), transfer), error in zip(transfers.items(), errors, strict=True):
        if error is not None:
            lost[segment_id] = bool(error.fields.get("settled")) and lost.get(segment_id, True)
            yield from unreachable(context, transfer.segment, error)
    written = []
    for copy in copies:
        on = {segment_id for segment_id, _ in copy.targets}
        if on <= segments.keys() and not on & lost.keys():
            written.append(copy)
        else:
            settled = all(lost.get(segment_id, True) for segment_id in on)
            yield from revoke(epoch, [copy.token], settled=settled)
    if not written:
        return []
    ended = yield from ask(calls.PutEnd(epoch, [copy.token for copy in written]), calls.PutEnded)
    return [
        copy
        for copy, outcome in zip(written, ended.outcomes, strict=True)
        if outcome == PutOutcome.STORED
    ]
