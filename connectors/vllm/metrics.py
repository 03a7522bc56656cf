"""The store's metrics in vLLM's ``/metrics``: counts, tokens, bytes of blocks, microseconds.

Each side collects plain numbers. vLLM sends them to the API server and adds them up; there
``StorePromMetrics`` exports them with the prefix ``vllm:kvstore_``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: Final = {
    "lookups": "Lookups that the store answered",
    "lookups_failed": "Lookups that the store did not answer",
    "lookups_late": "Lookups that were not answered by their deadline",
    "lookups_waited_for_writers": "Lookups that waited for blocks being written",
    "hit_tokens": "Tokens found in the store and loaded",
    "missed_tokens": "Tokens of prompts that were looked up and not found",
    "computed_stored_tokens": "Tokens found in the store and computed, as that was faster",
    "loaded_requests": "Requests that loaded blocks",
    "hit_states": "States of recurrent layers found in the store, one for a request",
    "saved_states": "States of recurrent layers to save, one for each place in a request",
    "load_blocks": "Blocks loaded, counted by each worker and cache group",
    "load_failures": "Loads in which some blocks did not arrive, counted by each worker",
    "loads_failed": "Loads in which some blocks did not arrive at some worker",
    "save_blocks": "Blocks saved, counted by each worker and cache group",
    "save_failures": "Saves that the store did not accept, counted by each worker",
    "saves_failed": "Saves that the store did not accept from some worker",
    "saves_refused": "Saves postponed, in part or whole, because too many blocks were waiting",
    "pins_failed": "Requests whose blocks could not be pinned as they asked (pin_ms)",
    "hints_failed": "Requests whose hints were malformed, or failed at the store",
    "load_bytes": "Bytes loaded",
    "load_bytes_shm": "Bytes read from memory of nodes on the worker's host",
    "load_bytes_device": "Bytes read from nodes' memory of a GPU on the worker's host",
    "load_bytes_tcp": "Bytes read from other nodes by TCP",
    "load_bytes_mooncake": "Bytes read from other nodes by Mooncake's transfer engine",
    "save_bytes": "Bytes saved",
    "breaker_opened": "How often a breaker has opened",
}
GAUGES: Final = {
    "pinned_blocks": "Blocks kept from other use until they are saved",
    "breaker_open": "Whether the breaker of lookups is open",
}
TIMES: Final = {
    "lookup_us": "Time of a lookup, microseconds",
    "load_us": "Time from order to arrival of one request's blocks, microseconds",
    "save_us": "Time of saving one step's blocks of one request, microseconds",
}
BUCKETS_US: Final = (
    *(50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000),
    *(200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000),
)
SAMPLES_MAX: Final = 1_000
"""Stored times of one kind per interval."""


@dataclass
class StoreStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """The numbers of one interval: each counter's sum, each gauge's last value, lists of times."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def count(self, name: str, number: int = 1) -> None:
        if number:
            self.data[name] = self.data.get(name, 0) + number

    def gauge(self, name: str, value: int) -> None:
        self.data[name] = value

    def time(self, name: str, microseconds: int) -> None:
        times = self.data.setdefault(name, [])
        if len(times) < SAMPLES_MAX:
            times.append(microseconds)

    def add(self, what: str, seconds: float, *, blocks: int, size: int, failed: int) -> None:
        self.count(f"{what}_blocks", blocks)
        self.count(f"{what}_bytes", size)
        self.count(f"{what}_failures", failed)
        self.time(f"{what}_us", int(seconds * 1e6))

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name in TIMES:
                self.data.setdefault(name, []).extend(value)
                del self.data[name][SAMPLES_MAX:]
            elif name in GAUGES:
                self.gauge(name, value)
            else:
                self.count(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line; of times, the median and the maximum."""
        reduced: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if name in TIMES:
                ordered = sorted(value)
                reduced[f"{name}_p50"] = ordered[len(ordered) // 2]
                reduced[f"{name}_max"] = ordered[-1]
            else:
                reduced[name] = value
        return reduced


class StorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The numbers as Prometheus metrics, one child per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for kind, texts in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES)):
            for name, text in texts.items():
                self._metrics[name] = kind(
                    name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames
                )
        for name, text in TIMES.items():
            self._metrics[name] = self._histogram_cls(
                name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames,
                buckets=list(BUCKETS_US),
            )  # fmt: skip
        for metric in self._metrics.values():  # so that each is exported before its first value
            for labels in per_engine_labelvalues.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in (transfer_stats_data or {}).items():
            metric = self._metrics.get(name)
            if metric is None:
                continue
            child = metric.labels(*labels)
            if name in TIMES:
                for each in value:
                    child.observe(each)
            elif name in GAUGES:
                child.set(value)
            else:
                child.inc(value)
