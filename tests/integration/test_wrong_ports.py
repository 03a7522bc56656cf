"""Another port of a running master or node instead of a master's gRPC port, and what is said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, ports
from kvstore.config import ClientConfig
from kvstore.diagnosis.cluster import ClusterChecks
from kvstore.errors import MasterUnreachableError
from tests.support.cluster import Cluster
from tests.support.http import http_port_of
from tests.support.processes import run_python
from tests.support.waiting import until


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The other ports of a store's processes, by what they are; and the right one, as a gRPC
    server."""
    cluster = Cluster(tmp_path_factory.mktemp("ports"))
    try:
        del cluster.settings["http_port"]
        http = http_port_of(cluster.master())
        cluster.node()
        [node] = cluster.status().nodes
        yield {
            ports.GRPC: cluster.address,
            ports.LANE: f"127.0.0.1:{cluster.lane_port}",
            ports.HTTP: f"127.0.0.1:{http}",
            ports.DATA: node.address,
        }
    finally:
        cluster.close()


OTHERS = [ports.LANE, ports.HTTP, ports.DATA]


@pytest.mark.parametrize("what", [ports.GRPC, *OTHERS])
def test_a_port_says_what_it_is(others: dict[str, str], what: str) -> None:
    assert ports.what_answers(others[what]) == what


def test_a_silent_or_absent_server_says_nothing() -> None:
    began = time.monotonic()
    assert ports.what_answers("127.0.0.1:9") == ""
    assert ports.what_answers("no.such.invalid:9") == ""
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("what", OTHERS)
def test_a_client_is_told_at_once(others: dict[str, str], what: str) -> None:
    began = time.monotonic()
    with (
        Client(others[what], timeout_ms=20_000) as client,
        pytest.raises(MasterUnreachableError, match=what) as caught,
    ):
        client.get("key")
    assert time.monotonic() - began < 5
    assert "gRPC port" in caught.value.advice


@pytest.mark.parametrize("what", OTHERS)
def test_the_doctor_says_it(others: dict[str, str], what: str) -> None:
    [found] = ClusterChecks(ClientConfig()).master(others[what]).found
    assert what in found.found
    assert "gRPC port" in found.advice


def test_a_node_says_it(others: dict[str, str], cluster: Cluster) -> None:
    node = cluster.launch_node(master=others[ports.LANE])
    until(lambda: f"reason=no session with the master at {others[ports.LANE]}" in node.errors)
    assert f"that is {ports.LANE}" in node.errors
    assert node.terminate() == 0


def test_an_error_is_short_to_read(tmp_path: Path) -> None:
    """One traceback, that of the call: none of the attempts that failed."""
    program = "from kvstore import Client; Client('127.0.0.1:9', timeout_ms=1500).get('key')"
    done = run_python("-c", program)
    assert done.stderr.count("Traceback") == 1
    assert "another exception" not in done.stderr
    first, *_, last = done.stderr.splitlines()
    assert first.startswith("waiting for a master at 127.0.0.1:9, up to 0.")
    assert "connection refused" in last
