"""Which client a call comes from.

A client gets a token when it joins, and returns it with every connection to the lane and every gRPC
call. The master puts the client's name into that token: so it knows clients of any release, and
keeps no table of them. The name is for operators; it proves nothing.
"""

from __future__ import annotations

import hmac
from typing import Final

from kvstore.errors import ProtocolError
from kvstore.wire.packed import unpack_text

UNKNOWN: Final = ""
"""The caller of calls that need no token, and of those who show one without a name."""

LOCAL: Final = "local"
"""The address of a client that calls through a Unix socket."""


def token_for(secret: bytes, client: str) -> bytes:
    """The token of one client, from the ``secret`` that all tokens of a master begin with."""
    return secret + client.encode()


def caller_of(token: bytes, secret: bytes, address: str) -> str | None:
    """``"NAME ADDRESS"`` of a client that shows this token; ``UNKNOWN`` without a name; None: the
    token is not of this master.

    Raises:
        ProtocolError, InvalidArgumentError: no client could have joined with this name.
    """
    if not hmac.compare_digest(token[: len(secret)], secret):
        return None
    if len(token) == len(secret):
        return UNKNOWN
    try:
        name = unpack_text(token[len(secret) :].decode(), "the client's name in a token")
    except UnicodeDecodeError:
        raise ProtocolError("the client's name in a token is not text") from None
    return f"{name} {address}"


def address_of(peer: str) -> str:
    """The address in what gRPC calls a peer: ``ipv4:10.0.0.8:4222``, ``ipv6:%5B::1%5D:4222``."""
    family, _, rest = peer.partition(":")
    if not family.startswith("ipv"):
        return LOCAL
    return rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")
