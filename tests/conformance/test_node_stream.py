"""A node's stream from both ends: ``NodeStream`` against the real servers of a master.

Both run in the server's loop, because ``grpc.aio`` serves one loop per process without noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvstore import calls
from kvstore.calls import MasterMessage, NodeMessage
from kvstore.errors import (
    InternalError,
    KVStoreError,
    MasterUnreachableError,
    NodeNameTakenError,
    ProtocolError,
    UsageError,
)
from kvstore.master.lane_server import LaneSettings
from kvstore.node.session import NodeStream
from kvstore.runtime.resolver import Address
from kvstore.wire.frames import CALL, ERROR, NODE_MESSAGE, REPLY, frame
from kvstore.wire.node_messages import encode_node_message
from kvstore.wire.status import decode_error
from tests.conformance.rpc_peers import RawLane, ScriptedService, Server

OFFER = calls.SegmentOffer(1 << 20, b"u" * 16, "kvstore-x", "h:1", b"t" * 16, 5, 1, True)
JOIN = calls.NodeJoin("n", "h", 1, 0, [OFFER])
ACCEPTED = calls.MasterAccepted(7, 500, 6_000, [0])

Scenario = Callable[[NodeStream], Coroutine[Any, Any, None]]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(ScriptedService()) as server:
        yield server


def run(server: Server, scenario: Scenario) -> None:
    """``scenario`` with an open stream, in the server's loop."""

    async def session() -> None:
        async with asyncio.timeout(10), NodeStream(server.address) as stream:
            await stream.connect("n", "h", 5)
            await scenario(stream)

    asyncio.run_coroutine_threadsafe(session(), server._loop).result(20)
    assert server.service.sessions_ended.wait(10), "the service sees every end"


def scripted(server: Server, *messages: MasterMessage | Exception) -> None:
    """The master says these, then waits for the node to go."""

    async def script(incoming: AsyncIterator[NodeMessage]) -> AsyncIterator[MasterMessage]:
        for message in messages:
            if isinstance(message, Exception):
                raise copy.copy(message)  # its traceback must not outlive the session
            yield message
        async for _ in incoming:
            pass

    server.service.script = script


def test_nobody_answers() -> None:
    async def session(address: str) -> None:
        async with asyncio.timeout(10), NodeStream(address) as stream:
            with pytest.raises(MasterUnreachableError, match="no master answers"):
                await stream.connect("n", "h", 0.2)

    with socket.create_server(("127.0.0.1", 0)) as listening:  # and says nothing
        asyncio.run(session(f"127.0.0.1:{listening.getsockname()[1]}"))


def test_messages_go_both_ways(server: Server) -> None:
    async def scenario(stream: NodeStream) -> None:
        await stream.send(JOIN)
        assert await stream.receive() == ACCEPTED
        for number in range(100):
            await stream.send(calls.NodeHeartbeat(number))
            assert await stream.receive() == calls.MasterHeartbeat(number)

    run(server, scenario)


def test_a_session_that_the_master_ends(server: Server) -> None:
    async def scenario(stream: NodeStream) -> None:
        await stream.send(calls.NodeLeave())
        for _ in range(2):
            with pytest.raises(MasterUnreachableError, match="ended the session"):
                await stream.receive()
        with pytest.raises(MasterUnreachableError):
            await stream.send(JOIN)

    run(server, scenario)


def test_an_error_of_the_master_arrives_typed(server: Server) -> None:
    scripted(server, ACCEPTED, NodeNameTakenError("there is one", advice="Rename.", name="n"))

    async def scenario(stream: NodeStream) -> None:
        await stream.send(JOIN)
        assert await stream.receive() == ACCEPTED
        with pytest.raises(NodeNameTakenError) as caught:
            await stream.receive()
        assert caught.value.fields == {"name": "n"}
        with pytest.raises(NodeNameTakenError):
            await stream.send(JOIN)

    run(server, scenario)


