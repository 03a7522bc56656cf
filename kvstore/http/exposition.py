"""Metrics as Prometheus text. A master's page has its reply to ``measures`` and, on the leader, the
numbers of the store from the status."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.calls import ClusterStatus, TenantStatus
from kvstore.calls.no_space_messages import CAUSES
from kvstore.http.families import MASTER, OF_COUNTERS, OF_DISK, OF_SEGMENT, STORE, Family
from kvstore.runtime import logs
from kvstore.runtime.histograms import cumulative

NAMESPACES_SHOWN: Final = 50
NODE_STATES: Final = ("alive", "suspect", "dead", "draining")
Labels = tuple[str, ...]
Rows = dict[Labels, Any]
"""Values by labels. A histogram's value is its counts and the sum of its values, in its unit."""


class _Shown(Collector):
    """The values of one scrape."""

    def __init__(self, families: Sequence[Family], values: Mapping[str, Rows]) -> None:
        self._families = families
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield metric(family, self._values.get(family.name, {}))


def of_master(
    measured: Mapping[str, Any], status: ClusterStatus | None, *, pid: int, scheme: str
) -> bytes:
    """Return the metrics page of a master.

    Args:
        measured: its reply to ``measures``.
        status: None: not the leader, or the store is unavailable.
        pid: the master's process, for its CPU time and memory.
        scheme: of this page: http or https.
    """
    files: int | None = measured["open_files"]
    values = _of_master(measured, scheme)
    if status is None:
        return page(MASTER, values, pid=pid, open_files=files)
    values |= _of_store(measured, status)
    return page((*MASTER, *STORE), values, pid=pid, open_files=files)


def page(
    families: Sequence[Family],
    values: Mapping[str, Rows],
    *,
    pid: int,
    open_files: int | None = None,
) -> bytes:
    """Return the text of a metrics page.

    Args:
        open_files: of a process with hidden memory (``kvstore.runtime.memory_protection``), whose
            files others cannot count.
    """
    registry = CollectorRegistry()
    registry.register(_Shown(families, values))
    registry.register(_Process(pid, open_files))
    return generate_latest(registry)


class _Process(ProcessCollector):
    def __init__(self, pid: int, open_files: int | None) -> None:
        super().__init__(pid=lambda: pid, registry=None)
        self._open_files = open_files

    def collect(self) -> Iterator[Metric]:
        found = list(super().collect())
        yield from found
        name = "process_open_fds"
        if self._open_files is not None and all(family.name != name for family in found):
            yield GaugeMetricFamily(
                name, "Number of open file descriptors.", value=self._open_files
            )


def of_log(process: str) -> dict[str, Rows]:
    """Return the number of lines suppressed in this process's log. ``process``: part of the
    metrics' names."""
    return {f"kvstore_{process}_{name}_total": {(): n} for name, n in logs.counters().items()}


def of_identity(process: str, until: float | None) -> dict[str, Rows]:
    """Return the expiry of this process's certificate; None: none. ``process``: as for
    ``of_log``."""
    return {
        f"kvstore_{process}_auth_expiry_timestamp_seconds": {} if until is None else {(): until}
    }


def of_files(process: str, refused: Mapping[str, int]) -> dict[str, Rows]:
    """Return the files whose current content is not used. ``refused``: as from ``refused_files``.
    ``process``: as for ``of_log``."""
    rows: Rows = {(setting,): value for setting, value in refused.items()}
    return {f"kvstore_{process}_file_refused": rows}


def _of_master(measured: Mapping[str, Any], scheme: str) -> dict[str, Rows]:
    valid = measured["auth_valid"]
    of: dict[str, Rows] = {
        "kvstore_master_info": {(measured["version"], measured["cluster"], scheme): 1},
        "kvstore_master_is_leader": {(): int(measured["leads"])},
        "kvstore_master_epoch": {(): measured["epoch"]},
        "kvstore_master_calls_total": {},
        "kvstore_master_call_seconds": {},
        "kvstore_master_step_seconds": {(): measured["step_us"]},
        "kvstore_master_event_loop_lag_seconds": {(): measured["late_us"]},
        "kvstore_master_connections": {(): measured["connections"]},
        **of_files("master", measured["files_refused"]),
        **of_identity("master", None if valid is None else valid[1]),
    }
    for call, (count, errors, times) in measured["calls"].items():
        of["kvstore_master_calls_total"][(call, "ok")] = count - errors
        of["kvstore_master_calls_total"][(call, "error")] = errors
        of["kvstore_master_call_seconds"][(call,)] = times
    for family in MASTER:
        if not family.labels and family.name not in of:
            name = family.name.removeprefix("kvstore_master_").removesuffix("_total")
            of[family.name] = {(): measured["counters"].get(name, 0)}
    return of


