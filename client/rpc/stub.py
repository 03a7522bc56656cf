"""``MasterStub``: blocking calls to the master."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import grpc

from kvstore.calls import Join, JoinReply, Reply, Request
from kvstore.client import fork_support
from kvstore.client.rpc.channels import ChannelPool
from kvstore.client.rpc.lane_client import LaneConnection, StaleConnectionError, connect
from kvstore.client.rpc.retries import (
    LANE_CONNECT_S,
    LOG_WAIT_S,
    NO_REPLY,
    Action,
    Attempts,
    Backoff,
    ConnectionBrokenError,
    FindLeader,
    JoinAt,
    LaneUnreachableError,
    MasterConnectionState,
    ProbePort,
    SendOnGrpc,
    SendOnLane,
    TokenRefusedError,
    attempts,
    deadline_error,
    failover_error,
    grpc_failure,
)
from kvstore.errors import BatchTooLargeError, ClosedError, NotLeaderError, without_frames
from kvstore.limits import PROTOCOL_VERSION, REQUEST_BYTES_MAX
from kvstore.runtime.addresses import split_address
from kvstore.runtime.cancellation import CancelToken, current
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.leader_lookup import find_leader
from kvstore.runtime.tasks import start_thread, uninterrupted
from kvstore.security.credentials import Credentials
from kvstore.wire.frames import ERROR
from kvstore.wire.messages import CALLS, RpcMethod, decode_reply, encode_request
from kvstore.wire.port_probe import GRPC, TLS, identify_service
from kvstore.wire.request_chunking import CHUNKINGS, Chunking
from kvstore.wire.status import CLOSED_REASONS, decode_error, detail_of

logger = logging.getLogger("kvstore.client")

JOIN = CALLS[Join]

CLOSED_PAUSE_S = 0.05
"""Interval in which a waiting call checks whether the client was closed."""

SPIN_S = 300e-6
"""Busy-polling time of a hot call: most replies come within it."""

LANE_CONNECTIONS_MAX = 32
"""Lane connections, one call at a time each; further concurrent calls use gRPC."""


def wait_in_call(seconds: float, is_closed: Callable[[], bool]) -> None:
    """Wait within a call. Raises ClosedError: the client was closed meanwhile."""
    until = uptime() + seconds
    while not is_closed() and (left_s := until - uptime()) > 0:
        time.sleep(min(left_s, CLOSED_PAUSE_S))
    if is_closed():
        raise ClosedError("the client was closed during the call")


class _Sending(NamedTuple):
    call: RpcMethod[Any, Any]
    payload: bytes
    deadline: float
    silence_s: float
    """As ``MasterConnectionState.failover_timeout_s``."""


class MasterStub:
    """Calls to a master, by several threads at once; of clients after a join.

    They use the lane, a pool of connections with one call at a time each, or gRPC if the lane is
    unreachable. Calls of operators use gRPC. In the child of a fork, call ``close_after_fork``.
    """

    def __init__(
        self,
        address: str,
        *,
        host: str,
        name: str,
        lane: bool = True,
        cluster: str = "",
        auth: str = "",
        client_number: int = 0,
    ) -> None:
        """Create a stub; it connects at its first call.

        Args:
            address: ``host:port`` of one or more masters, separated by commas.
            host: ``kvstore.runtime.host.host_id()``.
            name: of the caller, for the master's log.
            cluster: name of the cluster to join; empty: any.
            auth: the certificate file; empty: no authentication.

        Raises:
            InvalidArgumentError: ``address`` is not an address.
            ConfigError: the file cannot be used.
        """
        self._link = MasterConnectionState(address, lane=lane)
        self._join = Join(name, host, PROTOCOL_VERSION, cluster, client_number=client_number)
        self._closed = False
        self.check: Callable[[Request], None] | None = None
        """Called before each call; may refuse it by raising a ``KVStoreError``."""
        self._has_replied = self._has_logged_wait = False
        self._lock = threading.Lock()  # guards ``_connections``
        self.reset_after_fork()
        self.credentials = Credentials(auth) if auth else None
        self._pems = None if self.credentials is None else self.credentials.pems()
        self._channels = ChannelPool(self.credentials)

    def reset_after_fork(self) -> None:
        """Reconnect at the next calls, after a foreign exception interrupted a call."""
        self._joining = threading.Lock()
        self._idle: deque[LaneConnection] = deque()
        self._connections: set[LaneConnection] = set()

    @property
    def joined(self) -> JoinReply | None:
        """The master's reply to the last join; None before the first."""
        return self._link.joined

    @property
    def address(self) -> str:
        """The master in use, ``host:port``; empty: etcd has not named one yet."""
        return self._link.address

    @property
    def epoch(self) -> int:
        return self._link.joined.epoch if self._link.joined is not None else 0

    @property
    def contacted(self) -> bool:
        return self._has_replied or self._link.joined is not None

    def join(self, deadline: float) -> JoinReply:
        """Join now if the stub has not joined. Raises as ``call``."""
        if self._closed:
            raise ClosedError("the client is closed")
        if not self._link.current:
            under_way = attempts(self._link, None, deadline, uptime)
            self._run(under_way, _Sending(JOIN, b"", deadline, math.inf))
        joined = self._link.joined
        assert joined is not None
        return joined

    def call(self, request: Request, deadline: float) -> Reply:
        """Return the master's reply.

        Args:
            deadline: a ``uptime()`` value, by which this returns or raises.

        Raises:
            MasterUnreachableError: no master was found by the deadline, or (``fields["sent"]`` is
                1) the connection broke during a call that must not be sent twice.
            DeadlineExceededError: the master did not reply in time.
            ClosedError: the stub was closed, before or meanwhile.
            KVStoreError: the master's error.
        """
        if self._closed:
            raise ClosedError("the client is closed")
        if self.check is not None:
            self.check(request)
        if self.credentials is not None:
            self.credentials.warn_if_expiring()
            if (pems := self.credentials.pems()) is not self._pems:  # renewed: join with them
                self._pems, self._channels = pems, ChannelPool(self.credentials)
                self._link.on_master_lost(self._link.generation)
        call = CALLS[type(request)]
        split = CHUNKINGS.get(type(request))
        if split is not None and split.is_large(request):
            return self._call_in_chunks(split, request, deadline)
        payload = encode_request(request)
        if len(payload) > REQUEST_BYTES_MAX:
            return self._call_in_chunks(split, request, deadline)
        sending = _Sending(call, payload, deadline, self._link.failover_timeout_s(request))
        started = uptime()
        broken: ConnectionBrokenError | NotLeaderError | None = None
        while call.lane and broken is None and (connection := self._take()) is not None:
            try:
                return decode_reply(call, self._on_lane(connection, sending))
            except StaleConnectionError:
                pass
            except (ConnectionBrokenError, NotLeaderError) as error:
                broken = without_frames(error)
        under_way = attempts(self._link, call, deadline, uptime, broken, started)
        reply = decode_reply(call, self._run(under_way, sending))
        self._has_replied = True
        if isinstance(reply, JoinReply):
            self._accept(reply, self._link.address)
        return reply

    def _call_in_chunks(self, split: Chunking | None, request: Request, deadline: float) -> Reply:
        """Send the call in several requests to one master. Raises BatchTooLargeError."""
        chunks = [] if split is None else split.chunks(request)
        if split is None or len(chunks) < 2:
            raise BatchTooLargeError(
                f"{type(request).__name__}: over {REQUEST_BYTES_MAX} bytes in one request",
                advice="Split the batch.",
            )
        while True:
            replies = [self.call(chunk, deadline) for chunk in chunks]
            if len({getattr(reply, "epoch", 0) for reply in replies}) == 1:
                return split.joined(replies)

    def close_after_fork(self) -> None:
        """Refuse calls in a fork's child; close inherited file descriptors. Takes no lock."""
        self._closed = True
        for connection in list(self._connections):
            connection.close()
        fork_support.leak_deliberately(self._channels)  # gRPC's threads and locks were the parent's

    def close(self) -> None:
        """End calls in progress with ``ClosedError``. Idempotent."""
        self._closed = True
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.interrupt()
        while self._idle:
            with contextlib.suppress(IndexError):
                self._drop(self._idle.pop())
        self._channels.close()

    def _run(self, under_way: Attempts, sending: _Sending) -> bytes:
        action = next(under_way)
        while True:
            outcome: bytes | str | None = None
            failure: Exception | None = None
            try:
                outcome = self._do(action, sending)
            except Exception as error:  # noqa: BLE001  # `attempts` decides what it means
                failure = error
            if failure is not None and self._closed:
                raise ClosedError("the client was closed during the call")
            # Outside the handler, so that errors of `attempts` do not refer to the failed attempt.
            try:
                action = under_way.send(outcome) if failure is None else under_way.throw(failure)
            except StopIteration as done:
                return cast(bytes, done.value)
            finally:
                failure = None  # its traceback refers to this frame

    def _do(self, action: Action, sending: _Sending) -> bytes | str | None:
        call, payload, deadline, silence_s = sending
        if isinstance(action, JoinAt):
            self._join_at(action, deadline)
            return None
        if isinstance(action, ProbePort):
            what = identify_service(action.address, action.timeout_s)
            return GRPC if what == TLS and self.credentials is not None else what
        if isinstance(action, Backoff):
            self._log_waiting(action.reason, deadline)
            wait_in_call(action.seconds, lambda: self._closed)
            return None
        if isinstance(action, FindLeader):
            return uninterrupted(
                functools.partial(find_leader, action.address, uptime() + action.timeout_s)
            )
        if isinstance(action, SendOnLane):
            connection = self._take() or self._connect(deadline)
            if connection is not None:
                return self._on_lane(connection, sending)
        until = min(deadline, uptime() + silence_s)
        address = action.address if isinstance(action, SendOnGrpc) else self._link.address
        reply = self._on_grpc(address, call, payload, until, last=until == deadline)
        if isinstance(action, SendOnLane):
            return reply
        warning = self._link.lane_warning() if call.lane else None
        if warning is not None:
            logger.warning(warning)
        if call.lane and self._link.should_retry_lane(uptime()):
            with contextlib.suppress(RuntimeError):  # the system has no thread left
                start_thread("lane", self._retry_lane)
        return reply

    def _join_at(self, action: JoinAt, deadline: float) -> None:
        joining = self._joining
        if not joining.acquire(timeout=max(0.0, deadline - uptime())):
            raise deadline_error(self._link, "Join")
        try:
            if self._link.generation == action.generation:
                until = min(deadline, uptime() + action.timeout_s)
                payload = encode_request(self._join._replace(highest_epoch=self._link.epoch))
                data = self._on_grpc(action.address, JOIN, payload, until, last=until == deadline)
                self._accept(cast(JoinReply, decode_reply(JOIN, data)), action.address)
        finally:
            joining.release()

    def _accept(self, joined: JoinReply, address: str) -> None:
        self._link.accept(joined, address)
        self._has_logged_wait = False

    def _on_grpc(
        self,
        address: str,
        call: RpcMethod[Any, Any],
        payload: bytes,
        deadline: float,
        *,
        last: bool = True,
    ) -> bytes:
        # A signal handler that raises would leave the conditions of gRPC's channels locked.
        return uninterrupted(
            functools.partial(self._send, address, call, payload, deadline, last, current())
        )

    def _send(
        self,
        address: str,
        call: RpcMethod[Any, Any],
        payload: bytes,
        deadline: float,
        last: bool,
        stop: CancelToken | None,
    ) -> bytes:
        left_s = deadline - uptime()
        if left_s <= 0:
            raise deadline_error(self._link, call.name)
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        with self._channels.acquire(address, deadline) as lent:
            try:
                send = lent.channel.unary_unary(call.path)
                metadata = self._link.metadata(call)
                if stop is None and call is not JOIN:
                    return send(payload, timeout=left_s, metadata=metadata)
                if stop is not None:
                    stop.check()
                calling = send.future(payload, timeout=left_s, metadata=metadata)
                with stop.on_cancel(calling.cancel) if stop else contextlib.nullcontext():
                    return self._result(calling, call, deadline)
            except grpc.RpcError as error:
                failure: Exception = grpc_failure(error, self._link, call.name, last=last)
                if (
                    self.credentials is not None
                    and isinstance(failure, ConnectionBrokenError)
                    and failure.reason in CLOSED_REASONS
                ):
                    failure.reason = self.credentials.validity_error() or failure.reason
                lent.in_doubt = detail_of(error) is None
                without_frames(error)  # the error is the call itself, and frames refer to it
            except grpc.FutureCancelledError as error:  # cancelled, or the channel was closed
                failure = ConnectionBrokenError(str(error), sent=True)
            except ValueError as error:  # a channel that was closed meanwhile
                failure = ConnectionBrokenError(str(error), sent=False)
        # Outside the handler: as ``__context__``, gRPC's error would keep the connection open.
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame

    def _result(
        self, calling: grpc.Future[bytes], call: RpcMethod[Any, Any], deadline: float
    ) -> bytes:
        if call is JOIN:
            with contextlib.suppress(grpc.FutureTimeoutError):
                return calling.result(LOG_WAIT_S)
            self._log_waiting(NO_REPLY, deadline)
        return calling.result()

    def _log_waiting(self, reason: str, deadline: float) -> None:
        """Log the reason for a wait; once, until a master is joined."""
        if reason and not self._has_logged_wait:
            self._has_logged_wait = True
            logger.warning(
                "waiting for a master at %s, up to %.1f s more: %s",
                self._link.shown, deadline - uptime(), reason,
            )  # fmt: skip

    def _take(self) -> LaneConnection | None:
        """Take an idle connection, if any; its peer may have closed it."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.generation == self._link.generation:
                return connection
            self._drop(connection)

    def _on_lane(self, connection: LaneConnection, sending: _Sending) -> bytes:
        """Return the reply's bytes. The connection returns to the pool, or is closed."""
        call, payload, deadline, silence_s = sending
        # Polling threads compete for the GIL: polling pays for one, not for several.
        alone = len(self._connections) - len(self._idle) <= 1
        until = min(deadline, uptime() + silence_s) if silence_s < math.inf else deadline
        stop = current()
        try:
            if stop is None:
                _, kind, _, data = connection.exchange(call.wire_name, payload, until, spin=alone)
            else:
                with stop.on_cancel(connection.interrupt):
                    _, kind, _, data = connection.exchange(
                        call.wire_name, payload, until, spin=alone
                    )
        except TimeoutError:
            self._drop(connection)
            if until < deadline:
                raise failover_error(connection.generation) from None
            raise deadline_error(self._link, call.name) from None
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, ConnectionBrokenError):
                error.generation = connection.generation
            raise
        if self._closed:
            self._drop(connection)
        else:
            self._idle.append(connection)
        if kind == ERROR:
            raise decode_error(data)
        return data

    def _connect(self, deadline: float) -> LaneConnection | None:
        """Open a connection; None if ``LANE_CONNECTIONS_MAX`` are open."""
        joined, generation = self._link.joined, self._link.generation
        assert joined is not None
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            if len(self._connections) >= LANE_CONNECTIONS_MAX:
                return None
        now = uptime()
        until = now + min(LANE_CONNECT_S, (deadline - now) / 2)
        if until <= now:
            raise deadline_error(self._link, "lane")
        host, _ = split_address(self._link.address)
        connection = connect(joined, host, until, SPIN_S, generation, self.credentials)
        with self._lock:
            self._connections.add(connection)
        try:
            if self._closed:
                raise ClosedError("the client is closed")
            connection.handshake(joined, until)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _retry_lane(self) -> None:
        """Try an unreachable lane again, without a call that waits for it."""
        try:
            connection = self._connect(uptime() + 2 * LANE_CONNECT_S)
        except (LaneUnreachableError, TokenRefusedError, ClosedError) as error:
            self._link.on_lane_failed(uptime(), error)
        else:
            if connection is not None:
                self._idle.append(connection)
            self._link.on_lane_connected()

    def _drop(self, connection: LaneConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()
