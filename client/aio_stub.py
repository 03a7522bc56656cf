"""``AsyncMasterStub``: calls to the master from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import socket
from collections.abc import Callable
from typing import Any, cast

import grpc

from kvstore.addresses import join_address, split_address
from kvstore.calls import Join, Joined, Reply, Request
from kvstore.client import forks
from kvstore.client.channels import Channels
from kvstore.client.stub_flow import (
    LANE_CONNECT_S,
    CarrierBrokenError,
    Flow,
    JoinAt,
    LaneUnreachableError,
    Link,
    Locate,
    OnLane,
    Pause,
    Step,
    TokenRefusedError,
    call_flow,
    grpc_failure,
    late,
    silent,
)
from kvstore.clocks import uptime
from kvstore.errors import (
    ClosedError,
    KVStoreError,
    NotLeaderError,
    PermissionDeniedError,
    ProtocolError,
)
from kvstore.etcd.finding import find_leader
from kvstore.limits import PROTOCOL_MIN, PROTOCOL_VERSION
from kvstore.wire.frames import CALL, CANCEL, ERROR, REPLY, FrameReader, frame, hello
from kvstore.wire.messages import CALLS, Call, decode_reply, encode_request
from kvstore.wire.status import decode_error, detail_of

logger = logging.getLogger("kvstore.client")


class AsyncMasterStub:
    """Calls a master, as ``MasterStub`` does, from one event loop: that of its first call.

    Any number of parallel calls share one connection to the lane. Cancelling a call also cancels it
    at the master if it waits there.
    """

    def __init__(
        self,
        address: str,
        *,
        host: str,
        name: str,
        lane: bool = True,
        cluster: str = "",
        on_join: Callable[[Joined], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Arguments as of ``MasterStub``; the loop is the caller's, so nothing spins here."""
        self._link = Link(address, lane=lane, rng=rng)
        self._join = Join(name, host, PROTOCOL_VERSION, PROTOCOL_MIN, cluster)
        self._on_join = on_join
        self._joining = asyncio.Lock()
        self._connecting = asyncio.Lock()
        self._closed = asyncio.Event()
        self._lane: _Lane | None = None
        self._channels = Channels()

    @property
    def joined(self) -> Joined | None:
        """The master's answer to the last join; None before the first."""
        return self._link.joined

    @property
    def epoch(self) -> int:
        """The epoch of the master that was last joined; 0 before."""
        return self._link.joined.epoch if self._link.joined is not None else 0

    async def join(self, deadline: float) -> Joined:
        """Joins now if the stub has not joined, as any other call would.

        Raises:
            As ``call``.
        """
        if self._closed.is_set():
            raise ClosedError("the client is closed")
        if not self._link.current:
            flow = call_flow(self._link, None, deadline, uptime)
            await self._run(flow, None, b"", deadline, math.inf)
        joined = self._link.joined
        assert joined is not None
        return joined

    async def call(self, request: Request, deadline: float) -> Reply:
        """The master's reply.

        Args:
            deadline: a ``uptime()`` value, by which this returns or raises.

        Raises:
            As ``MasterStub.call``.
        """
        if self._closed.is_set():
            raise ClosedError("the client is closed")
        call = CALLS[type(request)]
        payload = encode_request(request)
        silence_s = self._link.silence_s(request)
        broken: CarrierBrokenError | NotLeaderError | None = None
        lane = self._lane
        if call.lane and lane is not None and lane.usable(self._link.generation):
            try:
                return decode_reply(
                    call, await self._on_lane(lane, call, payload, deadline, silence_s)
                )
            except (CarrierBrokenError, NotLeaderError) as error:
                if self._closed.is_set():
                    raise ClosedError("the client was closed during the call") from None
                broken = error
        flow = call_flow(self._link, call, deadline, uptime, broken)
        reply = decode_reply(call, await self._run(flow, call, payload, deadline, silence_s))
        if isinstance(reply, Joined):
            self._accept(reply, self._link.address)
        return reply

    def abandon(self) -> None:
        """As ``MasterStub.abandon``. Does not touch the loop, which is shared with the parent."""
        if self._lane is not None:
            self._lane.abandon()
        forks.keep(self)

    async def close(self) -> None:
        """Ends calls under way with ``ClosedError``. Idempotent."""
        self._closed.set()
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.abort()
            await lane.gone.wait()
        self._channels.close()

    # --- steps of a flow -----------------------------------------------------------------------

    async def _run(
        self,
        flow: Flow,
        call: Call[Any, Any] | None,
        payload: bytes,
        deadline: float,
        silence_s: float,
    ) -> bytes:
        try:
            step = next(flow)
            while True:
                try:
                    outcome = await self._do(step, call, payload, deadline, silence_s)
                except Exception as error:  # noqa: BLE001  # the flow decides what it means
                    if self._closed.is_set():
                        raise ClosedError("the client was closed during the call") from None
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            return cast(bytes, done.value)

    async def _do(
        self,
        step: Step,
        call: Call[Any, Any] | None,
        payload: bytes,
        deadline: float,
        silence_s: float,
    ) -> bytes | str | None:
        if isinstance(step, JoinAt):
            await self._join_at(step, deadline)
            return None
        if isinstance(step, Pause):
            try:
                async with asyncio.timeout(step.seconds):
                    await self._closed.wait()
            except TimeoutError:
                return None
            raise ClosedError("the client was closed during the call")
        if isinstance(step, Locate):
            until = uptime() + step.timeout_s
            return await asyncio.to_thread(find_leader, step.place, until)
        assert call is not None
        if isinstance(step, OnLane):
            lane = await self._connect(deadline)
            return await self._on_lane(lane, call, payload, deadline, silence_s)
        until = min(deadline, uptime() + silence_s)
        reply = await self._on_grpc(step.address, call, payload, until, last=until == deadline)
        warning = self._link.lane_warning() if call.lane else None
        if warning is not None:
            logger.warning(warning)
        return reply

    async def _join_at(self, step: JoinAt, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                await self._joining.acquire()
        except TimeoutError:
            raise late(self._link, "Join") from None
        try:
            if self._link.generation == step.generation:
                until = min(deadline, uptime() + step.timeout_s)
                call = CALLS[Join]
                payload = encode_request(self._join._replace(highest_epoch=self._link.epoch))
                data = await self._on_grpc(
                    step.address, call, payload, until, last=until == deadline
                )
                self._accept(cast(Joined, decode_reply(call, data)), step.address)
        finally:
            self._joining.release()

    def _accept(self, joined: Joined, address: str) -> None:
        if self._on_join is not None:
            self._on_join(joined)
        self._link.accept(joined, address)

    async def _on_grpc(
        self,
        address: str,
        call: Call[Any, Any],
        payload: bytes,
        deadline: float,
        *,
        last: bool = True,
    ) -> bytes:
        left_s = deadline - uptime()
        if left_s <= 0:
            raise late(self._link, call.name)
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        metadata = self._link.metadata(call)
        with self._channels.lend(address) as lent:
            try:
                send = lent.channel.unary_unary(call.path)
                return await _settled(send.future(payload, timeout=left_s, metadata=metadata))
            except grpc.RpcError as error:
                failure: Exception = grpc_failure(error, self._link, call.name, last=last)
                lent.in_doubt = detail_of(error) is None
            except (ValueError, grpc.FutureCancelledError) as error:  # the channel was closed
                failure = CarrierBrokenError(str(error), sent=True)
        # Not from within the handler: as context, gRPC's error would keep its connection open for
        # as long as the caller keeps ours.
        raise failure

    # --- the lane ------------------------------------------------------------------------------

    async def _on_lane(
        self,
        lane: _Lane,
        call: Call[Any, Any],
        payload: bytes,
        deadline: float,
        silence_s: float,
    ) -> bytes:
        until = min(deadline, uptime() + silence_s)
        try:
            return await lane.exchange(call.wire_name, payload, until)
        except TimeoutError:
            if until < deadline:
                raise silent(lane.generation) from None
            raise late(self._link, call.name) from None
        except CarrierBrokenError as error:
            error.generation = lane.generation
            raise

    async def _connect(self, deadline: float) -> _Lane:
        """The connection to the lane; connects if there is none."""
        now = uptime()
        until = now + min(LANE_CONNECT_S, (deadline - now) / 2)
        try:
            async with asyncio.timeout_at(_loop_time(until)):
                async with self._connecting:
                    joined, generation = self._link.joined, self._link.generation
                    assert joined is not None
                    if self._lane is not None:
                        if self._lane.usable(generation):
                            return self._lane
                        self._lane.abort()
                        self._lane = None
                    host, _ = split_address(self._link.address)
                    lane = await _open(joined, host, generation)
                    try:
                        await lane.greet(joined)
                        if self._closed.is_set():
                            raise ClosedError("the client is closed")
                    except BaseException:
                        lane.abort()
                        raise
                    self._lane = lane
        except TimeoutError:
            raise LaneUnreachableError("no answer in time") from None
        if self._link.lane_works():
            logger.info("lane reachable again address=%s", self._link.address)
        return lane


class _Lane(asyncio.BufferedProtocol):
    """One connection to the lane, with any number of parallel calls."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._last_id = 0

    def usable(self, generation: int) -> bool:
        transport = self._transport
        return (
            self.generation == generation and transport is not None and not transport.is_closing()
        )

    async def greet(self, joined: Joined) -> None:
        """
        Raises:
            TokenRefusedError, LaneUnreachableError
        """
        greeting = self._waiting[0] = self._loop.create_future()
        try:
            self._write(hello(joined.lane_token, joined.protocol))
            await greeting
        except PermissionDeniedError as refusal:
            raise TokenRefusedError(refusal.message) from None
        except CarrierBrokenError as error:
            raise LaneUnreachableError(f"no greeting: {error}", silent=True) from None
        except KVStoreError as refusal:
            raise LaneUnreachableError(refusal.message) from None
        finally:
            self._waiting.pop(0, None)

    async def exchange(self, name: bytes, payload: bytes, deadline: float) -> bytes:
        """The reply to one call.

        Raises:
            TimeoutError, CarrierBrokenError, KVStoreError
        """
        call_id = self._last_id = self._last_id + 1
        request = frame(call_id, CALL, name, payload)
        left_s = deadline - uptime()
        if left_s <= 0:
            raise TimeoutError
        self._write(request)
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[call_id] = reply
        timer = self._loop.call_later(left_s, self._expire, call_id)
        try:
            return await reply
        except asyncio.CancelledError:
            self._give_up(call_id)
            raise
        finally:
            timer.cancel()
            self._waiting.pop(call_id, None)

    def abandon(self) -> None:
        """Drops the connection in the child of a fork. Its objects would unregister it from a
        selector that is shared with the parent, so they are kept, over another file."""
        if self._transport is not None:
            ours = self._transport.get_extra_info("socket").fileno()
            if ours >= 0:
                nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(nothing, ours, inheritable=False)
                os.close(nothing)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self.gone.set()

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise CarrierBrokenError("the connection is closed", sent=False)
        self._transport.write(data)

    def _expire(self, call_id: int) -> None:
        reply = self._waiting.get(call_id)
        if reply is not None and not reply.done():
            self._give_up(call_id)
            reply.set_exception(TimeoutError())

    def _give_up(self, call_id: int) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(call_id, CANCEL, b"", b""))

    # --- what asyncio calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        reader.received(nbytes)
        try:
            while (received := reader.next()) is not None:
                call_id, kind, _, payload = received
                waiting = self._waiting.get(call_id)
                if kind not in (REPLY, ERROR):
                    raise ProtocolError(f"a master sends no frames of kind {kind}")
                if waiting is None or waiting.done():
                    continue  # given up
                if kind == REPLY:
                    waiting.set_result(payload)
                else:
                    waiting.set_exception(decode_error(payload))
        except ProtocolError as error:
            logger.warning("lane broken reason=%r", error.message)
            self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        waiting, self._waiting = self._waiting, {}
        reason = str(exc) if exc is not None else "the master closed the connection"
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(CarrierBrokenError(reason, sent=True))
        self._transport = None  # breaks the cycle with the transport
        self.gone.set()


async def _settled(call: grpc.Future[bytes]) -> bytes:
    """The result of a call that gRPC's thread carries."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    call.add_done_callback(tell)
    try:
        await done.wait()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call.result()


async def _open(joined: Joined, host: str, generation: int) -> _Lane:
    """Connects: by Unix socket where the master names one that is there, else by TCP.

    Raises:
        LaneUnreachableError
    """
    loop = asyncio.get_running_loop()
    if joined.lane_unix:
        try:
            _, lane = await loop.create_unix_connection(
                lambda: _Lane(generation), "\0" + joined.lane_unix
            )
            return lane
        except OSError:
            pass
    if not joined.lane_port:
        raise LaneUnreachableError(
            "the lane's Unix socket cannot be reached, and the master has no TCP port for it"
        )
    try:
        _, lane = await loop.create_connection(lambda: _Lane(generation), host, joined.lane_port)
        return lane
    except OSError as error:
        address = join_address(host, joined.lane_port)
        raise LaneUnreachableError(f"{address}: {error.strerror or error}") from None


def _loop_time(deadline: float) -> float:
    """A ``uptime()`` value on the clock of the loop."""
    return asyncio.get_running_loop().time() + (deadline - uptime())
