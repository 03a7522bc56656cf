"""The flow of get: which answers lead to which reads, and what is never believed."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.client.flows import read_objects
from kvstore.client.flows.read_objects import ATTEMPTS
from kvstore.client.flows.read_targets import CallerMemory, NewMemory
from kvstore.errors import BufferMismatchError, NodeUnreachableError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import SUPERBLOCK_BYTES
from tests.unit.client.world import World, found

NS = Namespace("default")
AT = SUPERBLOCK_BYTES


def place(
    world: World,
    key: bytes,
    payload: bytes,
    *,
    segment_id: int = 1,
    offset: int = AT,
    counter: int = 1,
    namespace: str = "default",
) -> None:
    world.store(segment_id, offset, Key(key), payload, counter, namespace=Namespace(namespace))


def read(world: World, *keys: bytes) -> list[bytes | None]:
    targets = NewMemory([Key(key) for key in keys])
    world.run(read_objects.read(world.context, NS, targets))
    return [found and found[2].tobytes() for found in targets.found()]


def test_found_objects_are_read_and_misses_are_none() -> None:
    world = World()
    place(world, b"a", b"payload")
    world.answers[calls.Lookup] = found((7, 1, [(1, AT)]), None)
    assert read(world, b"a", b"missing") == [b"payload", None]
    assert [type(request) for request in world.asked] == [calls.Lookup, calls.DescribeSegments]


def test_what_is_read_twice_within_a_second_is_leased_by_time_and_then_needs_no_call() -> None:
    world = World()
    place(world, b"a", b"payload")
    world.answers[calls.Lookup] = found((7, 1, [(1, AT)]))
    for pause in (0.0, 2.1, 0.9, 9.7):  # of the last lease of 10 s, less a margin of 0.2
        world.now += pause
        assert read(world, b"a") == [b"payload"]
    assert [request.lease for request in world.requests(calls.Lookup)] == [1, 2, 0]
    world.now += 0.2
    assert read(world, b"a") == [b"payload"]
    assert [request.lease for request in world.requests(calls.Lookup)] == [1, 2, 0, 3]
    assert world.context.leases.take() == [3]


def test_bytes_that_were_bad_once_are_not_reported() -> None:
    """They may have been removed at that moment: only a second look at the same version tells."""
    world = World()
    place(world, b"a", b"payload")
    world.memory[1][AT + 1024 + 3] ^= 1
    world.answers[calls.Lookup] = found((7, 1, [(1, AT)]))

    def die() -> None:
        world.failing[1] = [NodeUnreachableError("gone", quiesced=1)] * ATTEMPTS

    world.after_moves = die
    assert read(world, b"a") == [None]
    assert world.context.counters["checksum_mismatches"] == 1
    assert world.requests(calls.ReportCorrupt) == []


def test_a_bad_replica_is_passed_over_for_a_good_one() -> None:
    world = World()
    for segment_id in (1, 2):
        place(world, b"a", b"payload", segment_id=segment_id)
    world.memory[1][AT + 1024] ^= 1
    world.answers[calls.Lookup] = found((7, 1, [(1, AT), (2, AT)]))
    assert read(world, b"a") == [b"payload"]
    (report,) = world.requests(calls.ReportCorrupt)
    assert report.uuids == [world.segments[1].uuid]


def test_a_node_that_failed_is_avoided_by_the_next_get() -> None:
    world = World()
    for key, offset in ((b"a", AT), (b"b", AT + 4096)):
        place(world, key, b"payload", segment_id=2, offset=offset)
    world.failing[1] = [NodeUnreachableError("gone", quiesced=1)] * ATTEMPTS
    world.answers[calls.Lookup] = lambda request: found(
        (7, 1, [(1, AT), (2, AT if request.keys == [b"a"] else AT + 4096)])
    )
    assert [read(world, key) for key in (b"a", b"b")] == [[b"payload"]] * 2
    assert len(world.requests(calls.ReportFailure)) == 1


def test_a_buffer_that_is_too_small_is_refused_before_a_byte_moves() -> None:
    world = World()
    place(world, b"a", b"0123456789")
    world.answers[calls.Lookup] = found((10, 1, [(1, AT)]))
    buffer = bytearray(9)
    targets = CallerMemory([Key(b"a")], [[memoryview(buffer)]])
    with pytest.raises(BufferMismatchError) as caught:
        world.run(read_objects.read(world.context, NS, targets))
    assert (caught.value.fields["size_bytes"], caught.value.fields["buffer_bytes"]) == (10, 9)
    assert buffer == bytes(9)
