"""What is over leaves nothing behind that only the collector of cycles would find."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from kvstore.calls import (
    MasterHeartbeat,
    MasterMessage,
    NodeHeartbeat,
    NodeLeave,
    NodeMessage,
)
from kvstore.config import MasterConfig
from kvstore.errors import NodeNameTakenError
from kvstore.master.authorizer import Authorizer
from kvstore.master.busy_poll import new_event_loop
from kvstore.master.dispatcher import Dispatcher
from kvstore.master.lane_server import LaneServer, _LaneProtocol
from kvstore.security.credentials import MASTER_NAME, Credentials
from kvstore.security.identity import Identity
from kvstore.wire.frames import CALL, NODE_MESSAGE, REPLY, frame, hello
from kvstore.wire.node_messages import encode_node_message
from tests.support.certificates import Identities

ResultT = TypeVar("ResultT")


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


def ends_of(connection: _LaneProtocol) -> list[weakref.ref[object]]:
    return [weakref.ref(connection), weakref.ref(connection._transport)]


async def stop_when_empty(server: LaneServer) -> None:
    while server.connections:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    await server.stop()


@pytest.mark.usefixtures("_collector_off")
def test_a_connection_within_tls_is_gone_with_its_end(tmp_path: Path) -> None:
    async def come_and_go() -> list[weakref.ref[object]]:
        identities = Identities(tmp_path)
        gate = Authorizer(MasterConfig(auth=identities.file("master")))
        server = LaneServer(Dispatcher(cast(Any, None)), b"t" * 16, access=gate)
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
            await stop_when_empty(server)
        return ends

    assert [end() for end in run(come_and_go())] == [None, None]


class NodeService:
    """Serves a stream of a node; a leave ends it with an error."""

    async def node_session(
        self, incoming: AsyncIterator[NodeMessage], _: Identity
    ) -> AsyncIterator[MasterMessage]:
        async for message in incoming:
            yield MasterHeartbeat(1)
            if isinstance(message, NodeLeave):
                raise NodeNameTakenError("refused")


@pytest.mark.usefixtures("_collector_off")
@pytest.mark.parametrize("message", [NodeLeave(), NodeHeartbeat(1)])
def test_a_stream_of_a_node_is_gone_with_its_end(message: NodeMessage) -> None:
    """Whether the master ends it, or the node."""

    async def come_and_go() -> list[weakref.ref[object]]:
        server = LaneServer(Dispatcher(cast(Any, NodeService())), b"t" * 16)
        await server.bind("127.0.0.1", 0, unix=False)
        await server.start()
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            while not server.connections:
                await asyncio.sleep(0.001)
            ends = [end for each in server.connections for end in ends_of(each)]
            writer.write(hello(b"t" * 16))
            writer.write(frame(0, CALL, NODE_MESSAGE, encode_node_message(message)))
            assert await reader.readexactly(len(frame(0, REPLY, b"", b"")))
            assert await reader.read(100)
            if isinstance(message, NodeLeave):
                await reader.read()
            writer.close()
            await stop_when_empty(server)
        return ends

    assert [end() for end in run(come_and_go())] == [None, None]


def transports() -> int:
    # Not isinstance: some objects of torch warn when they are asked for their class.
    names = (type(each).__name__ for each in gc.get_objects())
    return sum(name in ("SSLProtocol", "_SelectorSocketTransport") for name in names)


@pytest.mark.usefixtures("_collector_off")
def test_a_handshake_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Any stranger can begin one."""

    async def come_and_go() -> int:
        gate = Authorizer(MasterConfig(auth=Identities(tmp_path).file("master")))
        server = LaneServer(Dispatcher(cast(Any, None)), b"t" * 16, access=gate)
        await server.bind("127.0.0.1", 0, unix=False)
        await server.start()
        before = server.stats.rejected
        for count in range(1, 6):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.sendall(b"\x16\x03\x01 no greeting")
            async with asyncio.timeout(5):
                while server.stats.rejected < before + count:
                    await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        left = transports()
        await server.stop()
        return left

    before = transports()
    assert run(come_and_go()) <= before
