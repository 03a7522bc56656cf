"""Transport over shared memory: a move is one copy, hashed while it is still in cache.

Memory order. A reader is told of an object by the master, who was told by the writer after its last
byte: system calls on both ends order the writer's stores before the reader's loads, on any CPU.
Within a write, payload and header may become visible in another order than they were written (not
on x86); nobody looks before the master says so, except a scan after a crash, and that one verifies
payload checksums. The generation is one aligned word, read between pieces: a writer that outlives a
takeover may finish the piece it is in, which the master's quarantine covers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from kvstore.calls import SegmentInfo
from kvstore.errors import ClosedError, NodeUnreachableError, SegmentGoneError
from kvstore.host import host_id
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.memory.segment import Mapping
from kvstore.native import fast
from kvstore.native.kinds import ReadRow, WriteRow
from kvstore.transport.base import PIECE_BYTES, Move
from kvstore.transport.pieces import (
    batch_ended,
    check_moves,
    deadline_exceeded,
    feed,
    invalid_range,
    segment_gone,
)

COPY_THREADS = min(4, os.cpu_count() or 1)
"""Of one batch, where it is of several MiB: one core does not fill the memory's bandwidth."""


class ShmTransport:
    """Implements ``Transport`` for segments in this host's ``/dev/shm``.

    Keeps one mapping per segment. Whatever fails here is settled: no byte lands after a call.
    Threads: any; a call holds the GIL but for the moments in which the interpreter switches.
    """

    name: str = "shm"
    maps: bool = True

    def __init__(self) -> None:
        self._mappings: dict[bytes, Mapping | None] = {}
        """By uuid; None: it was tried and is not here."""
        self._changing = threading.Lock()
        self._closed = False

    def reaches(self, segment: SegmentInfo) -> bool:
        """As ``Transport.reaches``: maps the segment the first time."""
        return self._mapping(segment) is not None

    def register(self, buffer: memoryview) -> None:
        """Nothing to do."""

    def read(self, segment: SegmentInfo, moves: Sequence[Move], deadline: float) -> None:
        """As ``Transport.read``."""
        self._run(segment, moves, deadline, is_write=False)

    def write(self, segment: SegmentInfo, moves: Sequence[Move], deadline: float) -> None:
        """As ``Transport.write``."""
        self._run(segment, moves, deadline, is_write=True)

    def read_objects(
        self,
        segment: SegmentInfo,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
    ) -> list[bytes | int] | None:
        """As ``Transport.read_objects``."""
        if fast is None:
            return None
        done = fast.read_objects(
            self.memory(segment), segment.generation, segment.seed, namespace, rows, verify,
            deadline, COPY_THREADS,
        )  # fmt: skip
        if isinstance(done, int):
            raise batch_ended(done, segment)
        return done

    def write_objects(
        self, segment: SegmentInfo, namespace: str, rows: list[WriteRow], deadline: float
    ) -> bool:
        """As ``Transport.write_objects``."""
        if fast is None:
            return False
        ended = fast.write_objects(
            self.memory(segment), segment.generation, segment.seed, namespace, rows, deadline,
            COPY_THREADS,
        )  # fmt: skip
        if ended:
            raise batch_ended(ended, segment)
        return True

    def memory(self, segment: SegmentInfo) -> memoryview:
        """As ``Transport.memory``."""
        mapping = self._mapping(segment)
        if mapping is None:
            if self._closed:
                raise self._closed_error()
            raise segment_gone(segment)
        if mapping.generation != segment.generation:
            raise segment_gone(segment)
        return mapping.memory

    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview | None:
        """As ``Transport.view``.

        Raises:
            InvalidRangeError: the range is not within the segment.
            SegmentGoneError: it was mounted anew.
        """
        mapping = self._mapping(segment)
        if mapping is None:
            return None
        if offset < SUPERBLOCK_BYTES or length < 0 or offset + length > mapping.size:
            raise invalid_range(offset, length, mapping.size)
        if mapping.generation != segment.generation:
            raise segment_gone(segment)
        try:
            return mapping.memory[offset : offset + length]
        except ValueError:  # released by ``close`` or ``forget`` in another thread
            raise segment_gone(segment) from None

    def watch(self, segment: SegmentInfo) -> Callable[[], bool] | None:
        """As ``Transport.watch``."""
        mapping = self._mapping(segment)
        return None if mapping is None else mapping.watch(segment.generation)

    def forget(self, segment: SegmentInfo) -> None:
        """As ``Transport.forget``. Views that were handed out stay valid."""
        with self._changing:
            mapping = self._mappings.pop(segment.uuid, None)
        if mapping is not None:
            mapping.close()

    def close(self) -> None:
        """As ``Transport.close``."""
        with self._changing:
            self._closed = True
            mappings = list(self._mappings.values())
            self._mappings.clear()
        for mapping in mappings:
            if mapping is not None:
                mapping.close()

    def _mapping(self, segment: SegmentInfo) -> Mapping | None:
        uuid = segment.uuid
        try:
            return self._mappings[uuid]
        except KeyError:
            pass
        if segment.host != host_id() or not segment.shm_name:
            return None
        with self._changing:
            if self._closed:
                return None
            if uuid not in self._mappings:
                mapping = Mapping.attach(segment.shm_name, uuid)
                if mapping is not None and mapping.size != segment.size:
                    mapping.close()
                    mapping = None
                self._mappings[uuid] = mapping
            return self._mappings[uuid]

    def _run(
        self, segment: SegmentInfo, moves: Sequence[Move], deadline: float, *, is_write: bool
    ) -> None:
        mapping = self._mapping(segment)
        if mapping is None:
            raise self._closed_error() if self._closed else _not_here(segment)
        check_moves(segment, moves)
        try:
            for move in moves:
                if is_write and move.prepare is not None:
                    move.prepare()
                _copy(segment, mapping, move, deadline, is_write=is_write)
        except SegmentGoneError:
            if self._closed:
                raise self._closed_error() from None
            raise

    def _closed_error(self) -> ClosedError:
        return ClosedError("the transport was closed", settled=1)


def _copy(
    segment: SegmentInfo, mapping: Mapping, move: Move, deadline: float, *, is_write: bool
) -> None:
    """One move, in pieces that stay in cache between copying and hashing."""
    memory = mapping.memory
    generation = segment.generation
    buffer = move.buffer
    hasher = move.hasher
    length = len(buffer)
    done = 0
    while True:
        if mapping.generation != generation:
            raise segment_gone(segment)
        if monotonic() >= deadline:
            raise deadline_exceeded(segment)
        stop = min(done + PIECE_BYTES, length)
        piece = buffer if length <= PIECE_BYTES else buffer[done:stop]
        try:
            place = memory[move.offset + done : move.offset + stop]
        except ValueError:  # released by ``close`` or ``forget`` in another thread
            raise segment_gone(segment) from None
        if is_write:
            place[:] = piece
        else:
            piece[:] = place
        if hasher is not None:
            feed(hasher, piece)
        done = stop
        if done == length:
            return


def _not_here(segment: SegmentInfo) -> NodeUnreachableError:
    return NodeUnreachableError(
        f"segment {segment.uuid.hex()} of node {segment.node!r} is not in this host's memory",
        node=segment.node,
        settled=1,
    )
