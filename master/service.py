"""The shell around ``MasterState``: clock, timers, streams and log. It decides nothing.

Everything here runs in the loop's thread. A call is one step of the state; the state's effects are
carried out right after it; work that need not be done at once is done in slices between calls.

One of several masters acts for as long as it leads: time is compared with ``leads_until`` before a
step and before its effects, and once more before a reply is handed on, so that a process that was
stopped meanwhile refuses before it does anything. The service then ends for good: another term is
another ``MasterService``.

A transition of the state is atomic. An unexpected exception in the middle of one
(``Common.changing``), in ``tick`` or in ``work`` breaks that: the service stops acting and
``died`` ends the process. The nodes keep their objects and report them to the next master.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvstore import calls
from kvstore.calls.tenants import TenantMatcher, TenantRule
from kvstore.errors import (
    BatchTooLargeError,
    BusyError,
    InternalError,
    KVStoreError,
    NotLeaderError,
    ProtocolError,
    UnavailableError,
)
from kvstore.limits import check_cluster, check_protocol
from kvstore.master.authorizer import Access
from kvstore.master.capabilities import CapabilityIssuer
from kvstore.master.connectivity import AGAIN_S, Reach
from kvstore.master.open_access import OpenAccess
from kvstore.master.request_recorder import RequestRecorder
from kvstore.master.rpc_servers import ListenAddresses
from kvstore.master.state.effects import (
    CloseSession,
    DeferredReply,
    LogClusterEvent,
    SendReply,
    SendToNode,
    SupersedeEpoch,
)
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.traffic import Caller
from kvstore.runtime.clock import uptime
from kvstore.runtime.formatting import field_text
from kvstore.runtime.histograms import Histogram
from kvstore.runtime.tasks import Died, start_task
from kvstore.security.identity import UNAUTHENTICATED, Identity
from kvstore.wire.request_chunking import CHUNKINGS

log = logging.getLogger("kvstore.master")

TICK_S: Final = 0.05
"""Time between two ticks, which do the work that is due, while puts are pending or calls wait."""

IDLE_TICK_S: Final = 0.5
"""The same otherwise: no promise is late by more than this. A tick of an idle process takes 0.4 ms,
because nothing is in the processor's caches."""

OUTBOX_MAX: Final = 4_096
"""Messages that may wait for one node; a node that does not read them is cut off."""

WARNED: Final = frozenset(
    (
        "corrupt_object",
        "disk_copy_corrupt",
        "disk_failed",
        "guarantees_exceed_pool",
        "node_dead",
        "node_shm_entry_missing",
        "node_unreachable",
    )
)
"""Notices that ask an operator for something."""

Outbox = asyncio.Queue[calls.MasterMessage | KVStoreError | None]


def clock_ms() -> int:
    """Monotonic milliseconds: the state's only idea of time."""
    return time.monotonic_ns() // 1_000_000


def not_leader(leader: str, what: str = "this master stands by") -> NotLeaderError:
    """The error with which a master that does not lead answers every call."""
    return NotLeaderError(
        f"{what}; " + (f"{leader} leads" if leader else "no master leads now"),
        advice="Ask the leader." if leader else "Try again in some seconds, when a master leads.",
        leader=leader,
    )


class _PendingCall(NamedTuple):
    """A call whose reply comes later."""

    future: asyncio.Future[Any]
    request: calls.Request
    caller: Caller
    """Of its caller."""


class Standby:
    """Answers while another master leads. Implements ``RpcService``."""

    def __init__(self, leader: str = "") -> None:
        self.leader = leader
        """``host:port``; empty: not known."""

    def call(self, request: calls.Request, caller: Caller | None = None) -> calls.Reply:
        raise not_leader(self.leader)

    def node_session(
        self, incoming: AsyncIterator[calls.NodeMessage], identity: Identity = UNAUTHENTICATED
    ) -> AsyncIterator[calls.MasterMessage]:
        raise not_leader(self.leader)


