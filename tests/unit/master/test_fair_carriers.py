"""The lane with authentication: whose calls come when, and how many one may have."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from kvstore import calls
from kvstore.auth.identity import ENGINE, Identity
from kvstore.config import MasterConfig
from kvstore.limits import Key, Namespace
from kvstore.master.carrier_base import Dispatcher
from kvstore.master.gate import Gate
from kvstore.master.lane import FRAMES_PER_TURN, LaneServer, LaneSettings
from kvstore.master.spin import new_event_loop
from kvstore.master.state.traffic import Caller
from kvstore.master.turns import SLICE_S, Turns
from kvstore.wire.frames import CALL, REPLY, frame, hello
from kvstore.wire.messages import CALLS, encode_request
from tests.support.issuing import Identities

SECRET = b"t" * 16
FLOOD = Identity("flood", frozenset((ENGINE,)))
OTHER = Identity("other", frozenset((ENGINE,)))
ASKED = encode_request(calls.Exists(Namespace("n"), [Key(b"k")]))
ONE = frame(1, CALL, CALLS[calls.Exists].wire_name, ASKED)


class Slow:
    """A service each of whose calls takes a slice; remembers who called."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[str] = []

    def call(self, request: calls.Request, caller: Caller | None = None) -> Any:
        assert caller is not None
        self.asked.append(caller.identity.name if caller.identity is not None else "")
        self.now_s += 1.001 * SLICE_S
        return calls.Existing(b"\x01")

    def node_session(
        self, incoming: AsyncIterator[calls.NodeMessage], who: Identity | None = None
    ) -> AsyncIterator[calls.MasterMessage]:
        raise NotImplementedError


class Lane:
    """A lane in this loop, and clients whose bytes are there before it looks."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, places: int = 100) -> None:
        self.service = Slow()
        self.gate = Gate(MasterConfig(auth=Identities(folder).file("master")))
        self.server = LaneServer(
            Dispatcher(self.service), SECRET, LaneSettings(connections_max=places), self.gate,
            Turns(lambda: self.service.now_s),
        )  # fmt: skip
        self._stack = stack

    def connect(self, who: Identity | None, count: int) -> socket.socket:
        """A client that has sent its HELLO and ``count`` calls."""
        sock = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(b"\0" + self.server.unix.encode())
        token = SECRET if who is None else self.gate.token(SECRET, who, b"c", 1)
        sock.sendall(hello(token) + ONE * count)
        sock.setblocking(False)
        return sock


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: new_event_loop(0)) as runner:
        runner.run(asyncio.wait_for(main, 20))


async def heard(sock: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(sock, 1 << 16)


def test_a_call_on_the_lane_waits_for_one_slice_of_a_flood(tmp_path: Path) -> None:
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
            assert before <= 10, "at most one for each turn of the loop until it was read"
            assert len(await heard(sock)) > len(frame(0, REPLY, b"", b""))
            while len(lane.service.asked) < 10 * 2 * FRAMES_PER_TURN + 1:
                await asyncio.sleep(0)
            assert lane.server.turns is not None
            lane.server.turns.check_invariants()
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
                assert sum(b"flood holds 4 of 8 places" in each for each in answers) == 2
                assert len(await heard(lane.connect(OTHER, 0))) > 0
                for sock in socks:
                    sock.close()
                while any(each._who != "other" for each in lane.server.connections):
                    await asyncio.sleep(0)
                lane.server.shares.check_invariants()
                lane.server.cut()
                while lane.server.connections:
                    await asyncio.sleep(0)
            assert lane.server.shares.refused() == {"flood": 6}
            await lane.server.stop()

    run(main())
