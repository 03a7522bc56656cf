"""What is over leaves nothing behind that only the collector of cycles would find."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kvstore import calls
from kvstore.auth.credentials import MASTER_NAME, Credentials
from kvstore.auth.identity import Identity
from kvstore.config import MasterConfig
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master import lane
from kvstore.master.carrier_base import Dispatcher
from kvstore.master.gate import Gate
from kvstore.master.lane import LaneServer, _LaneClient
from kvstore.master.spin import new_event_loop
from kvstore.master.state.traffic import Caller
from kvstore.wire.messages import CALLS, encode_request
from tests.support.issuing import Identities

ResultT = TypeVar("ResultT")


class Waits:
    """A service whose replies come later."""

    def __init__(self) -> None:
        self.replies: list[asyncio.Future[calls.Reply]] = []

    def call(
        self, request: calls.Request, caller: Caller | None = None
    ) -> asyncio.Future[calls.Reply]:
        del request, caller
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]

    def node_session(
        self, incoming: AsyncIterator[calls.NodeMessage], who: Identity | None = None
    ) -> AsyncIterator[calls.MasterMessage]:
        raise NotImplementedError


def run(main: Coroutine[object, object, ResultT]) -> ResultT:
    """In the master's own kind of loop."""
    with asyncio.Runner(loop_factory=lambda: new_event_loop(0)) as runner:
        return runner.run(main)


@pytest.fixture
def _collector_off() -> Iterator[None]:
    gc.collect()  # what other tests have left
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_collector_off")
def test_a_refusal_that_had_to_wait_is_gone_with_its_last_user() -> None:
    """What has waited for a second is frozen: a cycle of it would never be collected."""

    async def refuse() -> weakref.ref[NoSpaceError]:
        service = Waits()
        request = calls.Exists(Namespace("n"), [Key(b"k")])
        task = Dispatcher(service).dispatch(CALLS[calls.Exists], encode_request(request))
        assert isinstance(task, asyncio.Task)
        await asyncio.sleep(0)
        service.replies.pop().set_exception(NoSpaceError("full", missing_bytes=1))
        await asyncio.wait([task])
        error = task.exception()
        assert isinstance(error, NoSpaceError)
        return weakref.ref(error)

    assert asyncio.run(refuse())() is None


def ends_of(connection: _LaneClient) -> list[weakref.ref[object]]:
    return [weakref.ref(connection), weakref.ref(connection._transport)]


@pytest.mark.usefixtures("_collector_off")
def test_a_connection_that_has_ended_is_gone_with_its_transport() -> None:
    async def come_and_go() -> list[weakref.ref[object]]:
        server = LaneServer(Dispatcher(Waits()), b"t" * 16)
        await server.bind("127.0.0.1", 0, unix=False)
        await server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(5):
            while not server.connections:
                await asyncio.sleep(0)
            ends = [end for each in server.connections for end in ends_of(each)]
            writer.close()
            while server.connections:
                await asyncio.sleep(0)
        await writer.wait_closed()
        await server.stop()
        return ends

    assert [end() for end in run(come_and_go())] == [None, None]


@pytest.mark.usefixtures("_collector_off")
def test_a_connection_within_tls_is_gone_with_its_end(tmp_path: Path) -> None:
    async def come_and_go() -> list[weakref.ref[object]]:
        identities = Identities(tmp_path)
        gate = Gate(MasterConfig(auth=identities.file("master")))
        server = LaneServer(Dispatcher(Waits()), b"t" * 16, gate=gate)
        await server.bind("127.0.0.1", 0, unix=False)
        await server.start()
        sock = socket.create_connection(("127.0.0.1", server.port))
        context = Credentials(identities.file("admin")).client()
        async with asyncio.timeout(5):
            wire = await asyncio.to_thread(context.wrap_socket, sock, server_hostname=MASTER_NAME)
            while not server.connections:
                await asyncio.sleep(0.001)
            ends = [end for each in server.connections for end in ends_of(each)]
            wire.close()
            while server.connections:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await server.stop()
        return ends

    assert [end() for end in run(come_and_go())] == [None, None]


def transports() -> int:
    # Not isinstance: some objects of torch warn when they are asked for their class.
    names = (type(each).__name__ for each in gc.get_objects())
    return sum(name in ("SSLProtocol", "_SelectorSocketTransport") for name in names)


@pytest.mark.usefixtures("_collector_off")
@pytest.mark.parametrize("said", [b"\x16\x03\x01 no greeting", b"\x16"])
def test_a_handshake_that_fails_leaves_nothing(tmp_path: Path, said: bytes) -> None:
    """Any stranger can begin one."""

    async def come_and_go() -> int:
        gate = Gate(MasterConfig(auth=Identities(tmp_path).file("master")))
        server = LaneServer(Dispatcher(Waits()), b"t" * 16, gate=gate)
        await server.bind("127.0.0.1", 0, unix=False)
        await server.start()
        before = server.stats.refused
        for count in range(1, 6):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.sendall(said)
            async with asyncio.timeout(5):
                while server.stats.refused < before + count:
                    await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        left = transports()
        await server.stop()
        return left

    before = transports()
    assert run(come_and_go()) <= before


@pytest.mark.usefixtures("_collector_off")
def test_a_handshake_that_makes_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "HANDSHAKES_MAX", 2)

    async def come_and_go() -> int:
        gate = Gate(MasterConfig(auth=Identities(tmp_path).file("master")))
        server = LaneServer(Dispatcher(Waits()), b"t" * 16, gate=gate)
        await server.bind("127.0.0.1", 0, unix=False)
        await server.start()
        with contextlib.ExitStack() as stack:
            for count in range(6):
                place = ("127.0.0.1", server.port)
                stranger = stack.enter_context(socket.create_connection(place))
                stranger.sendall(b"\x16")
                async with asyncio.timeout(5):
                    while server.stats.refused + len(server._handshakes) <= count:
                        await asyncio.sleep(0.001)
            assert len(server._handshakes) == 2
        async with asyncio.timeout(5):
            while server._handshakes:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        left = transports()
        await server.stop()
        return left

    before = transports()
    assert run(come_and_go()) <= before
