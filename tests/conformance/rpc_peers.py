"""Both ends of the carriers for tests: a scripted service in a real server, and a stub.

The server runs in a thread with a loop of its own, so that a test can stop it, start it again on
the same ports, and look inside between calls.
"""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstore import calls
from kvstore.calls import MasterMessage, NodeMessage, Reply, Request
from kvstore.client.rpc.stub import MasterStub
from kvstore.errors import InvalidArgumentError
from kvstore.limits import FRAME_BYTES_MAX, Key, Namespace
from kvstore.master.busy_poll import new_event_loop
from kvstore.master.lane_server import LaneSettings
from kvstore.master.open_access import OpenAccess
from kvstore.master.rpc_servers import ListenAddresses, RpcServers
from kvstore.master.state import traffic
from kvstore.runtime.cancellation import CancelToken
from kvstore.runtime.clock import uptime
from kvstore.security.identity import UNAUTHENTICATED, Identity
from kvstore.wire.frames import Frame, FrameReader, hello

T = TypeVar("T")
Answer = Reply | Exception | Callable[[Any], Reply | Awaitable[Reply]]

N = Namespace("default")
KEYS = [Key(b"a" * 32), Key(b"b" * 32)]
PLACES = calls.Placements([4096, 10], [7, 7], [1, 2], [1, 2], [3, 3, 4], [0, 8192, 64])
SEGMENT = calls.SegmentInfo(
    3, "node", "host", 1 << 30, b"u" * 16, "kvstore-x", "h:1", b"t" * 16, 5, 2
)
STATUS = calls.ClusterStatus(
    7, "0.1", 5,
    [calls.NodeStatus("n", "h", "alive", "", 3, [calls.SegmentStatus(3, 9, 5, 4, "")],
                      disks=[calls.DiskStatus(4, 9, 5, 1, 3, 2, 1, 7)])],
    [calls.NamespaceStatus(N, 2, 4106)], [calls.Counter("puts", 2)],
    departed=[calls.DepartedNode("m", "h", "left", 9, 3, 0, False)],
    tenants=[calls.TenantStatus("t", 9, 5, 20, 3, 0, 2, 1, 4, 6, ["t/*"])],
)  # fmt: skip
SAMPLES: dict[type, tuple[Any, Any]] = {
    type(request): (request, reply)
    for request, reply in (
        (calls.MatchPrefix([N, Namespace("other")], KEYS, True, [Namespace("states")]),
         calls.MatchPrefixReply(7, 10_000, [
             calls.PrefixMatch(2, 0, PLACES), calls.PrefixMatch(0, 1, calls.NO_PLACEMENTS),
         ], 1)),
        (calls.Lookup(N, KEYS), calls.LookupReply(7, 10_000, PLACES)),
        (calls.Exists(N, KEYS), calls.ExistsReply(b"\x01\x02")),
        (calls.PutStart(N, KEYS, [4096, 10], None, True, 1, False, 0, "host"),
         calls.Grants(7, 30_000, b"\x01\x02", 1, [9], [3], [4096])),
        (calls.PutEnd(7, [9]), calls.PutEndReply(b"\x04")),
        (calls.PutRevoke(7, [9], False, [5, 6]), calls.PutRevokeReply(1)),
        (
            calls.Allocate(N, 4096, 0, "host"),
            calls.Grants(7, 30_000, b"\x01", 1, [10], [3], [4096]),
        ),
        (
            calls.Commit(7, 10, N, KEYS[0], KEYS[1], 4096, False, 0, True, 4096, "host", True),
            calls.CommitReply(1, b"", 11, 2, 8192),
        ),
        (calls.Renew(N, KEYS, [7, 7], [1, 2], 7, [10], (b"u" * 16, b"v" * 16), [4096, 8192]),
         calls.RenewReply(10_000, 30_000, b"\x01\x00", b"\x01")),
        (calls.Remove(N, KEYS), calls.RemoveReply(b"\x01\x00")),
        (calls.Clear(N, 100), calls.ClearReply(2, 0)),
        (calls.DescribeSegments([3, 4]), calls.DescribeSegmentsReply(7, [SEGMENT])),
        (calls.ReportFailure([3]), calls.ReportFailureReply(1)),
        (calls.ReportCorrupt(N, KEYS, [7, 7], [1, 2], [bytes(16)] * 2),
         calls.ReportCorruptReply(1)),
        (calls.Status(), STATUS),
        (calls.Drain("n", calls.DrainStep.BEGIN), calls.DrainReply(7, 4096, 1)),
    )
}  # fmt: skip
"""A request and its reply for each call of an engine, and for two of operators."""


