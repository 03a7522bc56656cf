"""The gate of a master with authentication: who a peer is, and whether it may make a call.

A peer shows its certificate on gRPC and on the lane over TCP. The lane's Unix socket has no TLS:
there the token that its client got when it joined, over TLS, stands for the certificate. Such a
token is signed, names the identity, and is of no use with the certificate of another.

Without authentication a client gets a token, too, and shows it on every connection to the lane and
in every gRPC call. The master puts the client's name into it, and keeps no table of clients. The
name is for operators; it proves nothing.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import ssl
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from kvstore.calls import (
    Allocate,
    Clear,
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
from kvstore.errors import InvalidArgumentError, PermissionDeniedError, ProtocolError
from kvstore.limits import REFUSED_HOLDERS_MAX
from kvstore.master import times
from kvstore.master.state.grants import PendingGrants
from kvstore.master.state.traffic import Caller
from kvstore.runtime.formatting import name_text
from kvstore.runtime.tcp_protocol import LOWER_HALF
from kvstore.security import permissions
from kvstore.security.credentials import MASTER_NAME, Credentials, alternative_names
from kvstore.security.holder_ids import holder_by, holder_of
from kvstore.security.identity import Identity, identity_of
from kvstore.security.revocation_list import RevocationList
from kvstore.wire.columns import unpack_text
from kvstore.wire.frames import TOKEN_BYTES_MAX

log = logging.getLogger("kvstore.security")

WhatT = TypeVar("WhatT")

IDENTITIES_MAX: Final = 65_536
"""Identities that have joined and whose tokens are known. Who is forgotten joins again."""

PUTTING: Final = (PutStart, Allocate, StartMoves)
"""Calls that get memory to write to."""

NAMING: Final = (PutEnd, PutRevoke, Renew)
"""Calls that name the tokens of several puts."""

AUDITED: Final = (Remove, Clear, Drain)
"""Calls that are logged with who has made them: they take something away from others."""

DIGEST_BYTES: Final = 16
MAC_BYTES: Final = 16

LOCAL: Final = "local"
"""The address of a client that calls through a Unix socket."""

CUT: Final = "…"

NAME_BYTES: Final = 48
SIGNED_NAME_BYTES: Final = TOKEN_BYTES_MAX - MAC_BYTES - 8 - DIGEST_BYTES
"""What is left for the client's name in a token."""

_TLS: Final = b"TLSv1.3"


