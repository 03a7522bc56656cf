"""The trace of the call that is being served, in the lines that are logged because of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

_PRESENT: Final[ContextVar[str]] = ContextVar("kvstore_trace", default="")


@contextlib.contextmanager
def tracing(trace_id: str) -> Iterator[None]:
    """For the block, and for tasks that it creates."""
    before = _PRESENT.set(trace_id)
    try:
        yield
    finally:
        _PRESENT.reset(before)


def add_trace(record: logging.LogRecord) -> bool:
    """A filter for loggers: ``kvstore.process.logs`` ends lines that belong to a trace with it."""
    record.trace = _PRESENT.get()
    return True
