"""Tells which client a call comes from.

A client gets a token when it joins, and shows it on every connection to the lane and in every gRPC
call. The master puts the client's name into that token, and keeps no table of clients. The name is
for operators; it proves nothing. With authentication the token is signed, and stands for the
client's identity (``kvstore.master.gate``).
"""

from __future__ import annotations

import hmac
from typing import Final

from kvstore.auth.holders import holder_of
from kvstore.auth.identity import Identity
from kvstore.errors import ProtocolError
from kvstore.master.gate import DIGEST_BYTES, MAC_BYTES, Gate
from kvstore.master.state.traffic import Caller
from kvstore.wire.frames import TOKEN_BYTES_MAX
from kvstore.wire.packed import unpack_text

LOCAL: Final = "local"
"""The address of a client that calls through a Unix socket."""

CUT: Final = "…"

NAME_BYTES: Final = 48
SIGNED_NAME_BYTES: Final = TOKEN_BYTES_MAX - MAC_BYTES - 8 - DIGEST_BYTES
"""What is left for the client's name in a token."""


def token_for(
    secret: bytes,
    client: str,
    who: Identity | None = None,
    gate: Gate | None = None,
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
    return gate.token(secret, who, name, number) if gate and who else secret + name


def caller_of(
    token: bytes,
    secret: bytes,
    address: str,
    gate: Gate | None = None,
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
