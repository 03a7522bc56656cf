"""The flow of get when replicas, leases and masters come and go: what is tried next."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.client.flows import reading
from kvstore.client.flows.placements import AVOID_FIRST_S
from kvstore.client.flows.reading import ATTEMPTS, Target
from kvstore.errors import (
    DeadlineExceededError,
    NodeUnreachableError,
    PermissionDeniedError,
)
from kvstore.limits import Key
from tests.support.moves import moves_of
from tests.unit.client.world import EPOCH, A, B, N, World, found

SILENT = NodeUnreachableError("node one:\nmoved no byte", silent_ms=1_000, settled=1)


def get(world: World, *keys: Key) -> list[bytes | None]:
    targets = [Target(key) for key in keys]
    world.run(reading.read(world.context, N, targets))
    return [
        None if target.descriptor is None or target.data is None else target.data.tobytes()
        for target in targets
    ]


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

    def slow(request: calls.Lookup) -> calls.Found:
        world.now += 0.9
        return found((1, 5, [(1, 4096)]), lease_ms=1_000)

    world.answers[calls.Lookup] = [slow] * ATTEMPTS
    assert get(world, A) == [None]
    assert world.context.counters["late_reads"] == ATTEMPTS


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


def test_of_two_replicas_the_first_gets_a_part_of_the_time() -> None:
    world = World()
    world.store(2, 4096, A, b"x", 5)
    world.failing[1] = [DeadlineExceededError("slow", settled=1)]
    world.answers[calls.Lookup] = [found((1, 5, [(1, 4096), (2, 4096)]))] * 2
    assert get(world, A) == [b"x"]
    first, second = world.moved
    assert first.deadline == world.now + world.context.failover_s
    assert second.deadline is None
    assert not world.requests(calls.ReportFailure), "a deadline says nothing of the node"


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


def test_a_node_that_refuses_our_token_is_another_one_at_that_address() -> None:
    world = World()
    world.store(2, 4096, A, b"x", 5)
    world.failing[1] = [PermissionDeniedError("token")]
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096), (2, 4096)]))
    assert get(world, A) == [b"x"]


def test_a_report_says_who_where_and_why() -> None:
    world = World()
    world.failing[1] = [SILENT]
    world.answers[calls.Lookup] = found((1, 5, [(1, 4096)]))
    get(world, A)
    expected = calls.ReportFailure([1], "me", "host", "node one: moved no byte", EPOCH)
    assert world.requests(calls.ReportFailure) == [expected]
