"""Who may read and write over HTTP: real masters, from loopback and from elsewhere, with a token
and over TLS."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.sse_client import follow
from kvstore.console.api.lookups import HINTS_PATH, PIN_PATH, REMOVE_PATH, UNPIN_PATH
from kvstore.errors import PermissionDeniedError
from tests.integration.conftest import OF_MASTER
from tests.integration.test_http import child_of
from tests.support.browser import browsing
from tests.support.cluster import SHORT, Cluster
from tests.support.http import Reply, certificate, request
from tests.support.network_namespaces import IsolatedNetwork
from tests.support.processes import children_of, free_port
from tests.support.wait import until

TOKEN = "s3cret-0123456789abcdef"
WRITES = (REMOVE_PATH, PIN_PATH, UNPIN_PATH, HINTS_PATH)
READS = ("/metrics", "/api/v1/status", "/api/v1/openapi.json")
KEYS = {"keys": ["00"]}

Started = Callable[..., tuple[Cluster, int]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Starts a master with a node and these settings; returns its port for HTTP, too."""
    with contextlib.ExitStack() as stack:

        def start(*, prefix: list[str] | None = None, **settings: Any) -> tuple[Cluster, int]:
            given = {"http_port": free_port(), **settings}
            cluster = Cluster(tmp_path, settings=SHORT | given, prefix=prefix or ())
            stack.enter_context(cluster)
            cluster.start()
            return cluster, given["http_port"]

        yield start


