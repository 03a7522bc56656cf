"""The text that Prometheus reads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.calls import (
    ClusterStatus,
    Counter,
    DepartedNode,
    DiskStatus,
    NamespaceStatus,
    NodeStatus,
    SegmentStatus,
    TenantStatus,
)
from kvstore.http.exposition import NAMESPACES_SHOWN, of_master
from kvstore.http.families import MASTER, STORE
from kvstore.runtime.histograms import Histogram


def measured(**changes: Any) -> dict[str, Any]:
    step = Histogram()
    step.add(3.0)
    values = (step.counts, step.total)
    return {
        "version": "1", "cluster": "", "leads": True, "epoch": 7, "step_us": values,
        "late_us": values, "eviction_age_ms": values, "reuse_ms": values,
        "calls": {"Lookup": (3, 1, values)},
        "connections": 2, "counters": {"connections_refused": 5},
        "auth_valid": None, "open_files": 7, "files_refused": {},
    } | changes  # fmt: skip


def status(*namespaces: NamespaceStatus, counters: dict[str, int] | None = None) -> ClusterStatus:
    segment = SegmentStatus(4, 1000, 300, 500, "x", 30, 20, 10)
    disk = DiskStatus(5, 9_000, 700, 3, 600, 60, 6, 8_000)
    nodes = [NodeStatus("a", "h", "alive", "1:2", 0, [segment], disks=[disk])]
    counted = [Counter(*each) for each in (counters or {}).items()]
    return ClusterStatus(7, "1", 0, nodes, namespaces, counted)


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def page(*args: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return samples(of_master(*args, pid=os.getpid(), scheme="https"))


def test_what_was_measured_is_there_with_its_labels() -> None:
    found = page(measured(), status(counters={"stored_objects": 9, "refused_leased": 2}))
    assert found["kvstore_master_epoch", ()] == 7
    call = ("call", "Lookup")
    assert found["kvstore_master_calls_total", (call, ("outcome", "ok"))] == 2
    assert found["kvstore_master_calls_total", (call, ("outcome", "error"))] == 1
    assert found["kvstore_master_call_seconds_count", (call,)] == 1
    assert found["kvstore_master_call_seconds_bucket", (call, ("le", "2e-06"))] == 0
    assert found["kvstore_master_call_seconds_bucket", (call, ("le", "4e-06"))] == 1
    assert found["kvstore_master_connections_refused_total", ()] == 5
    assert found["kvstore_stored_objects_total", ()] == 9
    assert found["kvstore_refused_puts_total", (("cause", "leased"),)] == 2
    assert found["kvstore_evicted_objects_total", ()] == 0, "what has not happened is 0"
    place = (("node", "a"), ("segment", "4"))
    assert found["kvstore_segment_used_bytes", place] == 300
    assert found["kvstore_segment_pending_bytes", place] == 30
    assert found["kvstore_segment_quarantined_bytes", place] == 20
    assert found["kvstore_segment_reclaim_bytes", place] == 10
    disk = (("disk", "0"), ("node", "a"))
    assert found["kvstore_disk_used_bytes", disk] == 700
    assert found["kvstore_disk_failed", disk] == 0
    assert found["kvstore_reuse_seconds_bucket", (("le", "0.004"),)] == 1
    assert found["kvstore_reuse_seconds_bucket", (("le", "0.002"),)] == 0


def test_a_node_counts_as_dead_until_one_of_its_name_joins() -> None:
    departed = [
        DepartedNode(name, "h", reason, departed_ms=9, missing=0, lost=3, reports=False)
        for name, reason in (("a", "silent"), ("b", "broken"), ("c", "left"))
    ]
    found = page(measured(), status()._replace(departed=departed))
    assert found["kvstore_nodes", (("state", "dead"),)] == 1, "a is back, c was stopped"


def test_the_largest_namespaces_have_rows_and_the_others_a_sum() -> None:
    many = [NamespaceStatus(f"n{i}", 1, i) for i in range(NAMESPACES_SHOWN + 10)]
    found = page(measured(), status(*many))
    shown = {labels for name, labels in found if name == "kvstore_namespace_bytes"}
    assert len(shown) == NAMESPACES_SHOWN
    assert (("namespace", "n9"),) not in shown
    assert found["kvstore_other_namespaces_bytes", ()] == sum(range(10))
    assert found["kvstore_other_namespaces_objects", ()] == 10
    assert found["kvstore_namespaces", ()] == len(many)


def test_tenants_have_rows() -> None:
    tenants = [
        TenantStatus("", 9, 0, 0, 0, 0, 1, 0, 0, 0),
        TenantStatus("acme", 8, 7, 60, 3, 0, 2, 4, 5, 6, disk_bytes=9),
    ]
    found = page(measured(), status()._replace(tenants=tenants))
    of_acme = {
        name: value for (name, labels), value in found.items() if ("tenant", "acme") in labels
    }
    assert of_acme.pop("kvstore_tenant_evicted_objects_total") in (4, 5)
    assert of_acme == {
        "kvstore_tenant_bytes": 8,
        "kvstore_tenant_guarantee_bytes": 7,
        "kvstore_tenant_limit_bytes": 60,
        "kvstore_tenant_disk_bytes": 9,
        "kvstore_tenant_pinned_bytes": 3,
        "kvstore_tenant_objects": 2,
        "kvstore_tenant_refused_total": 6,
    }
    by_others = (("by", "others"), ("tenant", "acme"))
    assert found["kvstore_tenant_evicted_objects_total", by_others] == 5
    assert ("kvstore_tenant_limit_bytes", (("tenant", ""),)) not in found


@pytest.mark.parametrize("name", ['a"} 1\nfake_metric 7', "\\", "\x00\x1b[31m", "模型", "a b"])
def test_a_namespace_of_any_name_is_one_label(name: str) -> None:
    found = page(measured(), status(NamespaceStatus(name, 1, 2)))
    assert found["kvstore_namespace_bytes", (("namespace", name),)] == 2
    assert not any(metric.startswith("fake") for metric, _ in found)


def test_every_counter_of_the_state_has_a_family() -> None:
    """Read from the sources: a counter appears in the status when it is first counted."""
    state = Path(__file__).parents[3] / "master/state"
    names = set()
    for file in state.glob("*.py"):
        names |= set(re.findall(r'counters\["(\w+)"\] \+?= ', file.read_text()))
    assert "stored_objects" in names
    families = {family.name for family in STORE}
    names.remove("refused_no_space")  # the sum of those by cause
    assert {f"kvstore_{name}_total" for name in names} <= families


def test_every_declared_metric_is_served_and_no_other() -> None:
    served = {
        family.name
        for family in text_string_to_metric_families(
            of_master(
                measured(), status(NamespaceStatus("n", 1, 1)), pid=os.getpid(), scheme="http"
            ).decode()
        )
        if not family.name.startswith("process_")
    }
    expected = {family.name for family in (*MASTER, *STORE)}
    assert served == {name.removesuffix("_total") for name in expected}
