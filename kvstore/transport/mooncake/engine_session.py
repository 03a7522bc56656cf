"""Engine sessions: an engine with its registered memory, used and retired together.

An abandoned transfer may still read and write its memory, so no part of a retired session is used
again: its buffer is unmapped, and the caller's memory released, once the engine is closed. This
quarantine lasts until the last call returns, which the engine's own timeout bounds
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
"""Buffer bytes of one batch: they take some milliseconds, in which the next one is prepared."""

CHUNKS_MIN: Final = 8


class ChunkBuffer:
    """Buffer memory whose chunks are used one by one."""

    def __init__(self, size: int) -> None:
        self.chunk_bytes: Final = min(CHUNK_BYTES_MAX, size // CHUNKS_MIN // 4096 * 4096)
        self._mapped: Final = mmap.mmap(-1, size)
        self.memory: Final = memoryview(self._mapped)
        self.base: Final = address_of_map(self._mapped)
        self.size: Final = size
        # Last in, first out: recently used chunks are in cache, and others stay untouched.
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
        """Start an engine; takes over ``buffer`` unless it raises TransferEngineError."""
        self.engine: Final = TransferEngine(settings, host)
        self.buffer: Final = buffer
        self.is_retired = False
        self.used_at: Final[dict[str, float]] = {}
        """End of the last successful transfer, by the peer's name."""
        self.ended: Final = threading.Event()
        self._users = 1
        self._changing = threading.Lock()
        try:
            self.engine.register(buffer.base, buffer.size)
            for region in registered:
                self.engine.register(region.start, region.stop - region.start)
        except BaseException:
            self.engine.close()
            raise

    def enter(self) -> None:
        with self._changing:
            assert self._users > 0, "it has ended"
            self._users += 1

    def leave(self) -> None:
        """Leave the session, by each thread that created or entered it; the last one closes it."""
        with self._changing:
            self._users -= 1
            if self._users:
                return
        self.engine.close()
        self.buffer.close()
        self.ended.set()

    def idle_s(self, peer: str) -> float:
        """Return the seconds since the last transfer with that peer; 0: there was none."""
        used_at = self.used_at.get(peer)
        return 0.0 if used_at is None else uptime() - used_at
