"""OpenTelemetry spans around calls, in programs that record spans."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from kvstore._version import __version__


def tracing(master: str) -> Callable[[str], AbstractContextManager[Any]] | None:
    """Return a function that starts a span ``kvstore.CALL``; None: there is no tracer provider."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    begin = partial(
        trace.get_tracer("kvstore", __version__).start_as_current_span,
        kind=trace.SpanKind.CLIENT,
        attributes={"kvstore.master": master},
    )
    return lambda call: begin(f"kvstore.{call}")
