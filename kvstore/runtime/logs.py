"""What our servers write to standard output and standard error.

One line per event: ``key=value``, or an object of JSON (``--log-format json``). Times are ISO 8601
with the offset from UTC. A server writes to a disk that may be full, a pipe that its reader has
closed, or one that is not read: none of that may stop or end it. ``configure`` puts both
streams behind a bounded queue and a thread of their own: a write never blocks and never fails. What
does not fit, or cannot be written, is dropped and counted, and a line says so once lines can be
written again. Prints, progress bars and tracebacks take the same way.

Lines of one kind (one format of one logger) are limited in rate, because strangers cause many of
them. No text of a peer begins a line of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Any, Final, TextIO, cast

from kvstore.runtime.log_lines import PIECE_BYTES_MAX, LineFormatter
from kvstore.runtime.token_buckets import TokenBuckets

PIECES_MAX: Final = 2_000
"""Lines that wait to be written; a traceback counts as one."""

DRAIN_S: Final = 1.0
"""How long the end of the process waits for what is still to be written."""

BURST: Final = 100
PER_S: Final = 1.0
"""Lines of one kind that are written: so many at once, and then so many a second."""

KINDS_MAX: Final = 2_000
"""Kinds of lines whose rate is known; if there are more, all rates begin anew."""

EACH: Final = {"each": True}
"""With ``extra=EACH`` a call of ``log`` is not limited: each of its lines is wanted."""


FORMATS: Final = ("text", "json")

HANDLER: Final = "kvstore-"
"""Begins the name of our log handler; the format follows."""


def configure(level: str, form: str = "text") -> None:
    """Sets up the logging of a process of ours. A library leaves this to its program.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        form: one of ``FORMATS``.
    """
    formatter: logging.Formatter = LineFormatter()
    if form == "json":
        from kvstore.runtime.json_logs import JsonFormatter  # 9 ms of imports

        formatter = JsonFormatter()
    _take_over(formatter)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    handler.set_name(HANDLER + form)
    handler.addFilter(limit)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def form_in_use() -> str:
    """In which of ``FORMATS`` this process logs, for its children."""
    is_json = any(each.name == HANDLER + "json" for each in logging.getLogger().handlers)
    return "json" if is_json else "text"


def counters() -> dict[str, int]:
    """Lines since the start that were not written, by name of a metric."""
    return {
        "log_lines_dropped": sum(writer.dropped for writer in _writers),
        "log_lines_suppressed": limit.left_out,
    }


class RateLimit(logging.Filter):
    """Bounds the rate of lines of one kind. The next line of that kind says how many were left
    out. Lines with ``extra={"whose": ...}`` are of a kind for each of these names, so that none
    hides what another does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.left_out = 0
        """Lines since the start."""
        self._clock = clock
        self._buckets = TokenBuckets(BURST, PER_S, KINDS_MAX)

    def filter(self, record: logging.LogRecord) -> bool:
        """As ``logging.Filter``: whether to write it. Never blocks."""
        if record.levelno <= logging.DEBUG or getattr(record, "each", False):
            return True
        kind = record.name, str(record.msg), getattr(record, "whose", "")
        left_out = self._buckets.take(kind, self._clock())
        if left_out is None:
            self.left_out += 1
            return False
        record.left_out = left_out
        return True


limit: Final = RateLimit()
"""The rate limit of this process."""


class LogWriter:
    """Writes to a descriptor in a thread of its own. Threads: any."""

    def __init__(self, fd: int, formatter: logging.Formatter | None = None) -> None:
        """``formatter``: of the line that says what was dropped.

        Raises RuntimeError: the system has no thread left.
        """
        self.dropped = 0
        self._formatter = formatter or LineFormatter()
        self._fd = fd
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._told = 0
        self._is_cut = False
        """Whether the last line was written in part."""
        from kvstore.runtime.tasks import start_thread  # not above: it imports asyncio

        start_thread(f"kvstore-output-{fd}", self._write_forever)

    def write(self, piece: bytes) -> None:
        """Never blocks. Takes no lock: a finalizer or a handler of a signal may call it."""
        if self._queue.qsize() >= PIECES_MAX:
            self.dropped += 1
        elif len(piece) > PIECE_BYTES_MAX:
            self._queue.put(piece[: PIECE_BYTES_MAX - 5] + b" ...\n")
        else:
            self._queue.put(piece)

    def drain(self, deadline: float) -> bool:
        """Waits until everything that was given to ``write`` before is written, or dropped. Returns
        whether that was so by ``deadline``, a ``time.monotonic()`` value."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(max(0.0, deadline - time.monotonic()))

    def _write_forever(self) -> None:
        while True:
            piece = self._queue.get()
            if isinstance(piece, threading.Event):
                self._report_suppressed()
                piece.set()
                continue
            self._report_suppressed()
            if not self._write(piece):
                self.dropped += 1

    def _report_suppressed(self) -> None:
        """Writes a line that says how many lines were dropped, once it can be written."""
        dropped = self.dropped
        if dropped == self._told:
            return
        said = self._formatter.format(
            logging.makeLogRecord(
                {
                    "name": __name__, "levelno": logging.WARNING, "levelname": "WARNING",
                    "msg": "log_lines_dropped count=%d: they could not be written",
                    "args": (dropped - self._told,),
                }
            )
        )  # fmt: skip
        if self._write(said.encode() + b"\n"):
            self._told = dropped

    def _write(self, piece: bytes) -> bool:
        if self._is_cut:
            piece = b"\n" + piece
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process has made the terminal non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:  # a full disk, a reader that is gone
                self._is_cut = self._is_cut or len(rest) < len(piece)
                return False
        self._is_cut = False
        return True


class _StandardStream(io.RawIOBase):
    """The raw stream below ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, fd: int, writer: LogWriter) -> None:
        self._fd = fd
        self._writer = writer
        self.name = fd  # as that of a file without a path

    def write(self, data: Any, /) -> int:
        """Takes all of it."""
        piece = bytes(data)
        self._writer.write(piece)
        return len(piece)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd


_writers: Final[list[LogWriter]] = []


def _take_over(formatter: logging.Formatter) -> None:
    """Puts both streams behind writers. A closed or replaced stream stays as it is."""
    shared: LogWriter | None = None
    for name, fd in (("stderr", 2), ("stdout", 1)):
        stream: TextIO | None = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        with contextlib.suppress(OSError, RuntimeError):
            if shared is None or not os.path.sameopenfile(1, 2):  # one file: in order
                shared = LogWriter(fd, formatter)
                _writers.append(shared)
            raw = cast(IO[bytes], _StandardStream(fd, shared))  # without a buffer: the queue is one
            text = io.TextIOWrapper(
                raw, encoding=stream.encoding, errors="backslashreplace", line_buffering=True
            )
            setattr(sys, name, text)
    if _writers:
        atexit.register(_drain)


def _drain() -> None:
    deadline = time.monotonic() + DRAIN_S
    for writer in _writers:
        writer.drain(deadline)
