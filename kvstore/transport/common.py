"""Common code of transports: range checks, chunked copies, hashes during the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.calls import SegmentInfo
from kvstore.errors import (
    DeadlineExceededError,
    InvalidRangeError,
    KVStoreError,
    NodeUnreachableError,
    SegmentUnmountedError,
)
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES
from kvstore.native.interface import OUTSIDE, UNMOUNTED, BatchEnd
from kvstore.runtime.tcp_protocol import Extent

if TYPE_CHECKING:
    from xxhash import xxh3_64

HASH_BYTES: Final = 64 << 10
"""Bytes hashed at once. xxhash releases the GIL above 100 KB, and regaining it from a busy Python
thread costs up to the switch interval: 1 ms per 256 KiB was measured, for a hash of 4 µs."""


@dataclass(slots=True)
class RangeCopy:
    """A range of a segment and the memory it is copied to (read) or from (write)."""

    offset: int
    buffer: memoryview
    """Flat, ``B``-formatted, of the range's length. The caller keeps it until the call returns."""
    hasher: xxh3_64 | None = None
    """Gets every byte of this copy, in sequence. Consecutive copies may share one."""
    extent: Extent | None = None
    """The extent around the range, with the client's capability for it; None: it has none."""


def check_moves(segment: SegmentInfo, moves: Sequence[RangeCopy]) -> None:
    """Raise InvalidRangeError if a range leaves the segment or touches its superblock."""
    size = segment.size
    for copy in moves:
        offset = copy.offset
        if offset < SUPERBLOCK_BYTES or offset + len(copy.buffer) > size:
            raise invalid_range(offset, len(copy.buffer), size)


def extent_of(offset: int, size: int, capability: bytes) -> Extent | None:
    """Return the extent of ``size`` payload bytes; None: there is no capability."""
    return Extent(offset, HEADER_BYTES + size, capability) if capability else None


def invalid_range(offset: int, length: int, size: int) -> InvalidRangeError:
    return InvalidRangeError(
        f"{length} bytes at {offset} are not within a segment of {size} bytes",
        offset=offset,
        length=length,
        size=size,
    )


def segment_unmounted(segment: SegmentInfo, *, quiesced: int = 1) -> SegmentUnmountedError:
    return SegmentUnmountedError(
        f"segment {segment.uuid.hex()} of node {segment.node!r} was unmounted, or mounted again,",
        advice="Look the object up again.",
        node=segment.node,
        quiesced=quiesced,
    )


def deadline_exceeded(segment: SegmentInfo, *, quiesced: int = 1) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"node {segment.node} ({segment.address or segment.host}) had not moved all bytes by the "
        "deadline",
        node=segment.node,
        address=segment.address,
        quiesced=quiesced,
    )


def not_encrypted(segment: SegmentInfo) -> NodeUnreachableError:
    """Build the error for a client that requires encryption. The master gets no report."""
    return NodeUnreachableError(
        f"node {segment.node} ({segment.address}) does not encrypt its data port, and "
        "data_encryption of this client is tls",
        advice="Start that node with --data-encryption tls; or this client without it, if the "
        "network between them is trusted.",
        node=segment.node, address=segment.address, transport="tcp", tried=0, quiesced=1,
    )  # fmt: skip


def batch_ended(how: BatchEnd, segment: SegmentInfo) -> KVStoreError:
    if how == OUTSIDE:
        return InvalidRangeError(
            f"an object is not within the segment of {segment.size} bytes", node=segment.node
        )
    return segment_unmounted(segment) if how == UNMOUNTED else deadline_exceeded(segment)


def feed(hasher: xxh3_64, data: memoryview) -> None:
    """Hash ``data`` without releasing the GIL."""
    if len(data) <= HASH_BYTES:
        hasher.update(data)
        return
    for start in range(0, len(data), HASH_BYTES):
        hasher.update(data[start : start + HASH_BYTES])


class Piece(NamedTuple):
    row: int
    """Index of its range."""
    start: int
    """In the range, bytes."""
    size: int


def windows(lengths: Sequence[int], bytes_max: int, pieces_max: int) -> Iterator[list[Piece]]:
    """Split and group ranges of these lengths, in sequence. An empty range is one window."""
    window: list[Piece] = []
    remaining = bytes_max
    for row, length in enumerate(lengths):
        start = 0
        while True:
            size = min(remaining, length - start)
            window.append(Piece(row, start, size))
            start += size
            remaining -= size
            if not remaining or len(window) == pieces_max:
                yield window
                window, remaining = [], bytes_max
            if start == length:
                break
    if window:
        yield window
