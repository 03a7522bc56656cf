"""The metrics of ``GET /metrics``. Each proxy has its own registry, so that two proxies can share a
process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.proxy.instances import Instances, InstanceView
from kvstore.runtime import logs

# Buckets from a short prompt on an idle engine to a long prompt after a queue.
SECONDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
LOOKUP_SECONDS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
BREAKER_VALUES: Final = {"closed": 0, "half_open": 1, "open": 2}
OF_INSTANCES: Final[Sequence[tuple[str, str, Callable[[InstanceView], int]]]] = (
    ("in_flight", "Requests under way on the instance.", lambda view: view.in_flight),
    ("healthy", "1: its health checks succeed.", lambda view: view.healthy),
    ("draining", "1: it gets no new requests.", lambda view: view.draining),
    ("breaker", "0 closed, 1 half open, 2 open.", lambda view: BREAKER_VALUES[view.breaker]),
)


def clock_ms() -> int:
    """Return milliseconds of the monotonic clock, which the whole proxy uses."""
    return time.monotonic_ns() // 1_000_000


class Metrics:
    def __init__(self, instances: Instances) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstore_proxy_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
            name = f"kvstore_proxy_{name}_seconds"
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self.requests = counter(
            "requests", "Requests that ended, by route and status; 499: the client left.",
            "route", "status",
        )  # fmt: skip
        self.in_flight = Gauge("kvstore_proxy_in_flight", "Requests under way.", registry=registry)
        self.first_byte_seconds = seconds(
            "first_byte", "From a request's arrival to the first byte of its answer.", "route",
            buckets=SECONDS,
        )  # fmt: skip
        self.prefill_seconds = seconds(
            "prefill", "Duration of the prefill hop, by outcome: done, refused, failed.", "outcome",
            buckets=SECONDS,
        )  # fmt: skip
        self.prefill_skipped = counter(
            "prefill_skipped", "Requests that used no prefiller, by reason.", "reason"
        )
        self.retries = counter(
            "retries", "Requests sent again to another instance, by role.", "role"
        )
        self.broken_streams = counter(
            "broken_streams", "Answers that ended too early, after their first byte."
        )
        self.renders = counter(
            "renders", "Prompts to be rendered, by outcome: done, refused, unavailable, failed.",
            "outcome",
        )  # fmt: skip
        self.lookups = counter(
            "lookups",
            "Lookups in the store, by outcome: held, missing, unknown (no record), failed.",
            "outcome",
        )
        self.lookup_seconds = seconds(
            "lookup", "Duration of a lookup in the store, hashing included.", buckets=LOOKUP_SECONDS
        )
        self.hints = counter(
            "hints",
            "Hints sent to the store: tool_calls, session_end; by outcome: accepted, clipped, "
            "missing, ignored, failed (or no record of the model).",
            "action", "outcome",
        )  # fmt: skip
        registry.register(_OfNow(instances))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _OfNow(Collector):
    """Reads the state of the instances at each scrape, so that removed ones do not appear, and the
    number of dropped log lines."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        views = self._instances.views(clock_ms())
        for name, text, value_of in OF_INSTANCES:
            gauge = GaugeMetricFamily(
                f"kvstore_proxy_instance_{name}", text, labels=["role", "instance"]
            )
            for view in views:
                gauge.add_metric([view.role, view.address], value_of(view))
            yield gauge
        for name, value in logs.counters().items():
            text = "Lines of the log that could not be written, or were too many of one kind."
            counter = CounterMetricFamily(f"kvstore_proxy_{name}", text)
            counter.add_metric([], value)
            yield counter
