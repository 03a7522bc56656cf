"""Requests to the HTTP ports of servers."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.cluster import Server


class Answer(NamedTuple):
    status: int
    text: str


def get(port: int, path: str, timeout_s: float = 10.0) -> Answer:
    """Raises OSError: there is no answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as got:
            return Answer(got.status, got.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode())


def metric(port: int, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(get(port, "/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


def http_port_of(server: Server) -> int:
    return int(server.line(r"serves metrics on http://\S+:(\d+)/metrics")[1])
