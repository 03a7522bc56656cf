"""A node that fails towards clients, and is there for the master."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import PutOutcome
from kvstore.client.flows.location_cache import AVOID_FIRST_S
from kvstore.runtime.clock import uptime
from tests.integration.conftest import OF_MASTER, OF_NODE
from tests.support.cluster import Cluster
from tests.support.network_namespaces import IsolatedNetwork
from tests.support.workload import content

STORED = PutOutcome.STORED
KEYS = [f"key-{number}" for number in range(20)]
QUICK_S = 0.5


@pytest.fixture
def two_nodes(island: IsolatedNetwork, tmp_path: Path) -> Iterator[Cluster]:
    """Nodes that this process reaches at different addresses."""
    with island.cluster(tmp_path, dead_ms=12_000) as cluster:
        cluster.master()
        master = f"{OF_MASTER}.1:{cluster.settings['port']}"
        for subnet in (OF_NODE, OF_MASTER):
            cluster.node(host=f"{subnet}.1", master=master)
        yield cluster
        island.mend()


@pytest.mark.netns
def test_a_failing_node_costs_each_client_a_second_and_nobody_else_anything(
    island: IsolatedNetwork, two_nodes: Cluster
) -> None:
    """Both run on one host, and a firewall may be before that: the master believes neither."""
    failing, _ = two_nodes.nodes
    first, second = (two_nodes.client(transports=("tcp",), timeout_ms=9_000) for _ in range(2))
    assert set(first.put_many([(key, content(key)) for key in KEYS], replicas=2)) == {STORED}
    for client in (first, second):
        assert client.get_many(KEYS) == [content(key) for key in KEYS]
    island.cut(OF_NODE)
    for client in (first, second):
        started = uptime()
        assert _reads(client)
        assert uptime() - started < 2.0
        assert two_nodes.state_of(failing) == "alive"
    noticed = uptime()
    for number, key in enumerate(KEYS):
        started = uptime()
        assert second.get(key) == content(key)
        assert second.put(f"new-{number}", content(key)) is STORED
        assert uptime() - started < QUICK_S or started - noticed > AVOID_FIRST_S
    names = {
        segment.segment_id: node.name for node in second.status().nodes for segment in node.segments
    }
    for number in range(len(KEYS)):
        stat = second.stat(f"new-{number}")
        assert stat is not None
        assert names[stat.detail.placements.segments[0]] != failing.name
    reports = [line for line in two_nodes.master_server.errors.splitlines() if "_reported" in line]
    assert len(reports) == 1
    assert f"node={failing.name} " in reports[0]
    assert "moved no byte over tcp for 1.0 s" in reports[0]


def _reads(client: Any) -> bool:
    return bool(client.get_many(KEYS) == [content(key) for key in KEYS])
