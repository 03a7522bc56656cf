"""Files that others replace while this process runs: identities, tenants, who is revoked.

A file that is written in place is empty and then incomplete for a moment, and stays so on a full
disk. So new content counts once its file is at rest and it passes the checks of a start; until then
the content of before stays in use. Servers read in a thread (``watching``), because a disk that
hangs must not stop an event loop. Other processes read when they need the content.
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
"""For how long a file has not changed that is at rest. So new content is in use within a second."""

AGAIN_S: Final = 60.0
"""After which a file that cannot be used is read, and reported, again."""

_files: Final[weakref.WeakValueDictionary[int, WatchedFile[Any]]] = weakref.WeakValueDictionary()
_threads: Final[set[object]] = set()
"""Not empty while a thread reads all files of this process."""


def read_file(path: StrPath, setting: str, *, bytes_max: int = 1 << 20, advice: str = "") -> bytes:
    """The bytes of a regular file, which the setting names. Does not wait for a pipe's other end.

    Raises:
        ConfigError: it cannot be read (``advice`` is for this), is longer, or changes meanwhile.
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
    """Replaces the file: others read the old content or the new one.

    Raises:
        OSError: the old file is still there.
    """
    import tempfile  # not above: who only reads files does not wait for it

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
            setting: the setting that names ``path``, for the log and the metrics.
            load: reads (``read_file``), parses and checks the content.
            files: what ``load`` reads; None: ``path``.
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
        """Uses the content of the file from now on if it is new, at rest and right. Takes as long
        as the disk does."""
        now = uptime()
        self._look_at = now + LOOK_S
        if (marks := self._marks()) != self._seen:
            self._seen, self._since, self._again_at = marks, now, now
        before_ns = time.time_ns() - int(REST_S * 1e9)
        is_at_rest = now - self._since >= REST_S or all(
            each and each[0] < before_ns for each in marks
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
        """Logs, every ``AGAIN_S`` at most, why the file does not count; empty: it does."""
        if reason and (reason != self._reason or uptime() >= self._remind_at):
            self._remind_at = uptime() + AGAIN_S
            log.warning(
                "file_refused setting=%s file=%s reason=%r", self._setting, self._path, reason
            )
        self._reason = reason

    def _marks(self) -> tuple[tuple[int, ...], ...]:
        """Differs once a file was replaced, changed, or given another mode. Follows links, as those
        by which Kubernetes replaces secrets. Empty for a file that cannot be found."""
        marks: list[tuple[int, ...]] = []
        for path in self._paths():
            try:
                marks.append(_mark(os.stat(path)))
            except OSError:
                marks.append(())
        return tuple(marks)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """In the block a thread reads the files of this process, and nothing else does."""
    from kvstore.runtime.tasks import (
        start_thread,  # needs asyncio, which a command that reads its settings does not wait for
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
    """By setting: 1 if its file does not count, or its disk hangs; else 0."""
    found: dict[str, int] = {}
    for file in _all():
        is_refused = bool(file._reason) or (bool(_threads) and uptime() > file._look_at + AGAIN_S)
        found[file._setting] = found.get(file._setting, 0) | is_refused
    return found


def _all() -> list[WatchedFile[Any]]:
    """In one step: other threads may open files meanwhile."""
    return [file for ref in _files.valuerefs() if (file := ref()) is not None]
