"""One read or write of a client: its copies as batches, two in progress at a time.

They pass through chunks; registered memory is transferred in place, and only hashed here.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from itertools import pairwise
from typing import Final, NamedTuple

from xxhash import xxh3_64

from kvstore.calls import SegmentInfo
from kvstore.errors import ClosedError
from kvstore.memory.process_memory import address_of
from kvstore.runtime.clock import uptime
from kvstore.transport.base import PIECE_BYTES
from kvstore.transport.common import RangeCopy, deadline_exceeded, feed
from kvstore.transport.mooncake.engine_session import EngineSession

IN_PROGRESS_MAX: Final = 2
RANGES_MAX: Final = 512

DIRECT_BYTES_MIN: Final = PIECE_BYTES
"""Smaller registered memory is copied, too: with its header it is one range instead of two."""

CHECK_INTERVAL_S: Final = 0.1
"""Interval in which a waiting call checks whether the transport was closed."""


class TransferFailedError(Exception):
    """Failure of a batch. Some of it may have happened, or may still."""


class _ChunkPiece(NamedTuple):
    data: memoryview
    offset: int
    """Offset in the buffer; -1: the memory is transferred without a copy."""
    hasher: xxh3_64 | None


class _ChunkTransfer:
    def __init__(self) -> None:
        self.ours: list[int] = []
        self.theirs: list[int] = []
        self.lengths: list[int] = []
        self.pieces: list[_ChunkPiece] = []
        self.bytes = 0
        self.chunk = -1
        self.chunk_used = 0
        self.moving: Future[bool] | None = None

    def add(self, ours: int, theirs: int, length: int) -> None:
        """Add a range. Adjacent ones are merged: each range costs the engine 70 us over tcp."""
        self.bytes += length
        if (
            self.lengths
            and self.ours[-1] + self.lengths[-1] == ours
            and self.theirs[-1] + self.lengths[-1] == theirs
        ):
            self.lengths[-1] += length
            return
        self.ours.append(ours)
        self.theirs.append(theirs)
        self.lengths.append(length)


class EngineCall:
    """One read or write: created, ``run`` once, and dropped, in one thread."""

    def __init__(
        self,
        session: EngineSession,
        segment: SegmentInfo,
        deadline: float,
        *,
        is_write: bool,
        threads: Executor,
        is_closed: Callable[[], bool],
        is_registered: Callable[[int, int], bool],
    ) -> None:
        assert segment.engine is not None
        self._session = session
        self._buffer = session.buffer
        self._segment = segment
        self._peer = segment.engine.name
        self._base = segment.engine.base
        self._deadline = deadline
        self._is_write = is_write
        self._threads = threads
        self._is_closed = is_closed
        self._is_registered = is_registered
        self._in_progress: deque[_ChunkTransfer] = deque()
        self._batch = _ChunkTransfer()
        self.is_quiesced = True
        """Whether no byte of this call can be in transit any more."""
        self.in_doubt: list[memoryview] = []
        """Caller's memory that may still be read or written, if the call is not quiesced."""

    def run(self, moves: Sequence[RangeCopy]) -> None:
        """Carry out all copies. After an error, retire the session unless ``is_quiesced``.

        Raises:
            TransferFailedError, DeadlineExceededError, ClosedError: and whatever hashers raise.
        """
        try:
            for wave in _waves(moves) if self._is_write else [moves]:
                for copy in wave:
                    self._add(copy)
                self._submit(is_last=True)
                while self._in_progress:
                    self._finish()
        except BaseException:
            self._leave_running()
            raise

    def _add(self, copy: RangeCopy) -> None:
        data, length = copy.buffer, len(copy.buffer)
        address = address_of(data) if length >= DIRECT_BYTES_MIN else 0
        is_direct = bool(address) and self._is_registered(address, length)
        at = 0
        while at < length:
            batch = self._batch
            room = self._buffer.chunk_bytes - batch.bytes
            if room <= 0 or len(batch.lengths) >= RANGES_MAX:
                self._submit()
                continue
            if not is_direct and batch.chunk < 0:
                batch.chunk = self._take_chunk()
            take = min(room, length - at, PIECE_BYTES)
            part = data if take == length else data[at : at + take]
            if is_direct:
                place, ours = -1, address + at
            else:
                place = batch.chunk + batch.chunk_used
                ours = self._buffer.base + place
                batch.chunk_used += take
            if self._is_write:
                if place >= 0:
                    self._buffer.memory[place : place + take] = part
                if copy.hasher is not None:
                    feed(copy.hasher, part)
            if is_direct or not self._is_write:
                batch.pieces.append(_ChunkPiece(part, place, copy.hasher))
            batch.add(ours, self._base + copy.offset + at, take)
            at += take

    def _take_chunk(self) -> int:
        """Take a chunk. Finishes own batches before it waits for other calls."""
        while True:
            self._check()
            try:
                if self._in_progress:
                    return self._buffer.free.get_nowait()
                return self._buffer.free.get(timeout=min(CHECK_INTERVAL_S, self._remaining()))
            except queue.Empty:
                if self._in_progress:
                    self._finish()

    def _submit(self, *, is_last: bool = False) -> None:
        """Start the present batch; in this thread if it is a single range and nothing else runs."""
        batch, self._batch = self._batch, _ChunkTransfer()
        if not batch.lengths:
            return
        while len(self._in_progress) >= IN_PROGRESS_MAX:
            self._finish()
        self._check()
        session, engine = self._session, self._session.engine
        ours, theirs, lengths = batch.ours, batch.theirs, batch.lengths
        self._in_progress.append(batch)
        if (
            is_last
            and len(lengths) == 1
            and len(self._in_progress) == 1
            and self._peer in session.used_at  # opening a peer may take long
        ):
            batch.moving = Future()
            batch.moving.set_running_or_notify_cancel()
            self.is_quiesced = False
            done = engine.transfer_one(
                self._peer, ours[0], theirs[0], lengths[0], self._deadline, is_write=self._is_write
            )
            batch.moving.set_result(done)
            return

        def move() -> bool:
            try:
                return engine.transfer(self._peer, ours, theirs, lengths, is_write=self._is_write)
            finally:
                session.leave()

        session.enter()
        try:
            batch.moving = self._threads.submit(move)
        except RuntimeError:  # shut down
            session.leave()
            raise self._closed() from None
        self.is_quiesced = False

    def _finish(self) -> None:
        batch = self._in_progress[0]
        moving = batch.moving
        assert moving is not None
        while not moving.done():
            self._check()
            wait([moving], min(CHECK_INTERVAL_S, self._remaining()))
        if not moving.result():
            raise TransferFailedError
        if not self._is_write:
            self._take_out(batch)
        self._in_progress.popleft()
        self._give_back(batch)
        self._session.used_at[self._peer] = uptime()
        self.is_quiesced = not self._in_progress

    def _take_out(self, batch: _ChunkTransfer) -> None:
        for data, place, hasher in batch.pieces:
            if place >= 0:
                data[:] = self._buffer.memory[place : place + len(data)]
            if hasher is not None:
                feed(hasher, data)

    def _check(self) -> None:
        if self._is_closed():
            raise self._closed()
        if uptime() >= self._deadline:
            raise deadline_exceeded(self._segment)

    def _remaining(self) -> float:
        return max(0.0, self._deadline - uptime())

    def _closed(self) -> ClosedError:
        return ClosedError("the transport was closed")

    def _leave_running(self) -> None:
        """Abandon the batches in progress. Those that have not begun never will."""
        begun = []
        for batch in self._in_progress:
            if batch.moving is not None and batch.moving.cancel():
                self._session.leave()
                self._give_back(batch)
            else:
                begun.append(batch)
                self.in_doubt += [piece.data for piece in batch.pieces if piece.offset < 0]
        if not begun:
            self.is_quiesced = True
        self._in_progress.clear()
        self._give_back(self._batch)

    def _give_back(self, batch: _ChunkTransfer) -> None:
        if batch.chunk >= 0:
            self._buffer.free.put(batch.chunk)


def _waves(moves: Sequence[RangeCopy]) -> list[Sequence[RangeCopy]]:
    """Group the copies: a batch has no sequence, so overlapping ranges need separate batches."""
    spans = sorted(
        (copy_range.offset, copy_range.offset + len(copy_range.buffer))
        for copy_range in moves
        if copy_range.buffer
    )
    are_apart = all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    return [moves] if are_apart else [[copy] for copy in moves]
