"""The shell around ``MasterState``: clock, timers, streams and log. It decides nothing.

Everything here runs in the loop's thread. A call is one step of the state; the state's effects are
carried out right after it; work that need not be done at once is done in slices between calls.

One of several masters acts for as long as it leads: time is compared with ``leads_until`` before
every step and every effect, and once more before a reply is handed on, so that a process that was
stopped meanwhile refuses before it does anything. Then it is over for good: another term is another
``MasterService``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

from kvstore import calls
from kvstore.errors import (
    BusyError,
    InvalidArgumentError,
    KVStoreError,
    NotLeaderError,
    ProtocolError,
)
from kvstore.limits import PROTOCOL_VERSION
from kvstore.master.carriers import Endpoints
from kvstore.master.state.effects import Answer, Hangup, Later, Notice, Send
from kvstore.master.state.master_state import MasterState

log = logging.getLogger("kvstore.master")

TICK_S: Final = 0.05
"""How often what is due is done: no promise is kept later than this, and an idle master spends
a thousandth of a core on it."""

JOIN_TIMEOUT_S: Final = 5.0
"""A node's stream must say who it is by then."""

OUTBOX_MAX: Final = 4_096
"""Messages that a node has not taken yet; one that does not read is cut off."""

_STEPS: Final[dict[type, Callable[[MasterState, int, Any], Any]]] = {
    calls.MatchPrefix: MasterState.find,
    calls.Lookup: MasterState.find,
    calls.Exists: MasterState.find,
    calls.PutStart: MasterState.put_start,
    calls.PutEnd: MasterState.put_end,
    calls.PutRevoke: MasterState.put_revoke,
    calls.Allocate: MasterState.allocate,
    calls.Commit: MasterState.commit,
    calls.Renew: MasterState.renew,
    calls.Remove: MasterState.remove,
    calls.Clear: MasterState.clear,
    calls.DescribeSegments: MasterState.describe_segments,
    calls.ReportFailure: MasterState.report_failure,
    calls.Status: MasterState.status,
    calls.ListObjects: MasterState.list_objects,
    calls.StatObject: MasterState.stat_object,
    calls.Drain: MasterState.drain,
    calls.StartMoves: MasterState.start_moves,
}

Outbox = asyncio.Queue[calls.MasterMessage | KVStoreError | None]


def clock_ms() -> int:
    """Monotonic milliseconds: the state's only idea of time."""
    return time.monotonic_ns() // 1_000_000


def not_leader(leader: str, what: str = "this master stands by") -> NotLeaderError:
    """What a master that does not lead answers to everything."""
    return NotLeaderError(
        f"{what}; " + (f"{leader} leads" if leader else "nobody leads now"),
        advice="Ask the leader." if leader else "Try again: one of the masters soon will.",
        leader=leader,
    )


class Standby:
    """What answers while another master leads. Implements ``Service``."""

    def __init__(self, leader: str = "") -> None:
        self.leader = leader
        """``host:port``; empty: not known."""

    def call(self, request: calls.Request) -> calls.Reply:
        raise not_leader(self.leader)

    def node_session(
        self, incoming: AsyncIterator[calls.NodeMessage]
    ) -> AsyncIterator[calls.MasterMessage]:
        raise not_leader(self.leader)


