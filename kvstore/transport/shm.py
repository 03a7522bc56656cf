"""Transport over shared memory: one copy, hashed while it is still in cache.

Memory order. A reader learns of an object from the master, which learned of it from the writer
after its last byte: system calls on both ends order the writer's stores before the reader's loads,
on any CPU. Within a write, payload and header may become visible in any order (not on x86); only a
scan after a crash reads without the master's reply, and it verifies checksums. The generation is
one aligned word, read between chunks: a writer that outlives a takeover may finish its chunk, which
the master's quarantine covers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvstore.calls import SegmentInfo
from kvstore.errors import ClosedError, NodeUnreachableError, SegmentUnmountedError
from kvstore.memory.mapping import Mapping
from kvstore.native import steps
from kvstore.native.interface import ReadRow, WriteRow
from kvstore.runtime.cancellation import current
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import host_id
from kvstore.runtime.tasks import uninterrupted
from kvstore.security.descriptor_client import NoDescriptorError, request_descriptor
from kvstore.transport.base import PIECE_BYTES, Transport
from kvstore.transport.common import (
    RangeCopy,
    batch_ended,
    check_moves,
    deadline_exceeded,
    feed,
    segment_unmounted,
)

log = logging.getLogger("kvstore.transport")

COPY_THREADS = min(4, os.cpu_count() or 1)
"""Threads for a batch of several MiB: one core does not use all of the memory's bandwidth."""


STOPPABLE_BYTES = 32 << 20
"""Bytes copied between checks for cancellation; an object is always copied at once."""

LOGGED_MAX = 1_000

RETRY_S = 10.0
"""Pause before the next request for a file descriptor: a silent node costs a call a second."""

RowT = TypeVar("RowT", ReadRow, WriteRow)


