"""Another port of a running master or node instead of a master's gRPC port, and what is said."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.errors import MasterUnreachableError
from kvstore.wire import port_probe
from tests.support.cluster import Cluster
from tests.support.http import http_port_of


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
            port_probe.GRPC: cluster.address,
            port_probe.LANE: f"127.0.0.1:{cluster.lane_port}",
            port_probe.HTTP: f"127.0.0.1:{http}",
            port_probe.DATA: node.address,
        }
    finally:
        cluster.close()


OTHERS = [port_probe.LANE, port_probe.HTTP, port_probe.DATA]


@pytest.mark.parametrize("what", [port_probe.GRPC, *OTHERS])
def test_a_port_says_what_it_is(others: dict[str, str], what: str) -> None:
    assert port_probe.identify_service(others[what]) == what


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
