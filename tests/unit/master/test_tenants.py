"""Quotas of tenants: who loses objects to whom, what is refused, and what an error says."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import PutOutcome, Version
from kvstore.calls.tenants import TENANTS_MAX, TenantMatcher, TenantRule, patterns_overlap
from kvstore.errors import BusyError, InvalidArgumentError, NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state.effects import DeferredReply
from kvstore.master.state.inventory import Claim
from kvstore.master.state.rules import MasterRules
from kvstore.memory.header import SUPERBLOCK_BYTES
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import BLOCK, EPOCH, EXTENT, Cluster, keys_of
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000
A, B = Namespace("a/x"), Namespace("b/x")
OTHER = Namespace("elsewhere")


def rule(name: str, guarantee: int = 0, limit: int | None = None, **more: float) -> TenantRule:
    """Quotas in blocks; the namespaces begin with the name."""
    made = TenantRule(name, (f"{name}/*",), guarantee * EXTENT)
    if limit is not None:
        made = made._replace(limit_bytes=limit * EXTENT)
    if "pinned" in more:
        made = made._replace(pin_limit_bytes=int(more["pinned"] * EXTENT))
    return made._replace(put_share=more.get("puts", 1.0))


def row(cluster: Cluster, name: str) -> calls.TenantStatus:
    return next(each for each in cluster.status().tenants if each.name == name)


def blocks(cluster: Cluster, name: str) -> int:
    return row(cluster, name).bytes // EXTENT


def pin(cluster: Cluster, names: str, namespace: Namespace) -> None:
    request = calls.Pin(namespace, keys_of(names), 60_000)
    cluster.state.keeping.pin(cluster.now_ms, request)


# --- what they hold -------------------------------------------------------------------------


def test_bytes_are_those_of_objects_replicas_and_puts_under_way(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a")], one=8, two=8)
    cluster.put("ab", namespace=A, replicas=2)
    assert blocks(cluster, "a") == 4
    grants = cluster.start("c", namespace=A)
    assert blocks(cluster, "a") == 5
    cluster.put("z", namespace=OTHER)
    assert blocks(cluster, "") == 1
    cluster.revoke(grants, quiesced=True)
    assert blocks(cluster, "a") == 4
    cluster.kill("two")
    assert blocks(cluster, "a") == 2
    cluster.remove("ab", namespace=A)
    assert (blocks(cluster, "a"), row(cluster, "a").objects) == (0, 0)


# --- at most --------------------------------------------------------------------------------


def test_a_put_above_the_bound_evicts_the_oldest_of_its_own(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=3)], one=9)
    cluster.put("z", namespace=B)  # older than all
    for name in "abc":
        cluster.after(1)
        cluster.put(name, namespace=A)
    cluster.after(1)
    cluster.match("a", namespace=A)
    cluster.after(LEASE_MS)

    cluster.put("d", namespace=A)

    assert cluster.present("abcd", namespace=A) == "acd"
    assert cluster.present("z", namespace=B) == "z"
    assert blocks(cluster, "a") == 3
    assert row(cluster, "a").evicted_by_own == 1


def test_where_the_own_are_leased_it_waits_and_is_refused_by_name(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=2)], one=9)
    cluster.put("ab", namespace=A)
    cluster.match("ab", namespace=A)

    with pytest.raises(NoSpaceError, match="tenant a holds 8 KiB of at most 8 KiB") as refused:
        cluster.start("c", namespace=A)
    fields = refused.value.fields
    assert (fields["tenant"], fields["quota"], fields["cause"]) == ("a", "limit", "quota")
    assert fields["missing_bytes"] == EXTENT
    assert fields["tenant_bytes_max"] == 2 * EXTENT

    late = cluster.wait("c", namespace=A, wait_ms=5_000)
    cluster.after(5_250)
    error = cluster.answers.pop(late)
    assert isinstance(error, NoSpaceError)
    assert error.fields["tenant"] == "a"

    granted = cluster.wait("c", namespace=A)
    cluster.after(LEASE_MS)
    assert isinstance(cluster.answers[granted], calls.Grants)
    assert row(cluster, "a").refused == 2


def test_what_never_fits_is_refused_at_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=2)], one=9)
    cluster.put("ab", namespace=A)
    with pytest.raises(NoSpaceError, match="tenant a may hold at most 8 KiB"):
        cluster.start_or_wait("xyz", namespace=A, wait_ms=20_000)
    assert cluster.present("ab", namespace=A) == "ab"


def test_replicas_count(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=3)], one=9, two=9)
    cluster.put("a", namespace=A, replicas=2)
    cluster.put("b", namespace=A, replicas=2)
    assert cluster.present("ab", namespace=A) == "b"


def test_one_at_its_bound_does_not_hold_up_the_puts_of_others(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=2), rule("b")], one=4)
    cluster.put("ab", namespace=A)
    cluster.put("yz", namespace=B)
    cluster.match("ab", namespace=A)
    cluster.match("yz", namespace=B)
    first = cluster.wait("c", namespace=A)
    second = cluster.wait("x", namespace=B)
    cluster.after(5_000)
    cluster.match("ab", namespace=A)  # leased again, for longer
    cluster.after(5_250)
    assert first not in cluster.answers
    assert isinstance(cluster.answers[second], calls.Grants)


def test_a_repair_stays_within_the_bound(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=2)], one=20, two=20, three=20)
    cluster.put("a", namespace=A, replicas=2)
    record = cluster.state.forest.get(A, Key(b"a"))
    assert record is not None
    assert not cluster.state.pool.may_have_copy(record)


# --- allocations ----------------------------------------------------------------------------


def test_a_tenant_that_allocates_and_renews_stays_within_its_bound(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=3), rule("b", guarantee=1)], one=5)
    cluster.put("z", namespace=B)
    cluster.put("k", namespace=A)
    held = [cluster.allocate(namespace=A) for _ in range(3)]  # the third evicts k, its own
    for _ in range(5):
        with pytest.raises(NoSpaceError, match="tenant a holds 12 KiB of at most 12 KiB"):
            cluster.allocate(namespace=A)
        cluster.after(cluster.rules.put_deadline_ms // 2)
        assert all(map(cluster.renew_token, held))
    cluster.put("y", namespace=B)
    assert cluster.present("yz", namespace=B) == "yz"
    assert (blocks(cluster, "a"), row(cluster, "a").refused) == (3, 5)


def test_an_allocation_at_the_bound_waits_and_is_refused_by_name(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=1), rule("b")], one=9)
    first = cluster.allocate(namespace=A)
    putting = cluster.state.putting
    request = calls.Allocate(A, BLOCK, 3_000, "")
    late, granted = (putting.allocate(cluster.now_ms, request) for _ in range(2))
    assert isinstance(late, DeferredReply)
    assert isinstance(granted, DeferredReply)
    cluster.allocate(namespace=B)  # which does not wait behind those of another tenant
    assert cluster.commit(first, "k", namespace=B) is PutOutcome.STORED  # leased, and not of a
    cluster.work()
    assert isinstance(cluster.answers.pop(late.reply_id), calls.Grants)
    cluster.after(3_250)
    error = cluster.answers.pop(granted.reply_id)
    assert isinstance(error, NoSpaceError)
    assert (error.fields["tenant"], error.fields["quota"]) == ("a", "limit")


@pytest.mark.parametrize("how", ["expires", "is revoked", "is revoked as quiesced"])
def test_an_abandoned_allocation_counts_until_it_can_be_granted_again(
    new_cluster: NewCluster, how: str
) -> None:
    """Else a tenant could fill the pool with what it has given up."""
    cluster = new_cluster(tenants=[rule("a", limit=2)], one=9)
    token = cluster.allocate(BLOCK + EXTENT, namespace=A)
    if how == "expires":
        cluster.after(cluster.rules.put_deadline_ms + 250)
    else:
        quiesced = how == "is revoked as quiesced"
        request = calls.PutRevoke(EPOCH, [token], quiesced)
        cluster.state.putting.put_revoke(cluster.now_ms, request)
    cluster.work()
    if how != "is revoked as quiesced":
        assert blocks(cluster, "a") == 2
        with pytest.raises(NoSpaceError, match="tenant a holds 8 KiB of at most 8 KiB"):
            cluster.allocate(namespace=A)
        cluster.after(cluster.rules.put_deadline_ms + cluster.rules.quarantine_ms + 250)
    assert blocks(cluster, "a") == 0
    cluster.allocate(BLOCK + EXTENT, namespace=A)


def test_an_abandoned_put_counts_until_its_memory_can_be_granted_again(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=2)], one=9)
    cluster.revoke(cluster.start("xy", namespace=A), quiesced=False)
    assert (blocks(cluster, "a"), row(cluster, "a").objects) == (2, 0)
    with pytest.raises(NoSpaceError, match="tenant a holds"):
        cluster.start("z", namespace=A)
    cluster.kill("one")
    assert blocks(cluster, "a") == 0
    cluster.after(cluster.rules.put_deadline_ms + cluster.rules.quarantine_ms + 250)
    assert blocks(cluster, "a") == 0


def test_a_commit_for_another_tenant_moves_the_bytes_within_the_bound(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=1), rule("b")], one=9)
    cluster.put("a", namespace=A)
    cluster.match("a", namespace=A)
    token = cluster.allocate(namespace=B)
    with pytest.raises(NoSpaceError, match="tenant a holds 4 KiB"):
        cluster.commit(token, "b", namespace=A)
    assert (blocks(cluster, "a"), blocks(cluster, "b")) == (1, 1)
    cluster.after(LEASE_MS)
    assert cluster.commit(token, "b", namespace=A) is PutOutcome.STORED
    assert cluster.present("ab", namespace=A) == "b"
    assert (blocks(cluster, "a"), blocks(cluster, "b")) == (1, 0)


def test_allocations_are_within_the_share_of_puts(new_cluster: NewCluster) -> None:
    rules = MasterRules(pending_puts_max=4)
    cluster = new_cluster(rules=rules, tenants=[rule("a", puts=0.5)], one=20)
    for _ in range(2):
        cluster.allocate(namespace=A)
    with pytest.raises(BusyError, match="tenant a has 2 pending puts; 1 more exceed its limit"):
        cluster.allocate(namespace=A)
    cluster.allocate(namespace=B)


def test_an_allocation_follows_its_namespace_when_it_is_renewed(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a")], one=9)
    held = [cluster.allocate(namespace=B) for _ in range(2)]
    cluster.state.set_tenants([rule("a"), rule("b", limit=1)])
    cluster.work()
    assert (blocks(cluster, "b"), blocks(cluster, "")) == (0, 2)
    cluster.renew_token(held[0])
    assert (blocks(cluster, "b"), blocks(cluster, "")) == (1, 1)
    cluster.renew_token(held[1])  # above the bound, which no put has broken
    assert (blocks(cluster, "b"), blocks(cluster, "")) == (2, 0)
    check_invariants(cluster.state)
    with pytest.raises(NoSpaceError, match="tenant b holds 8 KiB"):
        cluster.allocate(namespace=B)


# --- guarantees -----------------------------------------------------------------------------


def test_a_tenant_within_its_guarantee_loses_nothing_to_others(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", guarantee=2), rule("b")], one=4)
    cluster.put("ab", namespace=A, chain=False)  # the oldest
    cluster.after(1)
    cluster.put("yz", namespace=B, chain=False)
    cluster.after(1)

    cluster.put("wx", namespace=B, chain=False)

    assert cluster.present("ab", namespace=A) == "ab"
    assert cluster.present("wxyz", namespace=B) == "wx"
    assert row(cluster, "b").evicted_by_own == 2
    cluster.match("w", namespace=B)
    cluster.match("x", namespace=B)
    with pytest.raises(NoSpaceError, match="guarantees of other tenants hold the rest") as refused:
        cluster.start("c", namespace=OTHER)
    assert refused.value.fields["cause"] == "guarantees"
    assert refused.value.fields["tenant"] == ""
    assert "tenant a" not in str(refused.value)


def test_what_is_above_a_guarantee_may_go(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", guarantee=2), rule("b", guarantee=2)], one=4)
    cluster.put("abcd", namespace=A)
    cluster.put("wx", namespace=B)
    assert cluster.present("abcd", namespace=A) == "ab"
    assert row(cluster, "a").evicted_by_others == 2
    cluster.put("y", namespace=B, chain=False)  # takes from its own
    assert blocks(cluster, "a") == blocks(cluster, "b") == 2


def test_room_made_ahead_counts_for_the_tenant_whose_puts_used_it(
    new_cluster: NewCluster,
) -> None:
    """Found by a trial: the only tenant that put anything lost 1,316 objects "to others"."""
    cluster = new_cluster(tenants=[rule("a"), rule("b")], one=256)
    for number in range(600):
        cluster.put([f"a{number}"], namespace=A)
        cluster.work()
    assert row(cluster, "a").evicted_by_own > 300
    assert row(cluster, "a").evicted_by_others == 0

    before = row(cluster, "a")
    for number in range(240):
        cluster.after(1)
        names = [f"b{each}" for each in range(3 * number, 3 * number + 3)]
        cluster.put(names, namespace=B, chain=False)
        cluster.put([f"more{number}"], namespace=A)
        cluster.work()
    a, b = row(cluster, "a"), row(cluster, "b")
    own = a.evicted_by_own - before.evicted_by_own + b.evicted_by_own
    others = a.evicted_by_others + b.evicted_by_others
    assert own + others > 900
    by_a = a.evicted_by_own - before.evicted_by_own + b.evicted_by_others
    by_b = b.evicted_by_own + a.evicted_by_others
    assert 2.5 < by_b / by_a < 3.5, "b put three times as many"


def test_a_large_leaf_is_kept_where_the_guarantee_needs_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", guarantee=2)], one=4)
    grants = cluster.start("a", size=BLOCK + 2 * EXTENT, namespace=A)
    cluster.end(grants)
    cluster.after(1)
    cluster.put("z", namespace=OTHER)
    cluster.after(1)
    cluster.put("y", namespace=OTHER)
    assert cluster.present("a", namespace=A) == "a"
    assert cluster.present("yz", namespace=OTHER) == "y"


def test_the_reserve_of_a_full_segment_respects_guarantees(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", guarantee=64)], one=64)
    names = [f"k{number}" for number in range(64)]
    cluster.put(names, namespace=A, chain=False)
    cluster.put("x", namespace=A)
    cluster.work()
    assert blocks(cluster, "a") == 64
    with pytest.raises(NoSpaceError):
        cluster.put("x", namespace=OTHER)


def test_the_log_says_that_the_pool_is_too_small(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", guarantee=9)], one=4)
    cluster.after(40_000)
    assert cluster.notices.count("guarantees_exceed_pool") == 1
    cluster.join("two", 9)
    cluster.after(1_000)
    cluster.kill("two")
    cluster.after(40_000)
    assert cluster.notices.count("guarantees_exceed_pool") == 2


# --- pins and puts --------------------------------------------------------------------------


def test_a_pin_above_the_bound_of_the_tenant_is_refused(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", pinned=2)], one=20)
    cluster.put("abc", namespace=A, chain=False)
    pin(cluster, "ab", A)
    with pytest.raises(NoSpaceError, match="not pinned: tenant a has 8 KiB pinned") as refused:
        pin(cluster, "c", A)
    assert (refused.value.fields["tenant"], refused.value.fields["quota"]) == ("a", "pin_limit")
    assert row(cluster, "a").pinned == 2 * EXTENT
    cluster.after(60_250)
    assert row(cluster, "a").pinned == 0


def test_a_tenant_has_its_share_of_puts_under_way(new_cluster: NewCluster) -> None:
    rules = MasterRules(pending_puts_max=4, waiting_puts_max=2)
    cluster = new_cluster(rules=rules, tenants=[rule("a", limit=5, puts=0.5)], one=20)
    grants = cluster.start("ab", namespace=A)
    with pytest.raises(
        BusyError, match="tenant a has 2 pending puts; 1 more exceed its limit"
    ) as refused:
        cluster.start("c", namespace=A)
    assert (refused.value.fields["tenant"], refused.value.fields["quota"]) == ("a", "put_share")
    cluster.put("xy", namespace=B)
    cluster.end(grants)
    cluster.put("cd", namespace=A, chain=False)
    cluster.put("e", namespace=A)
    cluster.match("ab", namespace=A)
    for name in "cde":
        cluster.match(name, namespace=A)
    cluster.wait("f", namespace=A)
    with pytest.raises(
        BusyError, match="tenant a has reached its limit of puts waiting for space: 1"
    ):
        cluster.start_or_wait("g", namespace=A, wait_ms=9_000)


# --- other rules ----------------------------------------------------------------------------


def test_other_rules_hold_at_once_and_namespaces_move(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a")], one=6)
    cluster.put("abc", namespace=A, chain=False)
    cluster.put("xyz", namespace=B, chain=False)
    pin(cluster, "x", B)

    cluster.state.set_tenants([rule("a", limit=2), rule("b", guarantee=3)])
    check_invariants(cluster.state)
    cluster.work()

    assert "tenants_changed" in cluster.notices
    assert (blocks(cluster, "a"), blocks(cluster, "b"), blocks(cluster, "")) == (3, 3, 0)
    assert row(cluster, "b").pinned == EXTENT
    cluster.put("d", namespace=A)  # goes down to its bound
    assert blocks(cluster, "a") == 2
    cluster.put("q", namespace=OTHER)
    assert cluster.present("xyz", namespace=B) == "xyz"


def test_a_tenant_that_is_gone_gives_its_namespaces_back(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", guarantee=6)], one=6)
    cluster.put("abc", namespace=A)
    for first in range(0, 3 * TENANTS_MAX, 97):  # names come and go
        cluster.state.set_tenants([rule(f"t{first + each}") for each in range(TENANTS_MAX)])
        cluster.work()
    with pytest.raises(InvalidArgumentError, match="come and gone"):
        cluster.state.set_tenants([rule(f"u{each}") for each in range(TENANTS_MAX)])
    cluster.state.set_tenants([])
    cluster.work()
    assert [each.name for each in cluster.status().tenants] == [""]
    assert blocks(cluster, "") == 3


def test_rules_that_contradict_change_nothing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", guarantee=2)], one=6)
    twice = TenantRule("b", ("a/x",))
    with pytest.raises(InvalidArgumentError, match="have namespaces in common"):
        cluster.state.set_tenants([rule("a"), twice])
    assert row(cluster, "a").guarantee_bytes == 2 * EXTENT


def test_objects_that_a_node_brings_back_may_be_above_the_bound(new_cluster: NewCluster) -> None:
    cluster = new_cluster(tenants=[rule("a", limit=2)], one=9)
    cluster.kill("one")
    cluster.join("one", again=True, tells=False)
    claims = [
        Claim((A, Key(name.encode())), None, BLOCK, Version(EPOCH - 1, 1 + at), place(at))
        for at, name in enumerate("abc")
    ]
    cluster.tell("one", *claims)
    cluster.after(60_000)
    assert blocks(cluster, "a") == 3
    for name in "defg":  # never above it again
        cluster.put(name, namespace=A)
        assert blocks(cluster, "a") == 2


def place(at: int) -> int:
    return SUPERBLOCK_BYTES + at * EXTENT


# --- patterns -------------------------------------------------------------------------------


def test_the_matcher_finds_the_one_tenant() -> None:
    matcher = TenantMatcher(
        [TenantRule("a", ("a/*", "one")), TenantRule("b", ("b*",)), TenantRule("c", ("c", "a"))]
    )
    found = {name: matcher.of(name) for name in ("a/x", "a", "one", "ones", "b", "bb", "c", "d")}
    assert found == {
        "a/x": "a", "a": "c", "one": "a", "ones": "", "b": "b", "bb": "b", "c": "c", "d": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"), [("*", "x"), ("x", "x"), ("x*", "xy*"), ("xy*", "x*"), ("x", "x*")]
)
def test_patterns_that_meet(one: str, other: str) -> None:
    assert patterns_overlap(one, other)
    with pytest.raises(InvalidArgumentError, match="in common"):
        TenantMatcher([TenantRule("a", (one,)), TenantRule("b", (other,))])
    TenantMatcher([TenantRule("a", (one, other))])


@pytest.mark.parametrize(("one", "other"), [("x", "y"), ("x/*", "x"), ("x*", "y*"), ("xy", "x/*")])
def test_patterns_that_do_not_meet(one: str, other: str) -> None:
    assert not patterns_overlap(one, other)
    TenantMatcher([TenantRule("a", (one,)), TenantRule("b", (other,))])
