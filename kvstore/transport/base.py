"""The interface of all transports: copies between a segment and the caller's memory.

A transport knows no objects, leases or masters. Rules (``tests/conformance/test_transports.py``):

- Copies of one call happen in sequence; a failed write may have done the first ones.
- Offsets and lengths are checked on both ends; an invalid one raises ``InvalidRangeError`` before
  any byte is copied.
- A call exceeds its deadline by one chunk at most. A peer that dies, stops or is unreachable raises
  ``NodeUnreachableError`` or ``DeadlineExceededError``, whose field ``quiesced`` is 1 when no byte
  of this call can arrive in the segment any more. Otherwise, over tcp, the field ``connection`` is
  the number of the connection on which one can.
- Several threads may call at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from xxhash import xxh3_64

from kvstore.calls import SegmentInfo
from kvstore.errors import SegmentUnmountedError
from kvstore.memory.header import HEADER_BYTES, WIPE
from kvstore.native.interface import CORRUPT, STALE, ReadRow, WriteRow
from kvstore.native.object_headers import header_of, write_header
from kvstore.transport.common import RangeCopy, check_moves

PIECE_BYTES = 256 << 10
"""Bytes copied and hashed at once: within a core's L2 cache, and enough to hide call costs."""


class Transport(ABC):
    """Copies between this process and segments of nodes."""

    name: str
    maps: bool = False
    """Whether its segments are mapped, so that ``memory`` and ``mount_checker`` return them."""

    @abstractmethod
    def can_reach(self, segment: SegmentInfo) -> bool:
        """Return whether it can serve that segment from here. Cheap after the first time."""

    def can_write(self, segment: SegmentInfo) -> bool:
        """Return whether it ``can_reach`` the segment and write to it."""
        return self.can_reach(segment)

    @abstractmethod
    def read(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        """Fill each copy's buffer. ``deadline`` is a ``uptime()`` value.

        Raises:
            InvalidRangeError, NodeUnreachableError, SegmentUnmountedError, PermissionDeniedError,
                DeadlineExceededError: the buffers' contents are undefined afterwards.
        """

    @abstractmethod
    def write(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        """Write each copy's buffer completely. Raises as ``read``; see ``quiesced`` above."""

    def read_objects(
        self,
        segment: SegmentInfo,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
    ) -> list[bytes | int]:
        """Read complete objects: per row its descriptor, ``STALE`` or ``CORRUPT``.

        Without compiled primitives, headers and payloads are one ``read``, because each costs a
        round trip; so buffers are filled even if another object is there.

        Args:
            rows: each with buffers, unless the transport ``maps``.
            verify: check the payloads as well as the headers.

        Raises:
            As ``read``.
        """
        reads = [(row, bytearray(HEADER_BYTES), xxh3_64() if verify else None) for row in rows]
        copies: list[RangeCopy] = []
        for row, head, hasher in reads:
            copies += [RangeCopy(row[0], memoryview(head)), *payload_moves(row, hasher)]
        self.read(segment, copies, deadline)
        return [outcome_of(row, head, segment.seed, namespace, made) for row, head, made in reads]

    def write_objects(
        self, segment: SegmentInfo, namespace: str, rows: list[WriteRow], deadline: float
    ) -> None:
        """Write objects: each wiped, then payload, then header. Raises as ``read``."""
        wipes = [RangeCopy(row[0], memoryview(WIPE)) for row in rows]
        hashers = [xxh3_64() for _ in rows]
        payloads = [
            copy for pair in zip(rows, hashers, strict=True) for copy in payload_moves(*pair)
        ]
        heads = [RangeCopy(row[0], memoryview(bytearray(HEADER_BYTES))) for row in rows]
        check_moves(segment, [*payloads, *heads])
        self.write(segment, wipes, deadline)  # the copies of one ``write`` may happen at once
        self.write(segment, payloads, deadline)
        for row, head, hasher in zip(rows, heads, hashers, strict=True):
            write_header(head.buffer, segment.seed, namespace, row, hasher.intdigest())
        self.write(segment, heads, deadline)

    def memory(self, segment: SegmentInfo) -> memoryview:
        """Return all of a mapped segment, also mapped after ``close``. Raises
        SegmentUnmountedError."""
        raise SegmentUnmountedError(
            f"the memory of node {segment.node!r} is not in this address space",
            node=segment.node,
            quiesced=1,
        )

    def readonly_memory(self, segment: SegmentInfo) -> memoryview | None:
        """Return all of a mapped segment for views of programs; None: programs get copies. It
        claims to be writable, but a write ends the process. Stays mapped as ``memory`` does."""
        return None

    def mount_checker(self, segment: SegmentInfo) -> Callable[[], bool] | None:
        """Return a check of the mount, which works after ``close``, too; None: it is not mapped.

        It turns False permanently once the node has fenced, rejoined or left. Takes 0.1 us.
        """
        return None

    @abstractmethod
    def forget(self, segment: SegmentInfo) -> None:
        """Drop connections and mappings of a departed segment."""

    @abstractmethod
    def sweep(self) -> None:
        """Drop resources of departed segments and closed connections; called about every second."""

    def drop_connections(self) -> None:  # noqa: B027  # most have none
        """Reconnect at the next calls, after a foreign exception interrupted a call."""

    @abstractmethod
    def close_after_fork(self) -> None:
        """Close inherited file descriptors in the child of a fork. Takes no lock."""

    @abstractmethod
    def close(self) -> None:
        """Close it. Idempotent; calls in progress raise ``ClosedError`` or similar."""


def payload_moves(row: ReadRow | WriteRow, hasher: xxh3_64 | None) -> list[RangeCopy]:
    copies: list[RangeCopy] = []
    at = row[0] + HEADER_BYTES
    for buffer in row[5] or ():
        copies.append(RangeCopy(at, buffer, hasher))
        at += len(buffer)
    return copies


def outcome_of(
    row: ReadRow, head: bytearray, seed: int, namespace: str, hasher: xxh3_64 | None
) -> bytes | int:
    """Return the outcome of a row that was read. ``hasher``: None: it is not verified."""
    header = header_of(head, seed, namespace, row)
    if header is None:
        return STALE
    if hasher is not None and hasher.intdigest() != header.payload_checksum:
        return CORRUPT
    return header.descriptor