def of_token(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return str(file)


# --- the token ------------------------------------------------------------------------------------


def test_a_token_is_needed_and_is_seen_nowhere(started: Started, tmp_path: Path) -> None:
    given = {"http_token_file": of_token(tmp_path)}
    cluster, port = started(memory="32MiB", log_level="debug", **given)
    for write in WRITES:
        refused = request(port, "POST", write, KEYS)
        assert refused.status == 401
        assert refused.headers["WWW-Authenticate"].startswith("Bearer")
        assert request(port, "POST", write, KEYS, token="wrong" * 5).status == 401
        assert request(port, "POST", f"{write}?token={TOKEN}", KEYS).status == 401
        bytes_of_all = {"Authorization": "Bearer " + bytes(range(128, 256)).decode("latin-1")}
        assert request(port, "POST", write, KEYS, headers=bytes_of_all).status == 401
    assert request(port, "POST", REMOVE_PATH, KEYS, token=TOKEN).json == {"removed": [False]}
    for path in ("/", "/metrics", "/api/v1/status"):
        answer = request(port, "GET", path)
        assert answer.status == 200, path
        assert TOKEN not in answer.text
    server = cluster.master_server
    child = child_of(server)
    for pid in {server.pid, child, *children_of(server.pid)}:
        assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for other in set(children_of(server.pid)) - {child}:
        assert TOKEN.encode() not in Path(f"/proc/{other}/environ").read_bytes()
    os.kill(child, 9)  # the next one has the token, too
    assert request(port, "POST", REMOVE_PATH, KEYS, timeout_s=60).status == 401
    assert request(port, "POST", REMOVE_PATH, KEYS, token=TOKEN).status == 200
    assert TOKEN not in server.errors


def test_reading_can_need_the_token(started: Started, tmp_path: Path) -> None:
    _, port = started(http_token_file=of_token(tmp_path), http_reads="token", events="on")
    for path in READS:
        assert request(port, "GET", path).status == 401, path
        assert request(port, "GET", path, token=TOKEN).status == 200, path
    assert request(port, "POST", "/api/v1/match", {"keys": []}).status == 401
    for path in ("/healthz", "/readyz", "/", "/page.js"):
        assert request(port, "GET", path).status == 200, path
    at = [f"127.0.0.1:{port}"]
    assert next(iter(follow(at, token=TOKEN))).name == "cleared"
    with pytest.raises(PermissionDeniedError):
        next(iter(follow(at)))


def test_the_dashboard_asks_for_the_token(started: Started, tmp_path: Path) -> None:
    cluster, port = started(http_token_file=of_token(tmp_path), http_reads="token")
    name = cluster.nodes[0].name
    with browsing() as browser:
        browser.open(port, "nodes")
        until(lambda: "token required" in browser.text("#token"))
        assert name not in browser.text("#node-cards")
        enter = (
            "document.querySelector('#token-text').value = arguments[0];"
            "document.querySelector('#token button').click()"
        )
        browser.run(enter, "wrong" * 5)
        until(lambda: browser.run("return document.querySelector('#token-text').value") == "")
        until(lambda: "token required" in browser.text("#token"))
        browser.run(enter, TOKEN)
        until(lambda: name in browser.text("#node-cards"))
        until(lambda: not browser.text("#token"))
        assert not [address for address in browser.requests() if TOKEN in address]
        assert browser.run("return document.cookie + localStorage.length + location.href") == (
            f"0http://127.0.0.1:{port}/#nodes"
        )


# --- from elsewhere -------------------------------------------------------------------------------


@pytest.mark.netns
def test_from_another_host(island: IsolatedNetwork, tmp_path: Path) -> None:
    host, port, prefix = f"{OF_MASTER}.1", free_port(), island.prefix
    with island.cluster(tmp_path, http_port=port) as cluster:
        cluster.master()
        cluster.node(master=f"127.0.0.1:{cluster.settings['port']}", host=host)

        def ask(method: str, path: str, body: Any = None, **more: Any) -> Reply:
            return request(port, method, path, body, host=host, **more)

        for headers in ({}, {"X-Forwarded-For": "127.0.0.1"}, {"Host": "localhost"}):
            assert ask("POST", REMOVE_PATH, KEYS, headers=headers).status == 403
        for path in READS:
            assert ask("GET", path).status == 200, path
        curl = [*prefix, "curl", "-s", "-H", "Content-Type: application/json", "-w", "%{http_code}"]
        url = f"http://127.0.0.1:{port}{REMOVE_PATH}"
        done = subprocess.run(
            [*curl, "-d", json.dumps(KEYS), url], capture_output=True, check=True, timeout=60
        )
        assert done.stdout.endswith(b"200")
        cluster.master_server.terminate()
        cluster.master(http_token_file=of_token(tmp_path))
        until(lambda: cluster.state_of(cluster.nodes[0]) == "alive")
        assert ask("POST", REMOVE_PATH, KEYS).status == 401
        assert ask("POST", REMOVE_PATH, KEYS, token=TOKEN).status == 200


# --- TLS ------------------------------------------------------------------------------------------


def test_over_tls_with_a_certificate_that_is_renewed(started: Started, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "first")
    other_cert, other_key = certificate(tmp_path, "second")
    _, port = started(http_cert=cert, http_key=key, events="on")
    first, second = (ssl.create_default_context(cafile=each) for each in (cert, other_cert))
    keys = {"keys": ["00" * 200] * 1_000}
    assert request(port, "POST", REMOVE_PATH, keys, tls=first).json == {"removed": [False] * 1_000}
    assert request(port, "GET", "/readyz", tls=first).text == "leads\n"
    told = follow([f"https://127.0.0.1:{port}"], cacert=cert)
    assert next(told).name == "cleared"
    told.close()  # type: ignore[attr-defined]
    with pytest.raises(ssl.SSLCertVerificationError):
        request(port, "GET", "/readyz", tls=second)
    assert "https://" in request(port, "GET", "/readyz").text

    os.replace(other_cert, cert)  # half of a renewal: the pair before it serves on
    assert request(port, "GET", "/readyz", tls=first).status == 200
    os.replace(other_key, key)

    def is_renewed() -> bool:
        with contextlib.suppress(ssl.SSLCertVerificationError):
            return request(port, "GET", "/readyz", tls=second).status == 200
        return False

    until(is_renewed)
    with pytest.raises(ssl.SSLCertVerificationError):
        request(port, "GET", "/readyz", tls=first)


def test_a_node_over_tls_with_a_token(cluster: Cluster, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "node")
    cluster.master()
    port = free_port()
    cluster.node(
        http_port=port, http_cert=cert, http_key=key, http_token_file=of_token(tmp_path),
        http_reads="token",
    )  # fmt: skip
    tls = ssl.create_default_context(cafile=cert)
    assert request(port, "GET", "/readyz", tls=tls).text == "joined\n"
    assert request(port, "GET", "/metrics", tls=tls).status == 401
    assert "kvstore_node_info" in request(port, "GET", "/metrics", tls=tls, token=TOKEN).text
