"""The gRPC server of calls: generic handlers, made from the table ``CALLS``."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvstore.errors import (
    AddressInUseError,
    KVStoreError,
    PermissionDeniedError,
    StartupError,
)
from kvstore.limits import FRAME_BYTES_MAX, REQUEST_BYTES_MAX
from kvstore.master.authorizer import Access
from kvstore.master.dispatcher import Dispatcher
from kvstore.master.open_access import LOCAL, OpenAccess
from kvstore.master.state.traffic import Caller
from kvstore.runtime.addresses import join_address
from kvstore.runtime.limiter import Limiter
from kvstore.wire.messages import CALLS, JOIN_METADATA, RpcMethod
from kvstore.wire.port_probe import identify_service
from kvstore.wire.status import METADATA_KEY, encode_error, grpc_code

CALLS_MAX = 4096
"""Calls at once; further ones are refused and may be repeated."""

CONNECTIONS_MAX = 16_384
"""Connections at once, if memory and open files suffice; the lane has as many."""

_OPTIONS = [
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    # Otherwise two masters could share a port, and each would get some of the calls.
    ("grpc.so_reuseport", 0),
    # A host that vanished is noticed, although it sends nothing.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.max_concurrent_streams", 128),
    # A stream from which nothing is read holds so many bytes; gRPC would let that grow.
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.http2.bdp_probe", 0),
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
        access: Access | None = None,
    ) -> None:
        """
        Args:
            connections_max: gRPC closes further ones at once, without a notice.
            access: authenticates the peers; by default none.
        """
        self.token = token
        self.limiter = Limiter[object]("grpc", calls_max)
        self._access = access or OpenAccess()
        self._dispatcher = dispatcher
        self._calls_max = calls_max
        self._connections_max = connections_max
        self._server: grpc.aio.Server | None = None
        self._started = False
        self.port = 0

    async def bind(self, host: str, port: int) -> None:
        """Binds ``host:port`` (0: any); serves from ``start`` on.

        Raises:
            AddressInUseError, StartupError: nothing is bound then.
        """
        options = [*_OPTIONS, ("grpc.max_allowed_incoming_connections", self._connections_max)]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self._calls_max)
        server.add_generic_rpc_handlers(self._handlers())
        address = join_address(host or "::", port)
        with contextlib.suppress(RuntimeError):  # the code below finds out why
            self.port = self._access.add_grpc_port(server, address)
            self._server = server
        if self._server is None:
            raise try_bind(host, port) or AddressInUseError(
                f"{address} could not be bound",
                advice="Try again, or choose another port.",
                port=port,
            )

    async def start(self) -> None:
        assert self._server is not None, "bind first"
        self._started = True
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accepts no more calls, and cuts those that last longer than ``grace_s``. Idempotent."""
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
        return tuple(
            grpc.method_handlers_generic_handler(service, handlers)
            for service, handlers in methods.items()
        )

    def _unary(self, call: RpcMethod[Any, Any]) -> Any:
        async def answer(data: bytes, context: Context) -> bytes:
            try:
                caller = self._caller(context, call)
                name = "" if caller is None else caller.identity.name
                if name:
                    slot = object()
                    self.limiter.acquire(slot, name)
                    _when_done(context, functools.partial(self.limiter.release, slot))
                reply = self._dispatcher.dispatch(call, data, caller)
                return reply if isinstance(reply, bytes) else await reply
            except KVStoreError as error:
                await _abort(context, error)
                raise

        return answer

    def _caller(self, context: Context, call: RpcMethod[Any, Any]) -> Caller | None:
        """The client that calls; None: a client without a token and without an identity.

        Raises:
            PermissionDeniedError: this master did not give out the client's token, or the peer has
                no identity, and needs one.
        """
        access = self._access
        identity = access.identify_grpc_peer(context.auth_context)
        for key, value in context.invocation_metadata() or ():
            if key == JOIN_METADATA:
                known = None
                if isinstance(value, bytes):
                    address = address_of(context.peer())
                    known = access.verify_client_token(value, self.token, address, identity)
                if known is None:
                    raise PermissionDeniedError(
                        "this master does not know this client; the master may have been restarted",
                        advice="Join again.",
                        join=1,
                    )
                return known
        return access.caller_without_token(call, identity)


def _when_done(context: Context, action: Callable[[], object]) -> None:
    """Calls ``action`` when the peer has read the reply, or is gone."""
    done: Any = lambda _: action()  # noqa: E731  # a class of the stubs that gRPC has not
    context.add_done_callback(done)


def address_of(peer: str) -> str:
    """The address in gRPC's name of a peer: ``ipv4:10.0.0.8:4222``, ``ipv6:%5B::1%5D:4222``."""
    family, _, rest = peer.partition(":")
    if not family.startswith("ipv"):
        return LOCAL
    return rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")


async def _abort(context: Context, error: KVStoreError) -> None:
    """Ends the call with ``error``, by raising as gRPC expects."""
    details = error.message[:256].encode(errors="replace").decode()
    metadata = ((METADATA_KEY, encode_error(error)),)
    await context.abort(grpc_code(error), details, metadata)


def try_bind(host: str, port: int) -> StartupError | None:
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
        by = identify_service(address)
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
