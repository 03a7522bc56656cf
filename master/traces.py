"""Names the trace of the call that is being served in each line that is logged because of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

_PRESENT: Final[ContextVar[str]] = ContextVar("kvstore_trace", default="")


@contextlib.contextmanager
def tracing(trace_id: str) -> Iterator[None]:
    """Sets the present trace for the ``with`` block, and for tasks that the block creates."""
    before = _PRESENT.set(trace_id)
    try:
        yield
    finally:
        _PRESENT.reset(before)


def add_trace(record: logging.LogRecord) -> bool:
    """A filter for loggers that notes the trace; ``kvstore.process.logs`` ends the line with it."""
    record.trace = _PRESENT.get()
    return True
