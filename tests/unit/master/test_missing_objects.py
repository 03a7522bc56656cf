"""Objects that went with their node are lost only if they do not come back."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.master.state.inventory import Claim
from kvstore.master.state.missing_objects import LOST_AFTER_MS, NODES_MAX, TOLD_MS
from tests.unit.master.cluster import NAMESPACE, Cluster, claim_at
from tests.unit.master.conftest import NewCluster


@pytest.fixture
def one(new_cluster: NewCluster) -> Cluster:
    cluster = new_cluster(a=8, b=8)
    cluster.put("xyz", chain=False, host="host-a")
    cluster.after(20_000)
    return cluster


def claims_of(cluster: Cluster, names: str) -> list[Claim]:
    details = [(name, cluster.stat(name)) for name in names]
    return [claim_at(name, each.version, each.placements.offsets[0]) for name, each in details]


def kill(cluster: Cluster, name: str) -> None:
    cluster.silent.add(name)
    cluster.after(10_000)


def gone(cluster: Cluster) -> list[calls.DepartedNode]:
    return list(cluster.status().departed)


def counted(cluster: Cluster, name: str) -> int:
    return dict(cluster.status().counters).get(name, 0)


def test_what_comes_back_with_its_node_was_never_lost(one: Cluster) -> None:
    claims = claims_of(one, "xyz")
    kill(one, "a")
    (row,) = gone(one)
    assert (row.name, row.host, row.reason, row.missing, row.lost) == ("a", "a:9", "silent", 3, 0)
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
    one.after(TOLD_MS)
    assert gone(one), "it is still dead"
    one.join("a", 8)
    one.after(1_000)
    assert gone(one) == []


def test_a_drained_node_is_not_missed(one: Cluster) -> None:
    for step in (calls.DrainStep.BEGIN, calls.DrainStep.LEAVE):
        one.drain("a", step)
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


def come_back(cluster: Cluster, name: str, *claims: Claim) -> None:
    cluster.join(name, again=True, tells=False)
    cluster.tell(name, *claims)
    cluster.after(1_000)


def loses_nothing(cluster: Cluster) -> None:
    assert gone(cluster) == []
    cluster.after(LOST_AFTER_MS + TOLD_MS)
    assert (counted(cluster, "missing_objects"), counted(cluster, "lost_objects")) == (0, 0)


def test_what_is_put_again_is_missing_until_its_node_is_back(one: Cluster) -> None:
    claims = claims_of(one, "xyz")
    kill(one, "a")
    one.put("xy", chain=False)
    assert one.present("xyz") == "xy"
    assert counted(one, "missing_objects") == 3
    come_back(one, "a", *claims)
    assert counted(one, "refused_claims") == 2
    assert one.present("xyz") == "xyz"
    loses_nothing(one)


def test_what_is_removed_is_missing_until_its_node_is_back(one: Cluster) -> None:
    claims = claims_of(one, "xyz")
    kill(one, "a")
    one.remove("x")
    assert counted(one, "missing_objects") == 3
    come_back(one, "a", *claims)
    assert (one.present("xyz"), counted(one, "refused_claims")) == ("yz", 1)
    loses_nothing(one)


@pytest.mark.parametrize("namespace", [NAMESPACE, ""])
def test_what_is_cleared_is_missing_until_its_node_is_back(one: Cluster, namespace: str) -> None:
    claims = claims_of(one, "xyz")
    kill(one, "a")
    one.clear(100, namespace)
    one.work()
    assert counted(one, "missing_objects") == 3
    come_back(one, "a", *claims)
    assert (one.present("xyz"), counted(one, "refused_claims")) == ("", 3)
    loses_nothing(one)


def test_a_node_that_dies_twice_misses_what_it_had_then(one: Cluster) -> None:
    claims = claims_of(one, "xyz")
    kill(one, "a")
    one.after(LOST_AFTER_MS)
    assert counted(one, "lost_objects") == 3
    come_back(one, "a", *claims)
    kill(one, "a")
    assert counted(one, "missing_objects") == 3
    one.put("x")
    come_back(one, "a", *claims)
    assert (one.present("xyz"), counted(one, "missing_objects")) == ("xyz", 0)
    one.after(LOST_AFTER_MS)
    assert counted(one, "lost_objects") == 3
