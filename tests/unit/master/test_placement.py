"""Where new objects go."""

from __future__ import annotations

from kvstore.calls import PutOutcome
from tests.unit.master.cluster import BLOCK, EXTENT
from tests.unit.master.conftest import NewCluster


def test_a_block_goes_where_its_parent_is(new_cluster: NewCluster) -> None:
    cluster = new_cluster(small=4, large=8)
    cluster.put("a", host="host-small")

    cluster.put("b", parent="a", host="host-large")

    assert cluster.where("b") == ["small"]


def test_a_root_goes_to_the_putters_own_host(new_cluster: NewCluster) -> None:
    cluster = new_cluster(small=4, large=8)

    cluster.put("a", host="host-small")

    assert cluster.where("a") == ["small"]


def test_a_root_of_a_stranger_goes_where_most_room_is(new_cluster: NewCluster) -> None:
    cluster = new_cluster(small=4, large=8)

    cluster.put("a", host="elsewhere")

    assert cluster.where("a") == ["large"]


def test_a_batch_lies_in_one_piece(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)

    grants = cluster.start("abcd")

    first = grants.offsets[0]
    assert list(grants.offsets) == [first + EXTENT * index for index in range(4)]


def test_replicas_lie_on_distinct_nodes(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=8, three=8)

    cluster.put("ab", replicas=2)

    assert len(set(cluster.where("a"))) == 2
    assert len(set(cluster.where("b"))) == 2


def test_there_are_no_more_replicas_than_nodes(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=8)

    grants = cluster.start("a", replicas=3)

    assert grants.replicas == 2


def test_a_second_replica_finds_room_among_objects_whose_first_is_elsewhere(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(large=8, small=2)
    cluster.put("a", replicas=2)
    cluster.put("b", replicas=2)
    assert cluster.where("a") == cluster.where("b") == ["large", "small"]

    cluster.put("c", replicas=2)

    assert cluster.where("c") == ["large", "small"]
    assert cluster.present("abc") == "bc"


def test_an_inner_block_makes_room_although_its_leaf_lies_on_another_node(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(first=2, second=1)
    cluster.put("ab", host="host-first")
    cluster.put("c", parent="b", host="host-second")
    assert cluster.where("c") == ["second"]
    cluster.after(10_000)  # the put of c had leased its parent

    grants = cluster.start("x", size=2 * BLOCK, host="host-first")  # only the first could hold it

    assert list(grants.outcomes) == [PutOutcome.WRITE]
    assert cluster.present("abc") == ""


def test_a_suspect_node_gets_nothing_new_but_is_still_answered(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=4)
    cluster.put("a", host="host-one")
    cluster.break_stream("one")

    cluster.put("b", parent="a", host="host-one")

    assert cluster.where("b") == ["two"]
    assert cluster.match("ab") == 2


def test_replicas_on_suspect_nodes_come_last(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=8)
    cluster.put("a", replicas=2, host="host-one")
    assert cluster.lookup("a") == [["one", "two"]]

    cluster.report("one")

    assert cluster.lookup("a") == [["two", "one"]]
