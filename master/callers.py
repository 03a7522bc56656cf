"""Tells which client a call comes from.

A client gets a token when it joins, and shows it on every connection to the lane and in every gRPC
call. The master puts the client's name into that token: so it knows clients of any release, and
keeps no table of them. The name is for operators; it proves nothing.
"""

from __future__ import annotations

import hmac
from typing import Final

from kvstore.errors import ProtocolError
from kvstore.master.state.traffic import Caller
from kvstore.wire.frames import TOKEN_BYTES_MAX
from kvstore.wire.packed import unpack_text

LOCAL: Final = "local"
"""The address of a client that calls through a Unix socket."""

CUT: Final = "…"


def token_for(secret: bytes, client: str) -> bytes:
    """The token of one client, from the ``secret`` that all tokens of a master begin with.

    A long name loses its middle: names of hosts differ at the end, names of clients at both ends.
    """
    name, room = client.encode(), TOKEN_BYTES_MAX - len(secret)
    if len(name) > room:
        half = (room - len(CUT.encode())) // 2
        begin, end = (part.decode(errors="ignore") for part in (name[:half], name[-half:]))
        name = f"{begin}{CUT}{end}".encode()
    return secret + name


def caller_of(token: bytes, secret: bytes, address: str) -> Caller | None:
    """The caller that shows this token; None: this master did not give out the token.

    Raises:
        ProtocolError, InvalidArgumentError: no client could have joined with this name.
    """
    if not hmac.compare_digest(token[: len(secret)], secret):
        return None
    if len(token) == len(secret):
        return Caller()
    try:
        name = unpack_text(token[len(secret) :].decode(), "the client's name in a token")
    except UnicodeDecodeError:
        raise ProtocolError("the client's name in a token is not text") from None
    return Caller(f"{name} {address}")


def address_of(peer: str) -> str:
    """The address in gRPC's name of a peer: ``ipv4:10.0.0.8:4222``, ``ipv6:%5B::1%5D:4222``."""
    family, _, rest = peer.partition(":")
    if not family.startswith("ipv"):
        return LOCAL
    return rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")
