"""Ranges of a segment in the memory of a device, to and from memory of the host.

The bytes go through a slot of a ring of page-locked memory (``kvstore.device.ring``). Its halves
take turns: the device copies one while the processor copies and hashes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from kvstore.device.copies import Copies
from kvstore.device.device import Device
from kvstore.device.driver import Event, Way
from kvstore.memory.raw import address_of
from kvstore.transport.base import Move
from kvstore.transport.pieces import feed, windows

PIECES_MAX: Final = 4_096
"""Copies that are queued at once."""


class _Window(NamedTuple):
    """Pieces that the device copies into a half of a slot."""

    event: Event | None
    """None: the pieces have no bytes."""
    memory: memoryview
    pieces: list[tuple[int, memoryview]]
    """Index of the move, and the piece of its buffer; they lie in ``memory`` end to end."""


class DeviceRanges:
    """See the module. Whoever calls has checked that the moves are within the segment. However a
    call ends, no copy of it is under way afterwards, unless the device has failed.

    Threads: any.
    """

    def __init__(self, device: Device, base: int) -> None:
        """``base``: the address of the segment's first byte on the device."""
        self.device: Final = device
        self.base: Final = base

    def read(self, moves: Sequence[Move], deadline: float, check: Callable[[], None]) -> None:
        """Fills the moves' buffers.

        Args:
            check: called before the device gets work; may raise, which ends the call.

        Raises:
            DeadlineExceededError: no part of the ring was free by the deadline.
            DeviceError: the driver refused, or the device has failed.
        """
        places = [self.base + move.offset for move in moves]
        with self._halves(deadline) as halves:
            before: _Window | None = None
            begun: _Window | None = None
            try:
                for number, pieces in enumerate(_windows(moves, len(halves[0]))):
                    check()
                    begun = self._begin(pieces, places, halves[number % 2])
                    if before is not None:
                        self._finish(before, moves, deadline)
                    before, begun = begun, None
                if before is not None:
                    self._finish(before, moves, deadline)
                    before = None
            finally:
                left = [each.event for each in (before, begun) if each is not None]
                self._settle([event for event in left if event is not None], deadline)

    def write(self, moves: Sequence[Move], deadline: float, check: Callable[[], None]) -> None:
        """Writes the moves' buffers, in their order. Arguments and errors as ``read``."""
        places = [self.base + move.offset for move in moves]
        with self._halves(deadline) as halves:
            events: list[list[Event]] = [[], []]
            started = -1
            try:
                for number, pieces in enumerate(_windows(moves, len(halves[0]))):
                    check()
                    half, queued = halves[number % 2], events[number % 2]
                    self._settle(queued, deadline)
                    batch = _Batch(address_of(half))
                    at = 0
                    for index, piece in pieces:
                        move = moves[index]
                        is_new, started = index != started, index
                        if is_new and move.prepare is not None:
                            queued += self._send(batch)  # what the header describes goes first
                            move.prepare()
                        if move.hasher is not None:
                            feed(move.hasher, piece)
                        if batch.may_overlap(places[index]):
                            queued += self._send(batch)
                        half[at : at + len(piece)] = piece
                        batch.add(places[index], at, len(piece))
                        places[index] += len(piece)
                        at += len(piece)
                    queued += self._send(batch)
            finally:
                self._settle(events[0] + events[1], deadline)

    def _begin(
        self, pieces: list[tuple[int, memoryview]], places: list[int], half: memoryview
    ) -> _Window:
        batch = _Batch(address_of(half))
        at = 0
        for index, piece in pieces:
            batch.add(places[index], at, len(piece))
            places[index] += len(piece)
            at += len(piece)
        copies = batch.taken()
        event = None if copies is None else self.device.copy(Way.SAVE, copies)
        return _Window(event, half, pieces)

    def _finish(self, window: _Window, moves: Sequence[Move], deadline: float) -> None:
        if window.event is not None:
            self.device.settle(window.event, deadline)
        at = 0
        for index, piece in window.pieces:
            piece[:] = window.memory[at : at + len(piece)]
            at += len(piece)
            hasher = moves[index].hasher
            if hasher is not None:
                feed(hasher, piece)

    def _send(self, batch: _Batch) -> list[Event]:
        copies = batch.taken()
        return [] if copies is None else [self.device.copy(Way.LOAD, copies)]

    def _settle(self, events: list[Event], deadline: float) -> None:
        """Waits for events, and takes each from the list when it has passed."""
        while events:
            self.device.settle(events[0], deadline)
            del events[0]

    @contextmanager
    def _halves(self, deadline: float) -> Iterator[tuple[memoryview, memoryview]]:
        slot = self.device.ring.take(deadline)
        try:
            half = len(slot) // 2
            yield slot[:half], slot[half:]
        finally:
            if not self.device.has_failed:
                self.device.ring.give(slot)


class _Batch:
    """Copies that may run in any order, because their places on the device are disjoint."""

    def __init__(self, base: int) -> None:
        """``base``: the address of the host's memory."""
        self._base = base
        self._rows: list[tuple[int, int, int]] = []
        self._end = 0

    def may_overlap(self, place: int) -> bool:
        """Whether the range at ``place`` begins before the end of one that is here."""
        return place < self._end

    def add(self, place: int, at: int, size: int) -> None:
        """Copies between ``place`` on the device and ``at`` bytes behind ``base``."""
        if size:
            self._rows.append((place, self._base + at, size))
            self._end = max(self._end, place + size)

    def taken(self) -> Copies | None:
        """The copies, which are no longer here; None: there are none."""
        rows, self._rows, self._end = self._rows, [], 0
        return Copies(*np.array(rows, np.int64).T.copy()) if rows else None


def _windows(moves: Sequence[Move], size: int) -> Iterator[list[tuple[int, memoryview]]]:
    buffers = [move.buffer for move in moves]
    return windows(buffers, window_bytes=size, window_buffers=PIECES_MAX)
