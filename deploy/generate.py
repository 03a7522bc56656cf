"""Generate the alerts and the Grafana dashboard for Prometheus, Grafana and Kubernetes.

    python deploy/generate.py                        # to deploy/prometheus, deploy/kubernetes
    python deploy/generate.py --check                # writes nothing, fails if outdated
    python deploy/generate.py --to FOLDER --runbook https://wiki.example/kvstore

Sources are the rows of ``kvstore.console.diagnostics`` and ``deploy/grafana/kvstore.json``. By
default alerts link to the runbook that a master serves; ``--runbook`` names another page with the
same anchors, and ``--to`` the output folder."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Final

from kvstore.console.diagnostics.rows import RECORDS, ROWS, Row

DEPLOY: Final = Path(__file__).resolve().parent
DASHBOARD: Final = DEPLOY / "grafana/kvstore.json"

SERVED: Final = (
    '{{ with query "topk(1, kvstore_master_is_leader'
    ' * on (job, instance) group_right kvstore_master_info)" }}'
    '{{ . | first | label "scheme" }}://{{ . | first | label "instance" }}'
    "{{ else }}http://localhost:50080{{ end }}/runbook"
)
"""The default runbook, a Prometheus template: the leader's, else that of any master, over HTTP or
HTTPS as that master serves it."""

HEAD: Final = """\
# By deploy/generate.py, from kvstore/console/diagnostics/rows.toml. In prometheus.yml:
#
#     rule_files: [alerts.yml]
#
# One job is one cluster: the alerts are by job.

"""

RULE: Final = """\
# By deploy/generate.py, from kvstore/console/diagnostics/rows.toml. For the Prometheus operator;
# not in kustomization.yaml, because its kind must exist in the cluster. If your Prometheus has a
# ruleSelector (kube-prometheus-stack: the label release), add its labels.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvstore
  namespace: kvstore
  labels: {app.kubernetes.io/name: kvstore}
spec:
"""

CONFIG_MAP: Final = """\
# By deploy/generate.py, from deploy/grafana/kvstore.json. For the sidecar of Grafana's chart, which
# loads what has this label; not in kustomization.yaml, because not every cluster has one.
apiVersion: v1
kind: ConfigMap
metadata:
  name: kvstore-dashboard
  namespace: kvstore
  labels: {app.kubernetes.io/name: kvstore, grafana_dashboard: "1"}
data:
  kvstore.json: |
"""


def groups(runbook: str) -> str:
    """Return the rules of all rows, with links to the sections of the runbook."""
    lines = ["groups:", "  - name: kvstore records", "    rules:"]
    for name, expr in RECORDS.items():
        lines += [f"      - record: {name}", f"        expr: >-\n          {expr}"]
    lines += ["", "  - name: kvstore", "    rules:"]
    for row in ROWS:
        lines += _rule(row, runbook)
    return "\n".join(lines) + "\n"


def _rule(row: Row, runbook: str) -> list[str]:
    if row.alert is None:
        return []
    description = f"{row.means} {row.alert.advice(row)}"
    return [
        f"      - alert: {row.name}",
        f"        expr: >-\n          {row.alert.expr}",
        *([f"        for: {row.alert.lasts}"] if row.alert.lasts else []),
        f"        labels: {{severity: {row.alert.severity}}}",
        "        annotations:",
        f"          summary: {json.dumps(row.alert.summary)}",
        f"          description: {json.dumps(description, ensure_ascii=False)}",
        f"          runbook_url: '{runbook}#{row.anchor}'",
    ]


def config_map() -> str:
    board = json.dumps(json.loads(DASHBOARD.read_text()), separators=(",", ":"))
    return f"{CONFIG_MAP}    {board}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--runbook", default=SERVED, metavar="URL")
    given = parser.parse_args()
    if given.runbook != SERVED and (given.to is None or "'" in given.runbook):
        parser.error("--runbook needs --to, and a URL without quotation marks")
    rules = groups(given.runbook)
    prometheus, kubernetes = (given.to or DEPLOY / name for name in ("prometheus", "kubernetes"))
    wanted = {
        prometheus / "alerts.yml": HEAD + rules,
        kubernetes / "prometheusrule.yaml": RULE + textwrap.indent(rules, "  "),
        kubernetes / "grafana.yaml": config_map(),
    }
    outdated = [
        path for path, text in wanted.items() if not path.exists() or path.read_text() != text
    ]
    if given.check:
        sys.stderr.writelines(f"{path}: deploy/generate.py writes it anew\n" for path in outdated)
        return int(bool(outdated))
    for path in outdated:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
