"""Memory of nodes that take capabilities is zeroed before it is granted again, and never while a
client may use it."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import PutOutcome, Version
from kvstore.master.state import reclaim
from kvstore.memory.header import SUPERBLOCK_BYTES
from tests.unit.master.cluster import BLOCK, EPOCH, EXTENT, Cluster
from tests.unit.master.conftest import NewCluster
from tests.unit.master.test_inventories import claim

LEASE_MS = 10_000


@pytest.fixture
def cluster(new_cluster: NewCluster) -> Cluster:
    """A node of three blocks, whose orders wait."""
    return joined(new_cluster())


def joined(cluster: Cluster, *, takes: bool = True, blocks: int = 3) -> Cluster:
    cluster.takes_capabilities = takes
    cluster.join("one", blocks)
    cluster.remove_later("?")  # a mark
    cluster.wipe()
    cluster.wipes_at_once = False
    return cluster


def ordered(cluster: Cluster) -> list[tuple[int, int]]:
    """Ranges to zero, in blocks, of the orders that are not done."""
    return [
        ((at - SUPERBLOCK_BYTES) // EXTENT, length // EXTENT)
        for _, order in cluster.orders
        for at, length in zip(order.offsets, order.lengths or [0] * len(order.offsets), strict=True)
        if length
    ]


def free_blocks(cluster: Cluster) -> int:
    (segment,) = cluster.state.pool.segments.values()
    return segment.allocator.free_bytes // EXTENT


def test_an_evicted_extent_is_zeroed_before_it_is_granted(cluster: Cluster) -> None:
    cluster.put("abc", chain=False)
    ticket = cluster.start_or_wait("d")
    assert isinstance(ticket, int)
    assert ordered(cluster) == [(0, 1)]
    assert ticket not in cluster.answers
    cluster.wipe()
    assert isinstance(cluster.answers[ticket], calls.Grants)


def test_a_removed_object_is_zeroed_when_its_readers_are_done(cluster: Cluster) -> None:
    cluster.put("abc", chain=False)
    cluster.remove_later("b")
    assert not ordered(cluster)
    cluster.wipe()
    cluster.after(LEASE_MS - 250)
    assert not ordered(cluster)
    assert free_blocks(cluster) == 0
    cluster.after(250)
    assert ordered(cluster) == [(1, 1)]
    assert free_blocks(cluster) == 0
    cluster.wipe()
    assert free_blocks(cluster) == 1


def test_a_settled_put_is_zeroed_at_once_and_another_after_its_quarantine(cluster: Cluster) -> None:
    grants = cluster.start("a")
    cluster.revoke(grants, quiesced=True)
    assert ordered(cluster) == [(0, 1)]
    cluster.wipe()
    grants = cluster.start("a")
    cluster.revoke(grants, quiesced=False)
    assert not ordered(cluster)
    cluster.wipe()
    cluster.after(cluster.rules.put_deadline_ms + cluster.rules.quarantine_ms)
    assert ordered(cluster) == [(0, 1)]


def test_the_tail_of_an_allocation_alone_is_zeroed(cluster: Cluster) -> None:
    token = cluster.allocate(BLOCK + EXTENT)
    assert cluster.commit(token, "a") is PutOutcome.STORED
    assert ordered(cluster) == [(1, 1)]


def test_bytes_that_no_object_claims_are_zeroed_piece_by_piece(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the lease of before, and no space is granted before that."""
    monkeypatch.setattr(reclaim, "ZERO_BYTES", 2 * EXTENT)
    cluster.join("two", 8)
    cluster.break_stream("two")
    cluster.kill("one")
    cluster.kill("two")
    cluster.join("two", again=True, tells=False)
    refused = claim("c", 5, version=Version(EPOCH, 1_000))
    cluster.tell("two", claim("a", 0), claim("b", 4), refused)
    assert not ordered(cluster)
    cluster.wipe()
    cluster.after(LEASE_MS - 500)
    assert not ordered(cluster)
    cluster.after(500)
    found = []
    for free in (2, 4, 6):
        assert cluster.state.pool.segments
        orders = ordered(cluster)
        assert sum(length for _, length in orders) == 2
        found += orders
        cluster.wipe()
        assert free_blocks(cluster) == free
    assert found == [(1, 2), (3, 1), (5, 1), (6, 2)]
    assert not ordered(cluster)


def test_a_node_that_comes_back_hears_again_what_to_zero(cluster: Cluster) -> None:
    cluster.put("abc", chain=False)
    cluster.remove_later("b")
    cluster.wipe()
    cluster.after(LEASE_MS)
    cluster.orders.clear()
    cluster.break_stream("one")
    cluster.join("one", resume=True)
    assert ordered(cluster) == [(1, 1)]
    cluster.kill("one")
    assert not cluster.state.reclaim._unzeroed


def test_where_nodes_take_no_capabilities_nothing_is_zeroed(new_cluster: NewCluster) -> None:
    cluster = joined(new_cluster(), takes=False)
    token = cluster.allocate(BLOCK + EXTENT)
    cluster.commit(token, "a")
    cluster.wipe()
    cluster.remove_later("a")
    cluster.wipe()
    cluster.after(cluster.rules.put_deadline_ms)
    assert free_blocks(cluster) == 3
    cluster.put("bcd", chain=False)
    cluster.start_or_wait("e")
    assert all(order.lengths == () for _, order in cluster.orders)
