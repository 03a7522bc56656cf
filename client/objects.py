"""Whole objects of one segment, read or written together: header, payload, checksum.

What is to be done stands in *rows*, which a transport that can (shared memory, compiled) carries
out in one go. Any other moves the same bytes move by move, and looks at what came afterwards. Both
give the same outcomes, and ``tests/conformance/test_objects.py`` holds them to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from xxhash import xxh3_64

from kvstore.calls import SegmentInfo
from kvstore.client.placements import Placed
from kvstore.client.steps import Transfer
from kvstore.limits import Key, Namespace
from kvstore.memory.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    WIPE,
    Header,
    pack_into,
    unpack,
)
from kvstore.native import fast
from kvstore.native.kinds import CORRUPT, OUTSIDE, STALE, ReadRow, WriteRow
from kvstore.transport.base import Hasher, Move, Transport
from kvstore.transport.pieces import batch_ended, feed

_WIPE = memoryview(WIPE)

Outcome = bytes | int
"""The descriptor of an object that was read; or ``STALE`` or ``CORRUPT``."""


class _Reading(NamedTuple):
    """What a read that goes move by move leaves behind."""

    head: bytearray
    hasher: Hasher | None


class ObjectReads(Transfer):
    """Objects to read from one segment. Flows ``add`` rows, and ask for ``outcomes`` once the
    transfer has succeeded."""

    __slots__ = ("_reading", "done", "namespace", "rows", "verify")

    def __init__(self, segment: SegmentInfo, namespace: Namespace, *, verify: bool) -> None:
        """``verify``: payloads, too, and not only headers."""
        super().__init__(segment, [], write=False)
        self._moves = None
        self._reading: list[_Reading] = []
        self.namespace = namespace
        self.verify = verify
        self.rows: list[ReadRow] = []
        self.done: list[Outcome] | None = None
        """Set by a transport that has carried out the rows."""

    def add(self, placed: Placed, offset: int, key: Key, views: list[memoryview]) -> None:
        """``views`` have the payload's size together."""
        self.rows.append((offset, placed.size, placed.epoch, placed.counter, key, views))

    def in_one_go(self, transport: Transport, deadline: float) -> bool:
        """As ``Transfer.in_one_go``."""
        self.done = transport.read_objects(
            self.segment, self.namespace, self.rows, self.verify, deadline
        )
        return self.done is not None

    def outcomes(self) -> list[Outcome]:
        """One per row."""
        if self.done is None:
            pairs = zip(self.rows, self._reading, strict=True)
            self.done = [self._outcome(row, reading) for row, reading in pairs]
        return self.done

    def _made(self) -> list[Move]:
        moves: list[Move] = []
        for offset, _, _, _, _, views in self.rows:
            reading = _Reading(bytearray(HEADER_BYTES), xxh3_64() if self.verify else None)
            self._reading.append(reading)
            moves.append(Move(offset, memoryview(reading.head)))
            at = offset + HEADER_BYTES
            for view in views or ():
                moves.append(Move(at, view, reading.hasher))
                at += len(view)
        return moves

    def _outcome(self, row: ReadRow, reading: _Reading) -> Outcome:
        header = unpack(reading.head, self.segment.seed, row[0])
        if header is None or not is_of(header, self.namespace, row):
            return STALE
        if reading.hasher is not None and reading.hasher.intdigest() != header.payload_checksum:
            return CORRUPT
        return header.descriptor


class ObjectWrites(Transfer):
    """Objects to write to one segment: each wiped, then its payload, then its header, so that
    whoever finds the header finds a whole payload behind it."""

    __slots__ = ("namespace", "rows")

    def __init__(self, segment: SegmentInfo, namespace: Namespace, deadline: float) -> None:
        super().__init__(segment, [], write=True, deadline=deadline)
        self._moves = None
        self.namespace = namespace
        self.rows: list[WriteRow] = []

    def in_one_go(self, transport: Transport, deadline: float) -> bool:
        """As ``Transfer.in_one_go``."""
        return transport.write_objects(self.segment, self.namespace, self.rows, deadline)

    def _made(self) -> list[Move]:
        moves: list[Move] = []
        for row in self.rows:
            offset, views = row[0], row[5]
            hasher = xxh3_64()
            head = bytearray(HEADER_BYTES)
            moves.append(Move(offset, _WIPE))
            at = offset + HEADER_BYTES
            for view in views:
                moves.append(Move(at, view, hasher))
                at += len(view)
            seal: Callable[[], None] = partial(self._seal, row, head, hasher)
            moves.append(Move(offset, memoryview(head), None, seal))
        return moves

    def _seal(self, row: WriteRow, head: bytearray, hasher: Hasher) -> None:
        offset, size, epoch, counter, key, _, parent, descriptor = row
        header = Header(
            self.namespace, Key(key), Key(parent) if parent else None, size, epoch, counter,
            hasher.intdigest(), descriptor,
        )  # fmt: skip
        pack_into(head, header, self.segment.seed, offset)


def headers(
    memory: memoryview, segment: SegmentInfo, namespace: Namespace, rows: list[ReadRow]
) -> list[Outcome]:
    """One outcome per row, of objects that stay where they are: only their headers are checked.

    Raises:
        SegmentGoneError, InvalidRangeError
    """
    if fast is not None:
        done = fast.read_objects(
            memory, segment.generation, segment.seed, namespace, rows, False, math.inf, 1
        )
        if isinstance(done, int):
            raise batch_ended(done, segment)
        return done
    outcomes: list[Outcome] = []
    for row in rows:
        offset, size = row[:2]
        if offset < SUPERBLOCK_BYTES or offset + HEADER_BYTES + size > segment.size:
            raise batch_ended(OUTSIDE, segment)
        header = unpack(memory[offset : offset + HEADER_BYTES], segment.seed, offset)
        is_there = header is not None and is_of(header, namespace, row)
        outcomes.append(header.descriptor if header is not None and is_there else STALE)
    return outcomes


def is_whole(memory: memoryview, segment: SegmentInfo, row: ReadRow) -> bool:
    """Whether the payload behind a header is what the header says. Reads all of it."""
    offset, size = row[:2]
    header = unpack(memory[offset : offset + HEADER_BYTES], segment.seed, offset)
    hasher = xxh3_64()
    feed(hasher, memory[offset + HEADER_BYTES : offset + HEADER_BYTES + size])
    return header is not None and hasher.intdigest() == header.payload_checksum


def is_of(header: Header, namespace: Namespace, row: ReadRow) -> bool:
    """Whether the header is of exactly the object that was placed there."""
    _, size, epoch, counter, key, _ = row
    return (
        header.key == key
        and header.counter == counter
        and header.epoch == epoch
        and header.payload_size == size
        and header.namespace == namespace
    )
