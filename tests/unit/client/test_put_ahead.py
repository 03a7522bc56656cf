"""Puts whose memory came with the end of the put before."""

from __future__ import annotations

from contextlib import closing
from queue import SimpleQueue

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.client.flows import put_ahead
from kvstore.client.flows.write_objects import PutOptions
from kvstore.client.leases.grants_ahead import (
    GRANTS_MAX,
    REPEATED_S,
    AllocationAhead,
    GrantsAhead,
)
from kvstore.client.leases.views import ViewManager
from kvstore.errors import NodeUnreachableError, UnavailableError
from kvstore.limits import Key
from kvstore.memory.header import unpack
from kvstore.runtime.clock import uptime
from tests.unit.client.world import EPOCH, A, B, C, D, N, World, grants, items

WRITE, FOUND, _, STORED, REFUSED, _ = PutOutcome
PLACES = {9: 4096, 10: 8192, 11: 12_288, 12: 16_384}


def world_with_grants() -> World:
    world = World()
    world.context.ahead = GrantsAhead()
    world.answers[calls.Allocate] = grants([WRITE], [9], [(1, PLACES[9])])

    def commit(request: calls.Commit) -> calls.CommitReply:
        following = request.token + 1
        return calls.CommitReply(STORED, b"", following, 1, PLACES[following])

    world.answers[calls.Commit] = commit
    return world


def begin_series(world: World, size: int = 50) -> None:
    """Put two objects in the usual way."""
    for key in (C, D):
        assert put(world, key, size) is None


def put(world: World, key: Key, size: int = 50) -> PutOutcome | None:
    flow = put_ahead.put(world.context, items((key, key * size)), PutOptions(namespace=N))
    outcome: PutOutcome | None = world.run(flow)
    if world.context.ahead is not None:
        counted = STORED if outcome is None else outcome
        world.context.ahead.count((N, len(key) * size), counted, world.context.clock())
    return outcome


def test_from_the_fourth_put_of_a_size_on_there_is_one_exchange() -> None:
    world = world_with_grants()
    begin_series(world)
    assert put(world, B) is STORED
    before = len(world.asked)
    assert put(world, C) is STORED
    assert world.asked[before:] == [
        calls.Commit(EPOCH, 10, N, C, None, 50, False, 0, True, 50, "host", False)
    ]
    header = unpack(world.memory[1][PLACES[10] :], 1, PLACES[10])
    assert header is not None
    assert (header.key, header.counter) == (C, 10)


def test_an_object_that_exists_ends_the_series() -> None:
    world = world_with_grants()
    begin_series(world)
    world.answers[calls.Commit] = calls.CommitReply(FOUND)
    assert put(world, B) is FOUND
    begin_series(world)
    world.answers[calls.Commit] = calls.CommitReply(STORED)
    assert put(world, A) is STORED


def test_memory_for_another_size_is_given_back() -> None:
    world = world_with_grants()
    begin_series(world)
    for key in (A, B):
        put(world, key)
    world.answers[calls.Allocate] = grants([WRITE], [11], [(1, PLACES[11])])
    begin_series(world, 70)
    assert put(world, A, 70) is STORED
    assert world.requests(calls.PutRevoke) == [calls.PutRevoke(EPOCH, [11], True)]
    ahead = world.context.ahead
    assert ahead is not None
    assert ahead.give_back() == [calls.PutRevoke(EPOCH, [12], True)]


def test_no_more_than_so_many_are_held() -> None:
    ahead = GrantsAhead()
    place = world_with_grants().segments[1]
    revoked = [
        ahead.keep((N, 50), AllocationAhead(EPOCH, token, place, 4096, 30.0, 1_030.0))
        for token in range(GRANTS_MAX + 1)
    ]
    assert revoked == [[]] * GRANTS_MAX + [[calls.PutRevoke(EPOCH, [GRANTS_MAX], True)]]


def test_memory_near_its_deadline_is_not_used() -> None:
    world = world_with_grants()
    begin_series(world)
    put(world, A)
    world.now += 27
    assert put(world, B) is None


def test_a_put_that_fails_is_put_in_the_usual_way() -> None:
    world = world_with_grants()
    begin_series(world)
    put(world, A)
    world.failing[1] = [NodeUnreachableError("reset", quiesced=0, connection=5)]
    assert put(world, B) is None
    assert world.requests(calls.PutRevoke) == [calls.PutRevoke(EPOCH, [10], False, (5,))]
    assert put(world, D) is None, "a node fails: nothing is put ahead"


def test_a_refused_or_unanswered_commit_is_put_in_the_usual_way() -> None:
    world = world_with_grants()
    begin_series(world)
    world.answers[calls.Commit] = calls.CommitReply(REFUSED)
    assert put(world, B) is None
    world.answers[calls.Commit] = [UnavailableError("gone"), UnavailableError("gone")]
    assert put(world, C) is None
    assert [request.token for request in world.requests(calls.Commit)] == [9, 9, 9]


def test_a_thread_gives_back_what_is_not_used() -> None:
    world = world_with_grants()
    asked: SimpleQueue[tuple[calls.Request, float]] = SimpleQueue()
    ahead = world.context.ahead
    assert ahead is not None
    world.context.clock = uptime  # as the thread's

    def ask(request: calls.Request, seconds: float) -> calls.Reply:
        asked.put((request, uptime()))
        return calls.PutRevokeReply(1)

    with closing(ViewManager(ask, lease_margin_s=0.1, returnables=[ahead])):
        begin_series(world)
        for key in (A, B):
            put(world, key)
        last = uptime()
        request, at = asked.get(timeout=10)
    assert request == calls.PutRevoke(EPOCH, [11], True)
    assert at - last >= REPEATED_S - 0.1
    assert not ahead


def test_with_a_short_deadline_nothing_is_put_ahead() -> None:
    world = world_with_grants()
    brief = grants([WRITE], [9], [(1, 4096)])._replace(deadline_ms=1_000)
    world.answers[calls.Allocate] = brief
    begin_series(world)
    for key in (A, B):
        assert put(world, key) is None
    assert world.requests(calls.PutRevoke) == [calls.PutRevoke(EPOCH, [9], True)]


def test_with_capabilities_nothing_is_put_ahead() -> None:
    world = world_with_grants()
    world.answers[calls.Allocate] = grants([WRITE], [9], [(1, 4096)])._replace(capabilities=b"x")
    begin_series(world)
    for key in (A, B):
        assert put(world, key) is None
    assert len(world.requests(calls.Allocate)) == 1
    assert world.requests(calls.PutRevoke) == [calls.PutRevoke(EPOCH, [9], True)]
