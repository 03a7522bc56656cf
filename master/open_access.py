"""Access control of a master without certificates: allows every call; callers have no identity.

A master with certificates has an ``Authorizer`` (``kvstore.master.authorizer``) instead, with the
same methods: its servers have an ``Access``, which is one of the two.

A client gets a token when it joins, and shows it on every connection to the lane and in every gRPC
call. The token contains the client's name, so the master keeps no table of clients. The name is for
operators and proves nothing.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

import grpc.aio

from kvstore.calls import ClusterStatus, Request
from kvstore.errors import ProtocolError
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.traffic import Caller
from kvstore.security.data_port_tls import ClientTls
from kvstore.security.identity import UNAUTHENTICATED, Identity
from kvstore.wire.columns import unpack_text
from kvstore.wire.messages import RpcMethod

LOCAL: Final = "local"
"""The address of a client that calls through a Unix socket."""

CUT: Final = "…"

NAME_BYTES: Final = 48

AuthContext = Mapping[str, Iterable[bytes]]
Steps = dict[type, Callable[[int, Any], Any]]


class OpenAccess:
    """The access control of a master without certificates. Threads: the loop's."""

    refused: int = 0
    """Connections and calls that were refused since the start."""
    lane_tls: ssl.SSLContext | None = None
    """For connections to the lane over TCP; None: without TLS."""
    node_tls: ClientTls | None = None
    """For the master's own connections to nodes that encrypt; None: it has no certificate."""

    def add_grpc_port(self, server: grpc.aio.Server, address: str) -> int:
        """Add a port with the right credentials. Returns its number; raises RuntimeError."""
        return server.add_insecure_port(address)

    def background_tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the coroutines that must run as long as the master serves."""
        return ()

    def may_lead(self) -> bool:
        """Whether this master's certificate is valid now."""
        return True

    def measures(self) -> dict[str, Any]:
        """Return values for the metrics."""
        return {"open_files": None, "auth_valid": None}

    def identify_grpc_peer(self, auth_context: Callable[[], AuthContext]) -> Identity:
        """Authenticate the peer of a gRPC call. Raises PermissionDeniedError."""
        return UNAUTHENTICATED

    def identify_lane_peer(self, address: str, tls: ssl.SSLObject | None) -> Identity:
        """Authenticate the peer of a connection to the lane. Raises PermissionDeniedError."""
        return UNAUTHENTICATED

    def issue_client_token(
        self, secret: bytes, client: str, identity: Identity = UNAUTHENTICATED, number: int = 0
    ) -> bytes:
        """Issue the token of a client that joins.

        Args:
            secret: that of the term, with which the token ends.
            number: the number that the client has chosen for itself; 0: it gets one.
        """
        return secret + shorten_name(client, NAME_BYTES)

    def verify_client_token(
        self, token: bytes, secret: bytes, address: str, identity: Identity = UNAUTHENTICATED
    ) -> Caller | None:
        """Return the caller with this token; None: this master did not issue it, or issued it to
        another identity than ``identity``, which the connection has.

        Raises:
            ProtocolError, InvalidArgumentError: no client could have joined with this name.
        """
        if not hmac.compare_digest(token[: len(secret)], secret):
            return None
        if len(token) == len(secret):
            return Caller()
        return Caller(f"{parse_name(token[len(secret) :])} {address}")

    def caller_without_token(self, call: RpcMethod[Any, Any], identity: Identity) -> Caller | None:
        """Return the caller of a gRPC call without a token; None: nothing is known of it.

        Raises:
            PermissionDeniedError: the call needs a token.
        """
        return None

    def log_refusal(self, reason: str, identity: Identity = UNAUTHENTICATED) -> None:
        """Count and log a refused connection or call."""

    def check(self, identity: Identity, request: Request) -> None:
        """Check that a peer may make this call and is not revoked. Raises PermissionDeniedError."""

    def check_node(self, identity: Identity, name: str) -> None:
        """Check a stream of the node of this name, as ``check`` does a call."""

    def authorized_steps(self, state: MasterState) -> Steps:
        """Return the steps of the state, each of which checks its request first."""
        return state.steps

    def visible_status(self, identity: Identity, status: ClusterStatus) -> ClusterStatus:
        """Return the part of the status that this identity may see."""
        return status


def shorten_name(client: str, length: int) -> bytes:
    """Shorten a client's name for a token. A long name loses its middle, because names of hosts
    differ at the end, and names of clients at both ends."""
    name = client.encode()
    if len(name) <= length:
        return name
    half = (length - len(CUT.encode())) // 2
    begin, end = (part.decode(errors="ignore") for part in (name[:half], name[-half:]))
    return f"{begin}{CUT}{end}".encode()


def parse_name(data: bytes) -> str:
    """Return the client's name in a token. Raises ProtocolError, InvalidArgumentError."""
    try:
        return unpack_text(data.decode(), "the client's name in a token")
    except UnicodeDecodeError:
        raise ProtocolError("the client's name in a token is not text") from None
