"""The flow of put: what is written in which order, and what is asked for again."""

from __future__ import annotations

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.client.flows import write_objects
from kvstore.client.flows.write_objects import ATTEMPTS, Items, PutOptions, write
from kvstore.client.values import Value, encode, encode_all
from kvstore.errors import (
    DeadlineExceededError,
    MasterUnreachableError,
    NodeUnreachableError,
    NoSpaceError,
    PutRefusedError,
)
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES, unpack
from tests.support.range_copies import moves_of
from tests.unit.client.world import World, grants, items

WRITE, FOUND, BUSY = PutOutcome.WRITE, PutOutcome.FOUND, PutOutcome.BEING_WRITTEN
STORED, REFUSED, NO_SPACE = PutOutcome.STORED, PutOutcome.REFUSED, PutOutcome.NO_SPACE
AT = SUPERBLOCK_BYTES


def store(world: World, *keys: bytes, **options: object) -> list[PutOutcome]:
    chosen = PutOptions(namespace=Namespace("default"), wait_ms=100, **options)  # type: ignore[arg-type]
    return world.run(
        write(world.context, items(*((Key(key), b"payload of " + key) for key in keys)), chosen)
    )


def ended(world: World, *replies: list[int]) -> None:
    following = iter(replies)
    world.answers[calls.PutEnd] = lambda request: calls.PutEndReply(next(following))


def test_only_what_was_granted_is_written_and_ended() -> None:
    world = World()
    world.answers[calls.PutStart] = grants([FOUND, WRITE, BUSY], [1], [(1, AT)])
    ended(world, [STORED])
    assert store(world, b"a", b"b", b"c") == [FOUND, STORED, BUSY]
    header = unpack(world.memory[1][AT:], world.segments[1].seed, AT)
    assert header is not None
    assert (header.key, header.epoch, header.counter) == (b"b", 7, 1)
    payload = world.memory[1][AT + 1024 : AT + 1024 + header.payload_size]
    assert bytes(payload) == b"payload of b"


def test_the_old_header_is_wiped_before_and_the_new_one_written_after_the_payload() -> None:
    world = World()
    world.answers[calls.PutStart] = grants([WRITE], [1], [(1, AT)])
    ended(world, [STORED])
    store(world, b"a")
    written = [(move.offset - AT, len(move.buffer)) for move in moves_of(world.moved[0])]
    assert written == [(0, 64), (1024, 12), (0, 1024)]


def test_blocks_of_a_chain_name_the_block_before_them() -> None:
    world = World()
    world.answers[calls.PutStart] = grants([FOUND, WRITE, WRITE], [1, 2], [(1, AT), (1, AT + 4096)])
    ended(world, [STORED, STORED])
    store(world, b"a", b"b", b"c", chain=True, parent=Key(b"root"))
    headers = [unpack(world.memory[1][at:], world.segments[1].seed, at) for at in (AT, AT + 4096)]
    assert [header.parent for header in headers if header] == [b"a", b"b"]
    assert world.requests(calls.PutStart)[0].parent == b"root"


def test_a_refused_block_is_asked_for_again_alone_with_its_parent() -> None:
    world = World()
    replies = iter(
        [
            grants([WRITE] * 3, [1, 2, 3], [(1, AT), (1, AT + 4096), (1, AT + 8192)]),
            grants([WRITE], [9], [(1, AT + 4096)]),
        ]
    )
    world.answers[calls.PutStart] = lambda request: next(replies)
    ended(world, [STORED, REFUSED, STORED], [STORED])
    assert store(world, b"a", b"b", b"c", chain=True) == [STORED, STORED, STORED]
    again = world.requests(calls.PutStart)[1]
    assert (list(again.keys), again.parent) == ([b"b"], b"a")
    assert world.paused


def test_a_put_that_is_refused_again_and_again_ends_in_an_error() -> None:
    world = World()
    world.answers[calls.PutStart] = grants([WRITE], [1], [(1, AT)])
    world.answers[calls.PutEnd] = calls.PutEndReply([REFUSED])
    with pytest.raises(PutRefusedError) as caught:
        store(world, b"a")
    assert caught.value.retriable
    assert len(world.requests(calls.PutStart)) == ATTEMPTS


def test_one_failing_replica_gives_the_whole_put_up() -> None:
    world = World()
    replies = iter(
        [
            grants([WRITE], [1], [(1, AT), (2, AT)], replicas=2),
            grants([WRITE], [2], [(1, AT), (3, AT)], replicas=2),
        ]
    )
    world.answers[calls.PutStart] = lambda request: next(replies)
    world.failing[2] = [NodeUnreachableError("gone", quiesced=1)]
    ended(world, [STORED])
    assert store(world, b"a", replicas=2) == [STORED]
    assert [list(request.tokens) for request in world.requests(calls.PutEnd)] == [[2]]
    for segment_id in (1, 3):
        seed = world.segments[segment_id].seed
        assert unpack(world.memory[segment_id][AT:], seed, AT) is not None


