"""What operators see: status, listings, one object in detail."""

from __future__ import annotations

from kvstore import calls
from kvstore.limits import Namespace
from kvstore.master.state.records import ONE_SHARD_RECORDS
from tests.unit.master.cluster import BLOCK, EPOCH, EXTENT, NAMESPACE, Cluster
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000


def _pages(
    cluster: Cluster, limit: int, *, namespace: str = NAMESPACE, prefix: bytes = b""
) -> list[list[calls.ObjectRow]]:
    pages: list[list[calls.ObjectRow]] = []
    cursor = 0
    while True:
        request = calls.ListObjects(namespace, prefix, cursor, limit)
        page = cluster.state.report.list_objects(cluster.now_ms, request)
        pages.append(list(page.objects))
        cursor = page.next_cursor
        if not cursor:
            return pages


def test_the_status_shows_nodes_and_namespaces(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4, two=8)
    cluster.put("abc", host="host-one")
    cluster.after(1_000)
    cluster.silent.add("two")
    cluster.after(100)

    status = cluster.status()

    assert (status.epoch, status.uptime_ms) == (EPOCH, 1_100)
    one, two = status.nodes
    assert (one.name, one.host, one.state, one.silent_ms) == ("one", "host-one", "alive", 0)
    assert two.silent_ms == 100
    (segment,) = one.segments
    assert (segment.used, segment.largest_free) == (3 * EXTENT, EXTENT)
    assert status.namespaces == [calls.NamespaceStatus(NAMESPACE, 3, 3 * BLOCK)]
    assert dict(status.counters)["stored_objects"] == 3


def test_a_listing_of_a_large_namespace_is_whole(new_cluster: NewCluster) -> None:
    count = ONE_SHARD_RECORDS + 500
    cluster = new_cluster(one=count)
    names = [f"{index:06}" for index in range(count)]
    cluster.put(names)

    rows = [row for page in _pages(cluster, 1_000, namespace="") for row in page]

    assert sorted(row.key for row in rows) == [name.encode() for name in names]


def test_a_listing_goes_through_all_namespaces_and_can_be_narrowed(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put(["aa", "ab", "b"])
    cluster.put(["ac", "c"], namespace=Namespace("other"))

    (everything,) = _pages(cluster, 100, namespace="")
    narrowed = _pages(cluster, 1, namespace="", prefix=b"a")

    assert len(everything) == 5
    assert sorted(row.key for page in narrowed for row in page) == [b"aa", b"ab", b"ac"]
    assert _pages(cluster, 5, namespace="unknown") == [[]]


def test_a_cursor_that_nobody_gave_lists_nothing(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abc")

    request = calls.ListObjects(NAMESPACE, b"", (1 << 64) - 1, 10)

    assert cluster.state.report.list_objects(0, request) == calls.ListObjectsReply([], 0)
    status = cluster.state.report.status(0, calls.Status((1 << 64) - 1))
    assert (status.namespaces, status.next_cursor) == ([], 0)


def test_rows_say_what_state_an_object_is_in(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("abcd")
    cluster.remove("b")
    cluster.start("x", parent="d")
    cluster.match("a")
    cluster.after(1_000)

    rows = {row.key.decode(): row for page in _pages(cluster, 100) for row in page}

    assert {key: row.state for key, row in rows.items()} == {
        "a": "complete",
        "c": "detached",
        "d": "detached",
        "x": "being_written",
    }
    assert rows["a"].leased_ms == LEASE_MS - 1_000
    assert (rows["d"].depth, rows["d"].size, rows["d"].replicas) == (3, BLOCK, 1)


def test_an_object_in_detail(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8, two=8)
    grants = cluster.start("ab", replicas=2)
    cluster.end(grants)
    cluster.put("c", parent="b")
    cluster.after(500)

    detail = cluster.stat("b")

    assert detail.row is not None
    assert detail.row.state == "complete"
    assert (detail.parent, detail.children, detail.idle_ms) == (b"a", 1, 500)
    assert detail.version == calls.Version(EPOCH, grants.tokens[1])
    assert list(detail.placements.segments) == list(grants.segments[2:])


def test_used_memory_is_told_by_what_holds_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)

    def held() -> tuple[int, int, int]:
        [segment] = cluster.status().nodes[0].segments
        return segment.pending // EXTENT, segment.quarantined // EXTENT, segment.reclaim // EXTENT

    one, other = cluster.start("a"), cluster.start("b")
    cluster.start("c")
    assert held() == (3, 0, 0)
    cluster.end(one)
    cluster.revoke(other, quiesced=False)
    assert held() == (1, 1, 0)
    cluster.remove_later("a")
    assert held() == (1, 1, 1)
    cluster.wipe()
    cluster.after(cluster.rules.lease_ms + 1)
    assert held()[2] == 0
    cluster.after(cluster.rules.put_deadline_ms + cluster.rules.quarantine_ms)
    cluster.after(cluster.rules.quarantine_ms)
    assert held() == (0, 0, 0)


def test_objects_that_a_put_need_not_write_are_counted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=8)
    cluster.put("ab")
    cluster.start("c")
    cluster.start("abcd")
    assert cluster.state.counters["duplicate_puts"] == 2
    assert cluster.state.counters["overlapping_puts"] == 1
