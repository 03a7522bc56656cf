"""A node's stream from both ends: ``NodeStream`` against the real gRPC server.

Both run in the server's loop, because ``grpc.aio`` serves one loop per process without noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc.aio
import pytest

from kvstore import calls
from kvstore.calls import MasterMessage, NodeMessage
from kvstore.errors import (
    InternalError,
    KVStoreError,
    MasterUnreachableError,
    NodeNameTakenError,
    ProtocolError,
)
from kvstore.node.session import NodeStream
from kvstore.wire.node_messages import SESSION_PATH
from tests.conformance.rpc_peers import ScriptedService, Server

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
                await stream.connect(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listening:  # and says nothing
        asyncio.run(session(f"127.0.0.1:{listening.getsockname()[1]}"))


def test_messages_go_both_ways(server: Server) -> None:
    async def scenario(stream: NodeStream) -> None:
        await stream.connect(5)
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
        with pytest.raises(InternalError):
            await stream.receive()

    run(server, scenario)
    assert any(record.exc_info for record in caplog.records)
    caplog.clear()


def test_a_malformed_message_ends_the_session(server: Server) -> None:
    """The service sees it where it reads, and it is told to whoever sent it."""

    async def scenario(_: NodeStream) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            for garbage in (b"\xff\xff\xff", b"", b"\x0a\x00"):
                session: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
                session = channel.stream_stream(SESSION_PATH)
                call = session()
                await call.write(garbage)
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(server, scenario)


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
            with pytest.raises(MasterUnreachableError, match="connection refused"):
                await stream.connect(5)
            with pytest.raises(MasterUnreachableError, match="connection refused"):
                await stream.send(JOIN)
            with pytest.raises(MasterUnreachableError) as caught:
                await stream.receive()
            assert caught.value.fields == {"address": f"127.0.0.1:{port}"}

    asyncio.run_coroutine_threadsafe(session(), server._loop).result(20)


def test_a_malformed_message_of_the_master_is_a_protocol_error() -> None:
    async def session() -> None:
        async def babble(_: object, context: Any) -> None:
            await context.write(b"\xff\xff\xff")

        handler: grpc.RpcMethodHandler[bytes, bytes]
        handler = grpc.stream_stream_rpc_method_handler(babble)
        master = grpc.aio.server()
        service = SESSION_PATH.split("/")[1]
        master.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Session": handler}),)
        )
        port = master.add_insecure_port("127.0.0.1:0")
        await master.start()
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(10), NodeStream(f"127.0.0.1:{port}") as stream:
                with pytest.raises(ProtocolError):
                    await stream.receive()
        await master.stop(None)

    asyncio.run(session())
    gc.collect()
