"""What a client remembers, on a clock of the test's own."""

from __future__ import annotations

from kvstore.client.placements import AVOID_SECONDS, Placed, PlacementCache, Replica, SegmentTable
from tests.unit.client.world import A, B, C, N, found, segment


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def place(until: float, number: int = 1) -> Placed:
    return Placed(10, 7, number, (Replica(segment(number), 4096),), until)


def test_the_bound_is_kept_by_forgetting_what_was_remembered_first() -> None:
    cache = PlacementCache(2, Clock())
    for key in (A, B):
        cache.remember(N, key, place(200.0))
    cache.remember(N, A, place(300.0))  # again: now B is the oldest
    cache.remember(N, C, place(200.0))
    assert len(cache) == 2
    assert cache.get(N, B) is None
    assert cache.get(N, A) == place(300.0)


def test_a_cache_of_nothing_remembers_nothing() -> None:
    cache = PlacementCache(0, Clock())
    cache.remember(N, A, place(200.0))
    assert len(cache) == 0
    assert cache.get(N, A) is None


def test_only_the_segment_itself_is_forgotten() -> None:
    table = SegmentTable(Clock())
    known, of_before = segment(1), segment(1, generation=9)
    table.learn([known])
    assert not table.forget(of_before)
    assert table.get(1) is known
    assert table.forget(known)
    assert not table.forget(known)


def test_a_node_that_failed_is_tried_last_for_a_while() -> None:
    clock = Clock()
    table = SegmentTable(clock)
    table.learn([segment(1), segment(2)])
    rows = found((10, 5, [(1, 4096), (2, 8192)]), None).placements
    first, miss = table.rows(rows, 150.0)
    assert first is not None
    assert miss is None
    assert [replica.segment.segment_id for replica in first.replicas] == [1, 2]
    table.failed(segment(1))
    assert table.avoided(segment(1))
    again, _ = table.rows(rows, 150.0)
    assert again is not None
    assert [replica.segment.segment_id for replica in again.replicas] == [2, 1]
    clock.now += AVOID_SECONDS
    assert not table.avoided(segment(1))


def test_extents_of_unknown_segments_are_left_out() -> None:
    table = SegmentTable(Clock())
    table.learn([segment(2)])
    rows = found((10, 5, [(1, 4096), (2, 8192)]), (3, 6, [(1, 0)]), (4, 7, [(2, 0)])).placements
    places = list(table.rows(rows, 150.0))
    assert [each and each.replicas[0].offset for each in places] == [8192, None, 0]
