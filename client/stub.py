"""``MasterStub``: blocking calls to the master."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import random
import select
import socket
import threading
import time
from collections import deque
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
    OnGrpc,
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
from kvstore.errors import ClosedError, NotLeaderError, PermissionDeniedError, ProtocolError
from kvstore.etcd.finding import find_leader
from kvstore.limits import FRAME_BYTES_MAX, PROTOCOL_MIN, PROTOCOL_VERSION
from kvstore.native import fast
from kvstore.native.kinds import ANSWERED, BROKEN, ENDED, NOT_SENT, TIMED_OUT, UNASKED, Fast
from kvstore.stopping import current
from kvstore.wire.frames import CALL, ERROR, REPLY, Frame, FrameReader, frame, hello
from kvstore.wire.messages import CALLS, Call, decode_reply, encode_request
from kvstore.wire.spinning import SpinGauge
from kvstore.wire.status import decode_error, detail_of

logger = logging.getLogger("kvstore.client")

LANE_CONNECTIONS_MAX = 32
"""Connections to the lane at once, one call each; more calls at once go over gRPC."""

_CONNECT_PAUSE_S = 0.005
"""Between attempts on a Unix socket whose backlog is full."""


class MasterStub:
    """Calls a master. Several threads may call at once.

    The first call joins. After that calls of clients take the lane, a pool of connections with one
    call at a time each, or gRPC if the lane cannot be reached. After a fork, use ``abandon``.
    """

    def __init__(
        self,
        address: str,
        *,
        host: str,
        name: str,
        spin_us: int = 300,
        lane: bool = True,
        cluster: str = "",
        on_join: Callable[[Joined], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """
        Args:
            address: ``host:port`` of the master, or of several, separated by commas.
            host: this host (``kvstore.host.host_id()``).
            name: name of the caller, for the master's log.
            spin_us: how long a call polls for its reply before it sleeps.
            lane: whether to use the lane at all.
            cluster: name of the cluster that is meant; empty: any.
            on_join: called after every join, before any call uses it, in the thread that joined.
                It must not call the stub.
            rng: source of the backoff's jitter.

        Raises:
            InvalidArgumentError: ``address`` is none.
        """
        self._link = Link(address, lane=lane, rng=rng)
        self._join = Join(name, host, PROTOCOL_VERSION, PROTOCOL_MIN, cluster)
        self._spin_s = spin_us / 1e6
        self._on_join = on_join
        self._joining = threading.Lock()
        self._closed = threading.Event()
        self._idle: deque[_LaneConnection] = deque()
        self._lock = threading.Lock()  # guards the one below
        self._connections: set[_LaneConnection] = set()
        self._channels = Channels()

    @property
    def joined(self) -> Joined | None:
        """The master's answer to the last join; None before the first."""
        return self._link.joined

    @property
    def epoch(self) -> int:
        """The epoch of the master that was last joined; 0 before."""
        return self._link.joined.epoch if self._link.joined is not None else 0

    def join(self, deadline: float) -> Joined:
        """Joins now if the stub has not joined, as any other call would.

        Raises:
            As ``call``.
        """
        if self._closed.is_set():
            raise ClosedError("the client is closed")
        if not self._link.current:
            flow = call_flow(self._link, None, deadline, uptime)
            self._run(flow, None, b"", deadline, math.inf)
        joined = self._link.joined
        assert joined is not None
        return joined

    def call(self, request: Request, deadline: float) -> Reply:
        """The master's reply.

        Args:
            deadline: a ``uptime()`` value, by which this returns or raises.

        Raises:
            MasterUnreachableError: no master was found until the deadline, or (``fields["sent"]``
                is 1) the connection broke during a call that must not be sent twice.
            DeadlineExceededError: the master did not answer in time.
            ClosedError: the stub was closed, before or meanwhile.
            KVStoreError: what the master answered.
        """
        if self._closed.is_set():
            raise ClosedError("the client is closed")
        call = CALLS[type(request)]
        payload = encode_request(request)
        silence_s = self._link.silence_s(request)
        broken: CarrierBrokenError | NotLeaderError | None = None
        while call.lane and broken is None and (connection := self._take()) is not None:
            try:
                return decode_reply(
                    call, self._on_lane(connection, call, payload, deadline, silence_s)
                )
            except _EndedBeforeError:
                pass
            except (CarrierBrokenError, NotLeaderError) as error:
                broken = error
        flow = call_flow(self._link, call, deadline, uptime, broken)
        reply = decode_reply(call, self._run(flow, call, payload, deadline, silence_s))
        if isinstance(reply, Joined):
            self._accept(reply, self._link.address)
        return reply

    def abandon(self) -> None:
        """Called in the child of a fork: refuses calls, and closes the child's descriptors of the
        parent's connections. Takes no lock."""
        self._closed = threading.Event()
        self._closed.set()
        for connection in self._connections:
            connection.close()
        forks.keep(self._channels)  # gRPC's threads and locks were the parent's

    def close(self) -> None:
        """Ends calls under way with ``ClosedError``. Idempotent."""
        self._closed.set()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.interrupt()
        while self._idle:
            with contextlib.suppress(IndexError):
                self._drop(self._idle.pop())
        self._channels.close()

    # --- steps of a flow -----------------------------------------------------------------------

    def _run(
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
                    outcome = self._do(step, call, payload, deadline, silence_s)
                except Exception as error:  # noqa: BLE001  # the flow decides what it means
                    if self._closed.is_set():
                        raise ClosedError("the client was closed during the call") from None
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            return cast(bytes, done.value)

    def _do(
        self,
        step: Step,
        call: Call[Any, Any] | None,
        payload: bytes,
        deadline: float,
        silence_s: float,
    ) -> bytes | str | None:
        if isinstance(step, JoinAt):
            self._join_at(step, deadline)
            return None
        if isinstance(step, Pause):
            if self._closed.wait(step.seconds):
                raise ClosedError("the client was closed during the call")
            return None
        if isinstance(step, Locate):
            return find_leader(step.place, uptime() + step.timeout_s)
        assert call is not None
        if isinstance(step, OnLane):
            connection = self._take() or self._connect(deadline)
            if connection is not None:
                return self._on_lane(connection, call, payload, deadline, silence_s)
        until = min(deadline, uptime() + silence_s)
        address = step.address if isinstance(step, OnGrpc) else self._link.address
        reply = self._on_grpc(address, call, payload, until, last=until == deadline)
        if isinstance(step, OnLane):
            return reply
        warning = self._link.lane_warning() if call.lane else None
        if warning is not None:
            logger.warning(warning)
        return reply

    def _join_at(self, step: JoinAt, deadline: float) -> None:
        if not self._joining.acquire(timeout=max(deadline - uptime(), 0.0)):
            raise late(self._link, "Join")
        try:
            if self._link.generation == step.generation:
                until = min(deadline, uptime() + step.timeout_s)
                call = CALLS[Join]
                payload = encode_request(self._join._replace(highest_epoch=self._link.epoch))
                data = self._on_grpc(step.address, call, payload, until, last=until == deadline)
                self._accept(cast(Joined, decode_reply(call, data)), step.address)
        finally:
            self._joining.release()

    def _accept(self, joined: Joined, address: str) -> None:
        if self._on_join is not None:
            self._on_join(joined)
        self._link.accept(joined, address)

    def _on_grpc(
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
        with self._channels.lend(address) as lent:
            try:
                send = lent.channel.unary_unary(call.path)
                stop, metadata = current(), self._link.metadata(call)
                if stop is None:
                    return send(payload, timeout=left_s, metadata=metadata)
                calling = send.future(payload, timeout=left_s, metadata=metadata)
                with stop.wakes(calling.cancel):
                    return calling.result()
            except grpc.RpcError as error:
                failure: Exception = grpc_failure(error, self._link, call.name, last=last)
                lent.in_doubt = detail_of(error) is None
            except grpc.FutureCancelledError as error:  # stopped, or the channel was closed
                failure = CarrierBrokenError(str(error), sent=True)
            except ValueError as error:  # a channel that was closed meanwhile
                failure = CarrierBrokenError(str(error), sent=False)
        # Not from within the handler: as context, gRPC's error would keep its connection open for
        # as long as the caller keeps ours.
        raise failure

    # --- the lane ------------------------------------------------------------------------------

    def _take(self) -> _LaneConnection | None:
        """An idle connection whose other end is still open, if there is one."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            # Compiled, an exchange looks for itself whether the other end is there.
            if connection.generation == self._link.generation and (
                fast is not None or connection.is_quiet()
            ):
                return connection
            self._drop(connection)

    def _on_lane(
        self,
        connection: _LaneConnection,
        call: Call[Any, Any],
        payload: bytes,
        deadline: float,
        silence_s: float,
    ) -> bytes:
        """The reply's bytes. The connection goes back to the pool, or is closed."""
        # Threads that poll take turns at the interpreter's lock: one of them may, several lose.
        alone = len(self._connections) - len(self._idle) <= 1
        until = min(deadline, uptime() + silence_s) if silence_s < math.inf else deadline
        stop = current()
        try:
            if stop is None:
                _, kind, _, data = connection.exchange(call.wire_name, payload, until, spin=alone)
            else:
                with stop.wakes(connection.interrupt):
                    _, kind, _, data = connection.exchange(
                        call.wire_name, payload, until, spin=alone
                    )
        except TimeoutError:
            self._drop(connection)
            if until < deadline:
                raise silent(connection.generation) from None
            raise late(self._link, call.name) from None
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, CarrierBrokenError):
                error.generation = connection.generation
            raise
        if self._closed.is_set():
            self._drop(connection)
        else:
            self._idle.append(connection)
        if kind == ERROR:
            raise decode_error(data)
        return data

    def _connect(self, deadline: float) -> _LaneConnection | None:
        """A new connection; None when there are enough."""
        joined, generation = self._link.joined, self._link.generation
        assert joined is not None
        with self._lock:
            if self._closed.is_set():
                raise ClosedError("the client is closed")
            if len(self._connections) >= LANE_CONNECTIONS_MAX:
                return None
        now = uptime()
        until = now + min(LANE_CONNECT_S, (deadline - now) / 2)
        if until <= now:
            raise late(self._link, "lane")
        host, _ = split_address(self._link.address)
        connection = _open(joined, host, until, self._spin_s, generation)
        with self._lock:
            self._connections.add(connection)
        try:
            if self._closed.is_set():
                raise ClosedError("the client is closed")
            connection.greet(joined, until)
        except BaseException:
            self._drop(connection)
            raise
        if self._link.lane_works():
            logger.info("lane reachable again address=%s", self._link.address)
        return connection

    def _drop(self, connection: _LaneConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()


class _EndedBeforeError(CarrierBrokenError):
    """The other end has closed, or has sent bytes without a call; nothing was sent."""


class _LaneConnection:
    """One connection, one call at a time. Threads: the one that took it; ``interrupt``: any."""

    def __init__(self, sock: socket.socket, spin_s: float, generation: int) -> None:
        self.generation = generation
        self._sock = sock
        self._spin_s = spin_s
        self._reader = FrameReader()
        self._gauge = SpinGauge()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._call_id = 0

    def is_quiet(self) -> bool:
        """Whether nothing has arrived: no end of the stream, and no reply to an abandoned call."""
        return not self._readable.poll(0)

    def greet(self, joined: Joined, until: float) -> None:
        """
        Raises:
            TokenRefusedError, LaneUnreachableError
        """
        try:
            self._send(hello(joined.lane_token, joined.protocol), until)
            _, kind, _, data = self._receive(until, spin=False)
        except (TimeoutError, CarrierBrokenError) as error:
            raise LaneUnreachableError(f"no greeting: {error}", silent=True) from None
        except ProtocolError as error:
            raise LaneUnreachableError(error.message) from None
        if kind == ERROR:
            refusal = decode_error(data)
            if isinstance(refusal, PermissionDeniedError):
                raise TokenRefusedError(refusal.message)
            raise LaneUnreachableError(refusal.message)

    def exchange(self, name: bytes, payload: bytes, deadline: float, *, spin: bool) -> Frame:
        """The answer to one call, a REPLY or an ERROR.

        Raises:
            TimeoutError, CarrierBrokenError, ProtocolError: the connection is of no use any more.
        """
        call_id = self._call_id = self._call_id + 1
        request = frame(call_id, CALL, name, payload)
        if fast is not None:
            return self._exchange_fast(fast, call_id, request, deadline, spin=spin)
        self._send(request, deadline)
        received = self._receive(deadline, spin=spin)
        if received[0] != call_id or received[1] not in (REPLY, ERROR):
            if received[1] == ERROR:
                raise CarrierBrokenError(decode_error(received[3]).message, sent=True)
            raise ProtocolError("the master's reply on the lane belongs to another call")
        return received

    def _exchange_fast(
        self, fast: Fast, call_id: int, request: bytes, deadline: float, *, spin: bool
    ) -> Frame:
        """``exchange``, compiled."""
        gauge = self._gauge
        spinning = spin and self._spin_s > 0 and gauge.pays()
        spin_s = self._spin_s if spinning else 0.0
        # Nothing is left over in the reader: the greeting's answer was all that had come.
        status, number, kind, data = fast.exchange(
            self._sock.fileno(), request, call_id, spin_s, deadline, FRAME_BYTES_MAX
        )
        if status == ANSWERED and data is not None:
            if spinning:
                gauge.hit() if number else gauge.missed()
            if kind in (REPLY, ERROR):
                return call_id, kind, b"", data
        if status == TIMED_OUT:
            raise TimeoutError("no answer in time")
        if status == UNASKED:
            raise _EndedBeforeError("the connection had ended", sent=False)
        if status in (NOT_SENT, BROKEN):
            reason = _reason(OSError(number, os.strerror(number)))
            raise CarrierBrokenError(reason, sent=status == BROKEN)
        if status == ENDED:
            raise CarrierBrokenError("the master closed the connection", sent=True)
        if kind == ERROR and data is not None:
            raise CarrierBrokenError(decode_error(data).message, sent=True)
        raise ProtocolError(
            "the master's reply on the lane belongs to another call, or is not a frame"
        )

    def interrupt(self) -> None:
        """Makes a call under way fail."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _send(self, data: bytes, deadline: float) -> None:
        sock = self._sock
        try:
            sent = sock.send(data)
            if sent == len(data):
                return
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise CarrierBrokenError(_reason(error), sent=False) from None
        rest = memoryview(data)[sent:]
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        while rest:
            self._wait(writable, deadline)
            try:
                rest = rest[sock.send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise CarrierBrokenError(_reason(error), sent=False) from None

    def _receive(self, deadline: float, *, spin: bool) -> Frame:
        reader, sock = self._reader, self._sock
        spinning = spin and self._spin_s > 0 and self._gauge.pays()
        spin_until = time.perf_counter() + self._spin_s if spinning else 0.0
        while True:
            try:
                count = sock.recv_into(reader.space())
            except BlockingIOError:
                if spinning and time.perf_counter() < spin_until:
                    continue
                if spinning:
                    self._gauge.missed()
                    spinning = False
                self._wait(self._readable, deadline)
                continue
            except OSError as error:
                raise CarrierBrokenError(_reason(error), sent=True) from None
            if not count:
                raise CarrierBrokenError("the master closed the connection", sent=True)
            reader.received(count)
            received = reader.next()
            if received is not None:
                if spinning:
                    self._gauge.hit()
                return received

    @staticmethod
    def _wait(poll: select.poll, deadline: float) -> None:
        left_s = deadline - uptime()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        poll.poll(left_s * 1000 + 1)  # it rounds down


def _open(
    joined: Joined, host: str, until: float, spin_s: float, generation: int
) -> _LaneConnection:
    """Connects: by Unix socket where the master names one that is there, else by TCP.

    Raises:
        LaneUnreachableError
    """
    sock = _connect_unix(joined.lane_unix, until) if joined.lane_unix else None
    if sock is None:
        if not joined.lane_port:
            raise LaneUnreachableError(
                "the lane's Unix socket cannot be reached, and the master has no TCP port for it"
            )
        address = join_address(host, joined.lane_port)
        try:
            left_s = max(until - uptime(), 0.001)
            sock = socket.create_connection((host, joined.lane_port), timeout=left_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise LaneUnreachableError(f"{address}: {_reason(error)}") from None
    sock.setblocking(False)
    return _LaneConnection(sock, spin_s, generation)


def _connect_unix(name: str, until: float) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    while True:
        try:
            sock.connect(b"\0" + name.encode())
            return sock
        except BlockingIOError:  # its backlog is full
            if uptime() < until:
                time.sleep(_CONNECT_PAUSE_S)
                continue
        except OSError:
            pass
        sock.close()
        return None


def _reason(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "connection refused"
    return (error.strerror or str(error) or type(error).__name__).lower()