class ScriptedService:
    """Answers what it was told to; remembers what it was asked. Runs in the server's thread."""

    def __init__(self, *, epoch: int = 7, lane: bool = True, unix: bool = True) -> None:
        self.epoch = epoch
        self.endpoints: ListenAddresses | None = None
        self.lane_port: int | None = None
        """Announced instead of the real one."""
        self.answers: dict[type, Answer] = {kind: reply for kind, (_, reply) in SAMPLES.items()}
        self.asked: list[Request] = []
        self.callers: list[str] = []
        """Of those."""
        self.waiting: list[asyncio.Future[Reply]] = []
        self.sessions_ended = threading.Event()
        self.script: Callable[[AsyncIterator[NodeMessage]], AsyncIterator[MasterMessage]] = beats
        self._lane = lane
        self._unix = unix
        self._changed = threading.Condition()

    def call(
        self, request: Request, caller: traffic.Caller | None = None
    ) -> Reply | Awaitable[Reply]:
        with self._changed:
            self.asked.append(request)
            self.callers.append("" if caller is None else caller.name)
            self._changed.notify_all()
        if isinstance(request, calls.Join):
            return self._joined(request)
        answer = self.answers[type(request)]
        if isinstance(answer, Exception):
            raise copy.copy(answer)  # a fresh one: its traceback must not outlive the call
        return answer(request) if callable(answer) else answer

    def _joined(self, request: calls.Join) -> calls.JoinReply:
        assert self.endpoints is not None
        _, _, port, unix, token, *_ = self.endpoints
        port = port if self.lane_port is None else self.lane_port
        return calls.JoinReply(
            self.epoch,
            port if self._lane else 0,
            unix if self._lane and self._unix else "",
            OpenAccess().issue_client_token(token, request.client),
            10_000,
            30_000,
            "0.1",
        )

    def wait(self, request: Request) -> Awaitable[Reply]:
        """An answer: keeps the caller waiting for ``Server.release``."""
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(lambda _: self._notify())
        self.waiting.append(waiting)
        self._notify()
        return waiting

    def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Waits in the test's thread for something that the service will see."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "it did not happen"

    def count(self, kind: type) -> int:
        return sum(isinstance(request, kind) for request in self.asked)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def node_session(
        self, incoming: AsyncIterator[NodeMessage], identity: Identity = UNAUTHENTICATED
    ) -> AsyncIterator[MasterMessage]:
        try:
            async for message in self.script(incoming):
                yield message
        finally:
            self.sessions_ended.set()


async def beats(incoming: AsyncIterator[NodeMessage]) -> AsyncIterator[MasterMessage]:
    async for message in incoming:
        if isinstance(message, calls.NodeJoin):
            yield calls.MasterAccepted(7, 500, 6_000, list(range(len(message.segments))))
        elif isinstance(message, calls.NodeHeartbeat):
            yield calls.MasterHeartbeat(message.number)
        elif isinstance(message, calls.NodeWipeDone):
            raise InvalidArgumentError("no such order", order=message.wipe_seq)
        else:
            return


class Server:
    """A ``RpcServers`` in a thread. Entering starts it; ``restart`` is on the same ports."""

    def __init__(
        self,
        service: ScriptedService,
        *,
        settings: LaneSettings | None = None,
        busy_poll_us: int = 0,
    ) -> None:
        self.service = service
        self.settings = settings
        self.endpoints: ListenAddresses
        self.carriers: RpcServers
        self._spin_us = busy_poll_us
        self._ports = (0, 0)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="server")
        self._thread.start()
        assert ready.wait(20), "the server does not start"
        self.endpoints = self.service.endpoints  # type: ignore[assignment]  # set before ready
        self._ports = self.endpoints.port, self.endpoints.lane_port

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            thread.join(20)
            assert not thread.is_alive(), "the server does not stop"

    def restart(self, *, epoch: int) -> None:
        self.stop()
        self.service.epoch = epoch
        self.start()

    def run(self, work: Callable[[], T]) -> T:
        """``work()`` in the server's thread."""

        async def do() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(do(), self._loop).result(10)

    def release(self, reply: Reply | Exception, index: int = 0) -> None:
        """Ends the wait of a call that ``ScriptedService.wait`` holds."""

        def do() -> None:
            waiting = self.service.waiting.pop(index)
            if isinstance(reply, Exception):
                waiting.set_exception(reply)
            else:
                waiting.set_result(reply)

        self.run(do)

    def when_waiting(self, action: Callable[[], object]) -> threading.Thread:
        """``action()`` in a thread, as soon as a call waits; join it."""

        def do() -> None:
            self.service.until(lambda: bool(self.service.waiting))
            action()

        thread = threading.Thread(target=do, name="when waiting")
        thread.start()
        return thread

    def _run(self, ready: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: new_event_loop(self._spin_us)) as runner:
            runner.run(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self.carriers = RpcServers(self.service, lane_settings=self.settings)
        self.service.endpoints = await self.carriers.bind("127.0.0.1", *self._ports)
        await self.carriers.start()
        ready.set()
        await self._stopping.wait()
        await self.carriers.stop(0.0)


class Caller:
    """A stub, as tests use it."""

    def __init__(self, address: str, *, name: str = "test", **options: Any) -> None:
        self.stub = MasterStub(address, host="host", name=name, **options)

    @property
    def epoch(self) -> int:
        return self.stub.epoch

    def call(self, request: Request, timeout_s: float = 10.0) -> Reply:
        return self.stub.call(request, uptime() + timeout_s)

    def all(self, requests: Sequence[Request], timeout_s: float = 10.0) -> list[Any]:
        """All at once; each result is a reply or the error raised."""

        def one(request: Request) -> Any:
            try:
                return self.call(request, timeout_s)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(one, requests))

    def close(self) -> None:
        self.stub.close()


class StoppableCaller(Caller):
    """Its calls can be stopped, as those of ``AsyncClient``."""

    def call(self, request: Request, timeout_s: float = 10.0) -> Reply:
        with CancelToken().here():
            return super().call(request, timeout_s)


class RawLane:
    """A socket on the lane that speaks frames, or what it likes."""

    def __init__(self, endpoints: ListenAddresses, *, token: bytes | None = None) -> None:
        self.sock = socket.create_connection((endpoints.host, endpoints.lane_port), timeout=10)
        self.reader = FrameReader(FRAME_BYTES_MAX)
        if token is not None:
            self.sock.sendall(hello(token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def next(self) -> Frame | None:
        """The next frame; None at the end of the stream."""
        while (received := self.reader.next()) is None:
            try:
                count = self.sock.recv_into(self.reader.space())
            except ConnectionResetError:
                return None
            if not count:
                return None
            self.reader.received(count)
        return received
