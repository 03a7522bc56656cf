"""Spans of OpenTelemetry around the calls of a client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvstore import Client
from kvstore.errors import ValueTooLargeError
from tests.support.cluster import Cluster


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What a program that records spans exports."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_a_call_is_a_span_below_that_of_its_caller(
    cluster: Cluster, spans: InMemorySpanExporter
) -> None:
    cluster.master()
    cluster.node()
    spans.clear()  # those of the client that waited for the cluster
    with Client(cluster.address) as client:
        with trace.get_tracer("program").start_as_current_span("request"):
            client.put("key", b"value")
            client.get("key")
        with pytest.raises(ValueTooLargeError):
            client.put("too large", bytes(40 << 20))
    put, get, request, failed = spans.get_finished_spans()
    assert [span.name for span in (put, get)] == ["kvstore.put", "kvstore.get"]
    assert _parent(put) == _parent(get) == _number(request)
    assert put.kind is SpanKind.CLIENT
    assert put.attributes == {"kvstore.master": cluster.address}
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.events[0].name == "exception"


def _parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def _number(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id
