"""Copies ranges between a segment in the memory of a device and memory of the host.

The bytes use a slot of a page-locked ring (``kvstore.device.staging_ring``): the device copies one
half while the processor copies and hashes the other."""

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
"""Copies that are queued at once."""

_Taking = Callable[[int, int, memoryview], None]
"""Receives the index of a range, the offset of a chunk in the range, and its bytes."""


class _Window(NamedTuple):
    """Chunks that the device copies into a half of a slot, end to end."""

    event: Event | None
    """None: they have no bytes."""
    half: memoryview
    chunks: list[Piece]


class DeviceRanges:
    """See the module. The caller has checked that the ranges are within the segment. After a call
    none of its copies is in progress, unless the device has failed.

    Threads: any.

    Raises, in all methods:
        DeadlineExceededError: no part of the ring was free by the deadline.
        DeviceError: the driver refused, or the device has failed.
    """

    def __init__(self, device: Device, base: int) -> None:
        """``base``: the address of the segment's first byte on the device."""
        self.device: Final = device
        self.base: Final = base

    def read(self, moves: Sequence[RangeCopy], deadline: float, check: Callable[[], None]) -> None:
        """Fills the buffers. Calls ``check`` before each copy, and passes on its exception."""

        def take(index: int, start: int, data: memoryview) -> None:
            move = moves[index]
            move.buffer[start : start + len(data)] = data
            if move.hasher is not None:
                feed(move.hasher, data)

        self._read([(move.offset, len(move.buffer)) for move in moves], take, deadline, check)

    def hashed(
        self, ranges: Sequence[tuple[int, int]], deadline: float, check: Callable[[], None]
    ) -> list[xxh3_64]:
        """The hash of each range (offset, length). ``check``: as ``read``."""
        hashers = [xxh3_64() for _ in ranges]
        self._read(ranges, lambda index, _, data: feed(hashers[index], data), deadline, check)
        return hashers

    def write(self, moves: Sequence[RangeCopy], deadline: float, check: Callable[[], None]) -> None:
        """Writes the buffers, in their order. ``check``: as ``read``."""
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
        self, ranges: Sequence[tuple[int, int]], take: _Taking, deadline: float,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        lengths = [length for _, length in ranges]
        with self._halves(deadline) as halves:
            in_progress: list[_Window] = []
            try:
                for number, pieces in enumerate(windows(lengths, len(halves[0]), PIECES_MAX)):
                    check()
                    in_progress.append(self._begin(ranges, pieces, halves[number % 2]))
                    if len(in_progress) == 2:
                        self._finish(in_progress[0], take, deadline)
                        del in_progress[0]
                for window in in_progress:
                    self._finish(window, take, deadline)
            finally:
                events = [pending.event for pending in in_progress if pending.event is not None]
                self._wait_for_copies(events, deadline)

    def _begin(
        self, ranges: Sequence[tuple[int, int]], pieces: list[Piece], half: memoryview
    ) -> _Window:
        batch = _CopyBatch(address_of(half))
        for at, (row, start, size) in _laid_out(pieces):
            batch.add(self.base + ranges[row][0] + start, at, size)
        copies = batch.take()
        event = None if copies is None else self.device.copy(Direction.SAVE, copies)
        return _Window(event, half, pieces)

    def _finish(self, window: _Window, take: _Taking, deadline: float) -> None:
        if window.event is not None:
            self.device.wait_for_copies(window.event, deadline)
        for at, (row, start, size) in _laid_out(window.chunks):
            take(row, start, window.half[at : at + size])

    def _send(self, batch: _CopyBatch) -> list[Event]:
        copies = batch.take()
        return [] if copies is None else [self.device.copy(Direction.LOAD, copies)]

    def _wait_for_copies(self, events: list[Event], deadline: float) -> None:
        """Waits for events, and removes each from the list when it has occurred."""
        while events:
            self.device.wait_for_copies(events[0], deadline)
            del events[0]

    @contextmanager
    def _halves(self, deadline: float) -> Iterator[tuple[memoryview, memoryview]]:
        with self.device.slot(deadline) as slot:
            half = len(slot) // 2
            yield slot[:half], slot[half:]


class _CopyBatch:
    """Copies that may run in any order: their ranges on the device are disjoint."""

    def __init__(self, base: int) -> None:
        """``base``: the address of the host's memory."""
        self._base = base
        self._rows: list[tuple[int, int, int]] = []
        self._end = 0

    def may_overlap(self, address: int) -> bool:
        """Whether the range at ``address`` may overlap one of the batch."""
        return address < self._end

    def add(self, address: int, at: int, size: int) -> None:
        """Adds a copy between ``address`` on the device and ``at`` bytes after ``base``."""
        if size:
            self._rows.append((address, self._base + at, size))
            self._end = max(self._end, address + size)

    def take(self) -> CopyList | None:
        """Removes and returns the copies; None: there are none."""
        rows, self._rows, self._end = self._rows, [], 0
        if not rows:
            return None
        places, others, sizes = np.array(rows, np.int64).T.copy()
        return CopyList(places, others, sizes)


def _laid_out(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    """Yields each chunk with its offset end to end."""
    at = 0
    for piece in pieces:
        yield at, piece
        at += piece.size
