"""Access control of a master with certificates: authenticates peers and authorizes their calls.

A peer shows its certificate on gRPC and on the lane over TCP. The lane's Unix socket has no TLS:
there the token that its client got when it joined, over TLS, stands for the certificate. Such a
token is signed, names the identity, and is of no use with the certificate of another.
"""

from __future__ import annotations

import functools
import hmac
import logging
import secrets
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import grpc.aio

from kvstore.calls import (
    Allocate,
    Clear,
    ClusterStatus,
    Commit,
    Drain,
    PutEnd,
    PutRevoke,
    PutStart,
    Remove,
    Renew,
    Request,
    StartMoves,
)
from kvstore.config import MasterConfig
from kvstore.errors import InvalidArgumentError, PermissionDeniedError
from kvstore.master.open_access import (
    LOCAL,
    AuthContext,
    OpenAccess,
    Steps,
    parse_name,
    shorten_name,
)
from kvstore.master.state.grants import PendingGrants
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.traffic import Caller
from kvstore.runtime import descriptors
from kvstore.runtime.formatting import name_text
from kvstore.runtime.tcp_protocol import LOWER_HALF
from kvstore.security import permissions
from kvstore.security.credentials import MASTER_NAME, Credentials, peer_identity
from kvstore.security.data_port_tls import ClientTls
from kvstore.security.holder_ids import holder_of
from kvstore.security.identity import UNAUTHENTICATED, Identity, identity_of
from kvstore.security.revocation_list import RevocationList
from kvstore.security.validity import time_text, validity_of
from kvstore.wire.frames import TOKEN_BYTES_MAX
from kvstore.wire.messages import RpcMethod

log = logging.getLogger("kvstore.security")

WhatT = TypeVar("WhatT")

IDENTITIES_MAX: Final = 65_536
"""Identities that have joined and whose tokens are known. Who is forgotten joins again."""

CERTIFICATES_MAX: Final = 4_096
"""Certificates of gRPC peers that are not parsed again at each call."""

PUTTING: Final = (PutStart, Allocate, StartMoves)
"""Calls that get memory to write to."""

NAMING: Final = (PutEnd, PutRevoke, Renew)
"""Calls that name the tokens of several puts."""

AUDITED: Final = (Remove, Clear, Drain)
"""Calls that are logged with who has made them: they take something away from others."""

DIGEST_BYTES: Final = 16
MAC_BYTES: Final = 16

SIGNED_NAME_BYTES: Final = TOKEN_BYTES_MAX - MAC_BYTES - 8 - DIGEST_BYTES
"""What is left for the client's name in a token."""

_TLS: Final = b"TLSv1.3"


