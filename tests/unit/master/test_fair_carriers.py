"""The lane and gRPC with authentication: whose calls come when, and how many one may have."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore import calls
from kvstore.config import MasterConfig
from kvstore.limits import Key, Namespace
from kvstore.master.authorizer import Authorizer
from kvstore.master.busy_poll import new_event_loop
from kvstore.master.dispatcher import Dispatcher
from kvstore.master.grpc_server import GrpcServer
from kvstore.master.lane_server import FRAMES_PER_TURN, LaneServer, LaneSettings
from kvstore.master.state.traffic import Caller
from kvstore.security.identity import ENGINE, UNAUTHENTICATED, Identity
from kvstore.wire.frames import CALL, REPLY, frame, hello
from kvstore.wire.messages import CALLS, encode_request
from tests.support.certificates import Identities
from tests.support.limiters import check_limiter

SECRET = b"t" * 16
FLOOD = Identity("flood", frozenset((ENGINE,)))
OTHER = Identity("other", frozenset((ENGINE,)))
ASKED = encode_request(calls.Exists(Namespace("n"), [Key(b"k")]))
ONE = frame(1, CALL, CALLS[calls.Exists].wire_name, ASKED)


class Service:
    """Answers each call at once, or never; remembers who called."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.waits = False
        self.waiting: list[asyncio.Future[calls.Reply]] = []

    def call(self, request: calls.Request, caller: Caller | None = None) -> Any:
        assert caller is not None
        self.asked.append(caller.identity.name)
        if self.waits:
            self.waiting.append(asyncio.get_running_loop().create_future())
            return self.waiting[-1]
        return calls.ExistsReply(b"\x01")

    def node_session(
        self, incoming: AsyncIterator[calls.NodeMessage], identity: Identity = UNAUTHENTICATED
    ) -> AsyncIterator[calls.MasterMessage]:
        raise NotImplementedError


class Context:
    """What gRPC gives to the handler of one call."""

    def __init__(self, who: Identity) -> None:
        self.who = who
        self.done: list[Callable[[Context], None]] = []

    def add_done_callback(self, done: Callable[[Context], None]) -> None:
        self.done.append(done)

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: object, details: str, metadata: object) -> None:
        raise RuntimeError(details)


class Lane:
    """A lane in this loop, and clients whose bytes are there before it looks."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, places: int = 100) -> None:
        self.service = Service()
        self.gate = Authorizer(MasterConfig(auth=Identities(folder).file("master")))
        self.server = LaneServer(
            Dispatcher(self.service), SECRET, LaneSettings(connections_max=places), self.gate
        )
        self._stack = stack

    def connect(self, who: Identity | None, count: int) -> socket.socket:
        """A client that has sent its HELLO and ``count`` calls."""
        sock = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(b"\0" + self.server.unix.encode())
        token = SECRET if who is None else self.gate.issue_client_token(SECRET, "c", who, 1)
        sock.sendall(hello(token) + ONE * count)
        sock.setblocking(False)
        return sock


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: new_event_loop(0)) as runner:
        runner.run(asyncio.wait_for(main, 20))


async def heard(sock: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(sock, 1 << 16)


def test_a_call_on_the_lane_waits_for_one_turn_of_each_other_connection(tmp_path: Path) -> None:
    async def main() -> None:
        with contextlib.ExitStack() as stack:
            lane = Lane(tmp_path, stack)
            await lane.server.bind("127.0.0.1", 0)
            await lane.server.start()
            for _ in range(10):
                lane.connect(FLOOD, 2 * FRAMES_PER_TURN)
            sock = lane.connect(OTHER, 1)
            while "other" not in lane.service.asked:
                await asyncio.sleep(0)
            before = lane.service.asked.index("other")
            assert before <= 10 * FRAMES_PER_TURN
            assert len(await heard(sock)) > len(frame(0, REPLY, b"", b""))
            while len(lane.service.asked) < 10 * 2 * FRAMES_PER_TURN + 1:
                await asyncio.sleep(0)
            await lane.server.stop()

    run(main())


def test_one_identity_has_half_of_the_lane_until_it_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        with contextlib.ExitStack() as stack:
            lane = Lane(tmp_path, stack, places=8)
            await lane.server.bind("127.0.0.1", 0)
            await lane.server.start()
            for _ in range(3):  # what is given back can be had again
                socks = [lane.connect(FLOOD, 0) for _ in range(6)]
                answers = [await heard(sock) for sock in socks]
                assert sum(b"flood has reached its limit: 4 of 8" in each for each in answers) == 2
                assert len(await heard(lane.connect(OTHER, 0))) > 0
                for sock in socks:
                    sock.close()
                while len(lane.server.connections) > 1:
                    await asyncio.sleep(0)
                check_limiter(lane.server.connections)
                lane.server.drop_connections()
                while lane.server.connections:
                    await asyncio.sleep(0)
            await lane.server.stop()

    run(main())


def test_one_identity_has_half_of_the_calls_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        service, call = Service(), CALLS[calls.Exists]
        server = GrpcServer(Dispatcher(service), SECRET, calls_max=8)
        monkeypatch.setattr(server, "_caller", lambda context, _: Caller(identity=context.who))

        async def answer(who: Identity) -> bytes:
            context = Context(who)
            try:
                return cast(bytes, await server._unary(call)(ASKED, context))
            finally:
                for done in context.done:
                    done(context)

        def ask(who: Identity) -> asyncio.Task[bytes]:
            return asyncio.create_task(answer(who))

        service.waits = True
        flood = [ask(FLOOD) for _ in range(6)]
        while len(service.asked) < 4:
            await asyncio.sleep(0)
        refused = [task for task in flood if task.done()]
        assert [str(task.exception())[:20] for task in refused] == ["grpc: identity flood"] * 2
        service.waits = False
        assert len(await ask(OTHER)) > 0
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)
        check_limiter(server.limiter)
        while not all(each.cancelled() for each in service.waiting):
            await asyncio.sleep(0)

    run(main())
