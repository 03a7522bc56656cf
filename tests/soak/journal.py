"""What a worker did, one JSON list per line, appended to a file that the checker reads.

    ["put", version, namespace, key, at, overwrite]    a put begins: written before anything is sent
    ["done", version, at, outcome]                     it ended; no such line: it may have happened
    ["gone", namespace, key | null, began, ended, verb]     removed, or cleared, and acknowledged
    ["got", namespace, key, version, began, ended, verb]    a get returned this version
    ["there", namespace, key, began, ended, verb]           a key was said to be there
    ["broke", rule, detail, at]                        the worker has seen a violation itself
    ["count", verb, outcome, number]

Times are of the monotonic clock, which all processes of a host share. The beginning of a put is
written at once, the rest within half a second: the reads of a killed worker may be lost, but the
puts that it may have made must be known.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

FLUSH_S = 0.5


class Journal:
    """One worker's. Threads: any."""

    def __init__(self, path: Path, worker: int, role: str) -> None:
        self.worker = worker
        self.role = role
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._flushed = time.monotonic()
        self._next = 0
        self.forks = 0

    def forked(self) -> Journal:
        """The same for a child process, under a name of its own; call it there, first."""
        number = self.worker + self.forks
        return Journal(self._path.with_name(f"{number}.journal"), number, self.role)

    def version(self) -> int:
        """Of the next put."""
        with self._lock:
            self._next += 1
            return self.worker << 32 | self._next

    def puts(self, namespace: str, rows: list[tuple[bytes, int]], overwrite: bool) -> None:
        """Puts of these (key, version) begin."""
        at = time.monotonic()
        lines = [["put", version, namespace, key.hex(), at, overwrite] for key, version in rows]
        self._write(lines, at_once=True)

    def done(self, versions: list[int], outcomes: list[str]) -> None:
        at = time.monotonic()
        pairs = zip(versions, outcomes, strict=True)
        self._write([["done", version, at, outcome] for version, outcome in pairs], at_once=True)

    def gone(
        self, namespace: str, keys: list[bytes | None], began: float, ended: float, verb: str
    ) -> None:
        names = [None if key is None else key.hex() for key in keys]
        self._write([["gone", namespace, key, began, ended, verb] for key in names], at_once=True)

    def got(
        self, namespace: str, key: bytes, version: int, began: float, ended: float, verb: str
    ) -> None:
        self._write([["got", namespace, key.hex(), version, began, ended, verb]])

    def there(
        self, namespace: str, keys: list[bytes], began: float, ended: float, verb: str
    ) -> None:
        self._write([["there", namespace, key.hex(), began, ended, verb] for key in keys])

    def broke(self, rule: str, detail: str) -> None:
        self._write([["broke", rule, f"{self.role}: {detail}", time.monotonic()]], at_once=True)

    def count(self, verb: str, outcome: str, number: int = 1) -> None:
        with self._lock:
            self._counts[verb, outcome] += number

    def flush(self) -> None:
        self._write([], at_once=True)

    def _write(self, lines: list[Any], *, at_once: bool = False) -> None:
        with self._lock:
            self._lines += [json.dumps(line) for line in lines]
            now = time.monotonic()
            if not at_once and now - self._flushed < FLUSH_S:
                return
            if now - self._flushed >= FLUSH_S or not lines:
                self._lines += [
                    json.dumps(["count", verb, outcome, number])
                    for (verb, outcome), number in self._counts.items()
                ]
                self._counts.clear()
                self._flushed = now
            if self._lines:
                text = "\n".join(self._lines) + "\n"
                self._lines.clear()
                os.write(self._fd, text.encode())


class Reader:
    """New lines of all journals in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[tuple[int, list[Any]]]:
        """(worker, line) of all that is new and whole."""
        found: list[tuple[int, list[Any]]] = []
        for path in sorted(self._directory.glob("*.journal")):
            start = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._offsets[path] = start + end
            worker = int(path.stem)
            found += [(worker, json.loads(line)) for line in data[:end].splitlines()]
        return found
