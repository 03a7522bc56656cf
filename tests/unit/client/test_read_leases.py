"""What a client does with its leases once it has read the objects."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore import calls
from kvstore.client.flows import control_calls, read_objects
from kvstore.client.flows.get import lookup
from kvstore.client.flows.read_targets import NewMemory
from kvstore.client.leases.read_leases import IDLE_S
from kvstore.client.leases.views import ViewManager
from kvstore.limits import Key
from kvstore.runtime.clock import uptime
from tests.unit.client.world import EPOCH, A, B, N, World, found

AT, AT_B = 4096, 8192


@pytest.fixture
def world() -> World:
    world = World()
    world.store(1, AT, A, b"payload", 5)
    world.store(1, AT_B, B, b"another", 6)
    places = {A: (7, 5, [(1, AT)]), B: (7, 6, [(1, AT_B)])}
    world.answers[calls.Lookup] = lambda request: found(*(places[key] for key in request.keys))
    return world


def get(world: World, *keys: Key) -> None:
    targets = NewMemory(keys)
    world.run(read_objects.read(world.context, N, targets))
    assert None not in targets.placed


def numbers(world: World) -> Sequence[int]:
    return [request.lease for request in world.requests(calls.Lookup)]


def test_a_get_releases_its_lease_with_the_next_call(world: World) -> None:
    get(world, A)
    get(world, B)
    assert [list(each.released) for each in world.requests(calls.Lookup)] == [[], [1]]


def test_a_failed_get_releases_its_lease_too(world: World) -> None:
    flow = read_objects.read(world.context, N, NewMemory([A]))
    next(flow)
    with pytest.raises(KeyboardInterrupt):
        flow.throw(KeyboardInterrupt())
    assert world.context.leases.take() == [1]


def test_a_lookup_is_released_when_all_that_it_found_was_read_or_released(world: World) -> None:
    world.run(lookup(world.context, N, [A, B]))
    get(world, A)
    assert len(world.requests(calls.Lookup)) == 1, "the read needs no call"
    assert not world.context.leases.take()
    read_objects.release(world.context, N, [B])
    assert world.context.leases.take() == [1]
    get(world, B)
    assert numbers(world) == [1, 2]


def test_exists_and_match_are_released_by_the_reads_after_them(world: World) -> None:
    world.answers[calls.Exists] = calls.ExistsReply(b"\1\0")
    world.run(control_calls.exists(world.context, N, [A, B], leases=True))
    none = calls.NO_PLACEMENTS
    world.answers[calls.MatchPrefix] = calls.MatchPrefixReply(
        EPOCH, 10_000, [calls.PrefixMatch(2, 0, none)]
    )
    world.run(control_calls.match_prefix(world.context, [N], [A, B]))
    get(world, A)
    assert world.context.leases.take() == [1, 3]
    get(world, B)
    assert world.context.leases.take() == [2, 4]


def test_without_another_call_a_thread_releases(world: World) -> None:
    asked: list[tuple[calls.Request, float]] = []
    leases = world.context.leases
    leases._clock = uptime
    views: ViewManager

    def ask(request: calls.Request, seconds: float) -> calls.Reply:
        asked.append((request, uptime()))
        views.stop_renewing()
        return calls.ReleaseReply()

    views = ViewManager(ask, lease_margin_s=0.1, returnables=[leases])
    began = uptime()
    get(world, A)
    [thread] = views._started
    thread.join(10)
    [(request, at)] = asked
    assert request == calls.Release([1])
    assert at - began >= IDLE_S
    views.close()
