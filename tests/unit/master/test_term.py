"""A service whose time is over refuses: before a step, after one, whoever waits, every stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest

from kvstore import calls
from kvstore.errors import NotLeaderError
from kvstore.limits import PROTOCOL_VERSION, Key, Namespace
from kvstore.master.service import MasterService, Standby, clock_ms
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.rules import MasterRules
from kvstore.runtime.clock import uptime

EXISTS = calls.Exists(Namespace("n"), [Key(b"k")])
PUT = calls.PutStart(
    Namespace("n"), [Key(b"k")], [100], parent=None, chain=False, replicas=1, overwrite=False,
    wait_ms=60_000, host="h",
)  # fmt: skip
JOIN = calls.NodeJoin("n", "h", PROTOCOL_VERSION, 0, [
    calls.SegmentOffer(1 << 20, b"u" * 16, "shm", "h:1", b"token", 1, 1, True)
])  # fmt: skip


def during(body: Callable[[MasterService], Coroutine[Any, Any, None]]) -> None:
    """``body`` in a loop, with a service whose time is far off."""

    async def run() -> None:
        state = MasterState(epoch=7, version="0", rules=MasterRules(), started_ms=0)
        service = MasterService(state)
        service.leads_until = uptime() + 1_000
        service.start()
        try:
            await body(service)
        finally:
            await service.stop()

    asyncio.run(run())


async def quiet() -> AsyncIterator[calls.NodeMessage]:
    """A node that joins, and is silent."""
    yield JOIN
    await asyncio.Event().wait()


def test_a_call_after_its_time_does_nothing() -> None:
    async def body(service: MasterService) -> None:
        service.leads_until = uptime()
        for request in (EXISTS, PUT, calls.Join("c", "h", PROTOCOL_VERSION)):
            with pytest.raises(NotLeaderError):
                service.call(request)
        assert service.ceased
        assert not service.state.counters.get("puts", 0)

    during(body)


def test_a_reply_after_its_time_is_not_given() -> None:
    async def body(service: MasterService) -> None:
        def stopped() -> int:
            """The process is stopped between the check and the step."""
            service.leads_until = uptime()
            return clock_ms()

        service._clock = stopped
        with pytest.raises(NotLeaderError):
            service.call(EXISTS)
        assert service.ceased

    during(body)


def test_whoever_waits_is_refused() -> None:
    async def body(service: MasterService) -> None:
        session = service.node_session(quiet())
        assert isinstance(await anext(session), calls.MasterAccepted)
        large = PUT._replace(sizes=[900_000])
        assert isinstance(service.call(large), calls.Grants)
        waiting = cast("Awaitable[calls.Reply]", service.call(large._replace(keys=[Key(b"l")])))
        service.stop_serving()
        with pytest.raises(NotLeaderError):
            await waiting
        with pytest.raises(NotLeaderError):
            await anext(session)
        assert not service.state.effects

    during(body)


def test_a_node_is_not_heard_after_its_time() -> None:
    async def body(service: MasterService) -> None:
        speaks = asyncio.Event()

        async def speaking() -> AsyncIterator[calls.NodeMessage]:
            yield JOIN
            await speaks.wait()
            yield calls.NodeLeave()
            await asyncio.Event().wait()

        session = service.node_session(speaking())
        await anext(session)
        service.leads_until = uptime()
        speaks.set()
        with pytest.raises(NotLeaderError):
            await anext(session)
        assert "n" in service.state.membership.nodes, "it has not left, as far as we know"
        with pytest.raises(NotLeaderError):
            await anext(service.node_session(speaking()))

    during(body)


def test_the_timer_ends_what_nobody_calls() -> None:
    async def body(service: MasterService) -> None:
        session = service.node_session(quiet())
        await anext(session)
        service.leads_until = uptime() + 0.01
        with pytest.raises(NotLeaderError):
            await asyncio.wait_for(anext(session), 5)
        assert service.ceased

    during(body)


def test_a_single_master_has_no_end() -> None:
    service = MasterService(MasterState(epoch=1, version="0", rules=MasterRules(), started_ms=0))
    assert service.leads_until == math.inf
    status = service.call(calls.Status())
    assert isinstance(status, calls.ClusterStatus)
    assert (status.role, status.leader) == ("single", "")


def test_a_standby_names_the_leader() -> None:
    with pytest.raises(NotLeaderError, match="a:1 leads") as caught:
        Standby("a:1").call(EXISTS)
    assert caught.value.fields["leader"] == "a:1"
    with pytest.raises(NotLeaderError, match="no master leads now"):
        Standby().node_session(quiet())