def silent(node: str) -> NodeUnreachableError:
    return NodeUnreachableError(
        f"node {node} (10.0.0.8:50003) did not accept a tcp connection within 1.2 s",
        advice="Is its port open?", node=node, quiesced=1, silent_ms=1_000,
    )  # fmt: skip


def test_a_put_is_granted_elsewhere_and_says_what_to_avoid() -> None:
    world = World()
    world.answers[calls.PutStart] = [
        grants([WRITE], [1], [(1, AT)]),
        grants([WRITE], [2], [(2, AT)]),
    ]
    world.failing[1] = [silent("one")]
    ended(world, [STORED])
    assert store(world, b"a") == [STORED]
    first, second = world.requests(calls.PutStart)
    assert first.avoid_segments == ()
    assert second.avoid_segments == (world.segments[1].uuid,)
    assert not world.paused, "a second has passed"


def test_the_error_of_a_put_names_the_nodes_that_did_not_take_it() -> None:
    world = World()
    none_left = NoSpaceError("no space", cause="avoided", missing_bytes=5)
    world.answers[calls.PutStart] = [
        grants([WRITE, WRITE], [1, 2], [(1, AT), (2, AT)]),
        none_left,
        none_left,
    ]
    world.failing.update({1: [silent("one")], 2: [silent("two")]})
    with pytest.raises(PutRefusedError) as caught:
        store(world, b"a", b"b")
    assert caught.value.message == (
        "put: 2 of 2 objects not stored: node one (10.0.0.8:50003) did not accept a tcp connection "
        "within 1.2 s; node two (10.0.0.8:50003) did not accept a tcp connection within 1.2 s, "
        "1 attempts"
    )
    assert caught.value.advice == "Is its port open?"
    assert caught.value.fields["nodes"] == "node-1,node-2"
    world.now += 0.25
    with pytest.raises(PutRefusedError, match=r"node one .*; tried again in 1\.8 s"):
        store(world, b"a", b"b")  # at once, and it knows why


def test_a_node_that_failed_at_once_is_tried_again_where_there_is_no_other() -> None:
    world = World()
    avoided = NoSpaceError("no space", cause="avoided", missing_bytes=5)
    world.answers[calls.PutStart] = [
        grants([WRITE], [1], [(1, AT)]),
        avoided,
        grants([WRITE], [2], [(1, AT)]),
    ]
    world.failing[1] = [NodeUnreachableError("reset", node="one", quiesced=1), None]
    ended(world, [STORED])
    assert store(world, b"a") == [STORED]
    uuid = world.segments[1].uuid
    assert [each.avoid_segments for each in world.requests(calls.PutStart)] == [(), (uuid,), ()]


def test_room_that_is_missing_for_another_reason_is_no_fault_of_the_nodes() -> None:
    world = World()
    world.answers[calls.PutStart] = [
        grants([WRITE], [1], [(1, AT)]),
        NoSpaceError("full", cause="leased", missing_bytes=5),
    ]
    world.failing[1] = [silent("one")]
    with pytest.raises(NoSpaceError, match="full"):
        store(world, b"a")


def test_a_put_that_runs_out_of_time_names_the_nodes() -> None:
    world = World()
    world.answers[calls.PutStart] = [
        grants([WRITE], [1], [(1, AT)]),
        DeadlineExceededError("the master says nothing of nodes"),
    ]
    world.failing[1] = [silent("one")]
    with pytest.raises(DeadlineExceededError, match="node one"):
        store(world, b"a")


def test_an_unanswered_end_is_settled_by_asking_again() -> None:
    world = World()
    replies = iter([grants([WRITE], [1], [(1, AT)]), grants([FOUND], [], [])])
    world.answers[calls.PutStart] = lambda request: next(replies)
    world.answers[calls.PutEnd] = MasterUnreachableError("the connection broke", sent=1)
    assert store(world, b"a") == [FOUND]


def test_an_empty_payload_has_a_header_and_nothing_else() -> None:
    world = World()
    world.answers[calls.PutStart] = grants([WRITE], [1], [(1, AT)])
    ended(world, [STORED])
    options = PutOptions(namespace=Namespace("default"))
    outcome = world.run(write(world.context, items((Key(b"e"), b"")), options))
    header = unpack(world.memory[1][AT:], world.segments[1].seed, AT)
    assert outcome == [STORED]
    assert header is not None
    assert header.payload_size == 0


def test_nothing_to_put_asks_nobody() -> None:
    world = World()
    assert store(world) == []
    assert world.asked == []


