"""The metrics of ``GET /metrics``. Each proxy has its own registry, so that two proxies can share a
process."""

from __future__ import annotations

import time
from collections.abc import Iterator
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

from kvstore.process import logs
from kvstore.proxy.instances import Instances

# Buckets from a short prompt on an idle engine to a long prompt behind a queue.
SECONDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
LOOKUP_SECONDS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
BREAKER_VALUES: Final = {"closed": 0, "half_open": 1, "open": 2}


def clock_ms() -> int:
    """Milliseconds of the monotonic clock, which the whole proxy uses."""
    return time.monotonic_ns() // 1_000_000


class Metrics:
    """All metrics of the proxy."""

    def __init__(self, instances: Instances) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvstore_proxy_requests",
            "Requests that ended, by route and status; 499: the client left.",
            ["route", "status"],
            registry=registry,
        )
        self.in_flight = Gauge("kvstore_proxy_in_flight", "Requests under way.", registry=registry)
        self.first_byte_seconds = Histogram(
            "kvstore_proxy_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.prefill_seconds = Histogram(
            "kvstore_proxy_prefill_seconds",
            "Duration of the prefill hop, by outcome: done, refused, failed.",
            ["outcome"],
            buckets=SECONDS,
            registry=registry,
        )
        self.prefill_skipped = Counter(
            "kvstore_proxy_prefill_skipped",
            "Requests that used no prefiller, by reason.",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter(
            "kvstore_proxy_retries",
            "Requests sent again to another instance, by role.",
            ["role"],
            registry=registry,
        )
        self.broken_streams = Counter(
            "kvstore_proxy_broken_streams",
            "Answers that ended too early, after their first byte.",
            registry=registry,
        )
        self.renders = Counter(
            "kvstore_proxy_renders",
            "Prompts to be rendered, by outcome: done, refused, unavailable, failed.",
            ["outcome"],
            registry=registry,
        )
        self.lookups = Counter(
            "kvstore_proxy_lookups",
            "Lookups in the store, by outcome: held, missing, unknown (no record), failed.",
            ["outcome"],
            registry=registry,
        )
        self.lookup_seconds = Histogram(
            "kvstore_proxy_lookup_seconds",
            "Duration of a lookup in the store, hashing included.",
            buckets=LOOKUP_SECONDS,
            registry=registry,
        )
        registry.register(_OfInstances(instances))
        registry.register(_OfLog())

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _OfLog(Collector):
    """Reads the counters of log lines that were not written."""

    def collect(self) -> Iterator[Metric]:
        for name, value in logs.counters().items():
            text = "Lines of the log that could not be written, or were too many of one kind."
            counter = CounterMetricFamily(f"kvstore_proxy_{name}", text)
            counter.add_metric([], value)
            yield counter


class _OfInstances(Collector):
    """Reads the state of the instances at each scrape, so that removed ones do not appear."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "instance"]
        in_flight = GaugeMetricFamily(
            "kvstore_proxy_instance_in_flight", "Requests under way on the instance.", labels=labels
        )
        healthy = GaugeMetricFamily(
            "kvstore_proxy_instance_healthy", "1: its health checks succeed.", labels=labels
        )
        draining = GaugeMetricFamily(
            "kvstore_proxy_instance_draining", "1: it gets no new requests.", labels=labels
        )
        breaker = GaugeMetricFamily(
            "kvstore_proxy_instance_breaker", "0 closed, 1 half open, 2 open.", labels=labels
        )
        for view in self._instances.views(clock_ms()):
            at = [view.role, view.address]
            in_flight.add_metric(at, view.in_flight)
            healthy.add_metric(at, int(view.healthy))
            draining.add_metric(at, int(view.draining))
            breaker.add_metric(at, BREAKER_VALUES[view.breaker])
        yield from (in_flight, healthy, draining, breaker)
