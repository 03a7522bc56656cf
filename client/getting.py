"""Reading objects: the flow of ``get`` and its siblings.

    cached placement, or lookup ──► read header and payload ──► right header? ──► right checksum?
            ▲                              │ unreachable             │ no: stale       │ no: corrupt
            └── next replica, asked anew ◄─┴─────────────────────────┴─────────────────┘
                                   (ATTEMPTS times, then a miss)

What was read counts only if the lease, counted on our own clock from before the question, had not
ended when the last byte arrived. While it lives the extent has the object's bytes, so whoever finds
others there, asks anew and is sent to the same place has found bad memory: the master is told.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64

from kvstore import calls
from kvstore.calls import SegmentInfo
from kvstore.client.placements import Placed, Replica
from kvstore.client.steps import Context, Flow, Transfer, ask, learn, unreachable
from kvstore.client.values import Bytes1D, check_dtype
from kvstore.errors import BufferMismatchError, KVStoreError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES, Header, unpack
from kvstore.transport.base import Move

log = logging.getLogger("kvstore.client")

ATTEMPTS = 4
"""Lookups of one get before it is a miss."""


@dataclass(slots=True)
class Target:
    """One object to read: which, and where its payload goes."""

    key: Key
    views: list[memoryview] | None = None
    """Caller's memory, filled in order; None: memory is made once the size is known."""
    dtype: str = ""
    """What the caller's memory expects; "": raw bytes."""
    header: Header | None = None
    """Of what was read; None: a miss."""
    data: Bytes1D | None = None
    """What was read, where the memory was made here."""
    bad: list[Bad] = field(default_factory=list)
    """Reads, under a lease that lived, that brought other bytes."""


class Bad(NamedTuple):
    """Where other bytes were found than should be there."""

    key: Key
    placed: Placed
    replica: Replica


def locate(
    context: Context, namespace: Namespace, keys: Sequence[Key], *, fresh: bool = False
) -> Flow[list[Placed | None]]:
    """Where these objects are, leased; from the cache where the lease lives, unless ``fresh``."""
    placed: list[Placed | None]
    if fresh:
        placed = [None] * len(keys)
    else:
        placed = [context.placements.get(namespace, key) for key in keys]
    missing = [index for index, known in enumerate(placed) if known is None]
    if not missing:
        return placed
    asked = context.clock()
    wanted = [keys[index] for index in missing]
    found = yield from ask(calls.Lookup(namespace, wanted), calls.Found)
    until = asked + found.lease_ms / 1000 - context.lease_margin_s
    rows = yield from learn(context, found.epoch, found.placements, until)
    for index, row in zip(missing, rows, strict=True):
        placed[index] = row
        if row is not None:
            context.placements.remember(namespace, keys[index], row)
    return placed


def get(context: Context, namespace: Namespace, targets: Sequence[Target]) -> Flow[None]:
    """Read every target that is there; sets ``header`` of those, and ``data``.

    Raises:
        BufferMismatchError: caller's memory is too small (nothing was read into it) or of another
            dtype (its contents are undefined).
        MasterUnreachableError, DeadlineExceededError
    """
    todo = list(targets)
    fresh = False
    for attempt in range(ATTEMPTS):
        placed = yield from locate(context, namespace, [target.key for target in todo], fresh=fresh)
        reads: list[_Read] = []
        for target, known in zip(todo, placed, strict=True):
            if known is not None:
                target.bad = confirmed(target.bad, known) if target.bad else target.bad
                replica = in_order(known, target.bad)[0]
                reads.append(_Read(context, target, known, replica))
        if not reads:
            todo = []
            break
        transfers = _by_segment(reads)
        if not attempt:
            failover = context.clock() + context.failover_s
            for transfer, its_reads in transfers:
                if all(read.has_alternative for read in its_reads):
                    transfer.deadline = failover
        errors = yield [transfer for transfer, _ in transfers]
        assert isinstance(errors, list)
        failed: list[_Read] = []
        for (transfer, its_reads), error in zip(transfers, errors, strict=True):
            if error is None:
                failed += [read for read in its_reads if not read.finish(context, namespace)]
            else:
                yield from unreachable(context, transfer.segment, error)
                failed += its_reads
        todo = [read.target for read in failed]
        if not todo:
            break
        for target in todo:
            context.placements.forget(namespace, target.key)
        fresh = True
    bad = [target.bad for target in todo if len(target.bad) > 1]
    bad += [target.bad for target in targets if target.header is not None]
    yield from report_corrupt(context, namespace, [each for of_one in bad for each in of_one])


def confirmed(bad: Sequence[Bad], placed: Placed) -> list[Bad]:
    """Those of the version that is placed there still. A removal hides an object before it wipes
    it: who reads in between, by an older answer, has found nothing bad."""
    version = placed.epoch, placed.counter
    return [each for each in bad if (each.placed.epoch, each.placed.counter) == version]


