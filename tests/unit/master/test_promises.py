"""Promises of the master that a change of one line can break unseen: each has its test here."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import NO_VERSION, PutOutcome, Version
from kvstore.errors import NoSpaceError, SegmentUnmountedError
from tests.unit.master.cluster import EPOCH, Cluster, claim_at
from tests.unit.master.conftest import NewCluster

WRITE, FOUND, BEING_WRITTEN, STORED, REFUSED, _ = PutOutcome
LEASE_MS, DEADLINE_MS, QUARANTINE_MS = 10_000, 30_000, 20_000
BEFORE = EPOCH - 1


def _die(cluster: Cluster, name: str) -> None:
    cluster.break_stream(name)
    cluster.report(name)


# --- nobody writes where a header may stand ------------------------------------------------------


def test_a_grant_waits_until_what_was_evicted_for_it_is_wiped(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    version = cluster.stat("a").version
    cluster.wipes_at_once = False

    ticket = cluster.start_or_wait("b")

    assert isinstance(ticket, int)
    assert ticket not in cluster.answers
    assert [order.counters for _, order in cluster.orders] == [[version.counter]]
    cluster.wipe()
    assert isinstance(cluster.answers.pop(ticket), calls.Grants)


def test_a_put_that_waited_for_room_waits_until_that_is_wiped(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    grants = cluster.start("a")
    ticket = cluster.wait("b")
    cluster.wipes_at_once = False

    cluster.revoke(grants, quiesced=True)
    cluster.work()

    assert ticket not in cluster.answers
    cluster.wipe()
    assert isinstance(cluster.answers.pop(ticket), calls.Grants)


def test_what_is_in_quarantine_is_wiped_again_at_its_end(new_cluster: NewCluster) -> None:
    """A writer through shared memory may have gone on until its deadline."""
    cluster = new_cluster(one=1)
    grants = cluster.start("a")
    cluster.wipes_at_once = False
    cluster.revoke(grants, quiesced=False)
    cluster.wipe()

    cluster.after(DEADLINE_MS + QUARANTINE_MS)

    assert [order.counters for _, order in cluster.orders] == [list(grants.tokens)]
    ticket = cluster.start_or_wait("b")
    assert isinstance(ticket, int)
    assert ticket not in cluster.answers
    cluster.wipe()
    assert isinstance(cluster.answers.pop(ticket), calls.Grants)


# --- leases --------------------------------------------------------------------------------------


def test_a_put_evicts_neither_its_parent_nor_what_it_finds(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")

    for names in ("b", "ab"):
        with pytest.raises(NoSpaceError):
            cluster.start(names, parent=None if "a" in names else "a", chain=False)
        cluster.after(1)


def test_what_a_put_finds_and_the_parent_of_a_put_are_leased_no_longer_than_the_put(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=2)
    cluster.put("a")
    assert list(cluster.start("a").outcomes) == [FOUND]
    cluster.revoke(cluster.start("b", parent="a"), quiesced=True)

    cluster.after(1)
    cluster.put("xy")


def test_removed_memory_is_free_when_the_longest_lease_on_it_has_ended(
    new_cluster: NewCluster,
) -> None:
    """Who committed an allocation believes in it until the deadline that it had."""
    cluster = new_cluster(one=1)
    assert cluster.commit(cluster.allocate(), "a") is STORED
    assert cluster.remove("a") == [1]

    cluster.after(DEADLINE_MS - 1)
    with pytest.raises(NoSpaceError):
        cluster.start("b")
    cluster.after(1)
    cluster.put("b")


def test_a_claimed_object_is_kept_while_leases_on_any_of_its_segments_may_live(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster()
    version = Version(BEFORE, 1)
    for name in ("one", "two"):
        cluster.join(name, 1)
        _die(cluster, name)
        cluster.join(name, again=True, tells=False)
        cluster.tell(name, claim_at("a", version))
        cluster.after(LEASE_MS - 1_000 if name == "one" else 2_000)

    # The first is usable now.
    assert isinstance(cluster.start_or_wait("x", wait_ms=LEASE_MS), int)
    assert cluster.present("a") == "a"
    cluster.after(LEASE_MS)

    assert cluster.present("a") == ""


# --- the order of eviction -----------------------------------------------------------------------


# --- what memory that comes back says ------------------------------------------------------------


def test_what_was_overwritten_while_its_node_was_away_stays_away(new_cluster: NewCluster) -> None:
    """Also when the version that replaced it was evicted since."""
    cluster = new_cluster(one=1, two=1)
    cluster.put("a", host="host-one")
    assert cluster.where("a") == ["one"]
    version = cluster.stat("a").version
    _die(cluster, "one")
    cluster.put("a", overwrite=True)
    cluster.after(1_000)
    cluster.put("b")
    assert cluster.present("ab") == "b"

    cluster.join("one", again=True, tells=False)
    cluster.tell("one", claim_at("a", version))

    assert cluster.present("ab") == "b"


@pytest.mark.parametrize("evicted", [False, True])
def test_what_an_earlier_grant_replaced_stays_away(new_cluster: NewCluster, evicted: bool) -> None:
    """Versions are counted when space is granted: what replaces may be older than what it
    replaces."""
    cluster = new_cluster(one=1, two=1)
    token = cluster.allocate()
    cluster.put("a")
    [gone] = cluster.where("a")
    version = cluster.stat("a").version
    _die(cluster, gone)
    assert cluster.commit(token, "a", overwrite=True) is STORED
    if evicted:
        cluster.after(DEADLINE_MS + LEASE_MS)
        cluster.put("b")

    cluster.join(gone, again=True, tells=False)
    cluster.tell(gone, claim_at("a", version))

    assert cluster.present("ab") == ("b" if evicted else "a")
    assert evicted or cluster.where("a") != [gone]


def test_what_replaced_a_later_grant_comes_back_with_its_node(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1, two=1)
    token = cluster.allocate()
    cluster.put("a")
    assert cluster.commit(token, "a", overwrite=True) is STORED
    [node] = cluster.where("a")
    version = cluster.stat("a").version
    _die(cluster, node)
    assert cluster.present("a") == ""

    cluster.join(node, again=True, tells=False)
    cluster.tell(node, claim_at("a", version))

    assert cluster.where("a") == [node]


def test_what_is_still_being_put_is_not_claimed(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1, two=1)
    grants = cluster.start("a", replicas=2)
    _die(cluster, "one")

    cluster.join("one", again=True, tells=False)
    cluster.tell("one", claim_at("a", Version(EPOCH, grants.tokens[0])))

    assert cluster.present("a") == ""
    assert cluster.end(grants) == [STORED]
    assert cluster.lookup("a") == [["two"]]


def test_a_mark_of_an_earlier_master_does_not_replace_ours(new_cluster: NewCluster) -> None:
    """Otherwise the next removal makes a mark that memory has which misses it."""
    cluster = new_cluster(one=1)
    cluster.join("two", 1)
    _die(cluster, "two")
    cluster.join("two", again=True, mark=Version(BEFORE, 5))
    cluster.orders.clear()
    cluster.wipes_at_once = False

    cluster.remove_later("?")

    marks = {order.removal_watermark for _, order in cluster.orders} - {NO_VERSION}
    assert marks == {Version(EPOCH, 2)}


def test_a_node_does_not_resume_under_another_generation(new_cluster: NewCluster) -> None:
    """It has fenced since: what was granted on it is void."""
    cluster = new_cluster(one=1)
    cluster.break_stream("one")
    cluster.offers["one"] = [offer._replace(generation=2) for offer in cluster.offers["one"]]

    with pytest.raises(SegmentUnmountedError):
        cluster.join("one", resume=True)
