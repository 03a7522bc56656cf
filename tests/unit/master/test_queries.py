"""Matches, lookups and what their leases hold."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import NO_PLACEMENTS, PutOutcome
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from tests.unit.master.cluster import BLOCK, EPOCH, EXTENT, NAMESPACE, Cluster, claim_at, keys_of
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000


def test_a_match_is_the_longest_present_prefix(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abcd")

    assert cluster.match("abcd") == 4
    assert cluster.match("abcdxy") == 4
    assert cluster.match("abx") == 2
    assert cluster.match("xab") == 0
    assert cluster.match("") == 0


def test_only_what_exists_with_a_lease_is_kept(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    for name in "abc":
        cluster.put(name)
        cluster.after(1_000)
    cluster.after(LEASE_MS)
    ask = cluster.state.asking.exists
    assert bytes(ask(cluster.now_ms, calls.Exists(NAMESPACE, keys_of("b"))).presence) == b"\1"
    leased = ask(cluster.now_ms, calls.Exists(NAMESPACE, keys_of("ax"), True))
    assert bytes(leased.presence) == b"\1\0"
    cluster.put("de")
    assert cluster.present("abcde") == "ade"


def test_misses_are_counted_where_nothing_has_ever_been_put(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    assert cluster.match("abc") == 0
    cluster.put("a")
    assert cluster.match("abc") == 1
    assert cluster.state.counters["matched_objects"] == 1
    assert cluster.state.counters["missed_objects"] == 3 + 2


def test_a_match_says_where_everything_is_when_asked(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    grants = cluster.start("abc")
    cluster.end(grants)

    request = calls.MatchPrefix([NAMESPACE], keys_of("abcd"), True)
    reply = cluster.state.asking.match_prefix(cluster.now_ms, request)

    found = reply.matches[0].placements
    assert (reply.epoch, reply.lease_ms) == (EPOCH, LEASE_MS)
    assert list(found.sizes) == [BLOCK] * 3
    assert list(found.counters) == list(grants.tokens)
    assert list(found.offsets) == list(grants.offsets)


# --- states, of which the last one counts ---------------------------------------------------------

STATES = [Namespace("states-0"), Namespace("states-1")]


def state_of(cluster: Cluster, names: str, *namespaces: Namespace) -> tuple[int, int]:
    """How far the chain reaches, and up to which key the last state is."""
    request = calls.MatchPrefix([*namespaces], keys_of(names), False, STATES)
    reply = cluster.state.asking.match_prefix(cluster.now_ms, request)
    return min((match.matched for match in reply.matches), default=len(names)), reply.state


def test_the_last_state_is_one_that_all_have_and_that_the_chain_reaches(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=20)
    cluster.put("abcd")
    cluster.put("bd", namespace=STATES[0], chain=False)
    assert state_of(cluster, "abcd", NAMESPACE) == (4, 0)
    cluster.put("bce", namespace=STATES[1], chain=False)
    assert state_of(cluster, "abcd", NAMESPACE) == (4, 2)
    cluster.put("d", namespace=STATES[1], chain=False)
    assert state_of(cluster, "abcd", NAMESPACE) == (4, 4)
    assert state_of(cluster, "abcx", NAMESPACE) == (3, 2)
    assert state_of(cluster, "axcd", NAMESPACE) == (1, 0), "beyond what the chain reaches"
    assert state_of(cluster, "xxcd") == (4, 4), "without a chain"
    assert state_of(cluster, "", NAMESPACE) == (0, 0)


def test_the_last_state_is_leased_and_those_before_it_are_not(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20)
    cluster.put("abcd")
    for namespace in STATES:
        cluster.put("bd", namespace=namespace, chain=False)
    cluster.after(LEASE_MS + 1)
    assert state_of(cluster, "abcd", NAMESPACE) == (4, 4)
    leased = {
        (namespace, name): record.lease_until_ms > cluster.now_ms
        for namespace in STATES
        for name in "bd"
        if (record := cluster.state.forest.get(namespace, Key(name.encode())))
    }
    assert leased == {(each, name): name == "d" for each in STATES for name in "bd"}


def test_a_state_that_is_being_written_or_died_is_none(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=20, two=20)
    cluster.put("ab", host="host-one")
    for namespace in STATES:
        cluster.put("a", namespace=namespace, host="host-one")
    cluster.put("b", namespace=STATES[0], host="host-one")
    cluster.start("b", namespace=STATES[1])
    assert state_of(cluster, "ab", NAMESPACE) == (2, 1)
    cluster.kill("one")
    assert state_of(cluster, "ab", NAMESPACE) == (0, 0)


def test_blocks_behind_a_removed_one_are_not_matched_until_it_is_put_again(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abcd")
    cluster.remove("b")
    assert cluster.match("abcd") == 1
    assert cluster.stat("d").row is not None

    cluster.put("b", parent="a")

    assert cluster.match("abcd") == 4


def test_a_match_tells_how_many_blocks_are_being_written(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("a")
    cluster.start("bc", parent="a")

    request = calls.MatchPrefix([NAMESPACE], keys_of("abcd"), False)
    match = cluster.state.asking.match_prefix(cluster.now_ms, request).matches[0]

    assert match == calls.PrefixMatch(1, 2, NO_PLACEMENTS)


def test_keys_that_are_no_chain_are_matched_one_by_one(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abcd", chain=False)

    assert cluster.match("abcd") == 4
    assert cluster.match("dbx") == 2


def test_keys_that_only_look_like_a_chain_are_each_leased(new_cluster: NewCluster) -> None:
    # Every block that the search looks at has the depth of a chain; y is another chain's.
    cluster = new_cluster(one=6)
    cluster.put("abcd")
    cluster.put("xy")

    assert cluster.match("aycd", placements=True) == 4

    with pytest.raises(NoSpaceError):
        cluster.put("z")


def test_a_block_that_is_missing_is_noticed_although_depths_fit(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abcd")

    assert cluster.match("ab?d", placements=True) == 2


def test_a_gap_is_seen_though_depths_below_it_are_those_of_before(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=12)
    cluster.put("abcdefgh")
    cluster.remove("fg")
    cluster.put("g")  # a root now, but h is as deep as before

    assert cluster.match("abcdefgh") == 5


def test_a_lookup_leases_each_object(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    cluster.put("ab", chain=False)

    assert cluster.lookup("axb") == [["one"], [], ["one"]]

    with pytest.raises(NoSpaceError):
        cluster.put("x")


def test_a_renewed_lease_goes_on_for_that_version_only(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    version = cluster.stat("a").version

    for _ in range(5):
        cluster.after(LEASE_MS // 2)
        assert cluster.renew("a", version)
    with pytest.raises(NoSpaceError):
        cluster.put("x")

    assert not cluster.renew("a", version._replace(counter=version.counter + 1))
    assert not cluster.renew("b", version)
    cluster.remove("a")
    assert not cluster.renew("a", version)


def test_a_lease_is_renewed_in_the_memory_that_it_is_on(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4)
    cluster.put("ab", replicas=2)
    version = cluster.stat("b").version
    on_one, on_two = cluster.place("b", "one"), cluster.place("b", "two")
    assert cluster.renew("b", version, on_one)
    assert cluster.renew("b", version, on_two)
    assert not cluster.renew("b", version, (on_two[0], on_two[1] + EXTENT))
    assert not cluster.renew("b", version, (bytes(16), on_two[1]))
    assert not cluster.renew("b", version._replace(counter=version.counter + 1), on_two)

    cluster.kill("one")

    assert not cluster.renew("b", version, on_one)
    assert cluster.renew("b", version, on_two), "it has lost nothing"


def test_a_lease_is_not_renewed_where_the_object_has_ended(new_cluster: NewCluster) -> None:
    """Both nodes have died for this master. One comes back with the object; the other one's memory
    was not told to be the object's, and is free for others one lease later."""
    cluster = new_cluster(one=4, two=4)
    cluster.put("a", replicas=2)
    version = cluster.stat("a").version
    on_one, on_two = cluster.place("a", "one"), cluster.place("a", "two")
    cluster.kill("one")
    cluster.kill("two")
    cluster.work()

    cluster.join("one", again=True, tells=False)
    cluster.tell("one", claim_at("a", version, on_one[1]))

    assert cluster.present("a") == "a"
    assert cluster.renew("a", version, on_one)
    assert not cluster.renew("a", version, on_two)


def test_one_replica_is_enough(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=4)
    cluster.put("abc", replicas=2)

    cluster.kill("one")

    assert cluster.match("abc", placements=True) == 3
    assert cluster.lookup("c") == [["two"]]
    cluster.kill("two")
    assert cluster.match("abc") == 0
    assert PutOutcome.WRITE not in cluster.answers


def test_the_time_between_uses_is_counted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("ab")
    cluster.after(500)
    cluster.put(["x"])
    reuses = cluster.state.asking.reuses_ms
    cluster.after(1_000)
    cluster.match("abc")
    assert (sum(reuses.counts), reuses.total) == (1, 1_500), "a chain counts once"
    cluster.after(100)
    cluster.lookup("abx-")
    assert sum(reuses.counts) == 4, "each object counts once, absent ones do not"
    assert reuses.total == 1_500 + 1_600 + 100 + 1_100