def in_order(placed: Placed, bad: Sequence[Bad]) -> Sequence[Replica]:
    """Its replicas, the best first: as they are listed, those on nodes that failed last; what was
    found bad after all others."""
    if not bad:
        return placed.replicas
    seen = Counter(each.replica for each in bad)
    return sorted(placed.replicas, key=lambda replica: seen[replica])


def report_corrupt(context: Context, namespace: Namespace, bad: Sequence[Bad]) -> Flow[None]:
    """Tell the master of bad memory: what has no other replica is removed, so that it is a miss for
    everybody and can be put anew."""
    if not bad:
        return
    rows = {
        (key, placed.epoch, placed.counter, replica.segment.uuid): None
        for key, placed, replica in bad
    }
    keys, epochs, counters, uuids = map(list, zip(*rows, strict=True))
    for key in keys:
        context.placements.forget(namespace, key)  # a bad replica is listed first
    objects = len(set(keys))
    context.count("corrupt_objects", objects)
    log.error("corrupt_objects namespace=%s objects=%d", namespace, objects)
    try:
        request = calls.ReportCorrupt(namespace, keys, epochs, counters, uuids)
        yield from ask(request, calls.Dropped)
    except KVStoreError as error:
        log.warning("corruption_not_reported objects=%d error=%s", objects, error)


class _Read:
    """One object's moves, and the checks of what came."""

    __slots__ = (
        "_buffer",
        "_hasher",
        "_head",
        "_placed",
        "_replica",
        "moves",
        "target",
    )

    def __init__(self, context: Context, target: Target, placed: Placed, replica: Replica) -> None:
        self.target = target
        self._placed = placed
        self._replica = replica
        self._head = bytearray(HEADER_BYTES)
        self._hasher = xxh3_64() if context.verify_payload else None
        self._buffer: Bytes1D | None = None
        size = placed.size
        payload = replica.offset + HEADER_BYTES
        if target.views is None:
            self._buffer = np.empty(size, np.uint8)
            views = [memoryview(self._buffer)]  # type: ignore[arg-type]
        else:
            views = _exactly(target, size)
        self.moves = [Move(replica.offset, memoryview(self._head))]
        for view in views:
            self.moves.append(Move(payload, view, self._hasher))
            payload += len(view)

    @property
    def segment(self) -> SegmentInfo:
        return self._replica.segment

    @property
    def has_alternative(self) -> bool:
        return len(self._placed.replicas) > 1

    def finish(self, context: Context, namespace: Namespace) -> bool:
        """Whether the target has the right bytes now."""
        placed, target = self._placed, self.target
        if context.clock() >= placed.until:
            context.count("late_reads")
            return False
        header = unpack(self._head, self.segment.seed, self._replica.offset)
        if header is None or not is_of(header, namespace, target.key, placed):
            context.count("stale_reads")
            target.bad.append(Bad(target.key, placed, self._replica))
            return False
        if self._hasher is not None and self._hasher.intdigest() != header.payload_checksum:
            mismatch(context, namespace, target.key, self._replica)
            target.bad.append(Bad(target.key, placed, self._replica))
            return False
        if target.dtype:
            check_dtype(header.descriptor, target.dtype)
        target.header = header
        target.data = self._buffer
        return True


def is_of(header: Header, namespace: Namespace, key: Key, placed: Placed) -> bool:
    """Whether the header is of exactly the object that was placed there."""
    return (
        header.key == key
        and header.counter == placed.counter
        and header.epoch == placed.epoch
        and header.payload_size == placed.size
        and header.namespace == namespace
    )


def mismatch(context: Context, namespace: Namespace, key: Key, replica: Replica) -> None:
    """Count and log a payload that is not what its header says."""
    context.count("checksum_mismatches")
    log.warning(
        "checksum_mismatch namespace=%s key=%s node=%s offset=%d",
        namespace,
        key.hex(),
        replica.segment.node,
        replica.offset,
    )


def _exactly(target: Target, size: int) -> list[memoryview]:
    """The first ``size`` bytes of the caller's memory."""
    assert target.views is not None
    room = sum(len(view) for view in target.views)
    if room < size:
        raise BufferMismatchError(
            f"the object has {size} bytes, the buffer {room}",
            advice="Ask stat(key) for the size first.",
            size_bytes=size,
            buffer_bytes=room,
            key=target.key.hex(),
        )
    views = []
    for view in target.views:
        if not size:
            break
        if len(view):  # an empty buffer has no memory to fill
            views.append(view[:size] if len(view) > size else view)
            size -= len(views[-1])
    return views


def _by_segment(reads: list[_Read]) -> list[tuple[Transfer, list[_Read]]]:
    grouped: dict[int, tuple[Transfer, list[_Read]]] = {}
    for read in reads:
        segment = read.segment
        entry = grouped.get(id(segment))
        if entry is None:
            grouped[id(segment)] = (Transfer(segment, read.moves, False), [read])
        else:
            entry[0].moves.extend(read.moves)
            entry[1].append(read)
    return list(grouped.values())
