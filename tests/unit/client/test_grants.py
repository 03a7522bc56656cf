"""Puts whose grants come to nothing, and the flows of allocate and commit, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.client.flows import allocate, write_objects
from kvstore.client.flows.location_cache import LeasedLocation, Replica
from kvstore.client.flows.write_objects import PutOptions
from kvstore.client.leases.lease_table import AllocationLease
from kvstore.errors import (
    DeadlineExceededError,
    MasterUnreachableError,
    NodeUnreachableError,
    NoSpaceError,
    PermissionDeniedError,
    PutRefusedError,
)
from kvstore.limits import Key
from kvstore.memory.header import HEADER_BYTES, WIPE, unpack
from tests.unit.client.world import EPOCH, A, B, C, D, N, World, grants, items

WRITE, FOUND, BEING_WRITTEN, STORED, REFUSED, _ = PutOutcome

OPTIONS = PutOptions(namespace=N)
SETTLED = NodeUnreachableError("refused", quiesced=1)
UNSETTLED = NodeUnreachableError("reset", quiesced=0)
ON_6 = NodeUnreachableError("reset", quiesced=0, connection=6)
ON_5 = NodeUnreachableError("reset", quiesced=0, connection=5)


def put(world: World, *keys: Key, options: PutOptions = OPTIONS) -> list[PutOutcome]:
    pairs = ((key, b"payload of " + key) for key in keys)
    return world.run(write_objects.write(world.context, items(*pairs), options))


def test_each_replica_has_a_header_of_its_own() -> None:
    world = World()
    world.answers[calls.PutStart] = grants([WRITE], [9], [(1, 4096), (2, 8192)], replicas=2)
    world.answers[calls.PutEnd] = calls.PutEndReply([STORED])
    assert put(world, A, options=PutOptions(namespace=N, replicas=2)) == [STORED]
    assert unpack(world.memory[1][4096:], 1, 4096) == unpack(world.memory[2][8192:], 2, 8192)
    assert unpack(world.memory[1][4096:], 1, 4096) is not None


def test_the_deadline_of_the_writes_counts_from_before_the_question() -> None:
    world = World()

    def slow(request: calls.PutStart) -> calls.Grants:
        world.now += 3
        return grants([WRITE], [9], [(1, 4096)], deadline_ms=10_000)

    asked_at = world.now
    world.answers[calls.PutStart] = slow
    world.answers[calls.PutEnd] = calls.PutEndReply([STORED])
    put(world, A)
    assert world.moved[0].deadline == pytest.approx(asked_at + 10 - 0.2)


@pytest.mark.parametrize(
    ("error", "quiesced", "connections"),
    [(SETTLED, True, ()), (UNSETTLED, False, ()), (ON_5, False, (5,))],
)
def test_what_could_not_be_written_is_revoked_and_asked_for_again(
    error: NodeUnreachableError, quiesced: bool, connections: tuple[int, ...]
) -> None:
    world = World()
    world.failing[1] = [error]
    world.answers[calls.PutStart] = [
        grants([WRITE] * 3, [9, 10, 11], [(1, 4096), (2, 4096), (1, 8192)]),
        grants([WRITE, WRITE], [12, 13], [(2, 8192), (2, 12288)]),
    ]
    world.answers[calls.PutEnd] = [calls.PutEndReply([STORED]), calls.PutEndReply([STORED, STORED])]
    assert put(world, A, B, C) == [STORED] * 3
    assert world.requests(calls.PutRevoke) == [
        calls.PutRevoke(EPOCH, [9], quiesced, connections),
        calls.PutRevoke(EPOCH, [11], quiesced, connections),
    ]
    assert [request.keys for request in world.requests(calls.PutStart)] == [[A, B, C], [A, C]]
    assert [request.tokens for request in world.requests(calls.PutEnd)] == [[10], [12, 13]]
    assert len(world.paused) == 1
    assert world.requests(calls.ReportFailure)[0].segment_ids == [1]


@pytest.mark.parametrize(
    ("errors", "connections"),
    [([ON_5, UNSETTLED], ()), ([ON_5, SETTLED], (5,)), ([ON_5, ON_6], (5, 6))],
)
def test_connections_are_named_where_all_that_may_carry_bytes_are_known(
    errors: list[NodeUnreachableError], connections: tuple[int, ...]
) -> None:
    world = World()
    for number, error in enumerate(errors, 1):
        world.failing[number] = [error]
    world.answers[calls.PutStart] = [
        grants([WRITE], [9], [(1, 4096), (2, 4096)], replicas=2), grants([FOUND], [], []),
    ]  # fmt: skip
    put(world, A, options=PutOptions(namespace=N, replicas=2))
    (revoked,) = world.requests(calls.PutRevoke)
    assert (revoked.quiesced, sorted(revoked.connections)) == (False, list(connections))


def test_grants_are_asked_for_under_the_number_that_data_servers_see() -> None:
    world = World()
    world.context.client_number = 77
    world.answers[calls.PutStart] = grants([FOUND], [], [])
    put(world, A)
    world.answers[calls.Allocate] = grants([WRITE], [9], [(1, 4096)])
    world.run(allocate.grant(world.context, N, 100, 0))
    asked = world.requests(calls.PutStart) + world.requests(calls.Allocate)
    assert [request.client_number for request in asked] == [77, 77]


def test_a_segment_that_nobody_knows_is_nothing_to_write_to() -> None:
    world = World()
    world.answers[calls.PutStart] = [
        grants([WRITE], [9], [(17, 4096)]),
        grants([WRITE], [10], [(1, 4096)]),
    ]
    world.answers[calls.PutEnd] = calls.PutEndReply([STORED])
    assert put(world, A) == [STORED]
    assert world.requests(calls.PutRevoke) == [calls.PutRevoke(EPOCH, [9], True)]


def test_an_unanswered_end_is_asked_once_more() -> None:
    world = World()
    world.answers[calls.PutStart] = grants([WRITE], [9], [(1, 4096)])
    world.answers[calls.PutEnd] = [MasterUnreachableError("cut"), calls.PutEndReply([STORED])]
    assert put(world, A) == [STORED]
    assert len(world.requests(calls.PutStart)) == 1


def test_an_end_that_had_been_done_is_found() -> None:
    world = World()
    world.answers[calls.PutStart] = [grants([WRITE], [9], [(1, 4096)]), grants([FOUND], [], [])]
    world.answers[calls.PutEnd] = [MasterUnreachableError("cut"), calls.PutEndReply([REFUSED])]
    assert put(world, A) == [FOUND]


def test_under_a_new_master_it_is_written_again() -> None:
    world = World()

    def of_the_new_master(_: calls.Request) -> calls.Grants:
        world.epoch = EPOCH + 1
        return grants([WRITE], [1], [(1, 8192)], epoch=EPOCH + 1)

    world.answers[calls.PutStart] = [grants([WRITE], [9], [(1, 4096)]), of_the_new_master]
    world.answers[calls.PutEnd] = [calls.PutEndReply([REFUSED]), calls.PutEndReply([STORED])]
    assert put(world, A) == [STORED]
    header = unpack(world.memory[1][8192:], 1, 8192)
    assert header is not None
    assert (header.epoch, header.counter) == (EPOCH + 1, 1)


@pytest.mark.parametrize("error", [NoSpaceError("full"), PermissionDeniedError("no")])
def test_what_the_master_refuses_is_raised(error: Exception) -> None:
    world = World()
    world.answers[calls.PutStart] = error
    with pytest.raises(type(error)):
        put(world, A)
    assert len(world.asked) == 1


def test_a_deadline_that_passes_is_counted() -> None:
    world = World()
    world.failing[1] = [DeadlineExceededError("late", quiesced=1)]
    world.answers[calls.PutStart] = [
        grants([WRITE], [9], [(1, 4096)], deadline_ms=100),
        grants([WRITE], [10], [(1, 4096)]),
    ]
    world.answers[calls.PutEnd] = calls.PutEndReply([STORED])
    assert put(world, A) == [STORED]
    assert world.context.counters["put_deadlines_passed"] == 1


def test_the_refused_pieces_of_a_chain_keep_their_parents() -> None:
    world = World()
    world.failing[2] = [SETTLED]
    world.answers[calls.PutStart] = [
        grants([WRITE] * 4, [1, 2, 3, 4], [(2, 4096), (1, 4096), (2, 8192), (2, 12288)]),
        grants([WRITE], [5], [(1, 8192)]),
        grants([WRITE, WRITE], [6, 7], [(1, 16384), (1, 20480)]),
    ]
    world.answers[calls.PutEnd] = [
        calls.PutEndReply([STORED]), calls.PutEndReply([STORED]),
        calls.PutEndReply([STORED, STORED]),
    ]  # fmt: skip
    options = PutOptions(namespace=N, chain=True)
    assert put(world, A, B, C, D, options=options) == [STORED] * 4
    asked = [(request.keys, request.parent) for request in world.requests(calls.PutStart)]
    assert asked == [([A, B, C, D], None), ([A], None), ([C, D], B)]
    parents = [unpack(world.memory[1][at:], 1, at) for at in (8192, 4096, 16384, 20480)]
    assert [header and header.parent for header in parents] == [None, A, B, C]


def test_what_is_not_a_chain_shares_its_parent_and_is_asked_for_together() -> None:
    world = World()
    world.failing[2] = [SETTLED]
    world.answers[calls.PutStart] = [
        grants([WRITE] * 3, [1, 2, 3], [(2, 4096), (1, 4096), (2, 8192)]),
        grants([WRITE] * 2, [4, 5], [(1, 8192), (1, 16384)]),
    ]
    world.answers[calls.PutEnd] = [calls.PutEndReply([STORED]), calls.PutEndReply([STORED] * 2)]
    assert put(world, A, B, C, options=PutOptions(namespace=N, parent=D)) == [STORED] * 3
    asked = [(request.keys, request.parent) for request in world.requests(calls.PutStart)]
    assert asked == [([A, B, C], D), ([A, C], D)]


def test_a_put_forgets_where_the_object_was() -> None:
    world = World()
    place = LeasedLocation(1, EPOCH, 1, (Replica(world.segments[1], 0),), world.now + 5)
    world.context.placements.remember(N, [A], [place])
    world.answers[calls.PutStart] = grants([WRITE], [9], [(1, 4096)])
    world.answers[calls.PutEnd] = calls.PutEndReply([STORED])
    put(world, A)
    assert world.context.placements.get(N, A) is None


# --- allocations -------------------------------------------------------------------------------


def test_an_allocation_is_wiped_and_counts_from_before_the_question() -> None:
    world = World()
    world.memory[1][4096 : 4096 + 64] = b"x" * 64
    world.answers[calls.Allocate] = grants([WRITE], [9], [(1, 4096)], deadline_ms=5_000)
    granted, until = world.run(allocate.grant(world.context, N, 100, 0))
    assert granted == AllocationLease(EPOCH, 9, world.segments[1], 4096, 100)
    assert until == pytest.approx(world.now + 4.8)
    assert world.memory[1][4096 : 4096 + 64] == WIPE


def test_an_allocation_that_cannot_be_reached_is_revoked() -> None:
    world = World()
    world.failing[1] = [UNSETTLED]
    world.answers[calls.Allocate] = grants([WRITE], [9], [(1, 4096)])
    with pytest.raises(NodeUnreachableError):
        world.run(allocate.grant(world.context, N, 100, 0))
    assert world.requests(calls.PutRevoke) == [calls.PutRevoke(EPOCH, [9], False)]
    world.answers[calls.Allocate] = grants([WRITE], [10], [(17, 4096)])
    with pytest.raises(PutRefusedError):
        world.run(allocate.grant(world.context, N, 100, 0))
    assert world.requests(calls.PutRevoke)[-1] == calls.PutRevoke(EPOCH, [10], True)


def test_committing_moves_a_header_and_no_payload() -> None:
    world = World()
    payload = np.arange(50, dtype=np.uint8)
    world.memory[1][4096 + HEADER_BYTES : 4096 + HEADER_BYTES + 50] = payload.tobytes()
    world.answers[calls.Commit] = calls.CommitReply(STORED)
    granted = AllocationLease(EPOCH, 9, world.segments[1], 4096, 50)
    written = bytearray()

    def commit(data: bytes) -> None:
        flow = allocate.commit(
            world.context, granted, items((A, data)), OPTIONS, world.now + 3, written
        )
        assert world.run(flow) is STORED

    commit(payload.tobytes())
    (transfer,) = world.moved
    assert sum(len(move.buffer) for move in transfer.moves) == HEADER_BYTES
    assert transfer.deadline == world.now + 3
    header = unpack(world.memory[1][4096:], 1, 4096)
    assert header is not None
    assert header.payload_checksum == xxh3_64_intdigest(payload.tobytes())
    assert world.requests(calls.Commit) == [calls.Commit(EPOCH, 9, N, A, None, 50, False)]
    # Once more: what the first has made may have been removed, and its header wiped.
    world.memory[1][4096:4160] = bytes(64)
    commit(payload.tobytes())
    assert len(world.moved) == 1
    assert not any(world.memory[1][4096:4160])
    commit(payload.tobytes()[:40])
    assert len(world.moved) == 2
    world.failing[1] = [NodeUnreachableError("off", quiesced=1), None]
    with pytest.raises(NodeUnreachableError):
        commit(payload.tobytes())
    assert not written
    commit(payload.tobytes()[:40])
    assert len(world.moved) == 4


def test_a_stamp_is_written_behind_the_header_of_a_commit() -> None:
    world = World()
    payload, stamp = bytes(50), bytes(range(16))
    world.answers[calls.Commit] = calls.CommitReply(STORED, stamp)
    granted = AllocationLease(EPOCH, 9, world.segments[1], 4096, 50)
    end = 4096 + 64 + len(N) + len(A) + len(items((A, payload)).descriptors[0])

    def commit() -> PutOutcome:
        flow = allocate.commit(
            world.context, granted, items((A, payload)), OPTIONS, world.now + 3, bytearray()
        )
        return world.run(flow)

    assert commit() is STORED
    assert world.memory[1][end : end + 17] == stamp + b"\0"
    assert unpack(world.memory[1][4096:], 1, 4096) is not None
    assert [transfer.deadline for transfer in world.moved] == [world.now + 3] * 2
    world.memory[1][end : end + 16] = bytes(16)
    world.failing[1] = [None, NodeUnreachableError("off", quiesced=1)]
    assert commit() is STORED, "it is stored, and no restart finds it"
    assert not any(world.memory[1][end : end + 16])


def test_each_extent_of_a_put_gets_its_own_stamp() -> None:
    world = World()
    stamps = [bytes([number]) * 16 for number in (1, 2, 3, 4)]
    places = [(1, 4096), (2, 4096), (1, 8192), (2, 8192)]
    granted = grants([WRITE, FOUND, WRITE], [9, 10], places, replicas=2)
    world.answers[calls.PutStart] = granted._replace(
        capabilities=bytes(4 * 32), header_macs=b"".join(stamps)
    )
    world.answers[calls.PutEnd] = calls.PutEndReply([STORED] * 2)
    assert put(world, A, B, C) == [STORED, FOUND, STORED]
    end = 64 + len(N) + len(A) + len(items((A, b"")).descriptors[0])
    starts = [(number, at + end) for number, at in places]
    assert [bytes(world.memory[number][at : at + 16]) for number, at in starts] == stamps
