"""Alerts and dashboard: queries are valid and name what is served; alerts fire as they should.

``promtool`` checks syntax and behaviour. It does not know which metrics there are: that is read
out of the queries here.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from kvstore.console.diagnostics.rows import RECORDS, ROWS
from kvstore.http.families import CLIENT, MASTER, NODE, STORE
from kvstore.proxy.instances import Instances
from kvstore.proxy.metrics import Metrics
from tests.support.programs import need_program

ROOT: Final = Path(__file__).parents[3]
ALERTS: Final = ROOT / "deploy/prometheus/alerts.yml"
CASES: Final = ROOT / "deploy/prometheus/alerts_test.yml"
DASHBOARD: Final = ROOT / "deploy/grafana/kvstore.json"

OF_PROMETHEUS: Final = {"job", "instance", "exported_instance", "le", "alertname", "alertstate"}
"""Labels that Prometheus itself gives."""

KEYWORDS: Final = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring"}


def with_suffixes(name: str, kind: str, labels: tuple[str, ...]) -> Iterator[tuple[str, set[str]]]:
    suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
    yield from ((name + suffix, set(labels)) for suffix in suffixes)


@functools.cache
def served() -> dict[str, set[str]]:
    """The labels of every series that masters, nodes, clients, the proxy and vLLM serve."""
    known: dict[str, set[str]] = {"ALERTS": set()}
    for family in (*MASTER, *STORE, *NODE, *CLIENT):
        known.update(with_suffixes(family.name, family.kind, family.labels))
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    for metrics in (process, Metrics(Instances()).registry):
        for metric in metrics.collect():
            name = metric.name + ("_total" if metric.type == "counter" else "")
            known.update(with_suffixes(name, metric.type, ()))
    for name, kind in of_vllm():
        known.update(with_suffixes(name, kind, ("engine",)))
    return known


def of_vllm() -> Iterator[tuple[str, str]]:
    """Read from the source, which cannot be imported without vLLM."""
    tree = ast.parse((ROOT / "connectors/vllm/metrics.py").read_text())
    kinds = {"COUNTERS": "counter", "GAUGES": "gauge", "TIMES": "histogram"}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = kinds.get(node.target.id)
            if kind is not None and node.value is not None:
                for name in ast.literal_eval(node.value):
                    suffix = "_total" if kind == "counter" else ""
                    yield f"vllm:kvstore_{name}{suffix}", kind


def series_in(query: str) -> list[tuple[str, set[str]]]:
    """Each series that a query names, and the labels that it is selected by."""
    query = re.sub(r'"(?:\\.|[^"\\])*"', '""', query)
    query = re.sub(r"\[[^\]]*\]", "", query)
    query = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", query)
    found: list[tuple[str, set[str]]] = []
    for name, call, selectors in re.findall(
        r"(?<![\w:.])([A-Za-z_:][\w:]*)(\s*\()?(?:\{([^}]*)\})?", query
    ):
        if not call and name not in KEYWORDS:
            found.append((name, set(re.findall(r"(\w+)\s*[=!]", selectors))))
    return found


def grouped_by(query: str) -> set[str]:
    groups = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query)
    return {label.strip() for group in groups for label in group.split(",")} - {""}


ALL_RULES: Final = {**RECORDS, **{row.name: row.alert.expr for row in ROWS if row.alert}}
"""Expressions, by name."""


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return board


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_queries() -> list[tuple[str, str]]:
    queries = [
        (panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]
    ]
    return queries + [(each["name"], each["expr"]) for each in dashboard()["annotations"]["list"]]


def check(name: str, query: str) -> None:
    known = served()
    series = series_in(query)
    assert series, f"{name}: no metric found in {query}"
    labels = set(OF_PROMETHEUS)
    for metric, selected_by in series:
        if metric in RECORDS:
            continue
        assert metric in known, f"{name}: nothing serves {metric}"
        allowed = known[metric] | OF_PROMETHEUS
        assert selected_by <= allowed, f"{name}: {metric} has no label {selected_by - allowed}"
        labels |= known[metric]
    assert grouped_by(query) <= labels, f"{name}: nothing has {grouped_by(query) - labels}"


@pytest.mark.parametrize("name", ALL_RULES)
def test_alerts_name_what_is_served(name: str) -> None:
    check(name, ALL_RULES[name])


def test_panels_name_what_is_served() -> None:
    for title, query in panel_queries():
        check(title, query)


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy/generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_objects_of_kubernetes_are_those_of_their_sources() -> None:
    done = generate("--check")
    assert done.returncode == 0, done.stderr


def test_metrics_of_the_runbook_are_served() -> None:
    text = " ".join(part for row in ROWS for _, part in row.parts)
    named = set(re.findall(r"`(kvstore_\w+)`", text))
    known = {family.name for family in (*MASTER, *STORE, *NODE, *CLIENT)}
    assert named <= known


def test_each_alert_has_a_test_in_which_it_fires() -> None:
    cases = CASES.read_text()
    assert not [row.name for row in ROWS if row.alert and row.name not in cases]


@pytest.mark.slow
def test_promtool_accepts_the_rules_and_their_tests() -> None:
    promtool = need_program("promtool", "prometheus")
    for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run(
            [promtool, *command],
            cwd=ALERTS.parent, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_queries_of_the_panels(tmp_path: Path) -> None:
    promtool = need_program("promtool", "prometheus")
    entries = []
    for index, (_, query) in enumerate(panel_queries()):
        plain = query.replace("$__rate_interval", "5m").replace("$job", ".*")
        assert "$" not in plain, query
        entries.append({"record": f"panel:{index}", "expr": plain})
    file = tmp_path / "panels.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": entries}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