def _of_store(measured: Mapping[str, Any], status: ClusterStatus) -> dict[str, Rows]:
    counters = dict(status.counters)
    counted: dict[str, Rows] = {}
    for counter, value in counters.items():
        name, *labels = counter.split(".")
        family = OF_COUNTERS.get(name, f"kvstore_{name}_total")
        counted.setdefault(family, {})[tuple(labels)] = value
    largest = heapq.nlargest(NAMESPACES_SHOWN, status.namespaces, key=lambda row: row.size)
    objects = sum(row.objects for row in status.namespaces)
    size = sum(row.size for row in status.namespaces)
    segments = {
        (node.name, str(segment.segment_id)): segment
        for node in status.nodes
        for segment in node.segments
    }
    disks = {
        (node.name, str(number)): disk
        for node in status.nodes
        for number, disk in enumerate(node.disks)
    }
    states = Counter(node.state for node in status.nodes)
    joined = {node.name for node in status.nodes}
    states["dead"] = sum(
        node.reason != "left" and node.name not in joined for node in status.departed
    )
    of: dict[str, Rows] = {
        "kvstore_nodes": {(state,): states[state] for state in NODE_STATES},
        **{
            name: {place: getattr(segment, field) for place, segment in segments.items()}
            for name, field in OF_SEGMENT.items()
        },
        **{
            name: {place: int(getattr(disk, field)) for place, disk in disks.items()}
            for field, name in OF_DISK.items()
        },
        "kvstore_refused_puts_total": {
            (cause,): counters.get(f"refused_{cause}", 0) for cause in CAUSES
        },
        "kvstore_eviction_age_seconds": {(): measured["eviction_age_ms"]},
        "kvstore_reuse_seconds": {(): measured["reuse_ms"]},
        "kvstore_namespaces": {(): len(status.namespaces)},
        "kvstore_namespace_objects": {(row.name,): row.objects for row in largest},
        "kvstore_namespace_bytes": {(row.name,): row.size for row in largest},
        "kvstore_other_namespaces_objects": {(): objects - sum(row.objects for row in largest)},
        "kvstore_other_namespaces_bytes": {(): size - sum(row.size for row in largest)},
        **_of_tenants(status.tenants),
    }
    never: dict[str, Rows] = {family.name: {(): 0} for family in STORE if not family.labels}
    return {**never, **counted, **of}


def _of_tenants(tenants: Sequence[TenantStatus]) -> dict[str, Rows]:
    of: dict[str, Rows] = {}
    for name in (family.name for family in STORE if family.labels == ("tenant",)):
        field = name.removeprefix("kvstore_tenant_").removesuffix("_total")
        field = field if field in TenantStatus._fields else field.removesuffix("_bytes")
        rows = [row for row in tenants if "limit" not in field or getattr(row, field)]
        of[name] = {(row.name,): getattr(row, field) for row in rows}
    return of | {
        "kvstore_tenant_evicted_objects_total": {
            **{(row.name, "own"): row.evicted_by_own for row in tenants},
            **{(row.name, "others"): row.evicted_by_others for row in tenants},
        }
    }


def metric(family: Family, rows: Rows) -> Metric:
    """Return one family with its values."""
    name, text_, labels = family.name, family.text, family.labels
    if family.kind != "histogram":
        kind: type[CounterMetricFamily | GaugeMetricFamily] = (
            CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        )
        found = kind(name, text_, labels=labels)
        for values, value in rows.items():
            found.add_metric(values, value)
        return found
    histogram = HistogramMetricFamily(name, text_, labels=labels)
    for values, (counts, total) in rows.items():
        histogram.add_metric(values, cumulative(counts, family.unit_s), total * family.unit_s)
    return histogram
