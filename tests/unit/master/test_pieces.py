"""Large calls are cut into pieces, between which the loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

import pytest

from kvstore import calls
from kvstore.errors import NotLeaderError
from kvstore.limits import BATCH_KEYS_MAX, NAMESPACES_MAX, Key, Namespace
from kvstore.master.pieces import CUTS, KEYS_PER_PIECE, LOOKUPS_PER_PIECE, PROBES_PER_PIECE
from kvstore.master.service import MasterService
from kvstore.master.state.effects import Send
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.traffic import Caller
from tests.unit.master.test_term import JOIN

SPACE = Namespace("n")
MANY = 3 * KEYS_PER_PIECE + 7
KEYS = [Key(index.to_bytes(4, "big")) for index in range(MANY)]
REPEATED = (KEYS * (BATCH_KEYS_MAX // MANY + 1))[:BATCH_KEYS_MAX]


def service_with(objects: int) -> MasterService:
    """A master with a node that wipes at once, and so many objects."""
    state = MasterState(epoch=7)
    offer = JOIN.segments[0]._replace(size=64 << 20)
    state.nodes.joined(0, 1, JOIN._replace(segments=[offer]))
    service = MasterService(state, clock=lambda: 0)
    settle = service._settle

    def wiping() -> None:
        orders = [
            effect.message.order
            for effect in state.effects
            if isinstance(effect, Send) and isinstance(effect.message, calls.MasterWipe)
        ]
        settle()
        for order in orders:
            state.nodes.said(0, 1, calls.NodeWiped(order))
        settle()

    service._settle = wiping  # type: ignore[method-assign]
    for start in range(0, objects, KEYS_PER_PIECE):
        keys = KEYS[start : min(start + KEYS_PER_PIECE, objects)]
        put = calls.PutStart(SPACE, keys, [1] * len(keys), None, False, 1, False, 0, "h")
        grants = state.putting.put_start(0, put)
        assert isinstance(grants, calls.Grants)
        state.putting.put_end(0, calls.PutEnd(7, grants.tokens))
    return service


def ask(service: MasterService, request: calls.Request) -> tuple[Any, int]:
    """The reply, and how often others got their turn meanwhile."""

    async def main() -> tuple[Any, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        reply = service.call(request)
        if isinstance(reply, tuple):
            return reply, 0
        task = asyncio.ensure_future(other())
        try:
            return await asyncio.wait_for(reply, 10), turns
        finally:
            task.cancel()

    return asyncio.run(main())


def versions(service: MasterService) -> tuple[list[int], list[int]]:
    found = service.state.asking.lookup(0, calls.Lookup(SPACE, KEYS)).placements
    return list(found.epochs), list(found.counters)


def removal(_: MasterService) -> calls.Request:
    return calls.Remove(SPACE, KEYS)


def report(service: MasterService) -> calls.Request:
    return calls.ReportCorrupt(SPACE, KEYS, *versions(service), [b"u" * 16] * MANY)


def renewal(service: MasterService) -> calls.Request:
    return calls.Renew(SPACE, KEYS, *versions(service), 7, list(range(MANY)))


def revocation(_: MasterService) -> calls.Request:
    return calls.PutRevoke(7, list(range(MANY)), True)


def ending(_: MasterService) -> calls.Request:
    return calls.PutEnd(7, list(range(MANY)))


def match(_: MasterService) -> calls.Request:
    return calls.MatchPrefix([SPACE] * NAMESPACES_MAX, KEYS, False)


def states(_: MasterService) -> calls.Request:
    return calls.MatchPrefix([SPACE] * NAMESPACES_MAX, KEYS, False, [SPACE] * NAMESPACES_MAX)


def lookup(_: MasterService) -> calls.Request:
    return calls.Lookup(SPACE, REPEATED)


def exists(_: MasterService) -> calls.Request:
    return calls.Exists(SPACE, REPEATED)


def leased_exists(_: MasterService) -> calls.Request:
    return calls.Exists(SPACE, REPEATED, True)


@pytest.mark.parametrize(
    "request_of",
    [removal, report, renewal, revocation, ending, match, states, lookup, exists, leased_exists],
)
def test_a_large_call_says_what_a_whole_one_would(
    request_of: Callable[[MasterService], calls.Request],
) -> None:
    whole = service_with(MANY - 3)
    request = request_of(whole)
    cut = CUTS[type(request)]
    pieces = len(cut.pieces(request))
    assert pieces > (1 if request_of is exists else 3)
    assert not any(cut.is_large(piece) for piece in cut.pieces(request)), "it would be cut again"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CUTS, type(request), cut._replace(is_large=lambda _: False))
        expected, _ = ask(whole, request)
    reply, turns = ask(service_with(MANY - 3), request)

    assert as_lists(reply) == as_lists(expected)
    assert turns >= pieces - 1


def test_the_states_of_a_large_match_are_asked_for_after_its_chains() -> None:
    states = [Namespace("other")]
    request = calls.MatchPrefix([SPACE] * NAMESPACES_MAX, KEYS, False, states)
    pieces = cast("list[calls.MatchPrefix]", CUTS[calls.MatchPrefix].pieces(request))
    assert [(len(each.namespaces) > 0, list(each.states)) for each in pieces] == [
        *((True, []) for _ in pieces[1:]), (False, states),
    ]  # fmt: skip
    reply, _ = ask(service_with(MANY - 3), request._replace(states=[SPACE]))
    assert len(reply.matches) == NAMESPACES_MAX
    assert reply.state == MANY - 3


def test_the_largest_question_about_states_alone_is_not_cut() -> None:
    keys = [Key(b"absent-%d" % number) for number in range(BATCH_KEYS_MAX)]
    request = calls.MatchPrefix([], keys, False, [SPACE] * NAMESPACES_MAX)
    reply, turns = ask(service_with(1), request)
    assert (reply.matches, reply.state) == ([], 0)
    assert turns <= 1


def as_lists(value: Any) -> object:
    if isinstance(value, bytes | bytearray | Sequence) and not isinstance(value, str):
        return [as_lists(each) for each in value]
    return value


def test_small_calls_are_not_cut() -> None:
    service = service_with(1)
    for request in (
        calls.Remove(SPACE, KEYS[:KEYS_PER_PIECE]),
        calls.MatchPrefix([SPACE] * (PROBES_PER_PIECE // 64), KEYS[:64], False),
        calls.Lookup(SPACE, REPEATED[:LOOKUPS_PER_PIECE]),
        calls.Exists(SPACE, REPEATED[: 2 * LOOKUPS_PER_PIECE]),
    ):
        assert ask(service, request)[1] <= 1


def test_pieces_of_several_large_calls_take_turns() -> None:
    """One piece in each turn of the loop."""
    service = service_with(0)
    steps: list[int] = []
    turn = 0
    find = service._step

    def counted(request: calls.Request, caller: Caller | None = None) -> Any:
        if len(cast(calls.PutRevoke, request).tokens) <= KEYS_PER_PIECE:
            steps.append(turn)
        return find(request, caller)

    service._step = counted  # type: ignore[method-assign]

    async def main() -> None:
        nonlocal turn
        asked = [asyncio.ensure_future(cast(Any, service.call(revocation(service)))) for _ in "abc"]
        while not all(each.done() for each in asked):
            await asyncio.sleep(0)
            turn += 1

    asyncio.run(main())
    assert len(steps) == 3 * len(CUTS[calls.PutRevoke].pieces(revocation(service)))
    assert len(set(steps)) == len(steps)


def test_a_master_that_leads_no_more_refuses_the_rest() -> None:
    service = service_with(MANY)

    async def main() -> None:
        reply = asyncio.ensure_future(cast(Any, service.call(removal(service))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        service.cease()
        with pytest.raises(NotLeaderError):
            await reply

    asyncio.run(main())
    assert 0 < service.state.counters["removed_objects"] < MANY


def test_every_call_with_many_keys_is_cut_or_quick() -> None:
    """What is neither must be added to one of them."""
    quick = {calls.PutStart, calls.Pin, calls.Unpin, calls.Chains, calls.Blocks}
    batches = {
        kind
        for kind in get_args(calls.Request)
        if {"keys", "tokens"} & set(getattr(kind, "_fields", ()))
    }
    assert batches == quick | set(CUTS)
    assert BATCH_KEYS_MAX <= PROBES_PER_PIECE