class Authorizer:
    """See the module. Threads: the loop's."""

    def __init__(self, config: MasterConfig) -> None:
        """
        Raises:
            ConfigError: the file of ``auth`` cannot be used, or is not that of a master.
        """
        self.credentials = Credentials(config.auth)
        self.credentials.check_serves(MASTER_NAME)
        self.refused = 0
        """Connections and calls that were refused since the start."""
        longest_ms = max(config.lease_ms, times.PUT_DEADLINE_MS)
        self._revoked = RevocationList(config.auth_revoked, kept_s=2 * longest_ms / 1000)
        self._key = secrets.token_bytes(32)
        self._identities: OrderedDict[bytes, Identity] = OrderedDict()
        self._known: dict[tuple[str, ...], Identity] = {}

    # --- who a peer is ------------------------------------------------------------------------

    def identify_grpc_peer(self, context: Mapping[str, Iterable[bytes]]) -> Identity:
        """Who makes a gRPC call, by its ``auth_context``.

        Raises:
            PermissionDeniedError
        """
        names = context.get("peer_uri", ())  # other kinds of names are for people to choose
        version = next(iter(context.get("ssl_tls_version", ())), _TLS)
        if version != _TLS:
            raise self.refusal_error(f"a connection of {version.decode()!r}: TLS 1.3 is the lowest")
        return self._identity(tuple(name.decode(errors="replace") for name in names))

    def identify_tls_peer(self, connection: ssl.SSLObject) -> Identity:
        """Who has opened a connection, by its ``ssl_object``.

        Raises:
            PermissionDeniedError
        """
        return self._identity(tuple(alternative_names(connection.getpeercert())))

    def _identity(self, names: tuple[str, ...]) -> Identity:
        who = self._known.get(names)
        if who is None:
            try:
                who = identity_of(names)
            except InvalidArgumentError as error:
                raise self.refusal_error(error.message, error.advice) from None
            if len(self._known) >= IDENTITIES_MAX:
                self._known.clear()
            self._known[names] = who
        self._check_revoked(who)
        return who

    def _check_revoked(self, who: Identity) -> None:
        if self._revoked.has(who):
            raise self.refusal_error(
                f"{who.display_name} was revoked", "Issue it a new identity.", who
            )

    def rejected_holders(self) -> list[int]:
        """Holders whose capabilities may still be valid although their identities are revoked; the
        last ones, if there are too many for one message."""
        return [holder_by(number) for number in self._revoked.recent()[-REFUSED_HOLDERS_MAX:]]

    # --- tokens -------------------------------------------------------------------------------

    def issue_client_token(self, secret: bytes, who: Identity, name: bytes, number: int) -> bytes:
        """The token of a client that has joined with this identity.

        Args:
            secret: that of the term, at whose end the token is over.
            number: the one that the client has chosen for itself; 0: it gets one.
        """
        digest = _digest(who)
        self._identities[digest] = who
        self._identities.move_to_end(digest)
        if len(self._identities) > IDENTITIES_MAX:
            self._identities.popitem(last=False)
        body = assign_client_number(who, number).to_bytes(8, "little") + digest + name
        return self._mac(secret, body) + body

    def read_token(self, token: bytes, secret: bytes) -> tuple[Identity, int, bytes] | None:
        """The identity, the client's number and its name in a token; None: it is none of ours,
        or its identity is forgotten."""
        mac, body = token[:MAC_BYTES], token[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(secret, body)) or len(body) < 8 + DIGEST_BYTES:
            return None
        who = self._identities.get(body[8 : 8 + DIGEST_BYTES])
        return who and (who, int.from_bytes(body[:8], "little"), body[8 + DIGEST_BYTES :])

    def _mac(self, secret: bytes, body: bytes) -> bytes:
        return hmac.digest(self._key + secret, body, "sha256")[:MAC_BYTES]

    # --- what it may do -----------------------------------------------------------------------

    def check(self, who: Identity | None, request: Request) -> None:
        """
        Raises:
            PermissionDeniedError: it may not make this call, or was revoked.
        """
        self._check_permission(who, permissions.check, request)
        if who is not None and isinstance(request, AUDITED):
            self._audit(who, request)

    def check_node(self, who: Identity | None, name: str) -> None:
        """As ``check``, for a stream of the node of this name."""
        self._check_permission(who, permissions.check_node, name)

    def _check_permission(
        self, who: Identity | None, check: Callable[[Identity, WhatT], None], what: WhatT
    ) -> None:
        if who is None:
            raise self.refusal_error("a peer without an identity")
        self._check_revoked(who)
        try:
            check(who, what)
        except PermissionDeniedError as error:
            self._note(error.message, who)
            raise

    def bind_to_caller(
        self, caller: Caller | None, request: Request, pending: PendingGrants
    ) -> Request:
        """The request as its caller may make it: its puts are of its own number, and the tokens
        that it names are of such puts.

        Raises:
            PermissionDeniedError: a token belongs to a put of another client.
        """
        if caller is None or caller.identity is None:
            return request
        tokens: Sequence[int] = ()
        if isinstance(request, Commit):
            tokens = (request.token,)
        elif isinstance(request, NAMING):
            tokens = request.tokens
        puts = [pending.get(token) for token in tokens]
        if any(put is not None and put.client_number != caller.number for put in puts):
            self._note(
                f"{caller.identity.display_name} names a put of another client", caller.identity
            )
            raise permissions.permission_error(
                caller.identity, request, "names a put of another client"
            )
        if isinstance(request, PUTTING):
            return request._replace(client_number=caller.number)
        return request

    def _audit(self, who: Identity, request: Request) -> None:
        on = getattr(request, "namespace", None) or getattr(request, "node", "") or "*"
        log.info(
            "audit call=%s identity=%s on=%s keys=%d",
            type(request).__name__, name_text(who.name), name_text(on),
            len(getattr(request, "keys", ())), extra={"whose": who.certified},
        )  # fmt: skip

    def refusal_error(
        self, why: str, advice: str = "", who: Identity | None = None
    ) -> PermissionDeniedError:
        """The error for a peer that does not get in; counted, and logged."""
        self._note(why, who)
        return PermissionDeniedError(
            f"refused: {why}",
            advice=advice
            or "Give this process a file of kvstore auth issue: KVSTORE_AUTH, or --auth.",
        )

    def _note(self, why: str, who: Identity | None) -> None:
        self.refused += 1
        whose = "" if who is None else who.certified
        log.warning("refused count=%d reason=%r", self.refused, why, extra={"whose": whose})


