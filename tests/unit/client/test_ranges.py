"""The flow of get_ranges: where it looks next when a replica fails."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.client.flows.get import ObjectParts, get_ranges
from kvstore.client.flows.read_objects import ATTEMPTS
from kvstore.errors import BufferMismatchError, DeadlineExceededError, NodeUnreachableError
from kvstore.limits import Key
from tests.unit.client.world import A, B, N, World, found

TWO = [(1, 4096), (2, 8192)]
"""Both replicas of an object."""


def read(world: World, *keys: Key, timeout_ms: int | None = None) -> list[bytes | None]:
    """The bytes 2 to 5 of each object."""
    rooms = [bytearray(3) for _ in keys]
    wanted = ObjectParts(keys, [[(2, memoryview(room))] for room in rooms])
    found = world.run(get_ranges(world.context, N, wanted, timeout_ms))
    return [None if size is None else bytes(room) for size, room in zip(found, rooms, strict=True)]


def test_of_two_replicas_the_first_gets_a_part_of_the_time() -> None:
    world = World()
    world.store(2, 8192, A, b"payload", 5)
    world.failing[1] = [DeadlineExceededError("slow", quiesced=1)]
    world.answers[calls.Lookup] = [found((7, 5, TWO))] * 2
    assert read(world, A, timeout_ms=6_000) == [b"ylo"]
    assert [each.deadline for each in world.moved] == [world.now + 2.0, None]


def test_an_object_with_one_replica_gets_all_the_time() -> None:
    world = World()
    world.store(1, 4096, A, b"payload", 5)
    world.store(1, 16384, B, b"another", 6)
    world.answers[calls.Lookup] = [found((7, 5, TWO), (7, 6, [(1, 16384)]))]
    assert read(world, A, B) == [b"ylo", b"oth"]
    assert [each.deadline for each in world.moved] == [None]


def test_a_node_that_does_not_answer_is_avoided() -> None:
    world = World()
    world.store(2, 8192, A, b"payload", 5)
    world.failing[1] = [NodeUnreachableError("refused", quiesced=1)]
    world.answers[calls.Lookup] = [found((7, 5, TWO))] * 2
    assert read(world, A) == [b"ylo"]
    assert len(world.requests(calls.ReportFailure)) == 1


def test_bad_memory_is_read_from_the_other_replica_and_reported() -> None:
    world = World()
    world.store(1, 4096, B, b"foreign", 5)
    world.store(2, 8192, A, b"payload", 5)
    world.answers[calls.Lookup] = [found((7, 5, TWO))] * 2
    assert read(world, A) == [b"ylo"]
    assert world.context.counters == {"stale_reads": 1, "corrupt_objects": 1}
    (report,) = world.requests(calls.ReportCorrupt)
    assert (report.keys, report.uuids) == ([A], [world.segments[1].uuid])


def test_bad_memory_everywhere_is_a_miss_and_reported() -> None:
    world = World()
    world.answers[calls.Lookup] = [found((7, 5, TWO))] * ATTEMPTS
    assert read(world, A) == [None]
    (report,) = world.requests(calls.ReportCorrupt)
    assert set(report.uuids) == {world.segments[number].uuid for number in (1, 2)}


def test_one_look_at_what_was_removed_meanwhile_is_not_reported() -> None:
    world = World()
    world.answers[calls.Lookup] = [found((7, 5, TWO)), found(None)]
    assert read(world, A) == [None]
    assert not world.requests(calls.ReportCorrupt)


def test_a_read_that_ends_after_the_lease_is_thrown_away() -> None:
    world = World()
    world.store(1, 4096, A, b"payload", 5)
    world.answers[calls.Lookup] = [found((7, 5, [(1, 4096)]), lease_ms=1_000), found(None)]

    def pass_time() -> None:
        world.now += 2.0

    world.after_moves = pass_time
    assert read(world, A) == [None]
    assert world.context.counters == {"late_reads": 1}


def test_a_range_beyond_the_object_reads_nothing() -> None:
    world = World()
    world.store(1, 4096, A, b"1234", 5)
    world.answers[calls.Lookup] = found((4, 5, [(1, 4096)]))
    with pytest.raises(BufferMismatchError, match="a range ends at 5"):
        read(world, A)
    assert not world.moved
