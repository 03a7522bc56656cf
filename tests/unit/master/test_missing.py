"""Objects that went with their node are lost only if they do not come back."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.limits import Key
from kvstore.master.state.inventory import Claim
from kvstore.master.state.missing import LOST_AFTER_MS, NODES_MAX, TOLD_MS
from tests.unit.master.cluster import BLOCK, NAMESPACE, Cluster
from tests.unit.master.conftest import NewCluster


@pytest.fixture
def one(new_cluster: NewCluster) -> Cluster:
    cluster = new_cluster(a=8, b=8)
    cluster.put("xyz", chain=False, host="host-a")
    cluster.after(20_000)
    return cluster


def claims_of(cluster: Cluster, names: str) -> list[Claim]:
    found = []
    for name in names:
        detail = cluster.stat(name)
        offset = detail.placements.offsets[0]
        found.append(Claim((NAMESPACE, Key(name.encode())), None, BLOCK, detail.version, offset))
    return found


def kill(cluster: Cluster, name: str) -> None:
    cluster.silent.add(name)
    cluster.after(10_000)


def gone(cluster: Cluster) -> list[calls.GoneNode]:
    return list(cluster.status().gone)


def counted(cluster: Cluster, name: str) -> int:
    return dict(cluster.status().counters).get(name, 0)


def test_what_comes_back_with_its_node_was_never_lost(one: Cluster) -> None:
    claims = claims_of(one, "xyz")
    kill(one, "a")
    (row,) = gone(one)
    assert (row.name, row.host, row.why, row.missing, row.lost) == ("a", "a:9", "silent", 3, 0)
    assert (counted(one, "missing_objects"), counted(one, "lost_objects")) == (3, 0)
    one.join("a", again=True, tells=False)
    assert gone(one)[0].reports
    one.tell("a", *claims)
    one.after(1_000)
    assert gone(one) == []
    one.after(LOST_AFTER_MS + TOLD_MS)
    assert (counted(one, "missing_objects"), counted(one, "lost_objects")) == (0, 0)


def test_what_is_missing_from_what_comes_back_is_lost(one: Cluster) -> None:
    claims = claims_of(one, "xy")
    kill(one, "a")
    one.join("a", again=True, tells=False)
    one.tell("a", *claims)
    one.after(1_000)
    assert [(row.name, row.missing) for row in gone(one)] == [("a", 1)]
    one.after(LOST_AFTER_MS)
    assert [(row.missing, row.lost) for row in gone(one)] == [(0, 1)]
    assert counted(one, "lost_objects") == 1
    one.after(TOLD_MS)
    assert gone(one) == []


def test_what_does_not_come_back_in_time_is_lost_and_its_node_named(one: Cluster) -> None:
    kill(one, "a")
    one.after(LOST_AFTER_MS)
    assert [(row.name, row.missing, row.lost) for row in gone(one)] == [("a", 0, 3)]
    assert counted(one, "lost_objects") == 3


def test_memory_that_takes_long_to_report_loses_nothing_meanwhile(one: Cluster) -> None:
    claims = claims_of(one, "xyz")
    kill(one, "a")
    one.join("a", again=True, tells=False)
    missing = one.state.forest.missing
    missing.tick(one.now_ms + LOST_AFTER_MS + 1, one.state.membership.nodes)
    assert counted(one, "lost_objects") == 0
    one.tell("a", *claims)
    one.after(1_000)
    assert gone(one) == []


def test_a_replica_on_either_node_brings_its_object_back(new_cluster: NewCluster) -> None:
    cluster = new_cluster(a=8, b=8)
    cluster.put("x", replicas=2)
    cluster.after(20_000)
    record = cluster.state.forest.get(NAMESPACE, Key(b"x"))
    assert record is not None
    extents = {segment.node.name: offset for segment, offset in record.extents()}
    version = cluster.stat("x").version
    kill(cluster, "a")
    assert counted(cluster, "missing_objects") == 0, "b has it"
    kill(cluster, "b")
    assert counted(cluster, "missing_objects") == 1
    for name in "ab":
        cluster.join(name, again=True, tells=False)
        claim = Claim((NAMESPACE, Key(b"x")), None, BLOCK, version, extents[name])
        cluster.tell(name, claim)
        cluster.after(1_000)
        assert counted(cluster, "missing_objects") == 0, name
    cluster.after(LOST_AFTER_MS)
    assert counted(cluster, "lost_objects") == 0
    assert gone(cluster) == []


def test_a_drained_node_is_not_missed(one: Cluster) -> None:
    for step in (calls.DrainStep.BEGIN, calls.DrainStep.LEAVE):
        one.state.nodes.drain(one.now_ms, calls.Drain("a", step))
    one._settle()
    one.silent.add("a")
    one.after(1_000)
    assert gone(one) == []
    assert (counted(one, "missing_objects"), counted(one, "lost_objects")) == (0, 3)


def test_nodes_that_are_remembered_are_bounded(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    names = [f"n{number}" for number in range(NODES_MAX + 5)]
    for name in names:
        cluster.join(name, 1)
    cluster.silent.update(names)
    cluster.after(10_000)
    assert len(gone(cluster)) == NODES_MAX
