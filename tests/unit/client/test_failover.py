"""The flow of get when replicas, leases and masters come and go: what is tried next."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.client.flows import read_objects
from kvstore.client.flows.location_cache import AVOID_FIRST_S
from kvstore.client.flows.read_objects import ATTEMPTS
from kvstore.client.flows.read_targets import CallerMemory, NewMemory
from kvstore.errors import (
    ClosedError,
    DeadlineExceededError,
    MasterUnreachableError,
    NodeUnreachableError,
    PermissionDeniedError,
    SegmentUnmountedError,
)
from kvstore.limits import Key
from tests.support.range_copies import moves_of
from tests.unit.client.world import EPOCH, A, B, N, World, found, segment

GONE = NodeUnreachableError("refused", quiesced=1)
SILENT = NodeUnreachableError("node one:\nmoved no byte", silent_ms=1_000, quiesced=1)


def get(world: World, *keys: Key) -> list[bytes | None]:
    targets = NewMemory(keys)
    world.run(read_objects.read(world.context, N, targets))
    return [found and found[2].tobytes() for found in targets.found()]


def test_a_placement_is_used_until_the_lease_less_the_margin() -> None:
    world = World()
    world.store(1, 4096, A, b"x", 5)
    there = found((1, 5, [(1, 4096)]), lease_ms=1_000)
    world.answers[calls.Lookup] = [there, there, found(None)]
    assert get(world, A) == [b"x"]
    asked_at = world.now
    assert get(world, A) == [b"x"]
    world.now = asked_at + 0.79
    assert get(world, A) == [b"x"]
    world.now = asked_at + 0.81
    assert get(world, A) == [None]


def test_the_lease_counts_from_before_the_question() -> None:
    world = World()
    world.store(1, 4096, A, b"x", 5)

    def slow(request: calls.Lookup) -> calls.LookupReply:
        world.now += 0.9
        return found((1, 5, [(1, 4096)]), lease_ms=1_000)

    world.answers[calls.Lookup] = [slow] * ATTEMPTS
    assert get(world, A) == [None]
    assert world.context.counters["late_reads"] == ATTEMPTS


def test_a_read_that_ends_after_the_lease_is_thrown_away() -> None:
    world = World()
    world.store(1, 4096, A, b"x", 5)
    world.answers[calls.Lookup] = [found((1, 5, [(1, 4096)]), lease_ms=1_000)] * 2
    ends = iter([2.0, 0.0])

    def pass_time() -> None:
        world.now += next(ends)

    world.after_moves = pass_time
    assert get(world, A) == [b"x"]
    assert world.context.counters == {"late_reads": 1}
    assert len(world.requests(calls.Lookup)) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"key": B, "counter": 5},
        {"key": A, "counter": 6},
        {"key": A, "counter": 5, "epoch": EPOCH - 1},
        {"key": A, "counter": 5, "namespace": "other"},
        {"key": A, "counter": 5, "payload": b"longer than that"},
        None,
    ],
)
def test_foreign_bytes_are_never_returned(other: dict[str, object] | None) -> None:
    world = World()
    if other is not None:
        named = {"payload": b"foreign", **other}
        world.store(1, 4096, **named)  # type: ignore[arg-type]
    world.store(2, 8192, A, b"payload", 9)
    world.answers[calls.Lookup] = [found((7, 5, [(1, 4096)])), found((7, 9, [(2, 8192)]))]
    assert get(world, A) == [b"payload"]
    assert world.context.counters == {"stale_reads": 1}


def test_stale_again_and_again_is_a_miss() -> None:
    world = World()
    world.answers[calls.Lookup] = [found((7, 5, [(1, 4096)]))] * ATTEMPTS
    assert get(world, A) == [None]
    assert world.context.counters == {"stale_reads": ATTEMPTS, "corrupt_objects": 1}
    assert world.requests(calls.ReportCorrupt) == [corrupt(A, 5, 1)]


def test_what_cannot_be_reported_is_a_miss_all_the_same() -> None:
    world = World()
    world.answers[calls.Lookup] = [found((7, 5, [(1, 4096)]))] * ATTEMPTS
    world.answers[calls.ReportCorrupt] = MasterUnreachableError("off")
    assert get(world, A) == [None]


def corrupt(key: Key, counter: int, *numbers: int) -> calls.ReportCorrupt:
    """The report of one version's replicas on these segments."""
    rows = len(numbers)
    uuids = [segment(number).uuid for number in numbers]
    return calls.ReportCorrupt(N, [key] * rows, [EPOCH] * rows, [counter] * rows, uuids)


