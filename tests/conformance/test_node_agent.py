"""What a node says to a master that does not answer as it should."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator

import pytest

from kvstore import calls
from kvstore.calls import MasterMessage, NodeJoin, NodeMessage
from kvstore.memory.segment import OwnedSegment
from kvstore.node import inventory
from kvstore.node.agent import NodeAgent
from kvstore.transport.tcp_server import DataServer
from tests.conformance.rpc_peers import ScriptedService, Server

LEAVES = 9
"""The epoch of a master that ends the stream."""


@pytest.fixture
def segment() -> Iterator[OwnedSegment]:
    with contextlib.closing(OwnedSegment.create("agent-test", 1 << 20)) as segment:
        yield segment


class Master:
    """Takes joins, and answers none but the last of ``count``."""

    def __init__(self, count: int, epochs: Iterable[int] = itertools.repeat(7)) -> None:
        self.joins: list[NodeJoin] = []
        self._count = count
        self._epochs = iter(epochs)

    async def script(self, incoming: AsyncIterator[NodeMessage]) -> AsyncIterator[MasterMessage]:
        join = await anext(incoming)
        assert isinstance(join, NodeJoin)
        self.joins.append(join)
        if len(self.joins) < self._count:
            return
        epoch = next(self._epochs)
        yield calls.MasterAccepted(epoch, 500, 6_000, [1])
        if epoch == LEAVES:
            return
        async for _ in incoming:
            pass


def run(server: Server, segment: OwnedSegment, masters: str, epoch: int = 7) -> list[int]:
    """An agent, until it has joined that epoch; in the server's loop. The epochs it joined."""
    epochs: list[int] = []

    async def session() -> None:
        data = DataServer([segment], "127.0.0.1", 0)
        data.start()
        joined = asyncio.Event()

        def accepted(by: calls.MasterAccepted) -> None:
            epochs.append(by.epoch)
            if by.epoch == epoch:
                joined.set()

        agent = NodeAgent(
            name="n", host="h", master=masters, segment=segment, server=data, address="h:1",
            joined=accepted,
        )  # fmt: skip
        running = asyncio.create_task(agent.run())
        try:
            async with asyncio.timeout(20):
                await joined.wait()
                agent.stop()
                await running
        finally:
            running.cancel()
            data.stop()

    asyncio.run_coroutine_threadsafe(session(), server._loop).result(30)
    return epochs


def test_a_join_that_was_not_answered_may_have_been_accepted(segment: OwnedSegment) -> None:
    """Its master may have granted space since: so writers are fenced off, and it is not fresh."""
    with Server(ScriptedService()) as server:
        master = Master(2)
        server.service.script = master.script
        run(server, segment, server.address)
    offers = [(join.segments[0].fresh, join.segments[0].generation) for join in master.joins]
    assert offers == [(True, 1), (False, 2)]


def test_a_join_that_never_left_has_changed_nothing(segment: OwnedSegment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        nobody = f"127.0.0.1:{sock.getsockname()[1]}"
    with Server(ScriptedService()) as server:
        master = Master(1)
        server.service.script = master.script
        run(server, segment, f"{nobody},{server.address}")
    offers = [(join.segments[0].fresh, join.segments[0].generation) for join in master.joins]
    assert offers == [(True, 1)]


def test_nobody_with_a_lower_epoch_is_obeyed(segment: OwnedSegment) -> None:
    """It may have granted space before the node left again: so writers are fenced off."""
    with Server(ScriptedService()) as server:
        master = Master(1, [LEAVES, LEAVES - 1, LEAVES + 1])
        server.service.script = master.script
        epochs = run(server, segment, server.address, LEAVES + 1)
    assert epochs == [LEAVES, LEAVES + 1]
    offers = [(join.segments[0].fresh, join.segments[0].generation) for join in master.joins]
    assert offers == [(True, 1), (False, 1), (False, 2)]


def test_a_node_ends_although_messages_arrive_at_that_moment(segment: OwnedSegment) -> None:
    async def script(incoming: AsyncIterator[NodeMessage]) -> AsyncIterator[MasterMessage]:
        await anext(incoming)
        yield calls.MasterAccepted(7, 500, 6_000, [1])
        while True:
            await asyncio.sleep(0)
            yield calls.MasterHeartbeat(1)

    with Server(ScriptedService()) as server:
        server.service.script = script
        assert run(server, segment, server.address) == [7]


def test_one_thread_at_a_time_looks_through_the_memory(
    segment: OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master may grant extents once it has been told of them; a thread of the session before
    would stamp, there, what it found."""
    begun, again = threading.Event(), threading.Event()
    joined_meanwhile: list[bool] = []

    def take(*_: object) -> list[inventory.Found]:
        if not begun.is_set():
            begun.set()
            joined_meanwhile.append(again.wait(0.3))
        return []

    async def script(incoming: AsyncIterator[NodeMessage]) -> AsyncIterator[MasterMessage]:
        assert isinstance(await anext(incoming), NodeJoin)
        if begun.is_set():
            again.set()
            yield calls.MasterAccepted(LEAVES + 1, 500, 6_000, [1])
            async for _ in incoming:
                pass
        else:
            yield calls.MasterAccepted(LEAVES, 500, 6_000, [1])
            await asyncio.to_thread(begun.wait, 10)

    monkeypatch.setattr(inventory, "build_inventory", take)
    segment.attached = True
    with Server(ScriptedService()) as server:
        server.service.script = script
        assert run(server, segment, server.address, LEAVES + 1) == [LEAVES, LEAVES + 1]
    assert joined_meanwhile == [False]
