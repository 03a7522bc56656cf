"""Replicas that are missing come back by themselves: real nodes copy them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from tests.support.cluster import SHORT, Cluster, Node
from tests.support.wait import until
from tests.support.workload import content

SIZE = 200 << 10
SETTINGS = SHORT | {"put_deadline_ms": 20_000, "repair_after_ms": 1_000}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SETTINGS) as cluster:
        cluster.master()
        yield cluster


def nodes_of(client: Client, key: str) -> set[str]:
    """Where its replicas are."""
    stat = client.stat(key)
    segments = set() if stat is None else set(stat.detail.placements.segments)
    nodes = client.status().nodes
    return {n.name for n in nodes if any(s.segment_id in segments for s in n.segments)}


def dead(store: Cluster, node: Node) -> None:
    node.kill()
    until(lambda: store.state_of(node) == "gone")


def test_a_node_that_was_away_gets_its_replicas(store: Cluster) -> None:
    first, second = store.node(), store.node()
    dead(store, second)
    client = store.client(transports=("tcp",))
    client.put_chain(["a", "b"], [content("a", SIZE), content("b", 3)], replicas=2)
    client.put("empty", b"", replicas=2)
    keys = ["a", "b", "empty"]
    assert {name for key in keys for name in nodes_of(client, key)} == {first.name}
    second.entry.unlink()
    again = store.node(name=second.name)
    until(lambda: all(nodes_of(client, key) == {first.name, again.name} for key in keys))
    counters = dict(store.status().counters)
    assert counters["repaired_objects"] == 3
    assert counters["under_replicated_objects"] == 0
    dead(store, first)
    reader = store.client()
    assert reader.get("a") == content("a", SIZE)
    assert reader.get("b") == content("b", 3)
    assert reader.get("empty") == b""
    assert reader.match_prefix(["a", "b"]) == 2
