"""Output of our servers to standard output and standard error.

One line per event: ``key=value``, or an object of JSON (``--log-format json``). Times are ISO 8601
with the offset from UTC. A full disk, or a pipe that is closed or not read, must not stop or end a
server. ``configure`` puts a bounded queue and a thread in front of both streams, so that a write
never blocks or fails. Excess or unwritable lines are dropped and counted, and a later line reports
their number. This includes prints, progress bars and tracebacks.

The rate of lines of one kind (one format of one logger) is limited, because unauthenticated peers
can cause them. Text of a peer never begins a line.
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
"""Queued lines; a traceback counts as one."""

DRAIN_S: Final = 1.0
"""Maximum time that the end of the process waits for queued lines."""

BURST: Final = 100
PER_S: Final = 1.0
"""Lines of one kind: a burst, then a rate per second."""

KINDS_MAX: Final = 2_000
"""Kinds of lines whose rate is known; beyond that, all rates are reset."""

EACH: Final = {"each": True}
"""``extra=EACH`` exempts a call of ``log`` from the rate limit."""


FORMATS: Final = ("text", "json")

HANDLER: Final = "kvstore-"
"""Prefix of our log handler's name; the format follows."""


def configure(level: str, form: str = "text") -> None:
    """Set up the logging of a process of ours. Programs that use the library do this themselves.

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
    """Return the log format of this process (one of ``FORMATS``), for its children."""
    is_json = any(handler.name == HANDLER + "json" for handler in logging.getLogger().handlers)
    return "json" if is_json else "text"


def counters() -> dict[str, int]:
    """Return the number of lines not written since the start, by metric name."""
    return {
        "log_lines_dropped": sum(writer.dropped for writer in _writers),
        "log_lines_suppressed": limit.left_out,
    }


class RateLimit(logging.Filter):
    """Limits the rate of lines of one kind. The next line of that kind reports how many were
    suppressed. Lines with ``extra={"whose": ...}`` have a separate limit for each of these
    names."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.left_out = 0
        """Lines suppressed since the start."""
        self._clock = clock
        self._buckets = TokenBuckets(BURST, PER_S, KINDS_MAX)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record. Never blocks."""
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
    """Writes to a file descriptor in its own thread. Threads: any."""

    def __init__(self, fd: int, formatter: logging.Formatter | None = None) -> None:
        """Start the writer. ``formatter``: for the line that reports dropped lines.

        Raises RuntimeError: the system has no thread left.
        """
        self.dropped = 0
        self._formatter = formatter or LineFormatter()
        self._fd = fd
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._reported = 0
        self._is_cut = False
        """Whether the last line was written partially."""
        from kvstore.runtime.tasks import start_thread  # not above: it imports asyncio

        start_thread(f"kvstore-output-{fd}", self._write_forever)

    def write(self, piece: bytes) -> None:
        """Queue a line. Never blocks. Takes no lock: finalizers and signal handlers may call it."""
        if self._queue.qsize() >= PIECES_MAX:
            self.dropped += 1
        elif len(piece) > PIECE_BYTES_MAX:
            self._queue.put(piece[: PIECE_BYTES_MAX - 5] + b" ...\n")
        else:
            self._queue.put(piece)

    def drain(self, deadline: float) -> bool:
        """Wait until all queued lines are written or dropped; return whether that was done by
        ``deadline``, a ``time.monotonic()`` value."""
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
        """Write a line with the number of dropped lines, once possible."""
        dropped = self.dropped
        if dropped == self._reported:
            return
        said = self._formatter.format(
            logging.makeLogRecord(
                {
                    "name": __name__, "levelno": logging.WARNING, "levelname": "WARNING",
                    "msg": "log_lines_dropped count=%d: they could not be written",
                    "args": (dropped - self._reported,),
                }
            )
        )  # fmt: skip
        if self._write(said.encode() + b"\n"):
            self._reported = dropped

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
            except OSError:  # a full disk, a closed reader
                self._is_cut = self._is_cut or len(rest) < len(piece)
                return False
        self._is_cut = False
        return True


class _StandardStream(io.RawIOBase):
    """The raw stream below ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, fd: int, writer: LogWriter) -> None:
        self._fd = fd
        self._writer = writer
        self.name = fd  # as a file without a path

    def write(self, data: Any, /) -> int:
        """Accept all of ``data``."""
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
    """Redirect both streams to writers. A closed or replaced stream stays as it is."""
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
