"""What goes when room is needed, and in which order. Room is made by puts without a word."""

from __future__ import annotations

import pytest

from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state.eviction import LruPolicy
from kvstore.master.state.memory_pool import EVICTIONS_PER_STEP
from kvstore.master.state.records import ObjectRecord
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import NAMESPACE
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000


def test_the_least_recently_used_goes_first(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    for name in "abc":
        cluster.after(1)
        cluster.put(name)
    cluster.after(1)
    cluster.match("a")
    cluster.after(LEASE_MS)

    cluster.put("x")

    assert cluster.present("abcx") == "acx"


def test_the_age_of_what_is_evicted_is_counted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    cluster.put("ab")
    ages = cluster.state.pool.eviction_ages_ms
    cluster.after(3 * LEASE_MS)
    cluster.put("x")
    assert ages.total == 3 * LEASE_MS
    cluster.after(2 * LEASE_MS)
    cluster.put("y")
    assert ages.total == (3 + 5) * LEASE_MS
    assert sum(ages.counts) == 2 == cluster.state.counters["evicted_objects"]


def test_a_chain_goes_from_its_tip(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    cluster.put("abc")

    cluster.put("x")

    assert cluster.match("abc") == 2


def test_a_parent_inherits_the_recency_of_its_child(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("ab")
    cluster.after(1)
    cluster.put("c")
    cluster.after(1)
    cluster.match("ab")  # the tip is used, and the root with it
    cluster.after(1)
    cluster.put("d")
    cluster.after(LEASE_MS)

    cluster.put("xy")  # c, and then the tip

    assert cluster.present("abcdxy") == "adxy"
    cluster.put("z")
    assert cluster.present("adxyz") == "dxyz"


def test_a_lease_on_the_tip_protects_the_chain(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abcd")
    assert cluster.match("abcd") == 4

    with pytest.raises(NoSpaceError):
        cluster.put("x")

    cluster.after(LEASE_MS)
    cluster.put("x")
    assert cluster.match("abcd") == 3


def test_a_lease_on_an_inner_block_outlives_those_behind_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abcd")
    cluster.match("ab")

    cluster.put("xy")

    assert cluster.present("abcd") == "ab"
    with pytest.raises(NoSpaceError):
        cluster.put("uvw")


def test_removing_a_leased_tip_leaves_its_ancestors_protected(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    cluster.put("abc")
    cluster.match("abc")

    cluster.remove("c")

    with pytest.raises(NoSpaceError):
        cluster.put("x")
    assert cluster.match("ab") == 2


def test_detached_blocks_go_before_older_ones(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=5)
    cluster.put("x")
    cluster.after(1)
    cluster.put("abc")
    cluster.remove("b")
    cluster.after(LEASE_MS)

    cluster.put("uvw")  # two blocks were free

    assert cluster.present("abcxuvw") == "axuvw"


def test_many_breaks_do_not_keep_the_background_work_from_ending_a_round(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=5_000, two=10)
    cluster.after(1)
    cluster.put([f"w{index}" for index in range(4_500)], chain=False, host="host-one")
    cluster.put("abc", host="host-two")
    cluster.remove("b")

    for name in [f"w{index}" for index in range(100)]:
        cluster.put([f"{name}x"], parent=name)
        cluster.remove_later([name])  # another break
        cluster.state.work(cluster.now_ms)

    record = cluster.state.forest.get(NAMESPACE, Key(b"c"))
    assert record is not None
    assert cluster.state.pool.marked_detached(record)


def test_more_than_one_step_may_evict_is_evicted_in_further_steps(new_cluster: NewCluster) -> None:
    blocks = 3 * EVICTIONS_PER_STEP
    cluster = new_cluster(one=blocks)
    cluster.put([f"a{index}" for index in range(blocks)], chain=False)

    ticket = cluster.start_or_wait([f"b{index}" for index in range(blocks)], chain=False)

    assert isinstance(ticket, int)
    assert cluster.state.counters["evicted_objects"] == EVICTIONS_PER_STEP
    cluster.work()
    assert ticket in cluster.answers


def test_a_batch_that_can_never_fit_evicts_nothing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3, two=3)
    cluster.put("ab")

    with pytest.raises(NoSpaceError):
        cluster.put("stuvwxy")

    assert cluster.present("ab") == "ab"


def test_making_room_may_forget_the_place_of_what_is_put(new_cluster: NewCluster) -> None:
    """Found by the simulation: what was known of the key before is in no table any more."""
    cluster = new_cluster(one=1)
    cluster.put("b", parent="a")  # a is the place of a parent that is missing
    cluster.after(cluster.rules.lease_ms + 1_000)

    cluster.put("a")  # b has to go, and with it the place of its parent

    assert cluster.present("ab") == "a"
    check_invariants(cluster.state)


def test_a_peek_that_meets_too_many_leased_says_that_it_is_unfinished_and_gets_there() -> None:
    policy = LruPolicy()
    records = [ObjectRecord(Namespace("n"), Key(b"%06d" % index)) for index in range(2_000)]
    for record in records:
        policy.add(record)
        record.lease_until_ms = 10
    records[-1].lease_until_ms = 0

    answers = [policy.peek(5)]
    while policy.unfinished:
        answers.append(policy.peek(5))

    assert answers[-1] is records[-1]
    assert answers[:-1] == [None] * (len(answers) - 1)
    assert len(answers) > 2
    check_invariants(policy)
