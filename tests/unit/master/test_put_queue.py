"""Puts that find no room: refused with what is missing, or served as soon as there is some."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.errors import BusyError, NoSpaceError
from kvstore.master.state.rules import MasterRules
from tests.unit.master.cluster import BLOCK, EXTENT, STEP_MS, Cluster
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000


@pytest.fixture
def full(new_cluster: NewCluster) -> Cluster:
    """Three blocks, all leased."""
    cluster = new_cluster(one=3)
    cluster.put("abc")
    cluster.match("abc")
    return cluster


def _served(cluster: Cluster, ticket: int) -> bool:
    return isinstance(cluster.answers.get(ticket), calls.Grants)


def _refused(cluster: Cluster, ticket: int) -> int:
    """By how many bytes."""
    answer = cluster.answers[ticket]
    assert isinstance(answer, NoSpaceError)
    return int(answer.fields["missing_bytes"])


def test_a_put_that_may_not_wait_is_told_how_much_is_missing(full: Cluster) -> None:
    with pytest.raises(NoSpaceError) as refused:
        full.start("xy")

    assert refused.value.fields["missing_bytes"] == 2 * EXTENT


def test_pieces_that_are_too_small_are_missing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abcd", chain=False)
    cluster.lookup("bd")

    with pytest.raises(NoSpaceError) as refused:
        cluster.start("x", size=BLOCK + EXTENT)

    assert refused.value.fields["missing_bytes"] == EXTENT


def test_without_any_node_the_error_says_so(new_cluster: NewCluster) -> None:
    with pytest.raises(NoSpaceError, match="no node has mounted any memory"):
        new_cluster().start("a")


def test_a_waiting_put_is_served_when_a_lease_ends(full: Cluster) -> None:
    ticket = full.wait("x")

    full.after(LEASE_MS - STEP_MS)
    assert ticket not in full.answers
    full.after(STEP_MS)

    assert _served(full, ticket)
    grants = full.answers[ticket]
    assert isinstance(grants, calls.Grants)
    assert full.end(grants) == [PutOutcome.STORED]


def test_a_waiting_put_is_served_when_a_put_ends_whose_block_can_be_evicted(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=1)
    grants = cluster.start("a")
    ticket = cluster.wait("x")

    cluster.end(grants)
    cluster.work()

    assert _served(cluster, ticket)


def test_a_waiting_put_is_served_when_a_commit_gives_back_a_part(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    token = cluster.allocate(2 * EXTENT - 1024)
    ticket = cluster.wait("x")

    cluster.commit(token, "a")
    cluster.work()

    assert _served(cluster, ticket)
    assert cluster.present("a") == "a"


def test_a_waiting_put_is_served_when_a_reported_node_is_trusted_again(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=3)
    cluster.report("one")
    ticket = cluster.wait("x")

    cluster.after(2_001)

    assert _served(cluster, ticket)


def test_a_waiting_put_is_served_when_memory_that_others_may_read_becomes_usable(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=3)
    cluster.join("one", again=True)
    ticket = cluster.wait("x")

    cluster.after(LEASE_MS - 1)
    assert ticket not in cluster.answers
    cluster.after(1)

    assert _served(cluster, ticket)


def test_waiting_puts_are_served_in_their_order(full: Cluster) -> None:
    first, second, third = full.wait("xy"), full.wait("z"), full.wait("w")

    full.join("two", 2)
    full.work()
    assert list(full.answers) == [first]

    full.join("three", 2)
    full.work()
    assert list(full.answers) == [first, second, third]


def test_many_waiting_puts_are_served_over_several_steps(full: Cluster) -> None:
    tickets = [full.wait([f"x{index}"]) for index in range(40)]

    full.join("two", 40)
    full.state.work(full.now_ms)
    served_at_once = sum(ticket in full.answers for ticket in tickets) + len(full.state.effects)
    full.work()

    assert 0 < served_at_once < 40
    assert list(full.answers) == tickets


def test_a_put_that_waited_in_vain_is_refused_at_its_deadline(full: Cluster) -> None:
    ticket = full.wait("xy", wait_ms=2_000)

    full.after(2_000 - 1)
    assert ticket not in full.answers
    full.after(1)

    assert _refused(full, ticket) == 2 * EXTENT


def test_a_put_behind_another_is_refused_at_its_own_deadline(full: Cluster) -> None:
    first, second = full.wait("xy", wait_ms=5_000), full.wait("z", wait_ms=1_000)

    full.after(1_000)

    assert first not in full.answers
    assert _refused(full, second) == EXTENT


def test_when_the_first_is_refused_the_next_is_served(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    cluster.put("ab")
    cluster.match("ab")
    grants = cluster.start("c")
    first, second = cluster.wait("xy", wait_ms=1_000), cluster.wait("z", wait_ms=5_000)
    cluster.revoke(grants, quiesced=True)
    cluster.work()
    assert not cluster.answers

    cluster.after(1_000)

    assert _refused(cluster, first) == EXTENT
    assert _served(cluster, second)


def test_nobody_waits_longer_than_the_master_allows(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=MasterRules(put_wait_max_ms=1_000))
    ticket = cluster.wait("x", wait_ms=1_000_000)

    cluster.after(1_000)

    assert ticket in cluster.answers


def test_no_more_puts_wait_than_allowed(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=MasterRules(waiting_puts_max=2))
    cluster.wait("a")
    cluster.wait("b")

    with pytest.raises(BusyError):
        cluster.start_or_wait("c", wait_ms=1_000)
    with pytest.raises(NoSpaceError):
        cluster.start_or_wait("c", wait_ms=0)


def test_the_bound_of_puts_under_way_holds_for_those_that_waited(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=MasterRules(pending_puts_max=2))
    first, second = cluster.wait("ab"), cluster.wait("c")

    cluster.join("one", 8)
    cluster.work()

    assert _served(cluster, first)
    assert isinstance(cluster.answers[second], BusyError)


def test_a_put_that_nobody_waits_for_any_more_lets_the_next_one_pass(full: Cluster) -> None:
    first, second = full.wait("xy"), full.wait("z")

    full.state.cancel(first)
    full.join("two", 1)
    full.work()

    assert list(full.answers) == [second]


def test_outcomes_are_those_of_the_time_of_the_answer(full: Cluster) -> None:
    ticket = full.wait("xy")
    full.join("two", 1)
    full.put("x", host="host-two")
    full.work()

    full.join("three", 1)
    full.work()

    answer = full.answers[ticket]
    assert isinstance(answer, calls.Grants)
    assert list(answer.outcomes) == [PutOutcome.FOUND, PutOutcome.WRITE]
