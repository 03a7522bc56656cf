"""What the master remembers of clients that put and that ask, and that it remembers no more."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state.effects import DeferredReply
from kvstore.master.state.traffic import CLIENTS_MAX, HEADS_MAX, SPACES_MAX, Caller, TrafficRecorder
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import BLOCK, NAMESPACE, Cluster, keys_of
from tests.unit.master.conftest import NewCluster

OTHER = Namespace("other")


def seen(cluster: Cluster, namespace: str = NAMESPACE) -> calls.NamespaceTraffic:
    found = cluster.state.report.traffic(cluster.now_ms, calls.Traffic(namespace))
    (row,) = found.namespaces
    return row


def ask(cluster: Cluster, request: calls.Lookup | calls.MatchPrefix | calls.Exists) -> None:
    assert not isinstance(cluster.state.asking.find(cluster.now_ms, request), DeferredReply)


def as_client(cluster: Cluster, name: str) -> None:
    """The next calls come from there."""
    cluster.state.traffic.caller = Caller(f"{name} 10.0.0.8")


def test_who_puts_is_remembered_with_what_became_of_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    as_client(cluster, "prefill 1")
    cluster.put("abc")
    cluster.after(1_000)
    cluster.put("abcd")
    cluster.after(500)

    row = seen(cluster)

    assert (row.objects, row.readers, row.misses) == (4, [], [])
    assert row.writers == [
        calls.ClientTraffic("prefill 1", "10.0.0.8", 1_500, 500, 7, 3, 4, b"a", 4 * BLOCK),
    ]


def test_an_allocation_counts_when_it_has_its_key(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    as_client(cluster, "one")
    assert cluster.commit(cluster.allocate(), "k") is PutOutcome.STORED
    (putter,) = seen(cluster).writers
    assert (putter.keys, putter.stored, putter.key) == (1, 1, b"k")
    assert putter.stored_bytes == BLOCK


def test_a_put_without_space_is_seen_as_one_that_stores_nothing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    as_client(cluster, "one")
    with pytest.raises(NoSpaceError):
        cluster.start("abcd")
    (putter,) = seen(cluster).writers
    assert (putter.keys, putter.found, putter.stored) == (4, 0, 0)


@pytest.mark.parametrize(
    "question",
    [
        calls.Lookup(NAMESPACE, keys_of("abx")),
        calls.Exists(NAMESPACE, keys_of("abx")),
        calls.MatchPrefix([NAMESPACE], keys_of("abx"), False),
    ],
    ids=lambda question: type(question).__name__,
)
def test_who_asks_is_remembered_with_the_first_key_that_was_missing(
    new_cluster: NewCluster, question: calls.Lookup | calls.Exists | calls.MatchPrefix
) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abc")
    as_client(cluster, "decode")
    ask(cluster, question)
    ask(cluster, question._replace(keys=keys_of("ab")))
    cluster.after(700)

    row = seen(cluster)

    assert row.readers == [calls.ClientTraffic("decode", "10.0.0.8", 700, 700, 5, 4, 0, b"")]
    assert row.misses == [calls.MissedKey(Key(b"x"), "decode", "10.0.0.8", 700, 2, 3, False)]
    assert (row.queries, row.queries_without_hit, row.queries_with_partial_hit) == (2, 0, 1)


def test_a_missed_key_that_is_there_by_now_says_so(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    ask(cluster, calls.Lookup(NAMESPACE, keys_of("a")))
    grants = cluster.start("a")
    assert [miss.present for miss in seen(cluster).misses] == [False], "it is being written"
    cluster.end(grants)
    assert [miss.present for miss in seen(cluster).misses] == [True]


def test_evictions_are_counted_where_they_happen(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("abcd", chain=False)
    cluster.after(cluster.rules.lease_ms + 1_000)
    cluster.put("wxyz", namespace=OTHER, chain=False)
    cluster.after(200)
    row = seen(cluster)
    assert row.evicted >= 4
    assert (row.evicted_ms, row.evicted_idle_ms) == (200, cluster.rules.lease_ms + 1_000)
    assert seen(cluster, OTHER).evicted == 0


def evicts_all(cluster: Cluster) -> None:
    """Fills the memory with the objects of another namespace."""
    cluster.after(cluster.rules.lease_ms + 1_000)
    cluster.put("wxyz", namespace=OTHER, chain=False)


def test_a_missed_first_key_of_an_evicted_chain_is_called_evicted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    as_client(cluster, "early")
    ask(cluster, calls.Exists(NAMESPACE, keys_of("a")))
    cluster.put("abc")
    evicts_all(cluster)
    for client, name in [("late", "a"), ("deep", "b"), ("other", "q")]:
        as_client(cluster, client)
        ask(cluster, calls.MatchPrefix([NAMESPACE], keys_of(name), False))
    found = {miss.client: miss.evicted for miss in seen(cluster).misses}
    assert found == {"early": False, "late": True, "deep": False, "other": False}


def test_evicted_first_keys_are_forgotten_in_the_order_of_their_eviction() -> None:
    traffic = TrafficRecorder()
    keys = [Key(b"%d" % number) for number in range(3 * HEADS_MAX)]
    for number, key in enumerate(keys):
        traffic.record_eviction(number, NAMESPACE, 0, key)
    check_invariants(traffic)
    now_ms = len(keys)
    assert not traffic.had_evicted(NAMESPACE, keys[0], now_ms)
    assert all(traffic.had_evicted(NAMESPACE, key, now_ms) for key in keys[-HEADS_MAX:])
    assert not traffic.had_evicted(OTHER, keys[-1], now_ms)
    assert not traffic.had_evicted(NAMESPACE, keys[-1], now_ms - 2), "evicted after the question"


# --- bounds ------------------------------------------------------------------------------------


def test_a_connection_that_stays_is_never_counted_in_a_forgotten_row() -> None:
    traffic, stays, keys = TrafficRecorder(), Caller("stays a"), keys_of("a")
    for number in range(3 * CLIENTS_MAX):
        traffic.caller = stays
        traffic.record_query(number, NAMESPACE, keys, 1, -1)
        traffic.caller = Caller(f"c{number} a")
        traffic.record_query(number, NAMESPACE, keys, 1, -1)
    (space,) = traffic.spaces(NAMESPACE)
    assert len(space.askers.all()) <= 2 * CLIENTS_MAX
    (row,) = (row for row in space.askers.all() if row.name == "stays a")
    assert row.questions == 3 * CLIENTS_MAX

    for number in range(3 * SPACES_MAX):  # it is idle meanwhile
        traffic.caller = Caller("another a")
        traffic.record_query(number, Namespace(f"n{number}"), keys, 1, -1)
    assert traffic.spaces(NAMESPACE) == []
    traffic.caller = stays
    traffic.record_query(0, NAMESPACE, keys, 1, -1)
    (space,) = traffic.spaces(NAMESPACE)
    assert [row.questions for row in space.askers.all()] == [1]
