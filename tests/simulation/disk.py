"""The disk of a simulated node: a file that outlives its process and its host.

Copies and wipes follow the production rules. A power cut may tear what was written since the last
sync, and leave an older map.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

from kvstore.calls import CopyOutcome, Version
from kvstore.memory.disk_file import DiskFile
from kvstore.memory.header import DISK_ALIGN, HEADER_BYTES, Header, extent_bytes, unpack
from kvstore.memory.medium import Medium
from tests.simulation.memory import Memory

QUICK_US = (50, 2_000)
SECTOR = 512


class SimDisk(Memory):
    """One file's bytes."""

    def __init__(self, node: str, host: str, size: int, random: Random) -> None:
        super().__init__(node, host, size, random)
        self.shm_name = ""
        self.fails = False
        self.delay_us: tuple[int, int] = QUICK_US
        """Of a copy or a wipe, from and to."""
        self._random = random
        self._unsynced: list[tuple[int, bytes]] = []
        """Offsets, and what was there before."""
        self._offsets: dict[int, None] = {}
        self._synced_offsets: dict[int, None] = {}
        self._bringing = threading.Lock()
        self._abandoned: set[int] = set()

    def abandon(self, target: int, *, abandoned: bool = True) -> None:
        DiskFile.abandon(cast(Any, self), target, abandoned=abandoned)

    def write_behind(
        self, memory: Memory, source: int, target: int, size: int, version: Version
    ) -> CopyOutcome:
        of_node = cast(Medium, memory)
        return DiskFile.write_behind(cast(Any, self), of_node, source, target, size, version)

    def bring(
        self, memory: Memory, source: int, target: int, size: int, version: Version
    ) -> CopyOutcome:
        of_node = cast(Medium, memory)
        return DiskFile.bring(cast(Any, self), of_node, source, target, size, version)

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> None:
        """Raises OSError."""
        self._check()
        super().wipe(offsets, epochs, counters)
        self._unsynced = []
        self._synced_offsets = dict(self._offsets)

    def found(self) -> list[tuple[int, Header]]:
        """The headers where the map says that there are some, or lies."""
        rows = []
        for offset in self._offsets:
            raw = self.memory[offset : offset + HEADER_BYTES]
            header = unpack(raw, self.seed, offset)
            if header is not None and offset + extent_bytes(header.payload_size) <= self.size:
                rows.append((offset, header))
        return rows

    def power_cut(self) -> None:
        """Writes since the last sync are kept, lost or torn; so is the map."""
        for offset, before in reversed(self._unsynced):
            kept = self._random.choice((0.0, 0.8, 0.95, 1.0))
            for at in range(0, len(before), SECTOR):
                if self._random.random() >= kept:
                    piece = before[at : at + SECTOR]
                    self.memory[offset + at : offset + at + len(piece)] = piece
        self._unsynced = []
        if self._random.random() < 0.5:
            self._offsets = dict(self._synced_offsets)
        for _ in range(self._random.randrange(4)):
            self.note_use(self._random.randrange(1, self.size // DISK_ALIGN) * DISK_ALIGN)

    # --- for the production rules -----------------------------------------------------------------

    def note_use(self, offset: int) -> None:
        self._offsets[offset] = None

    def _page(self) -> memoryview:
        return memoryview(bytearray(DISK_ALIGN))

    def _move(
        self, call: Callable[..., int], page: memoryview, extent: memoryview, offset: int
    ) -> None:
        self._check()
        there = self.memory[offset : offset + len(extent)]
        if call is os.pwritev:
            self._unsynced.append((offset, bytes(there)))
            there[:HEADER_BYTES] = page[:HEADER_BYTES]
            there[HEADER_BYTES:] = extent[HEADER_BYTES:]
        else:
            page[:HEADER_BYTES] = there[:HEADER_BYTES]
            extent[HEADER_BYTES:] = there[HEADER_BYTES:]

    def _check(self) -> None:
        if self.fails:
            raise OSError("the simulated disk fails")
