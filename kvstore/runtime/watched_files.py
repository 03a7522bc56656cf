"""Files that are replaced while this process runs: identities, tenants, revocation lists.

A file that is written in place is empty or incomplete for a moment, or permanently on a full disk.
New content is used once the file no longer changes and the content passes the checks of a start;
until then the previous content stays in use. Servers read in a thread (``watching``), so that a
hanging disk does not stop the event loop. Other processes read on demand.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from kvstore.errors import ConfigError
from kvstore.runtime.clock import uptime

log = logging.getLogger("kvstore.files")

T = TypeVar("T")
StrPath = str | os.PathLike[str]

LOOK_S: Final = 0.5

REST_S: Final = 0.5
"""Time without changes after which a file is read. New content is in use within a second."""

AGAIN_S: Final = 60.0
"""Interval at which an unusable file is read, and reported, again."""

_files: Final[weakref.WeakValueDictionary[int, WatchedFile[Any]]] = weakref.WeakValueDictionary()
_threads: Final[set[object]] = set()
"""Not empty while a thread reads the files of this process."""


def read_file(path: StrPath, setting: str, *, bytes_max: int = 1 << 20, advice: str = "") -> bytes:
    """Return the bytes of a regular file that the setting names. Does not block on pipes.

    Raises:
        ConfigError: it cannot be read (with ``advice``), is longer, or changes meanwhile.
    """
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as f:
            before = os.fstat(f.fileno())
            content = f.read(bytes_max + 1) if stat.S_ISREG(before.st_mode) else b""
            after = os.fstat(f.fileno())
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ConfigError(f"{setting} {path} {what}", advice=advice, key=setting) from None
    if not stat.S_ISREG(before.st_mode):
        what = "is no regular file"
    elif len(content) > bytes_max:
        what = f"has more than {bytes_max} bytes"
    elif _mark(before) != _mark(after):
        what = "has changed while it was read"
    else:
        return content
    raise ConfigError(f"{setting} {path} {what}", key=setting)


def write_file(path: Path, content: bytes | memoryview, mode: int = 0o600) -> None:
    """Replace the file atomically: other processes read the old content or the new one.

    Raises:
        OSError: the old file is still there.
    """
    import tempfile  # here, because readers do not need it

    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
            os.fchmod(descriptor, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _mark(file: os.stat_result) -> tuple[int, ...]:
    return file.st_mtime_ns, file.st_dev, file.st_ino, file.st_size, file.st_mode


class WatchedFile(Generic[T]):
    """The content of a file, or of files that belong together. Threads: any."""

    def __init__(
        self,
        setting: str,
        path: str,
        load: Callable[[], T],
        *,
        files: Callable[[], Iterable[StrPath]] | None = None,
        accept: Callable[[T, T], T] = lambda _, new: new,
    ) -> None:
        """
        Args:
            setting: the name of the setting, for the log and the metrics.
            load: reads (``read_file``), parses and checks the content.
            files: the files that ``load`` reads; None: ``path``.
            accept: returns the content to use after the one in use and the new one; raises
                ConfigError if the new one must not replace it.

        Raises:
            ConfigError: as ``load``.
        """
        self._setting, self._path = setting, path
        self._load, self._accept, self._paths = load, accept, files or (lambda: (path,))
        self._seen = marks = self._marks()
        self._since = self._again_at = self._remind_at = 0.0
        self._look_at = uptime() + LOOK_S
        self._reason = ""
        self._used: tuple[T, object] = load(), marks
        _files[id(self)] = self

    @property
    def value(self) -> T:
        """The content in use."""
        if not _threads and uptime() >= self._look_at:
            self.look()
        return self._used[0]

    def look(self) -> None:
        """Switch to new content if it is stable and valid. Blocks on the disk."""
        now = uptime()
        self._look_at = now + LOOK_S
        if (marks := self._marks()) != self._seen:
            self._seen, self._since, self._again_at = marks, now, now
        before_ns = time.time_ns() - int(REST_S * 1e9)
        is_at_rest = now - self._since >= REST_S or all(
            mark and mark[0] < before_ns for mark in marks
        )
        value, used = self._used
        if marks == used or now < self._again_at or not is_at_rest:
            return
        self._used, self._again_at = (value, None), now + AGAIN_S
        try:
            value = self._accept(value, self._load())
        except ConfigError as error:
            self.report(error.message)
            return
        if self._marks() == marks:
            self._used = value, marks
            self.report("")
            log.info("file_loaded setting=%s file=%s", self._setting, self._path)

    def report(self, reason: str) -> None:
        """Log the reason for which the file is unusable, at most every ``AGAIN_S``; "": it is
        usable."""
        if reason and (reason != self._reason or uptime() >= self._remind_at):
            self._remind_at = uptime() + AGAIN_S
            log.warning(
                "file_refused setting=%s file=%s reason=%r", self._setting, self._path, reason
            )
        self._reason = reason

    def _marks(self) -> tuple[tuple[int, ...], ...]:
        """Return a value that differs after a replacement, change or new mode of the file. Follows
        links, with which Kubernetes replaces secrets. Empty for a missing file."""
        marks: list[tuple[int, ...]] = []
        for path in self._paths():
            try:
                marks.append(_mark(os.stat(path)))
            except OSError:
                marks.append(())
        return tuple(marks)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Run a thread that reads the files of this process in the block; nothing else reads them."""
    from kvstore.runtime.tasks import (
        start_thread,  # imports asyncio, which is slow for commands
    )

    ended = threading.Event()

    def run() -> None:
        _threads.add(ended)
        try:
            while not ended.wait(LOOK_S):
                for file in _all():
                    file.look()
        finally:
            _threads.discard(ended)

    thread = start_thread("kvstore-files", run)
    try:
        yield
    finally:
        ended.set()
        thread.join(LOOK_S)


def refused_files() -> dict[str, int]:
    """Return by setting: 1 if its file is unusable, or its disk hangs; else 0."""
    found: dict[str, int] = {}
    for file in _all():
        is_refused = bool(file._reason) or (bool(_threads) and uptime() > file._look_at + AGAIN_S)
        found[file._setting] = found.get(file._setting, 0) | is_refused
    return found


def _all() -> list[WatchedFile[Any]]:
    """Return a copy in one step: other threads may open files meanwhile."""
    return [file for ref in _files.valuerefs() if (file := ref()) is not None]