def assign_client_number(who: Identity, chosen: int) -> int:
    """The number under which a client puts: the lower half is that which it has chosen, or a new
    one, the upper half follows from the name of its identity, and every master knows that. Another
    identity can have it only if both names' digests begin alike (2^-32)."""
    half = int.from_bytes(hmac.digest(b"number", who.name.encode(), "sha256")[:4], "little")
    return half << 32 | (chosen & LOWER_HALF or 1 + secrets.randbits(31))


def _digest(who: Identity) -> bytes:
    return hmac.digest(b"identity", who.uri.encode(), "sha256")[:DIGEST_BYTES]


def token_for(
    secret: bytes,
    client: str,
    who: Identity | None = None,
    gate: Authorizer | None = None,
    number: int = 0,
) -> bytes:
    """The token of one client, from the ``secret`` that all tokens of a master begin with; signed,
    if the client has an identity.

    A long name loses its middle: names of hosts differ at the end, names of clients at both ends.
    """
    is_signed = who is not None and gate is not None
    name, room = client.encode(), (SIGNED_NAME_BYTES if is_signed else NAME_BYTES)
    if len(name) > room:
        half = (room - len(CUT.encode())) // 2
        begin, end = (part.decode(errors="ignore") for part in (name[:half], name[-half:]))
        name = f"{begin}{CUT}{end}".encode()
    return gate.issue_client_token(secret, who, name, number) if gate and who else secret + name


def caller_of(
    token: bytes,
    secret: bytes,
    address: str,
    gate: Authorizer | None = None,
    who: Identity | None = None,
) -> Caller | None:
    """The caller that shows this token; None: this master did not give out the token, or gave it to
    another identity than ``who``, whose certificate the connection has shown.

    Raises:
        ProtocolError, InvalidArgumentError: no client could have joined with this name.
    """
    if gate is not None and (signed := gate.read_token(token, secret)) is not None:
        named, number, given = signed
        if who is not None and who.name != named.name:
            return None
        who = who or named
        return Caller(f"{_name(given)} {address}", who, holder_of(who), number)
    if gate is not None:
        return None
    if not hmac.compare_digest(token[: len(secret)], secret):
        return None
    if len(token) == len(secret):
        return Caller()
    return Caller(f"{_name(token[len(secret) :])} {address}")


def _name(given: bytes) -> str:
    """Raises ProtocolError, InvalidArgumentError."""
    try:
        return unpack_text(given.decode(), "the client's name in a token")
    except UnicodeDecodeError:
        raise ProtocolError("the client's name in a token is not text") from None


def address_of(peer: str) -> str:
    """The address in gRPC's name of a peer: ``ipv4:10.0.0.8:4222``, ``ipv6:%5B::1%5D:4222``."""
    family, _, rest = peer.partition(":")
    if not family.startswith("ipv"):
        return LOCAL
    return rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")