class Authorizer:
    """See the module; ``OpenAccess`` describes the methods that both have. Threads: the loop's."""

    def __init__(self, config: MasterConfig) -> None:
        """
        Raises:
            ConfigError: the file of ``auth`` cannot be used, or is not that of a master.
        """
        self.credentials = Credentials(config.auth)
        self.credentials.check_serves(MASTER_NAME)
        self.refused = 0
        self.lane_tls: ssl.SSLContext | None = self.credentials.server()
        self.node_tls: ClientTls | None = ClientTls(self.credentials)
        self._revoked = RevocationList(config.auth_revoked)
        self._key = secrets.token_bytes(32)
        self._identities: OrderedDict[bytes, Identity] = OrderedDict()

    def add_grpc_port(self, server: grpc.aio.Server, address: str) -> int:
        return server.add_secure_port(address, self.credentials.grpc_server())

    def background_tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self.credentials.keep_reminding(),)

    def may_lead(self) -> bool:
        return not self.credentials.validity_error()

    def measures(self) -> dict[str, Any]:
        return {
            # The HTTP child may not count them itself where our memory is hidden.
            "open_files": descriptors.open_now(),
            "auth_valid": [*self.credentials.validity()],
        }

    # --- identities of peers ------------------------------------------------------------------

    def identify_grpc_peer(self, auth_context: Callable[[], AuthContext]) -> Identity:
        context = auth_context()
        names = context.get("peer_uri", ())  # other kinds of names are for people to choose
        pem = next(iter(context.get("x509_pem_cert", ())), b"")
        version = next(iter(context.get("ssl_tls_version", ())), _TLS)
        if version != _TLS:
            raise self.refusal_error(f"a connection of {version.decode()!r}: TLS 1.3 is the lowest")
        return self._valid_identity(functools.partial(_identity_in, tuple(names), pem))

    def identify_lane_peer(self, address: str, tls: ssl.SSLObject | None) -> Identity:
        if address == LOCAL:  # without TLS: the token alone authenticates
            return UNAUTHENTICATED
        return self._valid_identity(functools.partial(peer_identity, tls and tls.getpeercert()))

    def _valid_identity(self, identify: Callable[[], Identity]) -> Identity:
        try:
            identity = identify()
        except InvalidArgumentError as error:
            raise self.refusal_error(error.message, error.advice) from None
        self._check_valid(identity)
        return identity

    def _check_valid(self, identity: Identity) -> None:
        if identity.until <= time.time():
            raise self.refusal_error(
                f"the certificate of {identity.display_name} expired on "
                f"{time_text(identity.until)}",
                "Issue it again (kvstore auth issue --force) and replace the file. If that time "
                "has not come, the clock of the master's host is ahead.",
                identity,
            )
        if self._revoked.has(identity):
            raise self.refusal_error(
                f"{identity.display_name} was revoked", "Issue it a new identity.", identity
            )

    # --- tokens -------------------------------------------------------------------------------

    def issue_client_token(
        self, secret: bytes, client: str, identity: Identity = UNAUTHENTICATED, number: int = 0
    ) -> bytes:
        digest = _digest(identity)
        self._identities[digest] = identity
        self._identities.move_to_end(digest)
        if len(self._identities) > IDENTITIES_MAX:
            self._identities.popitem(last=False)
        name = shorten_name(client, SIGNED_NAME_BYTES)
        body = assign_client_number(identity, number).to_bytes(8, "little") + digest + name
        return self._mac(secret, body) + body

    def verify_client_token(
        self, token: bytes, secret: bytes, address: str, identity: Identity = UNAUTHENTICATED
    ) -> Caller | None:
        mac, body = token[:MAC_BYTES], token[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(secret, body)) or len(body) < 8 + DIGEST_BYTES:
            return None
        joined = self._identities.get(body[8 : 8 + DIGEST_BYTES])
        if joined is None or identity.name not in ("", joined.name):
            return None
        shown = identity if identity.name else joined
        name, number = parse_name(body[8 + DIGEST_BYTES :]), int.from_bytes(body[:8], "little")
        return Caller(f"{name} {address}", shown, holder_of(shown), number)

    def caller_without_token(self, call: RpcMethod[Any, Any], identity: Identity) -> Caller | None:
        if call.lane:
            # Its puts have the number of its join.
            raise PermissionDeniedError(
                f"{call.name} needs the token of a join", advice="Join first.", join=1
            )
        return Caller(identity=identity, holder=holder_of(identity))

    def _mac(self, secret: bytes, body: bytes) -> bytes:
        return hmac.digest(self._key + secret, body, "sha256")[:MAC_BYTES]

    # --- permissions --------------------------------------------------------------------------

    def check(self, identity: Identity, request: Request) -> None:
        self._check_permission(identity, permissions.check, request)
        if isinstance(request, AUDITED):
            self._audit(identity, request)

    def check_node(self, identity: Identity, name: str) -> None:
        self._check_permission(identity, permissions.check_node, name)

    def _check_permission(
        self, identity: Identity, check: Callable[[Identity, WhatT], None], what: WhatT
    ) -> None:
        if not identity.name:
            raise self.refusal_error("a peer without an identity")
        self._check_valid(identity)
        try:
            check(identity, what)
        except PermissionDeniedError as error:
            self.log_refusal(error.message, identity)
            raise

    def authorized_steps(self, state: MasterState) -> Steps:
        step = self._authorized_step
        return {kind: functools.partial(step, state, of) for kind, of in state.steps.items()}

    def _authorized_step(
        self, state: MasterState, step: Callable[[int, Any], Any], now_ms: int, request: Request
    ) -> Any:
        caller = state.traffic.caller
        self.check(caller.identity, request)
        return step(now_ms, self.bind_to_caller(caller, request, state.common.pending))

    def bind_to_caller(self, caller: Caller, request: Request, pending: PendingGrants) -> Request:
        """The request as its caller may make it: its puts are of its own number, and the tokens
        that it names are of such puts.

        Raises:
            PermissionDeniedError: a token belongs to a put of another client.
        """
        tokens: Sequence[int] = ()
        if isinstance(request, Commit):
            tokens = (request.token,)
        elif isinstance(request, NAMING):
            tokens = request.tokens
        puts = [pending.get(token) for token in tokens]
        if any(put is not None and put.client_number != caller.number for put in puts):
            identity, reason = caller.identity, "names a put of another client"
            self.log_refusal(f"{identity.display_name} {reason}", identity)
            raise permissions.permission_error(identity, request, reason)
        if isinstance(request, PUTTING):
            return request._replace(client_number=caller.number)
        return request

    def visible_status(self, identity: Identity, status: ClusterStatus) -> ClusterStatus:
        return permissions.visible_status(identity, status)

    def _audit(self, identity: Identity, request: Request) -> None:
        on = getattr(request, "namespace", None) or getattr(request, "node", "") or "*"
        log.info(
            "audit call=%s identity=%s on=%s keys=%d",
            type(request).__name__, name_text(identity.name), name_text(on),
            len(getattr(request, "keys", ())), extra={"whose": identity.certified},
        )  # fmt: skip

    def refusal_error(
        self, reason: str, advice: str = "", identity: Identity = UNAUTHENTICATED
    ) -> PermissionDeniedError:
        """The error for a peer that is refused; counted and logged."""
        self.log_refusal(reason, identity)
        return PermissionDeniedError(
            f"refused: {reason}",
            advice=advice
            or "Give this process a file of kvstore auth issue: KVSTORE_AUTH, or --auth.",
        )

    def log_refusal(self, reason: str, identity: Identity = UNAUTHENTICATED) -> None:
        self.refused += 1
        extra = {"whose": identity.certified}
        log.warning("refused count=%d reason=%r", self.refused, reason, extra=extra)


Access = OpenAccess | Authorizer


def assign_client_number(identity: Identity, chosen: int) -> int:
    """The number under which a client puts: the lower half is that which it has chosen, or a new
    one, the upper half follows from the name of its identity, and every master knows that. Another
    identity can have it only if both names' digests begin alike (2^-32)."""
    half = int.from_bytes(hmac.digest(b"number", identity.name.encode(), "sha256")[:4], "little")
    return half << 32 | (chosen & LOWER_HALF or 1 + secrets.randbits(31))


def _digest(identity: Identity) -> bytes:
    certificate = f"{identity.uri} {identity.until}"  # a token ends with its certificate
    return hmac.digest(b"identity", certificate.encode(), "sha256")[:DIGEST_BYTES]


@functools.lru_cache(CERTIFICATES_MAX)
def _identity_in(names: tuple[bytes, ...], pem: bytes) -> Identity:
    identity = identity_of(name.decode(errors="replace") for name in names)
    return identity._replace(until=validity_of(pem.decode(errors="replace")).until)
