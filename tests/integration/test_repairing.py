"""Replicas that are missing come back by themselves: real nodes copy, while others write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from tests.support.cluster import SHORT, Cluster, Node
from tests.support.traffic import content
from tests.support.waiting import until

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


def test_what_a_lost_node_held_is_copied_to_another(store: Cluster) -> None:
    nodes = [store.node() for _ in range(3)]
    client = store.client()
    keys = [f"k{index}" for index in range(40)]
    client.put_many([(key, content(key, SIZE)) for key in keys], replicas=2)
    lost = next(node for node in nodes if any(node.name in nodes_of(client, k) for k in keys))
    dead(store, lost)
    rest = {node.name for node in nodes if node is not lost}
    until(lambda: all(nodes_of(client, key) == rest for key in keys))
    reader = store.client(transports=("tcp",))
    dead(store, next(node for node in nodes if node is not lost))
    assert reader.get_many(keys) == [content(key, SIZE) for key in keys]


def test_what_is_overwritten_and_removed_meanwhile(store: Cluster) -> None:
    """While copies are made as slowly as it goes."""
    first = store.node()
    client = store.client()
    keys = [f"k{index}" for index in range(60)]
    client.put_many([(key, content(key, SIZE)) for key in keys], replicas=2)
    second = store.node()
    removed: set[str] = set()
    replaced: set[str] = set()
    while dict(store.status().counters)["under_replicated_objects"]:
        left = [key for key in keys if key not in removed | replaced]
        if not left:
            break
        client.remove(left[0])
        removed.add(left[0])
        for key in left[-1:]:
            client.put(key, content(key + "new", SIZE), overwrite=True, replicas=2)
            replaced.add(key)
    until(lambda: not dict(store.status().counters)["under_replicated_objects"])
    dead(store, first)
    reader = store.client()
    for key in keys:
        want = None if key in removed else content(key + "new" if key in replaced else key, SIZE)
        assert reader.get(key) == want, key
    del second
