"""The gRPC server of calls and nodes' streams: generic handlers, made from the table ``CALLS``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import importlib.util
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvstore.auth.holders import holder_of
from kvstore.auth.shares import Shares
from kvstore.calls import NodeMessage
from kvstore.errors import (
    AddressInUseError,
    KVStoreError,
    PermissionDeniedError,
    StartupError,
)
from kvstore.limits import FRAME_BYTES_MAX
from kvstore.master.callers import address_of, caller_of
from kvstore.master.carrier_base import Dispatcher, logger
from kvstore.master.gate import Gate
from kvstore.master.state.traffic import Caller
from kvstore.master.turns import Turns
from kvstore.network.addresses import join_address
from kvstore.network.listening import listen
from kvstore.network.sniffing import Sniffing, splice
from kvstore.ports import what_answers
from kvstore.wire import traces
from kvstore.wire.messages import CALLS, JOIN_METADATA, Call
from kvstore.wire.node_messages import NODE_SERVICE, decode_node_message, encode_master_message
from kvstore.wire.status import METADATA_KEY, encode_error, grpc_code, unexpected

CALLS_MAX = 4096
"""Calls and node streams at once; further ones are refused and may be repeated."""

CONNECTIONS_MAX = 1024
"""Connections at once: every client and every node has one."""

_OPTIONS = [
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    # Otherwise two masters could share a port, and each would get some of the calls.
    ("grpc.so_reuseport", 0),
    # A node's stream is silent between beats; a host that vanished must be noticed all the same.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.max_concurrent_streams", 1024),
    # gRPC closes connections without a handshake, or without a call for long; clients reconnect.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 60_000),
]

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[bytes, bytes]


class GrpcServer:
    """Serves gRPC between ``bind``/``start`` and ``stop``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        token: bytes,
        *,
        calls_max: int = CALLS_MAX,
        connections_max: int = CONNECTIONS_MAX,
        gate: Gate | None = None,
        turns: Turns | None = None,
    ) -> None:
        """
        Args:
            connections_max: gRPC closes further ones at once, without a notice.
            gate: None: without authentication.
            turns: in which calls are answered; not None with authentication.
        """
        self.token = token
        self.shares = Shares("grpc", calls_max)
        self._turns = turns
        self._gate = gate
        self._dispatcher = dispatcher
        self._calls_max = calls_max
        self._connections_max = connections_max
        self._server: grpc.aio.Server | None = None
        self._started = False
        self._sniffing: Sniffing | None = None
        self.port = 0

    async def bind(self, host: str, port: int) -> None:
        """Binds ``host:port`` (0: any); serves from ``start`` on.

        Raises:
            AddressInUseError, StartupError: nothing is bound then.
        """
        options = [*_OPTIONS, ("grpc.max_allowed_incoming_connections", self._connections_max)]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self._calls_max)
        server.add_generic_rpc_handlers(self._handlers())
        _add_reflection(server)
        address = join_address(host or "::", port)
        with contextlib.suppress(RuntimeError):  # the code below finds out why
            gate = self._gate
            if gate is None:
                self.port = server.add_insecure_port(address)
            elif gate.required:
                self.port = server.add_secure_port(address, gate.credentials.grpc_server())
            else:
                await self._bind_both(server, gate, host, port)
            self._server = server
        if self._server is None:
            raise why_not_bound(host, port)

    async def _bind_both(self, server: grpc.aio.Server, gate: Gate, host: str, port: int) -> None:
        """Serves peers with and without TLS on one port: gRPC itself can do either."""
        try:
            listener = await asyncio.to_thread(listen, host, port)
        except OSError:
            raise RuntimeError from None
        self.port = listener.getsockname()[1]
        name = f"kvstore-grpc-{self.port}-{secrets.token_hex(8)}"
        server.add_insecure_port(f"unix-abstract:{name}-plain")
        server.add_secure_port(f"unix-abstract:{name}-tls", gate.credentials.grpc_server())

        async def serve(sock: socket.socket, has_tls: bool) -> None:
            await splice(sock, f"{name}-{'tls' if has_tls else 'plain'}")

        self._sniffing = Sniffing(listener, serve)

    async def start(self) -> None:
        assert self._server is not None, "bind first"
        self._started = True
        await self._server.start()
        if self._sniffing is not None:
            self._sniffing.start()

    async def stop(self, grace_s: float) -> None:
        """Accepts no more calls, and cuts those that last longer than ``grace_s``. Idempotent."""
        if self._sniffing is not None:
            await self._sniffing.stop()
            self._sniffing = None
        server, self._server = self._server, None
        if server is not None:
            if not self._started:  # else gRPC leaves the port bound until the process ends
                await server.start()
            await server.stop(grace_s)

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        methods: dict[str, dict[str, Handler]] = {}
        for call in CALLS.values():
            handler: Handler = grpc.unary_unary_rpc_method_handler(self._unary(call))
            methods.setdefault(call.service, {})[call.name] = handler
        session: Handler = grpc.stream_stream_rpc_method_handler(self._session)
        methods[NODE_SERVICE] = {"Session": session}
        return tuple(
            grpc.method_handlers_generic_handler(service, handlers)
            for service, handlers in methods.items()
        )

    def _unary(self, call: Call[Any, Any]) -> Any:
        async def answer(data: bytes, context: Context) -> bytes:
            try:
                caller = self._caller(context, call)
                for key, value in context.invocation_metadata() or ():
                    if key == traces.METADATA_KEY and isinstance(value, str):
                        data = traces.with_trace(data, value)
                if self._turns is None:
                    reply = self._dispatcher.dispatch(call, data, caller)
                    return reply if isinstance(reply, bytes) else await reply
                return await self._in_turn(self._turns, call, data, caller)
            except KVStoreError as error:
                await _abort(context, error)
                raise

        return answer

    async def _in_turn(
        self, turns: Turns, call: Call[Any, Any], data: bytes, caller: Caller | None
    ) -> bytes:
        """Answers a call in the turn of its identity, which holds a place of all calls meanwhile.

        Raises:
            KVStoreError: the answer, or its identity has too many calls under way.
        """
        who = None if caller is None else caller.identity
        name = "" if who is None else who.name
        if who is not None:
            self.shares.enter(name)
        try:
            work = functools.partial(self._dispatcher.dispatch, call, data, caller)
            reply = await turns.taken(name, work)
            return reply if isinstance(reply, bytes) else await reply
        finally:
            if who is not None:
                self.shares.leave(name)

    def _caller(self, context: Context, call: Call[Any, Any]) -> Caller | None:
        """The client that calls; None: a client without a token and without an identity.

        Raises:
            PermissionDeniedError: this master did not give out the client's token, or the peer has
                no identity, and needs one.
        """
        gate = self._gate
        who = None if gate is None else gate.of_grpc(context.auth_context())
        for key, value in context.invocation_metadata() or ():
            if key == JOIN_METADATA:
                known = None
                if isinstance(value, bytes):
                    address = address_of(context.peer())
                    known = caller_of(value, self.token, address, gate, who)
                if known is None:
                    raise PermissionDeniedError(
                        "this master does not know this client; the master may have been restarted",
                        advice="Join again.",
                        join=1,
                    )
                return known
        if who is None:
            return None
        if call.lane:
            # Its puts have the number of its join.
            raise PermissionDeniedError(
                f"{call.name} needs the token of a join", advice="Join first.", join=1
            )
        return Caller(identity=who, holder=holder_of(who))

    async def _session(self, _: object, context: Context) -> None:
        """One node's stream. This is a coroutine, not a generator, so that the cancellation of a
        broken stream arrives here, and the service's generator is closed at once rather than when
        it is collected."""
        try:
            gate = self._gate
            who = None if gate is None else gate.of_grpc(context.auth_context())
            outgoing = self._dispatcher.node_session(_messages(context), who)
            async with contextlib.AsyncExitStack() as stack:
                if isinstance(outgoing, AsyncGenerator):
                    stack.push_async_callback(outgoing.aclose)
                async for message in outgoing:
                    await context.write(encode_master_message(message))
        except KVStoreError as error:
            await _abort(context, error)
        except grpc.aio.BaseError:
            return  # the stream broke while a message was written
        except Exception as error:  # noqa: BLE001  # the process outlives any bug in one stream
            await _abort(context, unexpected(error, "Session", logger))


