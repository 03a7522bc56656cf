"""Refused puts say why, with numbers, and when that changes."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state import liveness
from tests.unit.master.cluster import Cluster
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000


def refused(
    cluster: Cluster,
    *,
    size: int = 1024,
    host: str = "host-x",
    avoid: tuple[str, ...] = (),
    here_only: bool = False,
    wait_ms: int = 0,
) -> NoSpaceError:
    uuids = [s.offer.uuid for s in cluster.state.pool.segments.values() if s.node.name in avoid]
    request = calls.PutStart(
        Namespace("default"), [Key(b"new")], [size], None, False, 1, False, wait_ms, host, uuids,
        here_only,
    )  # fmt: skip
    with pytest.raises(NoSpaceError) as caught:
        cluster.state.putting.put_start(cluster.now_ms, request)
    return caught.value


def address(cluster: Cluster, name: str) -> str:
    (segment,) = cluster.state.membership.segments[name]
    return segment.offer.address


def test_full_and_all_leased(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    cluster.put("a")
    cluster.put("b")
    cluster.after(1_000)
    cluster.match("a")
    cluster.match("b")
    error = refused(cluster)
    assert error.fields["cause"] == "leased"
    assert "no space for 2 KiB: of 8 KiB on 1 node, 0 bytes are free" in error.message
    assert "the first lease ends in" in error.message
    assert 0 < int(error.fields["retry_after_ms"]) <= LEASE_MS


def test_a_node_that_came_back_gives_nothing_out_for_a_lease(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    cluster.join("one", again=True)
    cluster.work()
    cluster.after(3_000)
    error = refused(cluster)
    assert error.fields["cause"] == "restarted"
    assert error.fields["retry_after_ms"] == LEASE_MS - 3_000
    assert "12 KiB on node one" in error.message
    assert "can be granted in 7.0 s" in error.message


def test_nodes_that_the_client_cannot_reach(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3, two=3)
    error = refused(cluster, avoid=("one", "two"), wait_ms=5_000)
    assert error.fields["cause"] == "avoided", "at once: waiting does not help"
    assert "24 KiB free on node one (one:9), node two" in error.message
    assert "which this client failed to reach recently" in error.message
    fine = calls.PutStart(
        Namespace("default"), [Key(b"k")], [1], None, False, 1, False, 0, "host-x",
        [cluster.state.membership.segments["one"][0].offer.uuid],
    )  # fmt: skip
    grants = cluster.state.putting.put_start(cluster.now_ms, fine)
    assert isinstance(grants, calls.Grants)
    assert cluster.state.pool.segments[grants.segments[0]].node.name == "two"


def test_a_loopback_address_is_pointed_out_to_other_hosts(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    (segment,) = cluster.state.membership.segments["one"]
    segment.offer = segment.offer._replace(address="127.0.0.1:4711")
    error = refused(cluster, avoid=("one",))
    assert "node one (127.0.0.1:4711)" in error.message
    assert "an address that only its own host reaches" in error.message
    assert "--host" in error.advice
    assert "only its own host" not in refused(cluster, avoid=("one",), host="host-one").message


def test_all_nodes_suspect(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    cluster.silent.add("one")
    cluster.after(2_500)
    assert cluster.states() == {"one": liveness.SUSPECT}
    error = refused(cluster)
    assert error.fields["cause"] == "suspect"
    assert "node one" in error.message
    assert "silent (for 2." in error.message


def test_a_client_of_shared_memory_alone_with_no_node_on_its_host(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    error = refused(cluster, here_only=True, wait_ms=5_000)
    assert error.fields["cause"] == "not_here"
    assert "shared memory alone" in error.message
    assert "host-x" in error.message
    assert "kvstore-node on the client's host" in error.advice
    mine = calls.Allocate(Namespace("default"), 10, 0, "host-one", (), True)
    assert isinstance(cluster.state.putting.allocate(cluster.now_ms, mine), calls.Grants)


def test_no_node_at_all(new_cluster: NewCluster) -> None:
    assert refused(new_cluster()).fields["cause"] == "no_node"


def test_many_nodes_are_counted_and_a_few_are_named(new_cluster: NewCluster) -> None:
    cluster = new_cluster(n0=3, n1=3, n2=3, n3=3, n4=3, n5=3, n6=3)
    error = refused(cluster, avoid=tuple(f"n{number}" for number in range(7)))
    assert error.message.count("node n") == 3
    assert "and 4 more" in error.message
