"""Exceptions that nobody foresaw: a transition is whole, or has not happened, or is the last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, cast

import pytest

from kvstore import calls
from kvstore.errors import KVStoreError, UnavailableError
from kvstore.limits import PROTOCOL_VERSION, Namespace
from kvstore.master.service import MasterService
from kvstore.master.state.eviction import LruPolicy
from kvstore.master.state.master_state import MasterState
from tests.support.invariants import check_invariants
from tests.unit.master.test_term import EXISTS, JOIN, PUT


class State:
    """Of a master: real, but for the steps that break."""

    def __init__(self, state: MasterState, **breaks: BaseException) -> None:
        self.__dict__.update(state=state, breaks=breaks)

    def __getattr__(self, name: str) -> Any:
        if name in self.breaks:
            raise self.breaks[name]
        return getattr(self.state, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.state, name, value)


def broken_by(service: MasterService) -> list[BaseException]:
    told: list[BaseException] = []
    service._died = told.append
    return told


@pytest.mark.parametrize("step", ["tick", "work"])
def test_a_master_whose_clock_breaks_says_so_and_ends(
    step: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        state = MasterState(epoch=7)
        breaks = {step: MemoryError()}
        service = MasterService(state)
        died = broken_by(service)
        waits = service.call(PUT)  # for a node
        service.state = cast(MasterState, State(state, **breaks))
        service.start()
        if step == "work":
            service._work()
        deadline = time.monotonic() + 10
        while not died and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert [type(error) for error in died] == [MemoryError]
        with pytest.raises(UnavailableError):
            await cast(Awaitable[calls.Reply], waits)
        with pytest.raises(UnavailableError):
            service.call(EXISTS)
        await service.stop()

    asyncio.run(main())
    (record,) = [r for r in caplog.records if r.exc_info]
    assert record.getMessage().startswith("master_broken")


def test_an_exception_in_the_middle_of_a_call_is_the_last() -> None:
    state = MasterState(epoch=7)
    service = MasterService(state)
    died = broken_by(service)
    unhashable = cast("list[int]", [[]])
    request = calls.Renew(Namespace("n"), [], [], [], 7, unhashable, [], [])
    with pytest.raises(TypeError):
        service.call(request)
    assert state.common.changing
    assert died
    assert service.ceased


def test_an_exception_before_the_first_change_is_that_calls_alone() -> None:
    service = MasterService(MasterState(epoch=7))
    died = broken_by(service)
    with pytest.raises((TypeError, AttributeError)):
        service.call(PUT._replace(sizes=cast("list[int]", None)))
    assert not died
    service.call(EXISTS)


def test_a_join_for_which_there_is_no_memory_has_not_happened() -> None:
    """Nothing can be allocated for the second of two segments, while the node's former self is
    alive."""
    made = 0
    limit = 100

    def policy(tenant: int) -> LruPolicy:
        nonlocal made
        made += 1
        if made > limit:
            raise MemoryError
        return LruPolicy(tenant)

    state = MasterState(epoch=7, policy=policy)
    service = MasterService(state)
    died = broken_by(service)
    offer = JOIN.segments[0]._replace(fresh=False)
    offers = [offer._replace(uuid=bytes([n]) * 16) for n in range(2)]
    join = calls.NodeJoin("n", "h", PROTOCOL_VERSION, 0, offers)

    async def incoming() -> AsyncIterator[calls.NodeMessage]:
        yield join
        await asyncio.Event().wait()

    async def main() -> None:
        nonlocal limit
        first = cast(Any, service.node_session(incoming()))
        await anext(first)
        segments = dict(state.pool.segments)
        limit = made + 1
        second = cast(Any, service.node_session(incoming()))
        with pytest.raises(MemoryError):
            await anext(second)
        assert not died
        check_invariants(state)
        assert state.pool.segments == segments
        limit = 100
        third = cast(Any, service.node_session(incoming()))
        assert isinstance(await anext(third), calls.MasterAccepted)
        check_invariants(state)
        for session in (first, third):
            await session.aclose()
        await service.stop()

    asyncio.run(main())


def test_what_a_node_says_that_breaks_the_state_is_the_last() -> None:
    async def main() -> None:
        state = MasterState(epoch=7)
        service = MasterService(state)
        died = broken_by(service)

        async def incoming() -> AsyncIterator[calls.NodeMessage]:
            yield JOIN
            yield calls.NodeWipeDone(cast(int, []))  # no number: unhashable

        session = cast(Any, service.node_session(incoming()))
        await anext(session)
        with pytest.raises(KVStoreError):
            await anext(session)
        assert [type(error) for error in died] == [TypeError]
        await service.stop()

    asyncio.run(main())
