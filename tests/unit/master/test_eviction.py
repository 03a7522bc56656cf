"""What goes when room is needed, and in which order. Room is made by puts without a word."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state import pool
from kvstore.master.state.eviction import LRU
from kvstore.master.state.pool import EVICTIONS_PER_STEP
from kvstore.master.state.putting import MAKING_ROOM_MS
from kvstore.master.state.records import ObjectRecord
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


def test_a_removed_tip_protects_its_ancestors_though_another_branch_went_later(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    cluster.put("ab")
    cluster.put("c", parent="a")
    cluster.after(LEASE_MS)
    cluster.match("ab")
    cluster.remove("b")

    cluster.put("xy")  # one was free, the other branch goes

    assert cluster.present("abcxy") == "axy"
    with pytest.raises(NoSpaceError):
        cluster.put("uvw")


def test_the_death_of_a_leased_tip_leaves_its_ancestors_protected(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2, two=1)
    cluster.put("ab", host="host-one")
    cluster.put("c", parent="b", host="host-two")
    cluster.after(LEASE_MS)
    assert cluster.match("abc") == 3

    cluster.kill("two")

    with pytest.raises(NoSpaceError):
        cluster.put("x")
    cluster.after(LEASE_MS)
    cluster.put("x")


def test_a_block_that_moves_to_another_parent_leaves_the_old_one_protected(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abc")
    cluster.match("abc")
    cluster.remove("b")

    cluster.put("b")  # a root now

    with pytest.raises(NoSpaceError):
        cluster.put("x")


def test_detached_blocks_go_before_older_ones(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=5)
    cluster.put("x")
    cluster.after(1)
    cluster.put("abc")
    cluster.remove("b")
    cluster.after(LEASE_MS)

    cluster.put("uvw")  # two blocks were free

    assert cluster.present("abcxuvw") == "axuvw"


def test_blocks_that_were_made_whole_again_are_as_old_as_they_are(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=5)
    cluster.after(1)
    cluster.put("x")
    cluster.after(1)
    cluster.put("abc")
    cluster.remove("b")
    cluster.after(LEASE_MS)
    cluster.put("b", parent="a")

    cluster.put("uv")

    assert cluster.match("abc") == 3
    assert cluster.present("x") == ""


def test_a_child_that_arrives_first_goes_first(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    cluster.put("x")
    cluster.after(1)
    cluster.put("b", parent="a")
    cluster.after(1)

    cluster.put("yz")

    assert cluster.present("bxyz") == "xyz"


def test_a_child_that_arrived_first_is_whole_when_its_parent_is_there(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    cluster.put("x")
    cluster.after(1)
    cluster.put("c", parent="b")
    cluster.put("b", parent="a")
    assert cluster.match("abc") == 0

    cluster.put("a")

    assert cluster.match("abc") == 3
    cluster.after(LEASE_MS)
    cluster.put("y")
    assert cluster.match("abc") == 3


def test_a_block_that_becomes_a_leaf_late_is_marked_all_the_same(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SETTLE_STEPS", 1)
    cluster = new_cluster(one=8)
    cluster.revoke(cluster.start("abcd"), settled=True)  # forgets the tip, the rest later
    cluster.put("b", parent="a")

    cluster.work()

    record = cluster.state.forest.get(NAMESPACE, Key(b"b"))
    assert record is not None
    assert cluster.state.pool.marked_detached(record)


def test_evicting_a_detached_chain_goes_on_before_older_blocks(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=6)
    cluster.put("x")
    cluster.after(1)
    cluster.put("abcd")
    cluster.remove("a")
    cluster.after(LEASE_MS)

    cluster.put("stuvw")

    assert cluster.present("abcdx") == "x"


def test_the_background_work_finds_every_detached_leaf(new_cluster: NewCluster) -> None:
    # More leaves than one slice looks at, some of which are known to be whole already.
    whole = [f"w{index}" for index in range(2_500)]
    cut_off = [f"c{index}" for index in range(2_500)]
    cluster = new_cluster(one=6_000)
    cluster.put("a")
    for names in (whole, cut_off):
        cluster.after(1)
        cluster.put(names, parent="a" if names is cut_off else None, chain=False)
    cluster.remove("a")
    cluster.match(whole, placements=True)
    cluster.after(LEASE_MS + 1)

    cluster.work()

    table = cluster.state.forest.table(NAMESPACE)
    assert table is not None
    marked = sum(cluster.state.pool.marked_detached(record) for record in table)
    assert marked == len(cut_off)


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


def test_a_replica_can_be_evicted_though_the_node_of_the_first_has_died(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=8, two=4)
    cluster.put("ab", replicas=2, host="host-one")
    cluster.kill("one")
    cluster.remove("b")
    cluster.after(LEASE_MS)

    cluster.put("wxyz")

    assert cluster.present("abwxyz") == "wxyz"


def test_more_than_one_step_may_evict_is_evicted_in_further_steps(new_cluster: NewCluster) -> None:
    blocks = 3 * EVICTIONS_PER_STEP
    cluster = new_cluster(one=blocks)
    cluster.put([f"a{index}" for index in range(blocks)], chain=False)

    ticket = cluster.start_or_wait([f"b{index}" for index in range(blocks)], chain=False)

    assert isinstance(ticket, int)
    assert cluster.state.counters["evicted_objects"] == EVICTIONS_PER_STEP
    cluster.work()
    assert ticket in cluster.answers


def test_a_put_that_needs_many_steps_is_answered_in_time_all_the_same(
    new_cluster: NewCluster,
) -> None:
    blocks = 3 * EVICTIONS_PER_STEP
    cluster = new_cluster(one=blocks)
    cluster.put([f"a{index}" for index in range(blocks)], chain=False)
    ticket = cluster.start_or_wait([f"b{index}" for index in range(blocks)], chain=False)
    assert isinstance(ticket, int)

    cluster.now_ms += MAKING_ROOM_MS
    cluster.state.tick(cluster.now_ms)  # for want of idle time, the first since
    cluster.say("one", calls.NodeBeat(1))

    assert isinstance(cluster.answers[ticket], NoSpaceError)


def test_a_batch_that_can_never_fit_evicts_nothing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3, two=3)
    cluster.put("ab")

    with pytest.raises(NoSpaceError):
        cluster.put("stuvwxy")

    assert cluster.present("ab") == "ab"


def test_what_is_used_counts_from_the_first_millisecond() -> None:
    policy = LRU()
    first, second = (ObjectRecord(Namespace("n"), Key(key)) for key in (b"1", b"2"))
    policy.add(first)
    policy.add(second)

    first.last_used_ms = 5

    assert policy.peek(6) is second


def test_making_room_may_forget_the_place_of_what_is_put(new_cluster: NewCluster) -> None:
    """Found by the simulation: what was known of the key before is in no table any more."""
    cluster = new_cluster(one=1)
    cluster.put("b", parent="a")  # a is the place of a parent that is missing
    cluster.after(cluster.rules.lease_ms + 1_000)

    cluster.put("a")  # b has to go, and with it the place of its parent

    assert cluster.present("ab") == "a"
    cluster.state.check_invariants()


def test_a_peek_that_meets_too_many_leased_says_that_it_is_unfinished_and_gets_there() -> None:
    policy = LRU()
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
    policy.check_invariants()
