"""Put sessions: an engine that saves layer by layer opens a session per object, writes ranges of
it, and ends the session, which stores the object.

The parts are collected in this process, because an object of the store is either complete or
absent, and its checksum covers all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.mooncake.mooncake_types import Code

COLLECTED_BYTES_MAX: Final = 4 << 30
"""Limit of the collected bytes of all open sessions: an engine may forget to end some."""


class PutSessions:
    """The open put sessions of one store. Threads: any."""

    def __init__(self, bytes_max: int = COLLECTED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._open: dict[bytes, NDArray[np.uint8]] = {}
        self._bytes = 0
        self._changing = threading.Lock()

    def start(self, key: bytes, size: int) -> Code:
        """Open a session for an object of ``size`` bytes. Bytes that no part covers are zero.
        (Mooncake stores the former contents of its memory there.)"""
        with self._changing:
            if size <= 0 or key in self._open:
                return Code.INVALID_PARAMS
            if self._bytes + size > self._bytes_max:
                return Code.NO_AVAILABLE_HANDLE
            self._open[key] = np.zeros(size, np.uint8)
            self._bytes += size
        return Code.OK

    def write(self, key: bytes, parts: Sequence[tuple[int, memoryview]]) -> int:
        """Copy parts to their offsets. Return the bytes copied, or a code: nothing is copied."""
        with self._changing:
            data = self._open.get(key)
        if data is None:
            return Code.INVALID_PARAMS
        if any(offset < 0 or offset + len(part) > len(data) for offset, part in parts):
            return Code.INVALID_PARAMS
        for offset, part in parts:
            data[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
        return sum(len(part) for _, part in parts)

    def end(self, key: bytes) -> NDArray[np.uint8] | None:
        """End the session and return the collected object; None: there is no such session."""
        with self._changing:
            data = self._open.pop(key, None)
            if data is not None:
                self._bytes -= len(data)
        return data
