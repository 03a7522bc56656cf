"""The one interface of all transports: they copy ranges of a segment to and from caller's memory.

A transport moves bytes and knows nothing of objects, leases or masters. Rules for all of them
(``tests/conformance/test_transports.py`` holds them to it):

* Moves of one call happen in their order; a write that fails may have done some, in order.
* Every offset and length is checked against the segment on both ends; a bad one raises
  ``InvalidRangeError`` before any byte moves.
* No call outlives its deadline by more than one piece. A peer that dies, stops or is cut off
  raises ``NodeUnreachableError`` or ``DeadlineExceededError``; ``settled`` in its fields is 1 when
  no byte of this call can still land in the segment. Otherwise, over tcp, the field ``connection``
  is the number of the connection on which one can.
* Calls from several threads at once are allowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from xxhash import xxh3_64

from kvstore.calls import SegmentInfo
from kvstore.errors import SegmentGoneError
from kvstore.memory.header import HEADER_BYTES, WIPE
from kvstore.native.interface import CORRUPT, STALE, ReadRow, WriteRow
from kvstore.native.object_headers import header_of, write_header
from kvstore.transport.common import RangeCopy, check_moves

PIECE_BYTES = 256 << 10
"""Copied and hashed in one go: well inside a core's L2 cache, long enough to hide call costs."""


class Transport(ABC):
    """Moves bytes between this process and segments of nodes."""

    name: str
    maps: bool = False
    """Whether the segments that it reaches are in this address space: then ``memory`` and
    ``mount_checker`` show them."""

    @abstractmethod
    def can_reach(self, segment: SegmentInfo) -> bool:
        """Whether this transport can serve that segment from here. Cheap after the first time."""

    def can_write(self, segment: SegmentInfo) -> bool:
        """Whether it ``can_reach`` the segment, and can write there, too."""
        return self.can_reach(segment)

    @abstractmethod
    def read(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        """Fill each move's buffer. ``deadline`` is a ``uptime()`` value.

        Raises:
            InvalidRangeError, NodeUnreachableError, SegmentGoneError, PermissionDeniedError,
            DeadlineExceededError: the buffers' contents are undefined afterwards.
        """

    @abstractmethod
    def write(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        """Write each move's buffer; returns when all of it is in the segment.

        Raises:
            As ``read``; see ``settled`` above.
        """

    def read_objects(
        self,
        segment: SegmentInfo,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
    ) -> list[bytes | int]:
        """Read whole objects: per row its descriptor, or ``STALE`` or ``CORRUPT``.

        Without compiled steps: headers and payloads in one ``read``, because each costs a round
        trip. So buffers are filled even if another object is in that place by now.

        Args:
            rows: each with buffers, unless the transport ``maps``.
            verify: check the payloads as well as the headers.

        Raises:
            As ``read``.
        """
        reads = [(row, bytearray(HEADER_BYTES), xxh3_64() if verify else None) for row in rows]
        moves: list[RangeCopy] = []
        for row, head, hasher in reads:
            moves += [RangeCopy(row[0], memoryview(head)), *payload_moves(row, hasher)]
        self.read(segment, moves, deadline)
        return [outcome_of(row, head, segment.seed, namespace, made) for row, head, made in reads]

    def write_objects(
        self, segment: SegmentInfo, namespace: str, rows: list[WriteRow], deadline: float
    ) -> None:
        """Write whole objects: each wiped, then its payload, then its header, so that a valid
        header has a complete payload behind it.

        Raises:
            As ``write``.
        """
        wipes = [RangeCopy(row[0], memoryview(WIPE)) for row in rows]
        hashers = [xxh3_64() for _ in rows]
        payloads = [
            move for each in zip(rows, hashers, strict=True) for move in payload_moves(*each)
        ]
        heads = [RangeCopy(row[0], memoryview(bytearray(HEADER_BYTES))) for row in rows]
        check_moves(segment, [*payloads, *heads])
        self.write(segment, wipes, deadline)  # the moves of one ``write`` may happen at once
        self.write(segment, payloads, deadline)
        for row, head, hasher in zip(rows, heads, hashers, strict=True):
            write_header(head.buffer, segment.seed, namespace, row, hasher.intdigest())
        self.write(segment, heads, deadline)

    def memory(self, segment: SegmentInfo) -> memoryview:
        """All of a segment, if the transport ``maps``; writable, if it ``can_write`` there. The
        mapping stays for as long as the memoryview lives, also after ``close``.

        Raises:
            SegmentGoneError: it was unmounted or mounted anew, or is not in this address space.
        """
        raise SegmentGoneError(
            f"the memory of node {segment.node!r} is not in this address space",
            node=segment.node,
            settled=1,
        )

    def readonly_memory(self, segment: SegmentInfo) -> memoryview | None:
        """All of a segment, for values that programs get without a copy; None: programs get copies.
        It claims to be writable, but a write ends the process. Stays mapped as ``memory`` does."""
        return None

    def mount_checker(self, segment: SegmentInfo) -> Callable[[], bool] | None:
        """A function that tells whether the segment is still mounted as ``segment`` says: False,
        for good, once its node has fenced, joined anew or left. None where it is not mapped.

        The function works also after ``forget`` and ``close``, in any thread, and takes 0.1 us.
        """
        return None

    @abstractmethod
    def forget(self, segment: SegmentInfo) -> None:
        """Drop connections and mappings of a segment that is gone."""

    @abstractmethod
    def sweep(self) -> None:
        """Give back what belongs to segments that are gone, or to nodes that have ended a
        connection. Called every second or so, by one thread; does not wait for calls."""

    def drop_connections(self) -> None:  # noqa: B027  # most have none
        """After a foreign exception has cut a call: the next calls connect anew. Calls of other
        threads go on."""

    @abstractmethod
    def close_after_fork(self) -> None:
        """In the child of a fork: close our descriptors of the parent's sockets and files, and
        touch nothing else of the parent's. Takes no lock. The transport is not used after that."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent; calls under way fail with ``ClosedError`` or ``NodeUnreachableError``."""


def payload_moves(row: ReadRow | WriteRow, hasher: xxh3_64 | None) -> list[RangeCopy]:
    """The row's buffers, each with its place."""
    moves: list[RangeCopy] = []
    at = row[0] + HEADER_BYTES
    for buffer in row[5] or ():
        moves.append(RangeCopy(at, buffer, hasher))
        at += len(buffer)
    return moves


def outcome_of(
    row: ReadRow, head: bytearray, seed: int, namespace: str, hasher: xxh3_64 | None
) -> bytes | int:
    """The outcome of a row that was read. ``hasher``: of its payload; None: it is not verified."""
    header = header_of(head, seed, namespace, row)
    if header is None:
        return STALE
    if hasher is not None and hasher.intdigest() != header.payload_checksum:
        return CORRUPT
    return header.descriptor