def test_of_two_replicas_the_first_gets_a_part_of_the_time() -> None:
    world = World()
    world.store(2, 4096, A, b"x", 5)
    world.failing[1] = [DeadlineExceededError("slow", quiesced=1)]
    world.answers[calls.Lookup] = [found((1, 5, [(1, 4096), (2, 4096)]))] * 2
    assert get(world, A) == [b"x"]
    first, second = world.moved
    assert first.deadline == world.now + world.context.failover_s
    assert second.deadline is None
    assert not world.requests(calls.ReportFailure), "a deadline says nothing of the node"


def test_a_single_replica_gets_all_the_time() -> None:
    world = World()
    world.store(1, 4096, A, b"x", 5)
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096)]))
    get(world, A)
    assert world.moved[0].deadline is None


def test_a_node_that_joined_anew_is_not_reported() -> None:
    world = World()
    world.failing[1] = [SegmentUnmountedError("mounted anew", quiesced=1)]
    world.answers[calls.Lookup] = [found((1, 5, [(1, 4096)])), found(None)]
    assert get(world, A) == [None]
    assert not world.requests(calls.ReportFailure)
    assert 1 not in world.context.segments.of(EPOCH)


def test_a_segment_of_another_epoch_is_not_reported_under_its_number() -> None:
    world = World()
    world.store(1, 4096, A, b"x", 5)
    world.store(2, 4096, B, b"y", 6, epoch=EPOCH + 1)
    world.answers[calls.Lookup] = [
        found((1, 5, [(1, 4096)])),
        found((1, 6, [(2, 4096)]), epoch=EPOCH + 1),
        found(None, epoch=EPOCH + 1),
    ]
    assert get(world, A) == [b"x"]
    world.epoch += 1
    assert get(world, B) == [b"y"]  # from here on the ids are another master's
    world.failing[1] = [GONE]
    assert get(world, A) == [None]  # by its cached place
    assert not world.requests(calls.ReportFailure)


def test_wrong_payload_everywhere_is_counted_removed_and_a_miss() -> None:
    world = World()
    world.store(1, 4096, A, b"payload", 5)
    world.store(2, 4096, B, b"fine", 6)
    world.memory[1][4096 + 1024] ^= 1
    rows = (7, 5, [(1, 4096)]), (4, 6, [(2, 4096)])
    world.answers[calls.Lookup] = [found(*rows), *[found(rows[0])] * (ATTEMPTS - 1)]
    assert get(world, A, B) == [None, b"fine"]
    assert world.requests(calls.ReportCorrupt) == [corrupt(A, 5, 1)]
    assert world.context.counters["corrupt_objects"] == 1


def test_the_payload_is_believed_where_only_headers_are_verified() -> None:
    world = World(verify_payload=False)
    world.store(1, 4096, A, b"payload", 5)
    world.memory[1][4096 + 1024] ^= 1
    world.answers[calls.Lookup] = found((7, 5, [(1, 4096)]))
    assert get(world, A) != [b"payload"]
    assert world.context.counters == {}


def test_one_batch_is_one_transfer_per_segment() -> None:
    world = World()
    keys = [Key(bytes([number])) for number in range(6)]
    rows = []
    for number, key in enumerate(keys):
        where = (1 + number % 2, 4096 + 2048 * number)
        world.store(*where, key, b"p%d" % number, number + 1)
        rows.append((2, number + 1, [where]))
    world.answers[calls.Lookup] = found(*rows)
    assert get(world, *keys) == [b"p%d" % number for number in range(6)]
    assert [(each.segment.segment_id, len([*moves_of(each)])) for each in world.moved] == [
        (1, 6),
        (2, 6),
    ]


