"""What a client remembers, and for how long it believes it."""

from __future__ import annotations

from kvstore.client.flows.location_cache import (
    AVOID_FIRST_S,
    AVOID_QUICK_S,
    LeasedLocation,
    PlacementCache,
    Replica,
    SegmentTable,
)
from kvstore.errors import NodeUnreachableError
from kvstore.limits import Key, Namespace
from tests.unit.client.world import segment

NS = Namespace("default")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def placed(until: float) -> LeasedLocation:
    return LeasedLocation(5, 1, 1, (Replica(segment(1), 4096),), until)


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
