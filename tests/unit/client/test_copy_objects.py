"""The flow that copies objects from node to node: what is copied, and what is called corrupt."""

from __future__ import annotations

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.client.flows.copy_objects import MoveProgress, move_page
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES, unpack
from kvstore.transport.common import RangeCopy
from tests.unit.client.world import EPOCH, A, B, N, World, found, grants

AT = SUPERBLOCK_BYTES
TO = SUPERBLOCK_BYTES + (1 << 14)
PAYLOAD = b"a" * 1000


def world_that_moves() -> World:
    """Object ``A`` is to be moved from node 1 to node 2."""
    world = World()
    world.store(1, AT, A, PAYLOAD, 5)
    sources = found((len(PAYLOAD), 5, [(1, AT)])).placements
    world.answers[calls.StartMoves] = calls.StartMovesReply(
        0, 0, 0, 0, 0, [N], [A], sources, grants([PutOutcome.WRITE], [9], [(2, TO)])
    )
    world.answers[calls.PutEnd] = calls.PutEndReply([PutOutcome.STORED])
    return world


def moved(world: World) -> MoveProgress:
    return world.run(move_page(world.context, "node-1", 0))


def test_an_object_is_copied_with_the_version_of_its_move() -> None:
    world = world_that_moves()
    assert (moved(world).objects, world.requests(calls.PutRevoke)) == (1, [])
    memory = world.memory[2]
    header = unpack(memory[TO : TO + HEADER_BYTES], world.segments[2].seed, TO)
    assert header is not None
    assert (header.key, header.epoch, header.counter) == (A, EPOCH, 9)
    assert memory[TO + HEADER_BYTES :][: len(PAYLOAD)] == PAYLOAD


def test_memory_that_holds_other_bytes_than_its_header_says_is_corrupt() -> None:
    world = world_that_moves()
    world.memory[1][AT + HEADER_BYTES] ^= 1
    done = moved(world)
    assert (done.objects, done.corrupt, done.failed) == (0, 1, 0)
    assert [request.tokens for request in world.requests(calls.PutRevoke)] == [[9]]
    assert world.context.counters["corrupt_objects"] == 1


def test_an_object_that_is_evicted_between_its_header_and_its_bytes_is_not_corrupt() -> None:
    world = world_that_moves()

    def evict(move: RangeCopy) -> None:
        if len(move.buffer) == len(PAYLOAD):  # its header has been read
            world.store(1, AT, B, b"b" * 1000, 6)
            world.before_piece = lambda _: None

    world.before_piece = evict
    done = moved(world)
    assert (done.objects, done.corrupt, done.failed) == (0, 0, 1)
    assert "corrupt_objects" not in world.context.counters


def test_a_copy_that_is_ended_was_written_whatever_other_threads_forget() -> None:
    world = world_that_moves()
    world.store(1, AT + (1 << 13), B, PAYLOAD, 6)
    size = len(PAYLOAD)
    sources = found((size, 5, [(1, AT)]), (size, 6, [(1, AT + (1 << 13))])).placements
    places = grants([PutOutcome.WRITE] * 2, [9, 10], [(2, TO), (3, TO)])
    world.answers[calls.StartMoves] = calls.StartMovesReply(
        0, 0, 0, 0, 0, [N, N], [A, B], sources, places
    )
    world.answers[calls.PutEnd] = calls.PutEndReply([PutOutcome.STORED] * 2)

    def interfere() -> None:
        """Another call fails at node 3 while this one reads, and finds it well as it writes."""
        known = world.context.segments.of(EPOCH)
        if 3 in known:
            world.context.segments.forget(world.segments[3])
        else:
            known[3] = world.segments[3]

    world.after_moves = interfere
    done = moved(world)
    ended = [token for request in world.requests(calls.PutEnd) for token in request.tokens]
    assert done.objects == len(ended)
    for token, number in zip([9, 10], [2, 3], strict=True):
        header = unpack(world.memory[number][TO : TO + HEADER_BYTES], number, TO)
        assert (header is not None and header.counter == token) == (token in ended)
