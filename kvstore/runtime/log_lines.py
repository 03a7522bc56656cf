"""Text format of log lines, and helpers shared with JSON."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any, Final

from kvstore.runtime.formatting import sanitize

PIECE_BYTES_MAX: Final = 1 << 14
"""Longer lines and tracebacks are truncated."""

TEXT_MAX: Final = 4_000
"""Maximum characters of a message, and of a line of a traceback."""


class LineFormatter(logging.Formatter):
    """Writes one line per record. Line breaks and control characters are escaped, and lines of a
    traceback indented, so that none looks like a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s %(message)s")

    def formatTime(  # noqa: N802  # logging's own name
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        """Format as ``2026-11-27T03:02:51.123+01:00``."""
        del datefmt
        return time_text(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's own name
        """As ``logging.Formatter``, on one line."""
        record.message = sanitize(record.message, TEXT_MAX)
        if left_out := getattr(record, "left_out", 0):
            record.message += f" left_out={left_out}"
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # logging's own name
        """As ``logging.Formatter``, indented."""
        lines = super().formatException(ei).splitlines()
        return "\n".join("  " + sanitize(line, TEXT_MAX) for line in lines)


def time_text(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
