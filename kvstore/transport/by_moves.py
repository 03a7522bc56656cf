"""Reads and writes whole objects by moves, for transports without compiled steps for objects."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64

from kvstore.calls import SegmentInfo
from kvstore.memory.header import HEADER_BYTES, WIPE
from kvstore.native.kinds import CORRUPT, STALE, ReadRow, WriteRow
from kvstore.native.rows import header_of, write_header
from kvstore.transport.base import Hasher, Move, Transport
from kvstore.transport.pieces import check_moves


class ByMoves(Transport):
    """Reads headers and payloads in one batch, because each batch costs a round trip. So buffers
    are filled even if another object is in that place by now."""

    def read_objects(
        self,
        segment: SegmentInfo,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
    ) -> list[bytes | int]:
        reads = [(row, bytearray(HEADER_BYTES), xxh3_64()) for row in rows]
        moves: list[Move] = []
        for row, head, hasher in reads:
            moves += [
                Move(row[0], memoryview(head)),
                *payload_moves(row, hasher if verify else None),
            ]
        self.read(segment, moves, deadline)
        return [
            outcome_of(row, head, segment.seed, namespace, hasher if verify else None)
            for row, head, hasher in reads
        ]

    def write_objects(
        self, segment: SegmentInfo, namespace: str, rows: list[WriteRow], deadline: float
    ) -> None:
        """As ``Transport.write_objects``: wipes, then payloads, then headers, as the moves of one
        ``write`` may happen at once."""
        wipes = [Move(row[0], memoryview(WIPE)) for row in rows]
        hashers = [xxh3_64() for _ in rows]
        payloads = [
            move for each in zip(rows, hashers, strict=True) for move in payload_moves(*each)
        ]
        heads = [Move(row[0], memoryview(bytearray(HEADER_BYTES))) for row in rows]
        check_moves(segment, [*payloads, *heads])
        self.write(segment, wipes, deadline)
        self.write(segment, payloads, deadline)
        for row, head, hasher in zip(rows, heads, hashers, strict=True):
            write_header(head.buffer, segment.seed, namespace, row, hasher.intdigest())
        self.write(segment, heads, deadline)


def payload_moves(row: ReadRow | WriteRow, hasher: Hasher | None) -> list[Move]:
    """The row's buffers, each with its place."""
    moves: list[Move] = []
    at = row[0] + HEADER_BYTES
    buffers: Sequence[memoryview] = row[5] or ()
    for buffer in buffers:
        moves.append(Move(at, buffer, hasher))
        at += len(buffer)
    return moves


def outcome_of(
    row: ReadRow, head: bytearray, seed: int, namespace: str, hasher: Hasher | None
) -> bytes | int:
    """The outcome of a row that was read. ``hasher``: of its payload; None: it is not verified."""
    header = header_of(head, seed, namespace, row)
    if header is None:
        return STALE
    if hasher is not None and hasher.intdigest() != header.payload_checksum:
        return CORRUPT
    return header.descriptor
