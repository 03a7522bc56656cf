"""Pins and lifetimes: what is not evicted before its end, and what is gone after it."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import Presence
from kvstore.errors import InvalidArgumentError, NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state import retention
from kvstore.master.state.rules import MasterRules
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import BLOCK, EPOCH, EXTENT, NAMESPACE, Cluster, claim_at, keys_of
from tests.unit.master.conftest import NewCluster

ALL = MasterRules(pinned_max=1.0)
LEASE_MS = ALL.lease_ms
MINUTE_MS = 60_000


def pin(cluster: Cluster, names: str, ms: int = MINUTE_MS) -> list[int]:
    request = calls.Pin(NAMESPACE, keys_of(names), ms)
    return list(cluster.state.keeping.pin(cluster.now_ms, request).pinned)


def unpin(cluster: Cluster, names: str) -> list[int]:
    request = calls.Unpin(NAMESPACE, keys_of(names))
    return list(cluster.state.keeping.unpin(cluster.now_ms, request).unpinned)


def pinned(cluster: Cluster) -> tuple[int, int]:
    """Objects, and blocks of memory."""
    (row,) = [row for row in cluster.status().namespaces if row.name == NAMESPACE]
    return row.pinned_objects, row.pinned_bytes // EXTENT


# --- pins --------------------------------------------------------------------------------------


def test_what_is_pinned_is_not_evicted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abcd", chain=False)

    assert pin(cluster, "ax") == [1, 0]
    cluster.after(LEASE_MS)
    cluster.put("efg", chain=False)

    assert cluster.present("abcdefg") == "aefg"
    assert pinned(cluster) == (1, 1)


def test_a_pin_of_a_tip_keeps_its_chain_and_counts_it_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=ALL, one=6)
    cluster.put("abc")
    cluster.put("d", parent="b")

    pin(cluster, "cd")

    assert pinned(cluster) == (4, 4)
    cluster.after(LEASE_MS)
    cluster.put("xy", chain=False)
    cluster.put("z")
    assert cluster.match("abc") == 3
    assert unpin(cluster, "c") == [1]
    assert pinned(cluster) == (3, 3)
    assert unpin(cluster, "ad") == [0, 1]
    assert pinned(cluster) == (0, 0)


def test_what_is_lost_is_not_pinned(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=ALL, one=2)
    cluster.put("a")
    pin(cluster, "a")
    cluster.kill("one")

    assert unpin(cluster, "a") == [0]
    cluster.work()
    assert cluster.state.pool.pins.objects == 0


def test_of_two_pins_the_later_end_holds(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    cluster.put("a")
    pin(cluster, "a", 60_000)
    pin(cluster, "a", 1_000)

    cluster.after(30_000)
    with pytest.raises(NoSpaceError):
        cluster.start("bc", chain=False)
    cluster.after(31_000)
    cluster.put("bc", chain=False)

    assert cluster.present("abc") == "bc"


def test_a_removal_ends_a_pin(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=6)
    cluster.put("abc")
    cluster.put("z")
    pin(cluster, "c")

    assert cluster.remove("b") == [1]
    cluster.work()

    assert cluster.present("abc") == "ac"
    assert pinned(cluster) == (2, 2), "the place of the removed one keeps what is above"
    cluster.put("b", parent="a")
    assert pinned(cluster) == (3, 3)
    cluster.remove("abc")
    cluster.work()
    assert pinned(cluster) == (0, 0)


def test_a_removed_ancestor_that_is_put_elsewhere_lets_the_old_ones_go(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(rules=ALL, one=6)
    cluster.put("abc")
    cluster.put("z")
    pin(cluster, "c")
    cluster.remove("b")

    cluster.put("b", parent="z")
    cluster.work()

    assert pinned(cluster) == (2, 2)
    unpin(cluster, "c")
    assert pinned(cluster) == (0, 0)


def test_an_ancestor_that_is_lost_counts_no_more_and_its_own_pin_ends(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(rules=ALL, one=1, two=4)
    cluster.put("a", host="host-one")
    cluster.put("b", parent="a", host="host-two")
    pin(cluster, "ab")
    cluster.kill("one")
    cluster.work()
    assert pinned(cluster) == (1, 1)

    cluster.put("a", host="host-two")
    assert pinned(cluster) == (2, 2)
    assert unpin(cluster, "ab") == [0, 1]
    assert pinned(cluster) == (0, 0)


def test_an_overwrite_keeps_the_pin(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=6)
    cluster.put("a")
    pin(cluster, "a")

    cluster.put("a", overwrite=True)
    cluster.after(LEASE_MS)
    cluster.put("bcdef", chain=False)

    assert "a" in cluster.present("abcdef")
    assert pinned(cluster) == (1, 1)


def test_pins_are_bounded_and_a_call_is_all_or_nothing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=6)
    cluster.put("abcde")

    with pytest.raises(NoSpaceError, match="of the pool's 24 KiB") as error:
        pin(cluster, "aed")
    assert error.value.fields["cause"] == "pins"
    assert pinned(cluster) == (0, 0)
    assert pin(cluster, "bc") == [1, 1]
    assert pin(cluster, "abc") == [1, 1, 1], "what is pinned already needs no room"
    with pytest.raises(NoSpaceError):
        pin(cluster, "d")
    assert pinned(cluster) == (3, 3)


def test_pins_of_all_namespaces_leave_room_for_puts(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    others = [Namespace(f"n{number}") for number in range(8)]
    for number, namespace in enumerate(others):
        cluster.put(f"{number}", namespace=namespace)
    for namespace in others[:6]:
        request = calls.Pin(namespace, keys_of("012345"), MINUTE_MS)
        assert any(cluster.state.keeping.pin(cluster.now_ms, request).pinned)
    request = calls.Pin(others[6], keys_of("6"), MINUTE_MS)
    with pytest.raises(NoSpaceError, match="all have 24 KiB pinned") as error:
        cluster.state.keeping.pin(cluster.now_ms, request)
    assert "--pinned-max" in error.value.advice
    cluster.after(LEASE_MS)
    cluster.put("xy")


def test_a_pin_that_would_count_too_many_ancestors_is_refused(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PIN_STEPS", 3)
    cluster = new_cluster(rules=ALL, one=12)
    cluster.put("abcde")

    with pytest.raises(InvalidArgumentError, match="several calls"):
        pin(cluster, "e")
    pin(cluster, "c")
    pin(cluster, "e")

    assert pinned(cluster) == (5, 5)
    cluster.put("wxyz")
    with pytest.raises(InvalidArgumentError, match="several calls"):
        pin(cluster, "z")


def test_what_is_pinned_again_before_its_pin_is_taken_back_stays(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ENDED_PER_STEP", 1)
    cluster = new_cluster(rules=ALL, one=2)
    cluster.put("ab", chain=False)
    pin(cluster, "ab")
    unpin(cluster, "ab")
    assert pinned(cluster) == (1, 1), "one is still counted"

    pin(cluster, "ab")
    cluster.work()

    assert pinned(cluster) == (2, 2)
    check_invariants(cluster.state)


def test_a_pool_full_of_pins_says_so_and_lets_no_put_wait(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=ALL, one=4)
    cluster.put("abcd", chain=False)
    pin(cluster, "abc")

    with pytest.raises(NoSpaceError, match="12 KiB of the pool's 16 KiB are pinned") as error:
        cluster.start_or_wait("ef", wait_ms=20_000)

    assert "kvstore unpin" in error.value.advice
    assert error.value.fields["pinned_bytes"] == 3 * EXTENT
    assert error.value.fields["cause"] == "leased"
    cluster.put("d")  # what is not pinned was evicted in vain
    cluster.match("d")
    assert isinstance(cluster.start_or_wait("e", wait_ms=20_000), int), "a lease ends"


def test_an_unpin_wakes_a_put_that_waits(new_cluster: NewCluster) -> None:
    cluster = new_cluster(rules=ALL, one=2)
    cluster.put("ab", chain=False)
    pin(cluster, "a")
    cluster.match("b")
    ticket = cluster.wait("c", wait_ms=20_000)

    unpin(cluster, "a")
    cluster.work()

    assert isinstance(cluster.answers.pop(ticket), calls.Grants)


# --- lifetimes ---------------------------------------------------------------------------------


def test_an_object_is_gone_after_its_time_to_live(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a", ttl_ms=5_000)
    cluster.put("b")

    cluster.after(4_750)
    assert cluster.present("ab") == "ab"
    cluster.after(500)

    assert cluster.present("ab") == "b"
    assert cluster.free_blocks() == 3
    counters = dict(cluster.status().counters)
    assert (counters["expired_objects"], counters["expired_bytes"]) == (1, BLOCK)


def test_what_is_over_is_in_no_answer_before_it_is_taken_back(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=6)
    cluster.put("a")
    cluster.put("bc", parent="a", ttl_ms=640)
    version = cluster.stat("b").version
    cluster.now_ms += 640  # no tick

    assert cluster.match("abc") == 1
    assert cluster.lookup("abc") == [["one"], [], []]
    assert cluster.present("abc") == "a"
    assert not cluster.renew("b", version)
    assert cluster.stat("b").row is None
    assert pin(cluster, "abc") == [1, 0, 0]
    assert cluster.state.forest.get(NAMESPACE, Key(b"b")) is not None, "not taken back yet"


def test_what_is_over_is_not_listed_and_its_successor_is_being_written(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a", ttl_ms=640)
    cluster.put("b", ttl_ms=640)
    cluster.start("b", overwrite=True)
    cluster.now_ms += 640  # no tick

    listed = cluster.state.report.list_objects(
        cluster.now_ms, calls.ListObjects(NAMESPACE, b"", 0, 10)
    )
    assert [(row.key, row.state) for row in listed.objects] == [(b"b", "being_written")]
    asked = calls.Exists(NAMESPACE, keys_of("ab"))
    presence = cluster.state.asking.exists(cluster.now_ms, asked).presence
    assert list(presence) == [Presence.ABSENT, Presence.BEING_WRITTEN]
    assert cluster.stat("b").placements.replicas == [0]


def test_what_is_over_goes_before_anything_is_evicted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    cluster.put("a")
    cluster.put("bc", ttl_ms=640)
    cluster.now_ms += 640

    cluster.put("de", chain=False)

    assert cluster.present("abcde") == "ade"


def test_a_reader_keeps_its_lease(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    cluster.put("ab", ttl_ms=1_000)
    cluster.after(900)
    cluster.match("ab")

    cluster.after(500)
    assert cluster.present("ab") == ""
    assert cluster.free_blocks() == 0
    cluster.after(LEASE_MS)
    assert cluster.free_blocks() == 2


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("dies", ["before", "after"])
def test_what_is_over_does_not_come_back_with_a_node(
    new_cluster: NewCluster, dies: str, leased: bool
) -> None:
    """The node ends before the object does, or before it has wiped it. It does not yet count as
    dead when the object ends."""
    cluster = new_cluster(one=4, two=4)
    cluster.put("a", ttl_ms=20_480, replicas=2)
    version, at = cluster.stat("a").version, cluster.place("a", "two")
    _, offset = cluster.place("a", "one")
    cluster.wipes_at_once = False
    cluster.after(20_000)
    if leased:
        cluster.lookup("a")
    if dies == "before":
        cluster.break_stream("one")
    cluster.after(500)
    assert cluster.present("a") == ""
    if dies == "after":
        cluster.break_stream("one")

    cluster.join("one", again=True, tells=False)
    cluster.tell("one", claim_at("a", version, offset))

    assert cluster.present("a") == ""
    assert not cluster.renew("a", version, at)
    assert not cluster.renew("a", version)
    cluster.wipes_at_once = True
    cluster.wipe()
    cluster.after(LEASE_MS)
    assert cluster.free_blocks() == 8


def test_a_lease_below_keeps_the_memory_of_what_is_over(new_cluster: NewCluster) -> None:
    """A match leases the last block only, and its reader may read all of them."""
    cluster = new_cluster(one=2)
    cluster.put("a", ttl_ms=2 * LEASE_MS)
    cluster.put("b", parent="a")  # which leases the parent
    cluster.after(2 * LEASE_MS - 100)
    assert cluster.match("ab") == 2

    cluster.after(500)
    assert cluster.present("ab") == "b"
    assert cluster.free_blocks() == 0
    cluster.after(LEASE_MS)
    assert cluster.free_blocks() == 1


def test_a_put_of_what_is_over_finds_nothing_however_much_ended_with_it(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "EXPIRED_PER_STEP", 1)
    cluster = new_cluster(one=8)
    cluster.put(["a", "b", "c", "d"], ttl_ms=640)
    cluster.now_ms += 640

    cluster.put("b")
    cluster.work()

    assert cluster.present("abcd") == "b"


def test_a_put_of_what_is_there_changes_no_end_and_an_overwrite_does(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=6)
    cluster.put("a", ttl_ms=1_000)
    cluster.put("b", ttl_ms=1_000)
    cluster.put("c", ttl_ms=1_000)

    cluster.put("a", ttl_ms=60_000)
    cluster.put("b", ttl_ms=60_000, overwrite=True)
    cluster.put("c", overwrite=True)
    cluster.after(30_000)
    assert cluster.present("abc") == "bc"
    cluster.after(31_000)

    assert cluster.present("abc") == "c"


def test_a_pin_does_not_prolong_a_life(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("a", ttl_ms=1_000)
    pin(cluster, "a")

    cluster.after(1_250)

    assert cluster.present("a") == ""
    assert cluster.state.pool.pins.objects == 0


def test_a_committed_allocation_has_a_time_to_live(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    token = cluster.allocate()
    request = calls.Commit(EPOCH, token, NAMESPACE, Key(b"a"), None, BLOCK, False, 2_000)
    cluster.state.putting.commit(cluster.now_ms, request)
    assert cluster.present("a") == "a"

    cluster.after(2_250)

    assert cluster.present("a") == ""
