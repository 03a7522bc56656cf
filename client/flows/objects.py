"""Whole objects of one segment, read or written together: header, payload, checksum.

A table of *rows* describes the work. A transport with compiled steps executes all rows in one call;
any other moves the same bytes move by move and verifies them afterwards. Both give the same
outcomes, which ``tests/conformance/test_objects.py`` checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from xxhash import xxh3_64

from kvstore.calls import SegmentInfo
from kvstore.client.flows.placements import Placed
from kvstore.client.flows.steps import Transfer
from kvstore.client.values import Payload
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
from kvstore.transport.pieces import batch_ended, check_moves, feed

_WIPE = memoryview(WIPE)

Outcome = bytes | int
"""The descriptor of an object that was read; or ``STALE`` or ``CORRUPT``."""


class _Reading(NamedTuple):
    """The state of a read that goes move by move."""

    head: bytearray
    hasher: Hasher | None


class ObjectReads(Transfer):
    """Objects to read from one segment. Flows ``add`` rows, and read ``outcomes`` after the
    transfer has succeeded."""

    __slots__ = ("_reading", "done", "namespace", "rows", "verify")

    def __init__(self, segment: SegmentInfo, namespace: Namespace, *, verify: bool) -> None:
        """``verify``: check payloads as well as headers."""
        super().__init__(segment, [], write=False)
        self._moves = None
        self._reading: list[_Reading] = []
        self.namespace = namespace
        self.verify = verify
        self.rows: list[ReadRow] = []
        self.done: list[Outcome] | None = None
        """Set by a transport that has carried out the rows."""

    def add(self, placed: Placed, offset: int, key: Key, room: Payload) -> None:
        """``room`` has the payload's size."""
        views = cast("list[memoryview]", room)  # ``DeviceReads`` have memory of a device there
        self.rows.append((offset, placed.size, placed.epoch, placed.counter, key, views))

    def in_one_go(self, transport: Transport, deadline: float) -> bool:
        """As ``Transfer.in_one_go``."""
        self.done = transport.read_objects(
            self.segment, self.namespace, self.rows, self.verify, deadline
        )
        return self.done is not None

    def move_by_move(self, transport: Transport, deadline: float) -> None:
        """As ``Transfer.move_by_move``. If another object is at a row's place by now, the caller's
        memory is not touched, unless the transport reads headers and payloads in one batch."""
        if transport.reads_in_one_batch:
            super().move_by_move(transport, deadline)
            return
        self._reading = [self._new_reading() for _ in self.rows]
        pairs = list(zip(self.rows, self._reading, strict=True))
        payloads = [_payload(*pair) for pair in pairs]
        check_moves(self.segment, [move for moves in payloads for move in moves])
        transport.read(self.segment, [_head(*pair) for pair in pairs], deadline)
        there = [
            move
            for pair, moves in zip(pairs, payloads, strict=True)
            if self._header(*pair) is not None
            for move in moves
        ]
        if there:
            transport.read(self.segment, there, deadline)

    def outcomes(self) -> list[Outcome]:
        """One per row."""
        if self.done is None:
            pairs = zip(self.rows, self._reading, strict=True)
            self.done = [self._outcome(row, reading) for row, reading in pairs]
        return self.done

    def _made(self) -> list[Move]:
        moves: list[Move] = []
        for row in self.rows:
            reading = self._new_reading()
            self._reading.append(reading)
            moves.append(_head(row, reading))
            moves += _payload(row, reading)
        return moves

    def _new_reading(self) -> _Reading:
        return _Reading(bytearray(HEADER_BYTES), xxh3_64() if self.verify else None)

    def _header(self, row: ReadRow, reading: _Reading) -> Header | None:
        return header_of(reading.head, self.segment, self.namespace, row)

    def _outcome(self, row: ReadRow, reading: _Reading) -> Outcome:
        header = self._header(row, reading)
        if header is None:
            return STALE
        if reading.hasher is not None and reading.hasher.intdigest() != header.payload_checksum:
            return CORRUPT
        return header.descriptor


def _head(row: ReadRow, reading: _Reading) -> Move:
    return Move(row[0], memoryview(reading.head))


def _payload(row: ReadRow, reading: _Reading) -> list[Move]:
    moves: list[Move] = []
    at = row[0] + HEADER_BYTES
    for view in row[5] or ():
        moves.append(Move(at, view, reading.hasher))
        at += len(view)
    return moves


class ObjectWrites(Transfer):
    """Objects to write to one segment. For each, the old header is wiped, then the payload and last
    the header are written, so that a valid header has a complete payload behind it."""

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
            for view in views or ():
                moves.append(Move(at, view, hasher))
                at += len(view)
            seal: Callable[[], None] = partial(self._pack, row, head, hasher)
            moves.append(Move(offset, memoryview(head), None, seal))
        return moves

    def seal(self, rows: list[WriteRow], transport: Transport, deadline: float) -> None:
        """Writes the headers of objects whose payloads are in their places already, in a segment
        that is mapped.

        Args:
            rows: without buffers.

        Raises:
            As ``Transport.write``.
        """
        if transport.write_objects(self.segment, self.namespace, rows, deadline):
            return
        memory = transport.memory(self.segment)
        moves: list[Move] = []
        for row in rows:
            head = bytearray(HEADER_BYTES)
            self._pack(row, head, _hashed(memory, row[0], row[1]))
            moves.append(Move(row[0], memoryview(head)))
        transport.write(self.segment, moves, deadline)

    def _pack(self, row: WriteRow, head: bytearray, hasher: Hasher) -> None:
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
    if header is None:
        return False
    return _hashed(memory, offset, size).intdigest() == header.payload_checksum


def _hashed(memory: memoryview, offset: int, size: int) -> Hasher:
    """The hash of an extent's payload."""
    hasher = xxh3_64()
    feed(hasher, memory[offset + HEADER_BYTES : offset + HEADER_BYTES + size])
    return hasher


def header_of(
    head: bytearray, segment: SegmentInfo, namespace: Namespace, row: ReadRow
) -> Header | None:
    """The header of the row's object; None: another object, or none, is there."""
    header = unpack(head, segment.seed, row[0])
    return header if header is not None and is_of(header, namespace, row) else None


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
