"""Copies between ranges of a segment in device memory and host memory.

The bytes pass through a slot of page-locked memory (``kvstore.device.staging_ring``): the device
copies one half while the processor copies and hashes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64

from kvstore.device.copies import CopyList
from kvstore.device.device import Device
from kvstore.device.driver import Direction, Event
from kvstore.memory.process_memory import address_of
from kvstore.transport.common import Piece, RangeCopy, feed, windows

PIECES_MAX: Final = 4_096
"""Copies queued at once."""

_Taking = Callable[[int, int, memoryview], None]
"""Gets the index of a range, the offset of a chunk in it, and the chunk's bytes."""


class _Window(NamedTuple):
    """Chunks that the device copies into half a slot, end to end."""

    event: Event | None
    """None: they have no bytes."""
    half: memoryview
    chunks: list[Piece]


class DeviceRanges:
    """Ranges in device memory, within the segment. No copy is in progress after a call, unless the
    device has failed. Threads: any.

    Raises, in all methods:
    DeadlineExceededError: no part of the ring was free by the deadline.
    DeviceError: the driver refused, or the device has failed.
    """

    def __init__(self, device: Device, base: int) -> None:
        """``base``: the address of the segment's first byte on the device."""
        self.device: Final = device
        self.base: Final = base

    def read(self, moves: Sequence[RangeCopy], deadline: float, check: Callable[[], None]) -> None:
        """Fill the buffers. ``check`` is called before the device gets work, and may raise."""

        def take(index: int, start: int, data: memoryview) -> None:
            move = moves[index]
            move.buffer[start : start + len(data)] = data
            if move.hasher is not None:
                feed(move.hasher, data)

        self._read([(move.offset, len(move.buffer)) for move in moves], take, deadline, check)

    def hashed(
        self, ranges: Sequence[tuple[int, int]], deadline: float, check: Callable[[], None]
    ) -> list[xxh3_64]:
        """Return the hash of each range (offset, length). ``check``: as ``read``."""
        hashers = [xxh3_64() for _ in ranges]
        self._read(ranges, lambda index, _, data: feed(hashers[index], data), deadline, check)
        return hashers

    def write(self, moves: Sequence[RangeCopy], deadline: float, check: Callable[[], None]) -> None:
        """Write the buffers, in sequence. ``check``: as ``read``."""
        lengths = [len(move.buffer) for move in moves]
        with self._halves(deadline) as halves:
            events: tuple[list[Event], list[Event]] = [], []
            try:
                for number, pieces in enumerate(windows(lengths, len(halves[0]), PIECES_MAX)):
                    check()
                    half, queued = halves[number % 2], events[number % 2]
                    self._wait_for_copies(queued, deadline)
                    batch = _CopyBatch(address_of(half))
                    for at, (row, start, size) in _laid_out(pieces):
                        move = moves[row]
                        piece = move.buffer[start : start + size]
                        if move.hasher is not None:
                            feed(move.hasher, piece)
                        place = self.base + move.offset + start
                        if batch.may_overlap(place):
                            queued += self._send(batch)
                        half[at : at + size] = piece
                        batch.add(place, at, size)
                    queued += self._send(batch)
            finally:
                self._wait_for_copies(events[0] + events[1], deadline)

    def _read(
        self,
        ranges: Sequence[tuple[int, int]],
        take: _Taking,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        lengths = [length for _, length in ranges]
        with self._halves(deadline) as halves:
            under_way: list[_Window] = []
            try:
                for number, pieces in enumerate(windows(lengths, len(halves[0]), PIECES_MAX)):
                    check()
                    under_way.append(self._begin(ranges, pieces, halves[number % 2]))
                    if len(under_way) == 2:
                        self._finish(under_way[0], take, deadline)
                        del under_way[0]
                for window in under_way:
                    self._finish(window, take, deadline)
            finally:
                events = [each.event for each in under_way if each.event is not None]
                self._wait_for_copies(events, deadline)

    def _begin(
        self, ranges: Sequence[tuple[int, int]], pieces: list[Piece], half: memoryview
    ) -> _Window:
        batch = _CopyBatch(address_of(half))
        for at, (row, start, size) in _laid_out(pieces):
            batch.add(self.base + ranges[row][0] + start, at, size)
        copies = batch.taken()
        event = None if copies is None else self.device.copy(Direction.SAVE, copies)
        return _Window(event, half, pieces)

    def _finish(self, window: _Window, take: _Taking, deadline: float) -> None:
        if window.event is not None:
            self.device.wait_for_copies(window.event, deadline)
        for at, (row, start, size) in _laid_out(window.chunks):
            take(row, start, window.half[at : at + size])

    def _send(self, batch: _CopyBatch) -> list[Event]:
        copies = batch.taken()
        return [] if copies is None else [self.device.copy(Direction.LOAD, copies)]

    def _wait_for_copies(self, events: list[Event], deadline: float) -> None:
        """Wait for events; removes each from the list after it has occurred."""
        while events:
            self.device.wait_for_copies(events[0], deadline)
            del events[0]

    @contextmanager
    def _halves(self, deadline: float) -> Iterator[tuple[memoryview, memoryview]]:
        with self.device.slot(deadline) as slot:
            half = len(slot) // 2
            yield slot[:half], slot[half:]


class _CopyBatch:
    """Copies that may run in any order, because their device ranges are disjoint."""

    def __init__(self, base: int) -> None:
        """``base``: the address of the host's memory."""
        self._base = base
        self._rows: list[tuple[int, int, int]] = []
        self._end = 0

    def may_overlap(self, place: int) -> bool:
        """Return whether the range at ``place`` begins before the end of one in the batch."""
        return place < self._end

    def add(self, place: int, at: int, size: int) -> None:
        """Add a copy between ``place`` on the device and ``at`` bytes after ``base``."""
        if size:
            self._rows.append((place, self._base + at, size))
            self._end = max(self._end, place + size)

    def taken(self) -> CopyList | None:
        """Remove and return the copies; None: there are none."""
        rows, self._rows, self._end = self._rows, [], 0
        if not rows:
            return None
        places, others, sizes = np.array(rows, np.int64).T.copy()
        return CopyList(places, others, sizes)


def _laid_out(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    """Yield each piece with its offset if they lie end to end."""
    at = 0
    for piece in pieces:
        yield at, piece
        at += piece.size
