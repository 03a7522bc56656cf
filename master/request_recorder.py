"""Records which blocks clients ask for, as a trace for ``kvstore plan``: hashes, sizes and times.

The loop only queues a request; a thread formats and writes. The file is bounded: a full one becomes
``FILE.1``, which the next full one replaces. What cannot be written is counted, and delays nobody.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore import calls
from kvstore.errors import StartupError
from kvstore.limits import Key, Namespace
from kvstore.master.open_access import Steps
from kvstore.memory.header import extent_bytes
from kvstore.runtime.tasks import start_thread

log = logging.getLogger("kvstore.master")

QUEUE_MAX: Final = 4_096
"""Requests that wait to be written; further ones are dropped."""

FLUSH_S: Final = 0.5

KEY_BYTES: Final = 8
"""Bytes of a key that identify a block in a trace."""


class _Match(NamedTuple):
    now_ms: int
    namespaces: Sequence[Namespace]
    keys: Sequence[Key]
    size: int


class RequestRecorder:
    """Writes matches into a file. ``on_…`` are called by the loop."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Open the file, and append to it. Raises StartupError: it cannot be written."""
        self._path = path
        self._bytes_max = bytes_max
        self._queue: deque[_Match] = deque()
        self._sizes: dict[Namespace, int] = {}
        """Memory of the last block put, by namespace."""
        self._closing = threading.Event()
        self.dropped = 0
        """Requests that were not written: a full queue, or a disk that refuses."""
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise StartupError(
                f"--record {path}: {error.strerror or error}",
                advice="Name a file in a directory that this process may write.",
            ) from None
        self._thread = start_thread("record", self._write_forever)

    def wrap(self, steps: Steps) -> Steps:
        """Return the steps of the state, of which matches and puts are recorded."""
        match, put = steps[calls.MatchPrefix], steps[calls.PutStart]

        def match_prefix(now_ms: int, request: calls.MatchPrefix) -> Any:
            reply = match(now_ms, request)
            self._on_match(now_ms, request)
            return reply

        def put_start(now_ms: int, request: calls.PutStart) -> Any:
            if request.sizes:
                self._sizes[request.namespace] = extent_bytes(request.sizes[0])
            return put(now_ms, request)

        return {**steps, calls.MatchPrefix: match_prefix, calls.PutStart: put_start}

    def _on_match(self, now_ms: int, request: calls.MatchPrefix) -> None:
        if not request.keys or not request.namespaces:
            return
        if len(self._queue) >= QUEUE_MAX:
            self.dropped += 1
            return
        size = self._sizes.get(request.namespaces[0], 0)
        self._queue.append(_Match(now_ms, request.namespaces, request.keys, size))

    def close(self) -> None:
        """Write what is queued, and close the file."""
        self._closing.set()
        self._thread.join(5)

    def _write_forever(self) -> None:
        has_failed = False
        while not self._closing.wait(FLUSH_S) or self._queue:
            lines = [_line(self._queue.popleft()) for _ in range(len(self._queue))]
            try:
                for line in lines:
                    if self._file.tell() + len(line) > self._bytes_max // 2:
                        self._rotate()
                    self._file.write(line)
                self._file.flush()
                has_failed = False
            except OSError as error:
                self.dropped += len(lines)
                if not has_failed:
                    log.warning("record_failed file=%s error=%s", self._path, error)
                has_failed = True
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(f"{self._path}.1")
        self._file = self._path.open("ab")


def _line(match: _Match) -> bytes:
    row = {
        "t": match.now_ms,
        "n": match.namespaces,
        "k": [key[:KEY_BYTES].hex() for key in match.keys],
        "z": match.size,
    }
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
