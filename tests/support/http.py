"""Requests to the HTTP ports of servers."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import Server


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


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    token: str = "",
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 30.0,
) -> Reply:
    """One request on a connection of its own. ``body``: bytes, or what becomes JSON.

    Raises OSError: there is no answer.
    """
    given = dict(headers or {})
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        given.setdefault("Content-Type", "application/json")
    if token:
        given["Authorization"] = f"Bearer {token}"
    if tls is None:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)
    try:
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return Reply(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def metric(port: int, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(get(port, "/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


def http_port_of(server: Server) -> int:
    return int(server.line(r"serves metrics on http://\S+:(\d+)/metrics")[1])


def certificate(directory: Path, name: str) -> tuple[str, str]:
    """A certificate that signs itself, for 127.0.0.1, and its key."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1",
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return str(cert), str(key)
