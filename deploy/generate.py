"""Writes the alerts and the Grafana dashboard as objects of Kubernetes, for operators' sidecars.

    python deploy/generate.py                        # to deploy/kubernetes
    python deploy/generate.py --check                # writes nothing, fails if outdated
    python deploy/generate.py --to FOLDER --runbook https://wiki.example/kvstore

``deploy/prometheus/alerts.yml`` and ``deploy/grafana/kvstore.json`` are the sources. By default the
runbook of an alert is the page that a master serves; ``--runbook`` names another page with the same
anchors, and then ``--to`` is the folder for the three files, ``alerts.yml`` among them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Final

DEPLOY: Final = Path(__file__).resolve().parent
ALERTS: Final = DEPLOY / "prometheus/alerts.yml"
DASHBOARD: Final = DEPLOY / "grafana/kvstore.json"

SERVED: Final = (
    '{{ with query "topk(1, kvstore_master_leads'
    ' * on (job, instance) group_right kvstore_master_info)" }}'
    '{{ . | first | label "scheme" }}://{{ . | first | label "instance" }}'
    "{{ else }}http://localhost:50080{{ end }}/runbook"
)
"""The runbook by default, a template of Prometheus: that of the leader, else of any master, by HTTP
or HTTPS as that master serves it."""

RULE: Final = """\
# By deploy/generate.py, from deploy/prometheus/alerts.yml. For the Prometheus operator; not in
# kustomization.yaml, because its kind must exist in the cluster. If your Prometheus has a
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


def alerts(runbook: str) -> str:
    """The rules, with links to the sections of this page."""
    return re.sub(
        r"runbook_url: '[^'#]*(#\w+)'",
        lambda found: f"runbook_url: '{runbook}{found[1]}'",
        ALERTS.read_text(),
    )


def prometheus_rule(rules: str) -> str:
    _, groups, body = rules.partition("groups:\n")
    return RULE + textwrap.indent(groups + body, "  ")


def config_map() -> str:
    board = json.dumps(json.loads(DASHBOARD.read_text()), separators=(",", ":"))
    return f"{CONFIG_MAP}    {board}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--to", type=Path, default=DEPLOY / "kubernetes")
    parser.add_argument("--runbook", default=SERVED, metavar="URL")
    given = parser.parse_args()
    if given.runbook != SERVED and (given.to == DEPLOY / "kubernetes" or "'" in given.runbook):
        parser.error("--runbook needs --to, and a URL without quotation marks")
    rules = alerts(given.runbook)
    wanted = {"prometheusrule.yaml": prometheus_rule(rules), "grafana.yaml": config_map()}
    if given.to != DEPLOY / "kubernetes":
        wanted["alerts.yml"] = rules
    outdated = [
        name
        for name, text in wanted.items()
        if not (given.to / name).exists() or (given.to / name).read_text() != text
    ]
    if given.check:
        sys.stderr.writelines(
            f"{given.to / name}: deploy/generate.py writes it anew\n" for name in outdated
        )
        return int(bool(outdated))
    given.to.mkdir(parents=True, exist_ok=True)
    for name in outdated:
        (given.to / name).write_text(wanted[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