def test_a_bug_of_the_master_is_an_internal_error(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    scripted(server, ZeroDivisionError("a bug"))

    async def scenario(stream: NodeStream) -> None:
        await stream.send(JOIN)
        with pytest.raises(InternalError):
            await stream.receive()

    run(server, scenario)
    assert any(record.exc_info for record in caplog.records)
    caplog.clear()


def test_a_malformed_message_ends_the_session(server: Server) -> None:
    """The service sees it where it reads, and it is told to whoever sent it."""
    for garbage in (b"\xff\xff\xff", b"\x0a\x00"):
        with RawLane(server.endpoints, token=server.endpoints.lane_token) as raw:
            assert raw.next() is not None
            raw.sock.sendall(frame(0, CALL, NODE_MESSAGE, garbage))
            ended = raw.next()
            assert ended is not None
            assert ended[1] == ERROR
            assert isinstance(decode_error(ended[3]), UsageError | ProtocolError)
            assert raw.sock.recv(1) == b""


def test_a_node_that_does_not_read_is_cut() -> None:
    """Its messages wait, and take nothing from others."""
    with Server(ScriptedService(), settings=LaneSettings(stall_timeout_s=0.3)) as server:
        numbers = range(9_000)
        scripted(server, *[calls.MasterWipe(1, b"u" * 16, numbers, numbers, numbers)] * 500)
        with RawLane(server.endpoints, token=server.endpoints.lane_token) as raw:
            raw.sock.sendall(frame(0, CALL, NODE_MESSAGE, encode_node_message(JOIN)))
            assert server.service.sessions_ended.wait(10)
        assert server.run(lambda: server.carriers.lane.stats.stalled) == 1


def test_done_sending_lets_the_master_finish(server: Server) -> None:
    async def scenario(stream: NodeStream) -> None:
        await stream.send(JOIN)
        await stream.done_sending()
        assert await stream.receive() == ACCEPTED
        with pytest.raises(MasterUnreachableError, match="ended the session"):
            await stream.receive()

    run(server, scenario)


def test_a_master_that_goes_away(server: Server) -> None:
    async def scenario(stream: NodeStream) -> None:
        await stream.send(JOIN)
        await stream.receive()
        await server.carriers.stop()
        with pytest.raises(KVStoreError) as caught:
            await stream.receive()
        assert caught.value.retriable
        with pytest.raises(KVStoreError):
            await stream.send(calls.NodeHeartbeat(1))

    run(server, scenario)


def test_nobody_there(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]

    async def session() -> None:
        async with asyncio.timeout(10), NodeStream(f"127.0.0.1:{port}") as stream:
            with pytest.raises(MasterUnreachableError, match="connection refused") as caught:
                await stream.connect("n", "h", 5)
            assert caught.value.fields == {"address": f"127.0.0.1:{port}"}

    asyncio.run_coroutine_threadsafe(session(), server._loop).result(20)


def test_a_lane_that_cannot_be_reached(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = server.service.lane_port = sock.getsockname()[1]

    async def session() -> None:
        async with asyncio.timeout(10), NodeStream(server.address) as stream:
            with pytest.raises(MasterUnreachableError, match=f"lane, TCP port {port}: connection"):
                await stream.connect("n", "h", 5)

    asyncio.run_coroutine_threadsafe(session(), server._loop).result(20)


def test_of_several_masters_with_one_name_one_knows_the_token(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(ScriptedService()) as standby:
        ports = (standby.endpoints.lane_port, server.endpoints.lane_port)
        found = [Address(socket.AF_INET, ("127.0.0.1", port)) for port in ports]
        monkeypatch.setattr("kvstore.node.session.resolve", lambda *_: found)

        async def scenario(stream: NodeStream) -> None:
            await stream.send(JOIN)
            assert await stream.receive() == ACCEPTED

        run(server, scenario)


@pytest.mark.parametrize("reply", [frame(0, REPLY, b"", b"\xff" * 3), frame(0, CALL, b"x", b"")])
def test_a_malformed_message_of_the_master_is_a_protocol_error(
    server: Server, reply: bytes
) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(0, REPLY, b"", b"") + reply)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def session() -> None:
        async with await asyncio.start_server(babble, "127.0.0.1", 0) as lane:
            server.service.lane_port = lane.sockets[0].getsockname()[1]
            async with asyncio.timeout(10), NodeStream(server.address) as stream:
                await stream.connect("n", "h", 5)
                with pytest.raises(ProtocolError):
                    await stream.receive()

    asyncio.run_coroutine_threadsafe(session(), server._loop).result(20)
