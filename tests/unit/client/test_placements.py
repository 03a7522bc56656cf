"""What a client remembers, and for how long it believes it."""

from __future__ import annotations

from kvstore.calls import Placements
from kvstore.client.flows.placements import (
    AVOID_FIRST_S,
    AVOID_LONGEST_S,
    AVOID_QUICK_S,
    Placed,
    PlacementCache,
    Replica,
    SegmentTable,
)
from kvstore.errors import NodeUnreachableError
from kvstore.limits import AVOID_MAX, Key, Namespace
from tests.unit.client.world import segment

NS = Namespace("default")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def placed(until: float) -> Placed:
    return Placed(5, 1, 1, (Replica(segment(1), 4096),), until)


def test_a_placement_is_believed_until_its_promise_ends_and_not_at_that_moment() -> None:
    clock = Clock()
    cache = PlacementCache(10, clock)
    cache.remember(NS, [Key(b"a")], [placed(101.0)])
    assert cache.get(NS, Key(b"a")) is not None
    clock.now = 101.0
    assert cache.get(NS, Key(b"a")) is None
    assert len(cache) == 0


def test_namespaces_do_not_see_each_other() -> None:
    cache = PlacementCache(10, Clock())
    cache.remember(NS, [Key(b"a")], [placed(200.0)])
    assert cache.get(Namespace("other"), Key(b"a")) is None


def test_the_cache_is_bounded_and_forgets_what_it_learned_first() -> None:
    cache = PlacementCache(2, Clock())
    for key in (b"a", b"b", b"a", b"c"):
        cache.remember(NS, [Key(key)], [placed(200.0)])
    assert [cache.get(NS, Key(key)) is not None for key in (b"a", b"b", b"c")] == [
        True,
        False,
        True,
    ]
    nothing = PlacementCache(0, Clock())
    nothing.remember(NS, [Key(b"a")], [placed(200.0)])
    assert len(nothing) == 0


def test_ids_of_another_epoch_mean_nothing() -> None:
    table = SegmentTable(Clock())
    of_one = table.of(1)
    of_one[1] = segment(1)
    assert table.of(1) is of_one
    assert not table.of(2)
    of_one[2] = segment(2)  # a thread that still works with the epoch of before
    assert not table.of(2)


def test_only_the_segment_itself_is_forgotten() -> None:
    table = SegmentTable(Clock())
    known, of_before = segment(1), segment(1, generation=9)
    table.of(1)[1] = known
    assert not table.forget(of_before)
    assert table.of(1) == {1: known}
    assert table.forget(known)
    assert not table.forget(known)


def test_rows_leave_out_replicas_that_are_not_mounted_and_put_failed_ones_last() -> None:
    clock = Clock()
    table = SegmentTable(clock)
    known = {1: segment(1), 2: segment(2)}
    placements = Placements([5, 6, 0], [1, 1, 0], [1, 2, 0], [2, 1, 0], [1, 2, 9], [10, 20, 30])
    first, second, third = table.rows(known, placements, 200.0)
    assert first is not None
    assert [replica.segment.segment_id for replica in first.replicas] == [1, 2]
    assert (second, third) == (None, None)
    table.failed(segment(1), NodeUnreachableError("silent", silent_ms=1_000))
    avoided = next(table.rows(known, placements, 200.0))
    assert avoided is not None
    assert [replica.segment.segment_id for replica in avoided.replicas] == [2, 1]
    clock.now += AVOID_FIRST_S
    again = next(table.rows(known, placements, 200.0))
    assert again is not None
    assert [replica.segment.segment_id for replica in again.replicas] == [1, 2]


def test_a_segment_that_fails_again_and_again_is_avoided_ever_longer() -> None:
    clock = Clock()
    table = SegmentTable(clock)
    error = NodeUnreachableError("silent", silent_ms=1_000)
    pauses = []
    for _ in range(8):
        table.failed(segment(1), error)
        table.failed(segment(1), error)  # of a call that began before
        (failed,) = table.failures()
        assert table.avoid() == (segment(1).uuid,)
        pauses.append(failed.until - clock.now)
        clock.now = failed.until
        assert not table.avoided(segment(1))
        assert table.avoid() == ()
    assert pauses == [2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    clock.now += AVOID_LONGEST_S
    table.failed(segment(1), error)
    assert table.failures()[0].until == clock.now + AVOID_FIRST_S, "it had worked meanwhile"
    clock.now += 100.0
    assert table.failures() == []
    assert not table.failing


def test_placement_is_told_of_the_last_failures_within_a_bound() -> None:
    table = SegmentTable(Clock())
    silent = NodeUnreachableError("silent", silent_ms=1_000)
    for number in range(AVOID_MAX + 9):
        table.failed(segment(1)._replace(uuid=number.to_bytes(16)), silent)
    table.failed(segment(1), NodeUnreachableError("refused"))
    avoided = table.avoid()
    assert len(avoided) == AVOID_MAX
    assert avoided[0] == (AVOID_MAX + 8).to_bytes(16)


def test_what_did_not_answer_is_not_read_and_what_failed_at_once_comes_last() -> None:
    clock = Clock()
    table = SegmentTable(clock)
    replicas = [Replica(segment(number), 0) for number in (1, 2, 3)]
    table.failed(segment(1), NodeUnreachableError("refused"))
    table.failed(segment(2), NodeUnreachableError("silent", silent_ms=1_000))
    assert table.reachable(replicas) == [replicas[2], replicas[0]]
    clock.now += AVOID_QUICK_S
    assert table.reachable(replicas) == [replicas[0], replicas[2]]
    clock.now += AVOID_FIRST_S
    assert table.reachable(replicas) == replicas


def test_a_segment_that_is_mounted_anew_is_tried_at_once() -> None:
    table = SegmentTable(Clock())
    table.failed(segment(1), NodeUnreachableError("silent", silent_ms=1_000))
    table.met(segment(1))
    assert table.avoided(segment(1))
    table.met(segment(1, generation=2))
    assert not table.failing
