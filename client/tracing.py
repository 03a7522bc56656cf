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

    def span(self, call: str) -> AbstractContextManager[object]:
        """``kvstore.CALL``, below the span of the caller; records the error that leaves it."""
        span: AbstractContextManager[object] = self._tracer.start_as_current_span(
            f"kvstore.{call}", kind=self._kind, attributes=self._attributes
        )
        return span


def tracing(master: str) -> Tracing | None:
    """None where the program has not set a provider of tracers: then a call costs nothing more."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return Tracing(trace.get_tracer("kvstore", __version__), trace.SpanKind.CLIENT, master)
