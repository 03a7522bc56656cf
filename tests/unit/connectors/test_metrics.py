"""Numbers on their way to a log line and to Prometheus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from kvstore.connectors.vllm.metrics import (
    SAMPLES_MAX,
    StorePromMetrics,
    StoreStats,
)


def stats(**data: Any) -> StoreStats:
    return StoreStats(data=data)


def test_counts_add_up_gauges_are_the_last_times_are_collected() -> None:
    first = stats(lookups=2, pinned_blocks=5, lookup_us=[1, 2])
    second = stats(lookups=3, hit_tokens=16, pinned_blocks=1, lookup_us=[3], save_us=[9])
    assert first.aggregate(second) is first
    assert first.data == {
        "lookups": 5, "hit_tokens": 16, "pinned_blocks": 1, "lookup_us": [1, 2, 3], "save_us": [9],
    }  # fmt: skip
    second.time("save_us", 10)
    assert first.data["save_us"] == [9]


def test_times_are_bounded() -> None:
    collected = StoreStats()
    for number in range(SAMPLES_MAX + 10):
        collected.time("load_us", number)
    assert len(collected.data["load_us"]) == SAMPLES_MAX
    other = stats(load_us=[1] * SAMPLES_MAX)
    assert len(collected.aggregate(other).data["load_us"]) == SAMPLES_MAX


def test_the_log_line_has_plain_numbers() -> None:
    reduced = stats(save_us=[30, 10, 20], lookups=4, pinned_blocks=0).reduce()
    assert reduced == {"lookups": 4, "pinned_blocks": 0, "save_us_p50": 20, "save_us_max": 30}
    assert StoreStats().reduce() == {}


# --- Prometheus -----------------------------------------------------------------------------------


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def metrics(registry: prometheus_client.CollectorRegistry) -> StorePromMetrics:
    def on_registry(kind: Any) -> Any:
        return lambda **arguments: kind(registry=registry, **arguments)

    kinds = (
        prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram,
    )  # fmt: skip
    types: Any = {kind: on_registry(kind) for kind in kinds}
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace())
    return StorePromMetrics(
        config, types, ["model", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]}
    )


def value(
    registry: prometheus_client.CollectorRegistry, name: str, engine: int = 0, **labels: str
) -> float | None:
    return registry.get_sample_value(
        f"vllm:kvstore_{name}", {"model": "tiny", "engine": str(engine), **labels}
    )


def test_what_happened_is_seen_of_the_engine_where_it_did(
    metrics: StorePromMetrics, registry: prometheus_client.CollectorRegistry
) -> None:
    metrics.observe({"lookups": 2, "pinned_blocks": 7, "lookup_us": [60, 150], "unknown": 1}, 1)
    metrics.observe({"lookups": 3, "pinned_blocks": 4}, 1)
    metrics.observe({}, 1)
    assert value(registry, "lookups_total", 1) == 5
    assert value(registry, "lookups_total", 0) == 0
    assert value(registry, "pinned_blocks", 1) == 4
    assert value(registry, "lookup_us_sum", 1) == 210
    assert value(registry, "lookup_us_bucket", 1, le="100.0") == 1
    assert value(registry, "lookup_us_bucket", 1, le="200.0") == 2
