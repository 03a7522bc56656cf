"""A station is an engine with its registered memory: both are used, and retired, together.

    made ──► used by calls, several at once ──► retired ──► ended, when its last call has returned
                                                 ▲ a transfer failed, or was given up by its caller

An abandoned transfer may still read and write its memory. So no part of a retired station is used
again: its buffer is unmapped, and the caller's memory is released, once the engine is ended. This
quarantine lasts until the calls under way return, which the engine's own time-out bounds
(``MC_TRANSFER_TIMEOUT``, 5 s).
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
from collections.abc import Iterable
from typing import Final

from kvstore.memory.regions import Region
from kvstore.runtime.clock import uptime
from kvstore.transport.mooncake.engine import EngineSettings, TransferEngine, address_of_map

CHUNK_BYTES_MAX: Final = 4 << 20
"""Bytes of the buffer for one batch: they take some milliseconds, in which the next one is copied
and hashed."""

CHUNKS_MIN: Final = 8


class ChunkBuffer:
    """Memory of ours that bytes pass through; chunks of it are lent one by one."""

    def __init__(self, size: int) -> None:
        self.chunk_bytes: Final = min(CHUNK_BYTES_MAX, size // CHUNKS_MIN // 4096 * 4096)
        self._mapped: Final = mmap.mmap(-1, size)
        self.memory: Final = memoryview(self._mapped)
        self.base: Final = address_of_map(self._mapped)
        self.size: Final = size
        # Last in, first out: what was used a moment ago is in cache, and the rest untouched.
        self.free: Final[queue.LifoQueue[int]] = queue.LifoQueue()
        for start in range(
            size - size % self.chunk_bytes - self.chunk_bytes, -1, -self.chunk_bytes
        ):
            self.free.put(start)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view exists: unmapped with the last one
            self.memory.release()
            self._mapped.close()


class EngineSession:
    """An engine with its buffer and other registered memory. Threads: any."""

    def __init__(
        self,
        settings: EngineSettings,
        host: str,
        buffer: ChunkBuffer,
        registered: Iterable[Region],
    ) -> None:
        """``buffer`` is unmapped with the station.

        Raises:
            TransferEngineError: as ``TransferEngine``; ``buffer`` is the caller's still.
        """
        self.engine: Final = TransferEngine(settings, host)
        self.buffer: Final = buffer
        self.is_retired = False
        self.used_at: Final[dict[str, float]] = {}
        """When the last transfer with a peer ended well, by the peer's name."""
        self.ended: Final = threading.Event()
        self._users = 1
        self._changing = threading.Lock()
        try:
            self.engine.register(buffer.base, buffer.size)
            for each in registered:
                self.engine.register(each.start, each.stop - each.start)
        except BaseException:
            self.engine.close()
            raise

    def enter(self) -> None:
        with self._changing:
            assert self._users > 0, "it has ended"
            self._users += 1

    def leave(self) -> None:
        """Called by each thread that made or entered the station; the last one ends it."""
        with self._changing:
            self._users -= 1
            if self._users:
                return
        self.engine.close()
        self.buffer.close()
        self.ended.set()

    def idle_s(self, peer: str) -> float:
        """Seconds since the last transfer with that peer; 0: there was none."""
        used_at = self.used_at.get(peer)
        return 0.0 if used_at is None else uptime() - used_at