class MasterService:
    """Implements ``RpcService`` (``kvstore.master.dispatcher``) on one ``MasterState``."""

    def __init__(
        self,
        state: MasterState,
        clock: Callable[[], int] = clock_ms,
        *,
        access: Access | None = None,
        recorder: RequestRecorder | None = None,
        died: Died = lambda error: None,
    ) -> None:
        """
        Args:
            access: authorizes the calls; by default all are allowed.
            recorder: gets the matches, puts and hints.
            died: called once if this service cannot go on; see the module.
        """
        self._access = access or OpenAccess()
        self._steps = self._access.authorized_steps(state)
        if recorder is not None:
            self._steps = recorder.wrap(self._steps)
        self.state = state
        self._traffic = state.traffic
        self._died = died
        self._broken = False
        self.endpoints: ListenAddresses | None = None
        """The addresses on which the RPC servers listen; clients get them with the reply to
        Join."""
        self.counters_elsewhere: Callable[[], dict[str, int]] = dict
        """Counters of the shell around this (calls, refused connections); part of the status."""
        self.role = "single"
        """``single`` or ``leader``; part of the status."""
        self.address = ""
        """The address that this master advertises; part of the status."""
        self.leads_until = math.inf
        """The service may act only before this value of ``uptime()``."""
        self.on_superseded: Callable[[int], None] = lambda epoch: None
        """Called with the epoch of a later master that a node has joined: the next term must begin
        above that epoch."""
        self.noticed: Callable[[str, Mapping[str, str | int]], None] = lambda event, fields: None
        """Called with each notice, which is in the log as well."""
        self.reach: Reach | None = None
        """Tries to connect to a node that has joined; None: nobody tries."""
        self.has_events: Callable[[], None] | None = None
        """Called after each step that made events (``MasterState.take_events``)."""
        self.step_us = Histogram()
        """For how long the loop served one call or slice of work and nothing else."""
        self.late_us = Histogram()
        """How much later than planned the timer ran. A call that came meanwhile waited as long."""
        self._longest_step_us = 0
        self._clock = clock
        self._answers: dict[int, _PendingCall] = {}
        self._sealing = CapabilityIssuer(state)
        self._outboxes: dict[int, Outbox] = {}
        self._next_session = 0
        self._working = False
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the timer; call it in the running loop."""
        self._ticker = start_task("tick", self._tick_forever())

    def stop_serving(self) -> None:
        """Stops acting: refuses the waiting calls and ends the nodes' streams. Idempotent."""
        self.leads_until = -math.inf
        self.state.take_effects()
        answers, self._answers = self._answers, {}
        for waiting in answers.values():
            if not waiting.future.done():
                waiting.future.set_exception(self._over())
        for outbox in self._outboxes.values():
            self._put(outbox, self._over())

    def _fail_permanently(self, error: BaseException) -> None:
        """Called when the state may be half changed: stops acting, and lets the process end."""
        if not self._broken:
            self._broken = True
            epoch = self.state.epoch
            log.critical("master_broken epoch=%d error=%r", epoch, error, exc_info=error)
            self.stop_serving()
            self._died(error)

    def _check_state_intact(self, error: Exception) -> None:
        """After an exception in a step: calls ``_fail_permanently`` if the state may be half
        changed."""
        if not isinstance(error, KVStoreError) and self.state.common.changing:
            self._fail_permanently(error)

    @property
    def ceased(self) -> bool:
        return self.leads_until == -math.inf

    def _over(self) -> KVStoreError:
        if self._broken:
            return UnavailableError(
                "this master is stopping after an error", advice="Its log says why."
            )
        return not_leader("", "this master no longer leads")

    def _check_time(self, now: float) -> None:
        """Raises NotLeaderError, or UnavailableError if an error has broken the state."""
        if now >= self.leads_until:
            self.stop_serving()
            raise self._over()

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)

    # --- calls --------------------------------------------------------------------------------

    def call(
        self, request: calls.Request, caller: Caller | None = None
    ) -> calls.Reply | Awaitable[calls.Reply]:
        if isinstance(request, calls.Join):
            return self._joined(request, caller)
        cut = CHUNKINGS.get(type(request))
        if cut is not None and cut.is_large(request):
            raise BatchTooLargeError(
                f"{type(request).__name__}: more than one request may ask for",
                advice="Split the batch.",
            )
        step = self._steps.get(type(request))
        if step is None:
            raise ProtocolError(f"this master does not know {type(request).__name__}")
        started = uptime()
        if started >= self.leads_until:
            self._check_time(started)
        self.state.common.changing = False
        self._traffic.caller = caller = caller or self._traffic.unknown
        try:
            now_ms = self._clock()
            result: calls.Reply | DeferredReply = step(now_ms, request)
            answer: calls.Reply | Awaitable[calls.Reply] = (
                self._wait_for(result.reply_id, request, caller)
                if isinstance(result, DeferredReply)
                else result
            )
            if caller.holder and not isinstance(result, DeferredReply):
                answer = self._sealing.add_capabilities(now_ms, request, result, caller)
        except Exception as error:
            self._check_state_intact(error)
            raise
        finally:
            self._apply_effects()
            ended = self._record_step_time(started)
        if ended >= self.leads_until:
            self._check_time(ended)
        if isinstance(answer, calls.ClusterStatus):
            counters = self._counters(answer.counters)
            answer = answer._replace(counters=counters, role=self.role, leader=self.address)
            answer = self._access.visible_status(caller.identity, answer)
        return answer

    def _record_step_time(self, started: float) -> float:
        """Notes how long the loop was held. Returns the time now."""
        ended = uptime()
        took_us = (ended - started) * 1e6
        self.step_us.add(took_us)
        if took_us > self._longest_step_us:
            self._longest_step_us = int(took_us)
        return ended

    def _counters(self, counted: Sequence[calls.Counter]) -> list[calls.Counter]:
        """Adds the shell's counters. ``longest_step_us`` is the longest time since the start for
        which the loop served one call or slice of work and nothing else."""
        own = {"longest_step_us": self._longest_step_us, **self.counters_elsewhere()}
        return sorted([*counted, *(calls.Counter(*item) for item in own.items())])

    def _joined(self, request: calls.Join, caller: Caller | None) -> calls.JoinReply:
        identity = UNAUTHENTICATED if caller is None else caller.identity
        self._access.check(identity, request)
        check_protocol(request.protocol, "the client")
        check_cluster(self.state.cluster, request.cluster, "the client")
        self._check_time(uptime())
        self.state.nodes.client_joined(self._clock(), request)
        log.debug("client_joined client=%s host=%s", request.client, request.host)
        state, endpoints = self.state, self.endpoints
        token = b""
        if endpoints is not None:
            token = self._access.issue_client_token(
                endpoints.lane_token, request.client, identity, request.client_number
            )
        return calls.JoinReply(
            epoch=state.epoch,
            lane_port=endpoints.lane_port if endpoints else 0,
            lane_unix=endpoints.lane_unix if endpoints else "",
            lane_token=token,
            lease_ms=state.rules.lease_ms,
            put_deadline_ms=state.rules.put_deadline_ms,
            version=state.version,
            cluster=state.cluster,
            http_port=endpoints.http_port if endpoints else 0,
            has_events=endpoints is not None and endpoints.has_events,
            identity=identity.uri,
        )

    def _wait_for(
        self, ticket: int, request: calls.Request, caller: Caller
    ) -> Awaitable[calls.Reply]:
        future = asyncio.get_running_loop().create_future()
        self._answers[ticket] = _PendingCall(future, request, caller)

        def done(answered: asyncio.Future[Any]) -> None:
            if not answered.cancelled():
                answered.exception()  # marks it as seen: the caller may have got another error
            elif self._answers.pop(ticket, None) is not None:
                self.state.cancel(ticket)  # the caller is gone

        future.add_done_callback(done)
        return future

    def set_tenants(self, rules: Sequence[TenantRule], matcher: TenantMatcher) -> None:
        """Raises InvalidArgumentError, as ``MasterState.set_tenants``."""
        with self._transition() as state:
            state.set_tenants(rules, matcher)

    # --- nodes --------------------------------------------------------------------------------

    async def node_session(
        self, incoming: AsyncIterator[calls.NodeMessage], identity: Identity = UNAUTHENTICATED
    ) -> AsyncIterator[calls.MasterMessage]:
        first = await anext(incoming, None)
        if not isinstance(first, calls.NodeJoin):
            raise ProtocolError(f"a node's stream begins with NodeJoin, not {first!r:.80}")
        self._access.check_node(identity, first.name)
        self._check_time(uptime())
        self._next_session += 1
        session = self._next_session
        outbox: Outbox = asyncio.Queue(OUTBOX_MAX)
        encrypts = any(offer.encrypts for offer in first.segments)
        certified = identity.certified if encrypts else ""
        with self._transition() as state:
            accepted = state.nodes.on_node_join(self._clock(), session, first, certified)
            self._outboxes[session] = outbox
            outbox.put_nowait(accepted)
        reader = start_task(
            f"node {first.name}",
            self._read_node(session, incoming, outbox, identity, first.name),
            died=lambda error: self._put(outbox, InternalError(f"unexpected {error!r:.200}")),
        )
        reaching = start_task(f"reach {first.name}", self._probe_node(session))
        try:
            while (message := await outbox.get()) is not None:
                if isinstance(message, KVStoreError):
                    raise message
                yield message
        finally:
            del self._outboxes[session]
            reader.cancel()
            reaching.cancel()
            with self._transition() as state:
                state.nodes.stream_broken(session)
            await asyncio.gather(reader, reaching, return_exceptions=True)

    async def _read_node(
        self,
        session: int,
        incoming: AsyncIterator[calls.NodeMessage],
        outbox: Outbox,
        identity: Identity,
        name: str,
    ) -> None:
        try:
            async for message in incoming:
                self._access.check_node(identity, name)  # it may have been revoked
                self._check_time(uptime())
                with self._transition() as state:
                    state.nodes.on_node_message(self._clock(), session, message)
            self._put(outbox, None)
        except KVStoreError as error:
            self._put(outbox, error)

    async def _probe_node(self, session: int) -> None:
        """Connects to the node's memory until that has succeeded once."""
        while self.reach is not None and (offered := self.state.nodes.segments_of_session(session)):
            why = await self.reach(offered)
            with self._transition() as state:
                state.nodes.on_connectivity_result(session, why)
            if not why:
                return
            await asyncio.sleep(AGAIN_S)

    @contextlib.contextmanager
    def _transition(self) -> Iterator[MasterState]:
        """Wraps one step of the state that is not a call."""
        self.state.common.changing = False
        try:
            yield self.state
        except Exception as error:
            self._check_state_intact(error)
            raise
        finally:
            self._apply_effects()

    @staticmethod
    def _put(outbox: Outbox, message: calls.MasterMessage | KVStoreError | None) -> None:
        if outbox.full():  # the node does not read: drop its messages, end its stream
            while not outbox.empty():
                outbox.get_nowait()
            message = BusyError("the node does not read the master's messages")
        outbox.put_nowait(message)

    # --- effects and time ---------------------------------------------------------------------

    def _apply_effects(self) -> None:
        """Carries out the state's effects, and schedules its background work."""
        common = self.state.common
        if common.effects or common.jobs.due or self.has_events:  # most calls have neither
            try:
                self._carry_out()
            except Exception as error:  # noqa: BLE001  # an order or an answer may be lost
                self._fail_permanently(error)

    def _carry_out(self) -> None:
        state = self.state
        if self.has_events is not None and state.waiting_events:
            self.has_events()
        while state.effects:
            if uptime() >= self.leads_until:
                self.stop_serving()
                return
            for effect in state.take_effects():
                match effect:
                    case SendReply(ticket, result):
                        self._reply(ticket, result)
                    case SendToNode(session, message):
                        if session in self._outboxes:
                            self._put(self._outboxes[session], message)
                    case CloseSession(session, error):
                        if session in self._outboxes:
                            self._put(self._outboxes[session], error)
                    case SupersedeEpoch(epoch):
                        self.on_superseded(epoch)
                    case LogClusterEvent(event, fields):
                        words = " ".join(f"{key}=%s" for key in fields)
                        level = logging.WARNING if event in WARNED else logging.INFO
                        log.log(level, f"{event} {words}", *map(_shown, fields.values()))  # noqa: G004
                        self.noticed(event, fields)
        if state.has_work and not self._working:
            self._working = True
            asyncio.get_running_loop().call_soon(self._work)

    def _reply(self, ticket: int, result: calls.Reply | KVStoreError) -> None:
        waiting = self._answers.pop(ticket, None)
        if waiting is None or waiting.future.done():
            if isinstance(result, calls.Grants) and result.tokens:  # no client will write there
                revoke = calls.PutRevoke(result.epoch, result.tokens, True)
                self.state.putting.put_revoke(self._clock(), revoke)
            return
        future, request, caller = waiting
        if isinstance(result, KVStoreError):
            future.set_exception(result)
        elif caller.holder:
            future.set_result(
                self._sealing.add_capabilities(self._clock(), request, result, caller)
            )
        else:
            future.set_result(result)

    def _work(self) -> None:
        self._working = False
        started = uptime()
        if started >= self.leads_until:
            return
        try:
            self.state.work(self._clock())
        except Exception as error:  # noqa: BLE001  # as a tick's
            self._fail_permanently(error)
            return
        self._record_step_time(started)
        self._apply_effects()

    async def _tick_forever(self) -> None:
        while True:
            pause_s = TICK_S if self._answers or len(self.state.pending) else IDLE_TICK_S
            due = uptime() + pause_s
            await asyncio.sleep(pause_s)
            started = uptime()
            self.late_us.add(max(0.0, started - due) * 1e6)
            if started >= self.leads_until:
                self.stop_serving()
                return
            try:
                self.state.tick(self._clock())
            except Exception as error:  # noqa: BLE001  # of any kind
                self._fail_permanently(error)
                return
            self._apply_effects()
            self._record_step_time(started)


def _shown(value: str | int) -> str | int:
    """A field of a notice in the log, where a number stays one."""
    return value if isinstance(value, int) else field_text(value)
