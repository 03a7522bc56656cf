"""Spans of OpenTelemetry around calls, in programs that record spans."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from kvstore._version import __version__


class Tracing:
    """Begins a span per call. Threads: any."""

    def __init__(self, tracer: Any, kind: Any, master: str) -> None:
        self._tracer = tracer
        self._kind = kind
        self._attributes = {"kvstore.master": master}

    def span(self, call: str) -> AbstractContextManager[Any]:
        """A span ``kvstore.CALL`` below the caller's; it records the error that leaves the call."""
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            f"kvstore.{call}", kind=self._kind, attributes=self._attributes
        )
        return span


def tracing(master: str) -> Tracing | None:
    """A ``Tracing``; None if no provider of tracers is set: then a call costs nothing more."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return Tracing(trace.get_tracer("kvstore", __version__), trace.SpanKind.CLIENT, master)


def traceparent(span: Any) -> str:
    """The span's context as the master gets it (W3C Trace Context); empty: it has none."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