def test_a_large_batch_is_granted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put of 16,384 blocks would hold the master for 80 ms."""
    monkeypatch.setattr(write_objects, "PUT_KEYS_MAX", 2)
    world = World()
    world.answers[calls.PutStart] = [
        grants([WRITE, FOUND], [1], [(1, AT)]),
        grants([FOUND, FOUND], [], []),
        grants([FOUND], [], []),
    ]
    world.answers[calls.PutEnd] = calls.PutEndReply([STORED])
    outcomes = store(world, b"a", b"b", b"c", b"d", b"e", chain=True, parent=Key(b"root"))
    assert outcomes == [STORED, FOUND, FOUND, FOUND, FOUND]
    asked = world.requests(calls.PutStart)
    assert [list(each.keys) for each in asked] == [[b"a", b"b"], [b"c", b"d"], [b"e"]]
    assert [each.parent for each in asked] == [b"root", b"b", b"d"]


def test_a_gather_list_is_one_object_written_without_a_copy() -> None:
    world = World()
    world.answers[calls.PutStart] = grants([WRITE], [1], [(1, AT)])
    world.answers[calls.PutEnd] = calls.PutEndReply([STORED])
    first = np.arange(3, dtype=np.int16).view(np.uint8)
    parts: list[Value] = [first, b"", b"xyz", b"0123"]
    one = Items([Key(b"a")], *encode_all([parts]))
    options = PutOptions(namespace=Namespace("default"))
    assert world.run(write(world.context, one, options)) == [STORED]
    (transfer,) = world.moved
    assert [len(move.buffer) for move in moves_of(transfer)] == [64, 6, 3, 4, 1024]
    whole = first.tobytes() + b"xyz0123"
    header = unpack(world.memory[1][AT:], world.segments[1].seed, AT)
    assert header is not None
    assert (header.payload_size, header.payload_checksum) == (13, xxh3_64_intdigest(whole))
    assert world.memory[1][AT + 1024 : AT + 1024 + 13] == whole


def test_an_empty_gather_list_is_an_empty_value() -> None:
    assert encode([]).parts == []
    assert encode_all([[]]).sizes == [0]


def pool_of(world: World, size: int, cause: str = "leased") -> None:
    """A master that grants whole calls, for as long as payloads of ``size`` bytes fit."""
    left, at, tokens = size, AT, iter(range(1, 100))

    def start(request: calls.PutStart) -> calls.Grants:
        nonlocal left, at
        wanted = sum(request.sizes)
        if wanted > left:
            raise NoSpaceError("full", cause=cause, missing_bytes=wanted - left)
        left -= wanted
        places = []
        for each in request.sizes:
            places.append((1, at))
            at += HEADER_BYTES + each
        count = len(places)
        return grants([WRITE] * count, [next(tokens) for _ in range(count)], places)

    world.answers[calls.PutStart] = start
    world.answers[calls.PutEnd] = lambda request: calls.PutEndReply([STORED] * len(request.tokens))


def partly(world: World, sizes: list[int], **options: object) -> list[PutOutcome]:
    chosen = PutOptions(namespace=Namespace("default"), partial=True, wait_ms=100, **options)  # type: ignore[arg-type]
    rows = [(Key(b"%d" % index), bytes(size)) for index, size in enumerate(sizes)]
    return world.run(write(world.context, items(*rows), chosen))


@pytest.mark.parametrize("room", range(0, 80, 5))
def test_a_partial_put_stores_the_first_ones_that_there_is_room_for(room: int) -> None:
    world = World()
    pool_of(world, room)
    fit = min(room // 10, 7)
    assert partly(world, [10] * 7) == [STORED] * fit + [NO_SPACE] * (7 - fit)
    asked = world.requests(calls.PutStart)
    assert [each.wait_ms for each in asked] == [100] + [0] * (len(asked) - 1)
    assert len(asked) <= 1 + 2 * 3, (
        "halved twice: what is as large as what did not fit is not asked"
    )


def test_a_partial_put_also_stores_what_is_smaller() -> None:
    world = World()
    pool_of(world, 25)
    assert partly(world, [10, 30, 10, 5]) == [STORED, NO_SPACE, STORED, STORED]


def test_a_partial_chain_ends_with_the_first_that_does_not_fit() -> None:
    world = World()
    pool_of(world, 25)
    assert partly(world, [10, 30, 10, 5], chain=True) == [STORED] + [NO_SPACE] * 3
    world = World()
    pool_of(world, 45)
    assert partly(world, [10, 10, 10, 10, 10], chain=True) == [STORED] * 4 + [NO_SPACE]
    pieces = [(list(each.keys), each.parent) for each in world.requests(calls.PutStart)[1:]]
    assert pieces[0] == ([b"0", b"1"], None)
    assert all(parent == b"%d" % (int(keys[0]) - 1) for keys, parent in pieces[1:])


@pytest.mark.parametrize("cause", ["restarted", "suspect", "draining", "quota", "guarantees"])
def test_a_partial_put_stores_what_fits_whatever_keeps_the_rest_out_now(cause: str) -> None:
    world = World()
    pool_of(world, 25, cause)
    assert partly(world, [10] * 4) == [STORED] * 2 + [NO_SPACE] * 2


def test_a_partial_put_is_refused_where_the_pool_is_not_what_is_missing() -> None:
    world = World()
    world.answers[calls.PutStart] = NoSpaceError("no node", cause="no_node", missing_bytes=5)
    with pytest.raises(NoSpaceError, match="no node"):
        partly(world, [10, 10])
