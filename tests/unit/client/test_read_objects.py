"""The flow of get: which answers lead to which reads, and what is never believed."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.client.flows import read_objects
from kvstore.client.flows.read_objects import ATTEMPTS, ReadTarget
from kvstore.errors import BufferMismatchError, NodeUnreachableError, UnsupportedValueError
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
    targets = [ReadTarget(Key(key)) for key in keys]
    world.run(read_objects.read(world.context, NS, targets))
    return [
        None if target.descriptor is None or target.room is None else target.room.tobytes()
        for target in targets
    ]


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


def test_a_read_that_ends_after_its_lease_is_thrown_away() -> None:
    world = World()
    place(world, b"a", b"payload")
    world.answers[calls.Lookup] = found((7, 1, [(1, AT)]))
    slow = iter([True, False])

    def dawdle() -> None:
        if next(slow):
            world.now += 11

    world.after_moves = dawdle
    assert read(world, b"a") == [b"payload"]
    assert world.context.counters["late_reads"] == 1
    assert len(world.requests(calls.Lookup)) == 2


def test_another_object_at_the_place_is_stale_and_asked_for_anew() -> None:
    world = World()
    place(world, b"other", b"foreign")
    place(world, b"a", b"payload", offset=AT + 4096)
    replies = iter([found((7, 1, [(1, AT)])), found((7, 1, [(1, AT + 4096)]))])
    world.answers[calls.Lookup] = lambda request: next(replies)
    assert read(world, b"a") == [b"payload"]
    assert world.context.counters["stale_reads"] == 1


@pytest.mark.parametrize("change", ["version", "size", "namespace", "wiped"])
def test_a_header_that_differs_in_anything_is_not_believed(change: str) -> None:
    world = World()
    place(
        world,
        b"a",
        b"payload!" if change == "size" else b"payload",
        counter=2 if change == "version" else 1,
        namespace="other" if change == "namespace" else "default",
    )
    if change == "wiped":
        world.memory[1][AT : AT + 64] = bytes(64)
    world.answers[calls.Lookup] = found((7, 1, [(1, AT)]))
    assert read(world, b"a") == [None]
    assert world.context.counters["stale_reads"] == ATTEMPTS
    assert [request.keys for request in world.requests(calls.ReportCorrupt)] == [[b"a"]]


def test_flipped_bytes_are_never_returned_and_the_object_is_removed() -> None:
    world = World()
    place(world, b"a", b"payload")
    world.memory[1][AT + 1024 + 3] ^= 1
    world.answers[calls.Lookup] = found((7, 1, [(1, AT)]))
    assert read(world, b"a") == [None]
    assert world.context.counters["checksum_mismatches"] == ATTEMPTS
    assert [request.keys for request in world.requests(calls.ReportCorrupt)] == [[b"a"]]


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


def test_an_unreachable_node_is_reported_and_the_other_replica_read() -> None:
    world = World()
    place(world, b"a", b"payload", segment_id=2)
    world.failing[1] = [NodeUnreachableError("gone", quiesced=1)] * ATTEMPTS
    world.answers[calls.Lookup] = found((7, 1, [(1, AT), (2, AT)]))
    assert read(world, b"a") == [b"payload"]
    assert [request.segment_ids for request in world.requests(calls.ReportFailure)] == [[1]]


def test_a_node_that_failed_is_avoided_by_the_next_get() -> None:
    world = World()
    for key, offset in ((b"a", AT), (b"b", AT + 4096)):
        place(world, key, b"payload", segment_id=2, offset=offset)
    world.failing[1] = [NodeUnreachableError("gone", quiesced=1)] * ATTEMPTS
    world.answers[calls.Lookup] = lambda request: found(
        (7, 1, [(1, AT), (2, AT if request.keys == [b"a"] else AT + 4096)])
    )
    read(world, b"a")
    assert read(world, b"b") == [b"payload"]
    assert len(world.requests(calls.ReportFailure)) == 1


def test_when_the_only_node_is_gone_it_is_a_miss() -> None:
    world = World()
    world.failing[1] = [NodeUnreachableError("gone", quiesced=1)] * ATTEMPTS
    world.answers[calls.Lookup] = found((7, 1, [(1, AT)]))
    assert read(world, b"a") == [None]


def test_an_error_that_is_no_outage_reaches_the_caller() -> None:
    world = World()
    world.failing[1] = [UnsupportedValueError("not something another node would cure")] * ATTEMPTS
    world.answers[calls.Lookup] = found((7, 1, [(1, AT)]))
    with pytest.raises(UnsupportedValueError):
        read(world, b"a")


def test_a_placement_of_a_forgotten_segment_is_a_miss() -> None:
    world = World()
    world.answers[calls.Lookup] = found((7, 1, [(99, AT)]))
    assert read(world, b"a") == [None]


def test_scattered_buffers_are_filled_in_order_and_no_further() -> None:
    world = World()
    place(world, b"a", b"0123456789")
    world.answers[calls.Lookup] = found((10, 1, [(1, AT)]))
    parts = [bytearray(4), bytearray(3), bytearray(b"xxxxx")]
    target = ReadTarget(Key(b"a"), [memoryview(part) for part in parts])
    world.run(read_objects.read(world.context, NS, [target]))
    assert parts == [b"0123", b"456", b"789xx"]


def test_a_buffer_that_is_too_small_is_refused_before_a_byte_moves() -> None:
    world = World()
    place(world, b"a", b"0123456789")
    world.answers[calls.Lookup] = found((10, 1, [(1, AT)]))
    buffer = bytearray(9)
    with pytest.raises(BufferMismatchError) as caught:
        world.run(
            read_objects.read(world.context, NS, [ReadTarget(Key(b"a"), [memoryview(buffer)])])
        )
    assert (caught.value.fields["size_bytes"], caught.value.fields["buffer_bytes"]) == (10, 9)
    assert buffer == bytes(9)
