"""Objects whose bytes somebody has found to be bad."""

from __future__ import annotations

import pytest

from kvstore import calls
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import EPOCH, NAMESPACE, Cluster, claim_at, keys_of
from tests.unit.master.conftest import NewCluster


def report(cluster: Cluster, name: str, counter: int, *nodes: str, epoch: int = EPOCH) -> int:
    """Objects that are dropped, after replicas on these nodes were found to be bad."""
    rows = len(nodes)
    uuids = [cluster.offers[node][0].uuid for node in nodes]
    request = calls.ReportCorrupt(
        NAMESPACE, keys_of(name) * rows, [epoch] * rows, [counter] * rows, uuids
    )
    dropped = cluster.state.removing.report_corrupt(cluster.now_ms, request).dropped
    cluster.work()
    return dropped


def nodes_of(cluster: Cluster, name: str) -> list[str]:
    """In the order in which they are offered."""
    found = cluster.state.asking.lookup(cluster.now_ms, calls.Lookup(NAMESPACE, keys_of(name)))
    return [cluster.segments[segment] for segment in found.placements.segments]


def stored(cluster: Cluster, name: str, *, replicas: int = 1) -> int:
    """Its counter."""
    grants = cluster.start(name, replicas=replicas)
    cluster.end(grants)
    return grants.tokens[0]


def test_a_bad_object_is_gone_wiped_counted_and_can_be_put_again(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    counter = stored(cluster, "a")
    cluster.wipes_at_once = False

    assert report(cluster, "a", counter, "one") == 1

    assert cluster.present("a") == ""
    assert [order.counters for _, order in cluster.orders] == [[counter]]
    counted = dict(cluster.status().counters)
    assert (counted["corrupt_objects"], counted["corrupt_replicas"]) == (1, 1)
    assert "corrupt_object" in cluster.notices
    cluster.wipe()
    cluster.put("a")
    assert cluster.present("a") == "a"


@pytest.mark.parametrize(
    ("counter", "epoch", "node"), [(1, EPOCH, "one"), (0, EPOCH - 1, "one"), (0, EPOCH, "two")]
)
def test_another_version_or_segment_is_left_alone(
    new_cluster: NewCluster, counter: int, epoch: int, node: str
) -> None:
    cluster = new_cluster(one=4, two=1)
    counter += stored(cluster, "a")

    if node == "two" and nodes_of(cluster, "a") == ["two"]:
        node = "one"
    assert report(cluster, "a", counter, node, epoch=epoch) == 0

    assert cluster.present("a") == "a"
    assert report(cluster, "n", 1, "one") == 0


def test_a_bad_replica_is_offered_last(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4)
    counter = stored(cluster, "a", replicas=2)
    first, second = nodes_of(cluster, "a")

    assert report(cluster, "a", counter, first) == 0

    assert nodes_of(cluster, "a") == [second, first]
    check_invariants(cluster.state)
    assert report(cluster, "a", counter, first) == 0
    assert report(cluster, "a", counter, second, first) == 1
    assert cluster.present("a") == ""


def test_a_bad_replica_that_is_left_alone_is_the_object(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4)
    counter = stored(cluster, "a", replicas=2)
    first, second = nodes_of(cluster, "a")
    report(cluster, "a", counter, first)

    cluster.kill(second)

    assert nodes_of(cluster, "a") == [first]
    assert report(cluster, "a", counter, first) == 1


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_bad_object_does_not_come_back_with_a_node(new_cluster: NewCluster, dies: str) -> None:
    cluster = new_cluster(one=4, two=4)
    counter = stored(cluster, "a", replicas=2)
    version, (_, offset) = cluster.stat("a").version, cluster.place("a", "one")
    cluster.wipes_at_once = False
    if dies == "before":
        cluster.kill("one")

    assert report(cluster, "a", counter, *(["two"] if dies == "before" else ["one", "two"])) == 1

    if dies == "after":
        cluster.break_stream("one")
    cluster.join("one", again=True, tells=False)
    cluster.tell("one", claim_at("a", version, offset))
    assert cluster.present("a") == ""
    assert not cluster.renew("a", version)
    cluster.wipes_at_once = True
    cluster.wipe()