class MasterService:
    """Implements ``Service`` (``kvstore.master.carrier_base``) on one ``MasterState``."""

    def __init__(self, state: MasterState, clock: Callable[[], int] = clock_ms) -> None:
        self.state = state
        self.endpoints: Endpoints | None = None
        """Where the carriers listen, once they do; clients are told."""
        self.counters_elsewhere: Callable[[], dict[str, int]] = dict
        """What the shell around this counts (calls, refused strangers); part of the status."""
        self.role = "single"
        """Or leader; part of the status."""
        self.address = ""
        """Where this master says that it is; part of the status."""
        self.leads_until = math.inf
        """A ``time.monotonic()`` value."""
        self._longest_step_us = 0
        self._clock = clock
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._next_session = 0
        self._working = False
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep time; in the running loop."""
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    def cease(self) -> None:
        """Act no more: whoever waits for an answer is refused, streams of nodes end. Idempotent."""
        self.leads_until = -math.inf
        self.state.take_effects()
        answers, self._answers = self._answers, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(self._over())
        for outbox in self._outboxes.values():
            self._put(outbox, self._over())

    @property
    def ceased(self) -> bool:
        return self.leads_until == -math.inf

    @staticmethod
    def _over() -> NotLeaderError:
        return not_leader("", "this master leads no more")

    def _check_time(self, now: float) -> None:
        """Raises NotLeaderError."""
        if now >= self.leads_until:
            self.cease()
            raise self._over()

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)

    # --- calls --------------------------------------------------------------------------------

    def call(self, request: calls.Request) -> calls.Reply | Awaitable[calls.Reply]:
        if isinstance(request, calls.Join):
            return self._joined(request)
        step = _STEPS.get(type(request))
        if step is None:
            raise ProtocolError(f"this master does not know {type(request).__name__}")
        started = time.monotonic()
        if started >= self.leads_until:
            self._check_time(started)
        try:
            result: calls.Reply | Later = step(self.state, self._clock(), request)
            answer: calls.Reply | Awaitable[calls.Reply] = (
                self._wait_for(result.ticket) if isinstance(result, Later) else result
            )
        finally:
            self._settle()
            ended = self._took(started)
        if ended >= self.leads_until:
            self._check_time(ended)
        if isinstance(answer, calls.ClusterStatus):
            counters = self._counters(answer.counters)
            return answer._replace(counters=counters, role=self.role, leader=self.address)
        return answer

    def _took(self, started: float) -> float:
        """Notes how long the loop was held; the time now."""
        ended = time.monotonic()
        self._longest_step_us = max(self._longest_step_us, int((ended - started) * 1e6))
        return ended

    def _counters(self, counted: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """With those of the shell: ``longest_step_us`` is for how long the loop served one call or
        slice of work and nobody else, at most, since the start."""
        own = {"longest_step_us": self._longest_step_us, **self.counters_elsewhere()}
        return sorted([*counted, *own.items()])

    def _joined(self, request: calls.Join) -> calls.Joined:
        if request.protocol != PROTOCOL_VERSION:
            raise InvalidArgumentError(
                f"this master speaks protocol {PROTOCOL_VERSION}, the client {request.protocol}",
                advice="Run the same release of kvstore on both.",
            )
        self._check_time(time.monotonic())
        log.debug("client_joined client=%s host=%s", request.client, request.host)
        state, endpoints = self.state, self.endpoints
        return calls.Joined(
            epoch=state.epoch,
            lane_port=endpoints.lane_port if endpoints else 0,
            lane_unix=endpoints.lane_unix if endpoints else "",
            lane_token=endpoints.lane_token if endpoints else b"",
            lease_ms=state.rules.lease_ms,
            put_deadline_ms=state.rules.put_deadline_ms,
            version=state.version,
        )

    def _wait_for(self, ticket: int) -> Awaitable[calls.Reply]:
        future = asyncio.get_running_loop().create_future()
        self._answers[ticket] = future

        def done(answered: asyncio.Future[Any]) -> None:
            if answered.cancelled() and self._answers.pop(ticket, None) is not None:
                self.state.cancel(ticket)  # its caller is gone

        future.add_done_callback(done)
        return future

    # --- nodes --------------------------------------------------------------------------------

    async def node_session(
        self, incoming: AsyncIterator[calls.NodeMessage]
    ) -> AsyncIterator[calls.MasterMessage]:
        try:
            first = await asyncio.wait_for(anext(incoming), JOIN_TIMEOUT_S)
        except (TimeoutError, StopAsyncIteration):
            raise ProtocolError("a node's stream begins with its join") from None
        if not isinstance(first, calls.NodeJoin):
            raise ProtocolError(f"a node's stream begins with NodeJoin, not {first!r:.80}")
        self._check_time(time.monotonic())
        self._next_session += 1
        session = self._next_session
        outbox: Outbox = asyncio.Queue(OUTBOX_MAX)
        try:
            accepted = self.state.node_joined(self._clock(), session, first)
            self._outboxes[session] = outbox
            outbox.put_nowait(accepted)
        finally:
            self._settle()
        reader = asyncio.get_running_loop().create_task(self._read_node(session, incoming, outbox))
        try:
            while (message := await outbox.get()) is not None:
                if isinstance(message, KVStoreError):
                    raise message
                yield message
        finally:
            del self._outboxes[session]
            reader.cancel()
            self.state.node_stream_broken(session)
            self._settle()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_node(
        self, session: int, incoming: AsyncIterator[calls.NodeMessage], outbox: Outbox
    ) -> None:
        try:
            async for message in incoming:
                self._check_time(time.monotonic())
                self.state.node_said(self._clock(), session, message)
                self._settle()
            self._put(outbox, None)
        except KVStoreError as error:
            self._put(outbox, error)

    @staticmethod
    def _put(outbox: Outbox, message: calls.MasterMessage | KVStoreError | None) -> None:
        if outbox.full():  # it does not read: end the stream with what it did not take
            while not outbox.empty():
                outbox.get_nowait()
            message = BusyError("the node does not read what the master says")
        outbox.put_nowait(message)

    # --- effects and time ---------------------------------------------------------------------

    def _settle(self) -> None:
        """Carry out what the state asks for, and see to its background work."""
        state = self.state
        while state.effects:
            if time.monotonic() >= self.leads_until:
                self.cease()
                return
            for effect in state.take_effects():
                match effect:
                    case Answer(ticket, result):
                        self._answer(ticket, result)
                    case Send(session, message):
                        if session in self._outboxes:
                            self._put(self._outboxes[session], message)
                    case Hangup(session, error):
                        if session in self._outboxes:
                            self._put(self._outboxes[session], error)
                    case Notice(event, fields):
                        words = " ".join(f"{key}={value}" for key, value in fields.items())
                        log.info("%s %s", event, words)
        if state.has_work and not self._working:
            self._working = True
            asyncio.get_running_loop().call_soon(self._work)

    def _answer(self, ticket: int, result: calls.Reply | KVStoreError) -> None:
        future = self._answers.pop(ticket, None)
        if future is None or future.done():
            if isinstance(result, calls.Grants) and result.tokens:  # nobody will write there
                revoke = calls.PutRevoke(result.epoch, result.tokens, True)
                self.state.put_revoke(self._clock(), revoke)
            return
        if isinstance(result, KVStoreError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _work(self) -> None:
        self._working = False
        started = time.monotonic()
        if started >= self.leads_until:
            return
        self.state.work(self._clock())
        self._took(started)
        self._settle()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            started = time.monotonic()
            if started >= self.leads_until:
                self.cease()
                return
            self.state.tick(self._clock())
            self._settle()
            self._took(started)
