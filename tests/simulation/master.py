"""The simulated master: ``MasterState`` behind streams, with the rules of ``MasterService``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvstore import calls
from kvstore.errors import (
    KVStoreError,
    NotLeaderError,
    PermissionDeniedError,
    ProtocolError,
)
from kvstore.master.state.effects import (
    CloseSession,
    DeferredReply,
    Effect,
    LogClusterEvent,
    SendReply,
    SendToNode,
    SupersedeEpoch,
)
from kvstore.master.state.master_state import MasterState
from kvstore.wire.messages import BY_WIRE_NAME, decode_request
from kvstore.wire.node_messages import decode_node_message, encode_master_message
from kvstore.wire.status import encode_error
from tests.simulation import state_access
from tests.simulation.network import BrokenStreamError, End
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import MS, Future, Process

TICK_US = 10 * MS


class Master:
    """One term of a master process: an empty state, a higher epoch than any before.

    Alone it lasts as long as the process; elected, it acts before ``leads_until`` only.
    """

    def __init__(
        self, process: Process, oracle: Oracle, new_state: Callable[[int], MasterState],
        clock: Callable[[], float], lane_token: bytes,
    ) -> None:  # fmt: skip
        """``clock``: monotonic seconds."""
        self.process = process
        self.oracle = oracle
        self.lane_token = lane_token
        self.leads_until = math.inf
        self.outrun: Callable[[int], None] = lambda epoch: None
        self._clock = clock
        self._over = False
        self.state = new_state(self.now_ms)
        self._answers: dict[int, Future[Any]] = {}
        self._sessions: dict[int, End] = {}
        self._next_session = 0
        self._working = False
        oracle.master_started(self.state, lambda: self.now_ms)
        process.on_death[self] = lambda: oracle.master_ended(self.state)
        process.spawn("tick", self._tick_forever())

    @property
    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    @property
    def leads(self) -> bool:
        return not self._over and self._clock() < self.leads_until

    def extend(self, until: float) -> bool:
        """The lease was kept; False: too late, it has stopped by itself."""
        if not self._over:
            self.leads_until = max(self.leads_until, until)
        return not self._over

    def cease(self) -> None:
        """As ``MasterService.stop_serving``."""
        if self._over:
            return
        self._over = True
        self.oracle.master_ended(self.state)
        self.state.take_effects()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set(_not_leader())
        for end in self._sessions.values():
            self._send(end, ("error", encode_error(_not_leader())))
            end.close()

    def _check_time(self) -> None:
        """Raises NotLeaderError."""
        if not self.leads:
            self.cease()
            raise _not_leader()

    def accept(self, port: str, end: End) -> None:
        serve = self._serve_node if port == "node" else self._serve_call
        self.process.spawn(port, serve(port, end))

    # --- calls --------------------------------------------------------------------------------

    async def _serve_call(self, port: str, end: End) -> None:
        try:
            call_id, wire_name, payload, token = await end.receive()
        except BrokenStreamError:
            return
        if token is not None and token != self.lane_token:
            error = PermissionDeniedError("join again", join=1)
            self._send(end, ("refused" if port == "lane" else "error", encode_error(error)))
            return
        call = BY_WIRE_NAME[wire_name]
        await self.process.reached(f"master: before {call.name}")
        try:
            self._check_time()
            request = decode_request(call, payload)
            reply = self._answer_to(call_id, request, end)
            self._check_time()
            await self.process.reached(f"master: after {call.name}")
            if isinstance(reply, Future):
                reply = await reply
                if reply is None:
                    return  # cancelled: nobody is there any more
            if isinstance(reply, KVStoreError):
                raise reply
        except KVStoreError as error:
            self._send(end, ("error", encode_error(error)))
        else:
            self._send(end, ("reply", call.encode_reply(reply)))

    def _answer_to(self, call_id: int, request: calls.Request, end: End) -> Any:
        if isinstance(request, calls.Join):
            self.state.nodes.client_joined(self.now_ms, request)
            rules = self.state.rules
            return calls.JoinReply(
                self.state.epoch, 1, "", self.lane_token, rules.lease_ms, rules.put_deadline_ms, ""
            )
        self.oracle.processing(self.state, self.now_ms, call_id, request)
        try:
            reply = self.state.steps[type(request)](self.now_ms, request)
        except KVStoreError:
            self.oracle.master_stepped(self.state, self.now_ms, request, None)
            raise
        else:
            self.oracle.master_stepped(self.state, self.now_ms, request, reply)
            if not isinstance(reply, DeferredReply):
                return reply
            answer: Future[Any] = Future()
            self._answers[reply.reply_id] = answer
            end.on_end = lambda: self._caller_gone(reply.reply_id)
            return answer
        finally:
            self._settle()

    def _caller_gone(self, ticket: int) -> None:
        answer = self._answers.pop(ticket, None)
        if answer is not None:
            answer.set(None)
            self.state.cancel(ticket)
            self._stepped()
            self._settle()

    # --- nodes --------------------------------------------------------------------------------

    async def _serve_node(self, port: str, end: End) -> None:
        del port
        self._next_session += 1
        session = self._next_session
        try:
            join = decode_node_message(await end.receive())
            if not isinstance(join, calls.NodeJoin):
                raise ProtocolError("a node's stream begins with NodeJoin")
            self._check_time()
        except BrokenStreamError:
            return
        except KVStoreError as error:
            self._send(end, ("error", encode_error(error)))
            end.close()
            return
        await self.process.reached("master: before a join")
        try:
            accepted = self.state.nodes.on_node_join(self.now_ms, session, join)
        except KVStoreError as error:
            self._send(end, ("error", encode_error(error)))
            end.close()
            return
        else:
            self._sessions[session] = end
            self._send(end, ("message", encode_master_message(accepted)))
        finally:
            self._stepped()
            self._settle()
        try:
            while True:
                message = decode_node_message(await end.receive())
                await self.process.reached(f"master: before {type(message).__name__}")
                self._check_time()
                self.state.nodes.on_node_message(self.now_ms, session, message)
                self._stepped()
                self._settle()
        except BrokenStreamError:
            pass
        except KVStoreError as error:
            self._send(end, ("error", encode_error(error)))
        del self._sessions[session]
        end.close()
        if self._over:
            return
        self.state.nodes.stream_broken(session)
        self._stepped()
        self._settle()

    # --- effects and time ---------------------------------------------------------------------

    def _settle(self) -> None:
        while self.state.effects:
            if not self.leads:
                self.cease()
                return
            for effect in self.state.take_effects():
                self._carry_out(effect)
        if self.state.has_work and not self._working:
            self._working = True
            self.process.after(0, "master/work", self._work)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendReply(ticket, result):
                answer = self._answers.pop(ticket, None)
                if answer is not None:
                    self.oracle.answered(result)
                    answer.set(result)
                elif isinstance(result, calls.Grants) and result.tokens:
                    revoke = calls.PutRevoke(result.epoch, result.tokens, True)
                    self.state.putting.put_revoke(self.now_ms, revoke)
                    self._stepped()
            case SendToNode(session, message):
                if session in self._sessions:
                    self._send(self._sessions[session], ("message", encode_master_message(message)))
            case CloseSession(session, error):
                if session in self._sessions:
                    self._send(self._sessions[session], ("error", encode_error(error)))
                    self._sessions[session].close()
            case SupersedeEpoch(epoch):
                self.oracle.outrun(epoch)
                self.process.after(0, "master/outrun", lambda: self.outrun(epoch))
            case LogClusterEvent(event, fields):
                self.oracle.note(f"master {event} {fields}")

    def _work(self) -> None:
        self._working = False
        if not self.leads:
            return
        self.state.work(self.now_ms)
        self._stepped()
        self._settle()

    async def _tick_forever(self) -> None:
        while True:
            await self.process.sleep(TICK_US)
            if not self.leads:
                self.cease()
                return
            before = state_access.outline(self.state)
            self.state.tick(self.now_ms)
            changed = before != state_access.outline(self.state)
            if changed or self.state.effects or state_access.waiting(self.state):
                self._stepped()  # else it had nothing to do
            self._settle()

    def _stepped(self) -> None:
        if not self.leads:
            return  # nothing of it will be heard of
        self.oracle.master_stepped(self.state, self.now_ms, None, None)

    @staticmethod
    def _send(end: End, message: Any) -> None:
        try:
            end.send(message)
        except BrokenStreamError:
            pass  # its own task finds out


def _not_leader() -> NotLeaderError:
    return NotLeaderError("this master leads no more", leader="")