def test_callers_memory_is_filled_piece_by_piece() -> None:
    world = World()
    world.store(1, 4096, A, b"0123456789", 5)
    world.answers[calls.Lookup] = found((10, 5, [(1, 4096)]))
    pieces = [bytearray(4), bytearray(0), bytearray(3), bytearray(5), bytearray(2)]
    targets = CallerMemory([A], [[memoryview(piece) for piece in pieces]])
    world.run(read_objects.read(world.context, N, targets))
    assert [bytes(piece) for piece in pieces] == [b"0123", b"", b"456", b"789\0\0", b"\0\0"]
    assert targets.sizes() == [10]


@pytest.mark.parametrize("error", [ClosedError("closed"), MasterUnreachableError("off")])
def test_what_going_elsewhere_cannot_help_is_raised(error: Exception) -> None:
    world = World()
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096)]))
    if isinstance(error, MasterUnreachableError):
        world.answers[calls.Lookup] = error
    else:
        world.failing[1] = [error]  # type: ignore[list-item]
    with pytest.raises(type(error)):
        get(world, A)


def test_a_single_replica_that_does_not_answer_is_a_miss_and_is_not_asked_again() -> None:
    world = World()
    world.store(1, 4096, A, b"x", 5)
    world.failing[1] = [SILENT, None]
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096)]))
    assert get(world, A) == [None]
    assert get(world, A) == [None]
    assert len(world.moved) == 1
    assert world.context.counters["avoided_reads"] == 2
    world.now += AVOID_FIRST_S
    assert get(world, A) == [b"x"]


def test_of_two_replicas_the_one_that_did_not_answer_is_left_out() -> None:
    world = World()
    world.store(2, 4096, A, b"x", 5)
    world.failing[1] = [SILENT]
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096), (2, 4096)]))
    assert get(world, A) == [b"x"]
    world.context.placements.clear()
    assert get(world, A) == [b"x"]
    assert [each.segment.segment_id for each in world.moved] == [1, 2, 2]


def test_a_node_that_refuses_our_token_is_another_one_at_that_address() -> None:
    world = World()
    world.store(2, 4096, A, b"x", 5)
    world.failing[1] = [PermissionDeniedError("token")]
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096), (2, 4096)]))
    assert get(world, A) == [b"x"]


def test_a_deadline_that_ends_in_a_transfer_names_the_node() -> None:
    world = World()
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096)]))
    world.failing[1] = [DeadlineExceededError("node one was slow", final=1)]
    with pytest.raises(DeadlineExceededError, match="node one was slow"):
        get(world, A)
    assert len(world.requests(calls.Lookup)) == 1


def test_a_report_says_who_where_and_why() -> None:
    world = World()
    world.failing[1] = [SILENT]
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096)]))
    get(world, A)
    expected = calls.ReportFailure([1], "me", "host", "node one: moved no byte", EPOCH)
    assert world.requests(calls.ReportFailure) == [expected]


def test_what_was_not_tried_is_not_reported() -> None:
    world = World()
    world.failing[1] = [NodeUnreachableError("no transport", tried=0, quiesced=1)]
    world.answers[calls.Lookup] = [found((1, 5, [(1, 4096)])), found(None)]
    assert get(world, A) == [None]
    assert not world.requests(calls.ReportFailure)


def test_a_report_that_is_not_answered_changes_nothing() -> None:
    world = World()
    world.store(2, 4096, A, b"x", 5)
    world.failing[1] = [GONE]
    world.answers[calls.ReportFailure] = MasterUnreachableError("off")
    world.answers[calls.Lookup] = [found((1, 5, [(1, 4096), (2, 4096)]))] * 2
    assert get(world, A) == [b"x"]


def test_replicas_whose_segments_nobody_knows_are_passed_over() -> None:
    world = World()
    world.store(2, 4096, A, b"x", 5)
    del world.segments[1]
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096), (2, 4096)]))
    assert get(world, A) == [b"x"]
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096)]))
    assert get(world, B) == [None]
    assert segment(1).segment_id == 1
