"""What clients expect of chains, and what that changes: the order of eviction in their tenant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvstore import calls
from kvstore.calls import HintAction, HintOutcome
from kvstore.calls.tenants import TenantRule
from kvstore.limits import Key, Namespace
from kvstore.master.state.density import density
from kvstore.master.state.eviction import NewPolicy, lru
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import EPOCH, NAMESPACE, Cluster, keys_of
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000
LONG_MS = 3_600_000


def hint(
    cluster: Cluster, action: HintAction, names: Sequence[str], retain_ms: int = 0,
    namespace: Namespace = NAMESPACE,
) -> list[tuple[HintOutcome, int]]:  # fmt: skip
    count = len(names)
    request = calls.Hint(namespace, keys_of(names), [int(action)] * count, [retain_ms] * count)
    reply = cluster.state.hints.hint(cluster.now_ms, request)
    check_invariants(cluster.state)
    outcomes = map(HintOutcome, reply.outcomes)
    return list(zip(outcomes, reply.retained_ms, strict=True))


def put_apart(cluster: Cluster, names: str, **given: Namespace) -> None:
    """Roots, each a little later than the one before."""
    for name in names:
        cluster.after(1)
        cluster.put(name, **given)


def test_what_is_retained_goes_last_and_only_until_its_time(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("ab")  # a chain
    put_apart(cluster, "xy")
    assert hint(cluster, HintAction.RETAIN, ["b"], LONG_MS) == [(HintOutcome.ACCEPTED, LONG_MS)]
    cluster.after(LEASE_MS)
    put_apart(cluster, "12")
    assert cluster.present("abxy12") == "ab12"
    put_apart(cluster, "34")
    assert cluster.present("ab1234") == "ab34", "its ancestors, too"
    cluster.after(LONG_MS)
    put_apart(cluster, "56")
    assert cluster.present("ab3456") == "3456"


def test_a_use_ends_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    put_apart(cluster, "abc")
    hint(cluster, HintAction.RETAIN, ["a"], LONG_MS)
    hint(cluster, HintAction.RELEASE, ["c"])
    cluster.match("a")
    cluster.match("c")
    cluster.after(LEASE_MS)
    put_apart(cluster, "12")
    assert cluster.present("abc12") == "c12"
    assert cluster.state.counters["hinted_found.retained"] == 1
    assert cluster.state.counters["hinted_found.released"] == 1


def test_what_is_over_goes_first_then_what_is_demoted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    put_apart(cluster, "abcd")
    assert hint(cluster, HintAction.DEMOTE, ["c"]) == [(HintOutcome.ACCEPTED, 0)]
    assert hint(cluster, HintAction.RELEASE, ["d"]) == [(HintOutcome.ACCEPTED, 0)]
    cluster.after(LEASE_MS)
    put_apart(cluster, "1")
    assert cluster.present("abcd") == "abc"
    put_apart(cluster, "2")
    assert cluster.present("abc") == "ab"


def test_only_blocks_that_no_other_chain_shares_are_released(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=5)
    cluster.put("sab")
    cluster.put("x", parent="s")
    cluster.after(1)
    put_apart(cluster, "u")
    hint(cluster, HintAction.RELEASE, ["b"])
    assert hint(cluster, HintAction.RELEASE, ["s"]) == [(HintOutcome.IGNORED, 0)]
    cluster.after(LEASE_MS)
    put_apart(cluster, "12")
    assert cluster.present("sabxu12") == "sxu12"
    put_apart(cluster, "3")
    assert cluster.present("sxu123") == "su123", "x and s are as old as they are"


def test_everybody_retains_everything_is_plain_lru(new_cluster: NewCluster) -> None:
    stored = []
    for lies in (False, True):
        cluster = new_cluster(one=8)
        for name in "abcdeafgbhijakblmnop":
            cluster.after(LEASE_MS + 1)
            if not cluster.match(name):
                cluster.put(name)
            if lies:
                hint(cluster, HintAction.RETAIN, [name], LONG_MS)
        stored.append(cluster.present("abcdefghijklmnop"))
    assert stored[0] == stored[1]


@pytest.mark.parametrize("policy", [lru, density])
def test_one_tenants_hints_cost_no_other_one(
    new_cluster: NewCluster, policy: Callable[[], NewPolicy]
) -> None:
    rules = [TenantRule("liar", ("liar",)), TenantRule("good", ("good",))]
    liar, good = Namespace("liar"), Namespace("good")
    names = "".join(map(chr, range(0x4E00, 0x4E00 + 48)))
    found = []
    for lies in (False, True):
        cluster = new_cluster(tenants=rules, policy=policy(), one=8)
        for index in range(24):
            for namespace in (liar, good):
                cluster.after(LEASE_MS + 1)
                cluster.put(names[2 * index : 2 * index + 2], namespace=namespace)
                if lies and namespace is liar:  # so its last blocks are evicted while they are new
                    hint(cluster, HintAction.RETAIN, [names[2 * index]], LONG_MS, namespace)
        found.append(len(cluster.present(names, namespace=good)))
    assert found[0] == 4
    assert found[1] >= 4


@pytest.mark.parametrize("policy", [lru, density])
def test_hints_decide_between_the_segments_of_a_node(
    new_cluster: NewCluster, policy: Callable[[], NewPolicy]
) -> None:
    cluster = new_cluster(policy=policy())
    cluster.join("one", 2, 2)
    put_apart(cluster, "abcd")
    for name in "ab":
        hint(cluster, HintAction.RETAIN, [name], LONG_MS)
    cluster.after(LEASE_MS)
    put_apart(cluster, "12")
    assert cluster.present("abcd12") == "ab12"


@pytest.mark.parametrize("truthful", [True, False])
def test_density_learns_what_the_hints_of_a_tenant_are_worth(
    new_cluster: NewCluster, truthful: bool
) -> None:
    """Half of the objects are retained. Three rounds later either these or the others are used, of
    which the pool has space for one kind only."""
    cluster = new_cluster(policy=density(), one=5)
    found: list[int] = []
    for index in range(1_000):
        cluster.after(LEASE_MS + 1)
        retained, plain, *used = [
            chr(0x4E00 + 2 * number + kind)
            for number, kind in ((index, 0), (index, 1), (index - 3, not truthful))
        ]
        cluster.put(retained)
        request = calls.Hint(NAMESPACE, keys_of(retained), [int(HintAction.RETAIN)], [LONG_MS])
        cluster.state.hints.hint(cluster.now_ms, request)
        cluster.put(plain)
        found.append(cluster.match(used))
        if not found[-1]:
            cluster.put(used)
    assert sum(found[-100:]) > 90, sum(found[-100:])


def test_a_retain_is_clipped_to_six_times_the_age_at_eviction(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=32)
    for index in range(96):
        cluster.after(LEASE_MS + 100)
        cluster.put([str(index)])
    [(outcome, retained_ms)] = hint(cluster, HintAction.RETAIN, ["95"], LONG_MS)
    assert outcome is HintOutcome.CLIPPED
    assert retained_ms == pytest.approx(6 * 32 * (LEASE_MS + 100), rel=0.05)


def test_it_may_come_with_a_match_or_the_end_of_a_put(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    put_apart(cluster, "ab")
    retain = int(HintAction.RETAIN)
    match = calls.MatchPrefix([NAMESPACE], [Key(b"a")], False, hint=retain, retain_ms=LONG_MS)
    cluster.state.asking.match_prefix(cluster.now_ms, match)
    grants = cluster.start("c")
    end = calls.PutEnd(EPOCH, grants.tokens, retain, LONG_MS)
    cluster.state.putting.put_end(cluster.now_ms, end)
    cluster.after(LEASE_MS)
    put_apart(cluster, "1")
    put_apart(cluster, "2")
    assert cluster.present("abc12") == "ac2"


def test_what_is_not_there_is_said_to_be_missing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    cluster.put("a")
    assert hint(cluster, HintAction.RETAIN, ["x"], LONG_MS) == [(HintOutcome.MISSING, 0)]
    assert hint(cluster, HintAction.PREFETCH, ["a"]) == [(HintOutcome.IGNORED, 0)]
    assert cluster.state.counters["hints.retain.missing"] == 1