async def _messages(context: Context) -> AsyncIterator[NodeMessage]:
    while isinstance(data := await context.read(), bytes):  # else it is EOF
        yield decode_node_message(data)


async def _abort(context: Context, error: KVStoreError) -> None:
    """Ends the call with ``error``, by raising as gRPC expects."""
    details = error.message[:256].encode(errors="replace").decode()
    metadata = ((METADATA_KEY, encode_error(error)),)
    await context.abort(grpc_code(error), details, metadata)


def why_not_bound(host: str, port: int) -> StartupError:
    """The error for ``host:port``, which gRPC could not bind: tries once more to learn why."""
    return cannot_bind(host, port) or AddressInUseError(
        f"{join_address(host or '::', port)} could not be bound",
        advice="Try again, or choose another port.",
        port=port,
    )


def cannot_bind(host: str, port: int) -> StartupError | None:
    """Tries to bind ``host:port`` for gRPC, and lets it go; the error, if that fails."""
    address = join_address(host or "::", port)
    family = socket.AF_INET6 if ":" in (host or "::") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host or "::", port))
            sock.listen()
    except OSError as error:
        return startup_error(address, port, error)
    return None


def startup_error(
    address: str, port: int, error: OSError, role: str = "gRPC", flag: str = "--port"
) -> StartupError:
    """The error to raise when binding the port of ``role``, which ``flag`` sets, has failed."""
    if error.errno == errno.EADDRINUSE:
        by = what_answers(address)
        return AddressInUseError(
            f"{address}, for {role}, is in use" + (f": {by} answers there" if by else ""),
            advice=f"Stop what listens there (ss -ltnp shows it), or choose another {flag}.",
            address=address,
            port=port,
        )
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StartupError(
        f"cannot listen on {address}, for {role}: {reason}",
        advice=f"--host has to be an address of this host, and {flag} a port that this user may "
        "take.",
        address=address,
        port=port,
    )


def _add_reflection(server: grpc.aio.Server) -> None:
    """Lets grpcurl and its like list the services, where the ``reflection`` extra is installed."""
    if importlib.util.find_spec("grpc_reflection") is None:
        return
    from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]  # optional

    names = sorted({call.service for call in CALLS.values()} | {NODE_SERVICE})
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
