"""Leases that clients release."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.errors import NoSpaceError
from kvstore.master.state import leases as leases_module
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import NAMESPACE, Cluster, keys_of
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000


def lookup(cluster: Cluster, names: str, lease: int = 0) -> None:
    cluster.state.asking.find(cluster.now_ms, calls.Lookup(NAMESPACE, keys_of(names), lease))


def release(cluster: Cluster, *numbers: int) -> None:
    cluster.state.asking.release(cluster.now_ms, calls.Release(numbers))
    cluster.work()


def is_evictable(cluster: Cluster) -> bool:
    """Whether a pool of one object takes another one."""
    try:
        cluster.put("x")
    except NoSpaceError:
        return False
    return True


def test_a_released_object_can_be_evicted_and_a_waiting_put_gets_its_space(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    lookup(cluster, "a", lease=7)
    ticket = cluster.wait("x")
    release(cluster, 7)
    assert isinstance(cluster.answers[ticket], calls.Grants)


def test_calls_carry_releases_before_they_are_answered(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    match = calls.MatchPrefix([NAMESPACE], keys_of("a"), False, lease=7)
    cluster.state.asking.find(cluster.now_ms, match)
    request = calls.PutStart(
        NAMESPACE, keys_of("x"), [1], None, False, 1, False, 0, "", released=[7]
    )
    cluster.state.putting.put_start(cluster.now_ms, request)
    assert cluster.present("a") == ""


@pytest.mark.parametrize("other", [8, 0], ids=["a client that releases", "one that does not"])
def test_the_lease_lasts_as_long_as_the_last_client_has_it(
    new_cluster: NewCluster, other: int
) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    lookup(cluster, "a", lease=7)
    lookup(cluster, "a", lease=other)
    release(cluster, 7, 7, 9)  # twice, and one that nobody has
    assert not is_evictable(cluster)
    if other:
        release(cluster, other)
    else:
        cluster.after(LEASE_MS)
    assert is_evictable(cluster)


def test_a_release_that_is_late_ends_no_later_lease(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    lookup(cluster, "a", lease=7)
    cluster.after(LEASE_MS)
    lookup(cluster, "a", lease=8)
    release(cluster, 7)
    assert not is_evictable(cluster)


def test_a_number_that_is_used_again_is_one_lease(new_cluster: NewCluster) -> None:
    """As by a call that is sent again, or one that the master serves in chunks."""
    cluster = new_cluster(one=2)
    cluster.put("ab", chain=False)
    for names in ("a", "b", "ab"):
        lookup(cluster, names, lease=7)
        cluster.after(LEASE_MS // 2)
    release(cluster, 7)
    cluster.put("xy", chain=False)


def test_beyond_the_bound_leases_end_by_time(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "LEASED_MAX", 2)
    cluster = new_cluster(one=3)
    cluster.put("abc", chain=False)
    lookup(cluster, "ab", lease=7)
    lookup(cluster, "c", lease=8)
    release(cluster, 7, 8)
    cluster.put("xy", chain=False)
    assert cluster.present("abc") == "c"
    cluster.after(LEASE_MS)
    cluster.put("uvw", chain=False)
    assert cluster.present("abc") == ""


def test_leases_that_nobody_releases_are_forgotten_when_they_have_ended(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(one=1)
    cluster.put("a")
    for number in range(1, 20):
        lookup(cluster, "a", lease=number)
        cluster.after(LEASE_MS // 4)
        check_invariants(cluster.state)
    record = cluster.state.forest.get(NAMESPACE, keys_of("a")[0])
    assert record is not None
    assert record.readers <= 5
