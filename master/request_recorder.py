"""Records matches, puts and hints: hashes, sizes and times, as a trace for ``kvstore plan``.

The loop only queues a request; a thread formats and writes. What cannot be written is counted, and
delays nobody.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
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

PUTS_MAX: Final = 4_096
"""Puts in progress whose last key is remembered, for the hint of their end."""

_Hints = list[tuple[Key, int, int]]
"""Keys, actions, and times to retain."""


class _Row(NamedTuple):
    now_ms: int
    namespaces: Sequence[Namespace]
    keys: Sequence[Key] = ()
    size: int = 0
    parent: Key | None = None
    """Of a put; empty: it has none."""
    hints: _Hints | None = None


class TraceFile:
    """A bounded file: a full one becomes ``FILE.1``, which the next full one replaces."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Open the file, and append to it. Raises StartupError: it cannot be written."""
        self._path = path
        self._bytes_max = bytes_max
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise StartupError(
                f"--record {path}: {error.strerror or error}",
                advice="Name a file in a directory that this process may write.",
            ) from None

    def write(self, lines: Sequence[bytes]) -> None:
        """Raises OSError."""
        for line in lines:
            if self._file.tell() + len(line) > self._bytes_max // 2:
                self._file.close()
                self._path.replace(f"{self._path}.1")
                self._file = self._path.open("ab")
            self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RequestRecorder:
    """Writes requests into a file. ``_on_…`` are called by the loop."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._queue: deque[_Row] = deque()
        self._sizes: dict[Namespace, int] = {}
        """Memory of the last block put, by namespace."""
        self._puts: dict[int, tuple[Namespace, Key]] = {}
        """The last granted key, by the last token."""
        self._closing = threading.Event()
        self.dropped = 0
        """Requests that were not written: a full queue, or a file that cannot be written."""
        self._thread = start_thread("record", self._write_forever)

    def wrap(self, steps: Steps) -> Steps:
        """Return the steps of the state, of which matches, puts and hints are recorded."""
        recorders: dict[type, Callable[[int, Any, Any], None]] = {
            calls.MatchPrefix: self._on_match,
            calls.PutStart: self._on_put,
            calls.PutEnd: self._on_put_end,
            calls.Hint: self._on_hint,
        }

        def recorded(kind: type) -> Callable[[int, Any], Any]:
            step, record = steps[kind], recorders[kind]

            def run(now_ms: int, request: Any) -> Any:
                reply = step(now_ms, request)
                record(now_ms, request, reply)
                return reply

            return run

        return {**steps, **{kind: recorded(kind) for kind in recorders if kind in steps}}

    def _on_match(self, now_ms: int, request: calls.MatchPrefix, reply: object) -> None:
        if not request.keys or not request.namespaces:
            return
        size = self._sizes.get(request.namespaces[0], 0)
        # A reply that comes later, when inventories have been loaded, counts as a miss.
        matched = reply.matches[0].matched if isinstance(reply, calls.MatchPrefixReply) else 0
        self._add(_Row(now_ms, request.namespaces, request.keys, size))
        if request.hint and matched:
            hint = (request.keys[matched - 1], request.hint, request.retain_ms)
            self._add(_Row(now_ms, request.namespaces, hints=[hint]))

    def _on_put(self, now_ms: int, request: calls.PutStart, reply: object) -> None:
        if not request.sizes:
            return
        self._sizes[request.namespace] = extent_bytes(request.sizes[0])
        if request.chain:
            parent = request.parent or Key(b"")
            self._add(_Row(now_ms, [request.namespace], request.keys, parent=parent))
        if isinstance(reply, calls.Grants) and reply.tokens:
            self._puts[reply.tokens[-1]] = request.namespace, request.keys[-1]
            if len(self._puts) > PUTS_MAX:
                del self._puts[next(iter(self._puts))]

    def _on_put_end(self, now_ms: int, request: calls.PutEnd, _reply: object) -> None:
        put = self._puts.pop(request.tokens[-1], None) if request.tokens else None
        if put is not None and request.hint:
            self._add(_Row(now_ms, put[:1], hints=[(put[1], request.hint, request.retain_ms)]))

    def _on_hint(self, now_ms: int, request: calls.Hint, _reply: object) -> None:
        hints = list(zip(request.keys, request.actions, request.retain_ms, strict=True))
        self._add(_Row(now_ms, [request.namespace], hints=hints))

    def _add(self, row: _Row) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self.dropped += 1
        else:
            self._queue.append(row)

    def close(self) -> None:
        """Write what is queued, and close the file."""
        self._closing.set()
        self._thread.join(5)

    def _write_forever(self) -> None:
        has_failed = False
        while not self._closing.wait(FLUSH_S) or self._queue:
            lines = [_line(self._queue.popleft()) for _ in range(len(self._queue))]
            try:
                self._file.write(lines)
                has_failed = False
            except OSError as error:
                self.dropped += len(lines)
                if not has_failed:
                    log.warning("record_failed error=%r", error)
                has_failed = True
        self._file.close()


def _line(row: _Row) -> bytes:
    fields: dict[str, Any] = {"t": row.now_ms, "n": row.namespaces}
    if row.hints is not None:
        fields["h"] = [(_name(key), action, ms) for key, action, ms in row.hints]
    else:
        fields["k"] = [_name(key) for key in row.keys]
        if row.parent is None:
            fields["z"] = row.size
        else:
            fields["p"] = _name(row.parent)
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _name(key: Key) -> str:
    return key[:KEY_BYTES].hex()