class ShmTransport(Transport):
    """Reaches segments in this host's ``/dev/shm``: by file descriptor or by name. Threads: any.

    Every failure is quiesced. A call holds the GIL, except in compiled primitives on large batches.
    """

    name: str = "shm"
    maps: bool = True

    def __init__(self) -> None:
        self._mappings: dict[bytes, Mapping | None] = {}
        """By uuid; None: the segment could not be mapped."""
        self.not_mapped: dict[str, str] = {}
        """Reasons why segments of this host are not mapped, by node."""
        self._again: dict[bytes, float] = {}
        """Time of the next request for a segment's file descriptor, by uuid."""
        self._changing = threading.Lock()
        self._closed = False

    def can_reach(self, segment: SegmentInfo) -> bool:
        """As ``Transport.can_reach``: maps the segment the first time."""
        return self._mapping(segment) is not None

    def can_write(self, segment: SegmentInfo) -> bool:
        mapping = self._mapping(segment)
        return mapping is not None and mapping.writable

    def read(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        self._run(segment, moves, deadline, is_write=False)

    def write(self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float) -> None:
        self._run(segment, moves, deadline, is_write=True)

    def read_objects(
        self,
        segment: SegmentInfo,
        namespace: str,
        rows: list[ReadRow],
        verify: bool,
        deadline: float,
    ) -> list[bytes | int]:
        memory = self.memory(segment)
        outcomes: list[bytes | int] = []
        for some in _stoppable(rows):
            done = steps.read_objects(
                memory, segment.generation, segment.seed, namespace, some, verify, deadline,
                COPY_THREADS,
            )  # fmt: skip
            if isinstance(done, int):
                raise batch_ended(done, segment)
            outcomes = outcomes + done if outcomes else done
        return outcomes

    def write_objects(
        self, segment: SegmentInfo, namespace: str, rows: list[WriteRow], deadline: float
    ) -> None:
        memory = self.memory(segment)
        for some in _stoppable(rows):
            ended = steps.write_objects(
                memory, segment.generation, segment.seed, namespace, some, deadline, COPY_THREADS
            )
            if ended:
                raise batch_ended(ended, segment)

    def memory(self, segment: SegmentInfo) -> memoryview:
        mapping = self._mapping(segment)
        if mapping is None:
            if self._closed:
                raise self._closed_error()
            raise segment_unmounted(segment)
        if mapping.generation != segment.generation:
            raise segment_unmounted(segment)
        return mapping.memory

    def readonly_memory(self, segment: SegmentInfo) -> memoryview | None:
        mapping = self._mapping(segment)
        return None if mapping is None else mapping.readonly_view()

    def mount_checker(self, segment: SegmentInfo) -> Callable[[], bool] | None:
        mapping = self._mapping(segment)
        return None if mapping is None else mapping.watch(segment.generation)

    def forget(self, segment: SegmentInfo) -> None:
        with self._changing:
            mapping = self._mappings.get(segment.uuid)
            if mapping is not None and not mapping.is_current:
                del self._mappings[segment.uuid]
        if mapping is not None and not mapping.is_current:
            mapping.close()

    def close(self) -> None:
        with self._changing:
            self._closed = True
            mappings = list(self._mappings.values())
            self._mappings.clear()
        for mapping in mappings:
            if mapping is not None:
                mapping.close()

    def sweep(self) -> None:
        """As ``Transport.sweep``; a segment that could not be mapped is tried again when met."""
        for uuid, mapping in list(self._mappings.items()):
            is_due = uptime() >= self._again.get(uuid, 0.0)
            if is_due if mapping is None else not mapping.is_current:
                with self._changing:
                    if self._mappings.get(uuid) is mapping:
                        self._mappings.pop(uuid, None)
                        self._again.pop(uuid, None)
                if mapping is not None:
                    mapping.close()

    def close_after_fork(self) -> None:
        """As ``Transport.close_after_fork``: unmaps the memory, except what views refer to."""
        for mapping in self._mappings.values():
            if mapping is not None:
                mapping.close_after_fork()
        self._mappings.clear()

    def _mapping(self, segment: SegmentInfo) -> Mapping | None:
        uuid = segment.uuid
        try:
            return self._mappings[uuid]
        except KeyError:
            pass
        if segment.host != host_id() or not (segment.shm_name or segment.descriptor_socket):
            return None
        return uninterrupted(partial(self._attach, segment))

    def _attach(self, segment: SegmentInfo) -> Mapping | None:
        uuid = segment.uuid
        with self._changing:
            if self._closed:
                return None
            if uuid not in self._mappings:
                mapping = self._mapped(segment)
                if mapping is not None and mapping.size != segment.size:
                    mapping.close()
                    mapping = None
                self._mappings[uuid] = mapping
                if mapping is not None:
                    self.not_mapped.pop(segment.node, None)
            return self._mappings[uuid]

    def _mapped(self, segment: SegmentInfo) -> Mapping | None:
        handle = segment.descriptor_socket if segment.holder else None
        try:
            if handle is None:
                return Mapping.attach(segment.shm_name, segment.uuid)
            return Mapping.of(request_descriptor(segment, handle), segment.uuid)
        except NoDescriptorError as error:
            if not error.is_for_now:
                self._again[segment.uuid] = uptime() + RETRY_S
            self._log_unmapped(segment, str(error))
        except (OSError, ValueError) as error:
            self._log_unmapped(segment, str(error))
        return None

    def _log_unmapped(self, segment: SegmentInfo, reason: str) -> None:
        """Log once per node the reason why its memory cannot be mapped."""
        known = self.not_mapped.get(segment.node)
        if known != reason and (known is not None or len(self.not_mapped) < LOGGED_MAX):
            self.not_mapped[segment.node] = reason
            entry = segment.shm_name or "-"
            log.warning("shm_not_mapped node=%s entry=%s reason=%s", segment.node, entry, reason)

    def _run(
        self, segment: SegmentInfo, moves: Sequence[RangeCopy], deadline: float, *, is_write: bool
    ) -> None:
        mapping = self._mapping(segment)
        if mapping is None:
            raise self._closed_error() if self._closed else _not_here(segment)
        check_moves(segment, moves)
        try:
            for copy in moves:
                _copy(segment, mapping, copy, deadline, is_write=is_write)
        except SegmentUnmountedError:
            if self._closed:
                raise self._closed_error() from None
            raise

    def _closed_error(self) -> ClosedError:
        return ClosedError("the transport was closed", quiesced=1)


def _copy(
    segment: SegmentInfo, mapping: Mapping, copy: RangeCopy, deadline: float, *, is_write: bool
) -> None:
    """Copy one range, in chunks that stay in cache between copying and hashing."""
    memory = mapping.memory
    stop = current()
    generation = segment.generation
    buffer = copy.buffer
    hasher = copy.hasher
    length = len(buffer)
    done = 0
    while True:
        if mapping.generation != generation:
            raise segment_unmounted(segment)
        if uptime() >= deadline:
            raise deadline_exceeded(segment)
        if stop is not None:
            stop.check()
        end = min(done + PIECE_BYTES, length)
        chunk = buffer if length <= PIECE_BYTES else buffer[done:end]
        mapped = memory[copy.offset + done : copy.offset + end]
        if is_write:
            mapped[:] = chunk
        else:
            chunk[:] = mapped
        if hasher is not None:
            feed(hasher, chunk)
        done = end
        if done == length:
            return


def _stoppable(rows: list[RowT]) -> Iterator[list[RowT]]:
    """Yield all rows at once, or groups of a few milliseconds if the call may be cancelled."""
    stop = current()
    if stop is None or len(rows) == 1:
        yield rows
        return
    some: list[RowT] = []
    size = 0
    for row in rows:
        if size > STOPPABLE_BYTES:
            yield some
            stop.check()
            some, size = [], 0
        some.append(row)
        size += row[1]
    yield some


def _not_here(segment: SegmentInfo) -> NodeUnreachableError:
    return NodeUnreachableError(
        f"segment {segment.uuid.hex()} of node {segment.node!r} is not in this host's memory",
        node=segment.node,
        quiesced=1,
    )
