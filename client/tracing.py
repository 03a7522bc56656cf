"""Spans of OpenTelemetry around calls, in programs that record spans."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from kvstore._version import __version__


def tracing(master: str) -> Callable[[str], AbstractContextManager[Any]] | None:
    """A function that begins a span ``kvstore.CALL`` below the caller's, which records the error
    that leaves the call. None if no provider of tracers is set: then a call costs nothing more."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    begin = partial(
        trace.get_tracer("kvstore", __version__).start_as_current_span,
        kind=trace.SpanKind.CLIENT,
        attributes={"kvstore.master": master},
    )
    return lambda call: begin(f"kvstore.{call}")


def traceparent(span: Any) -> str:
    """The span's context as the master gets it (W3C Trace Context); empty: it has none."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
