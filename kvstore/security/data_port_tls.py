"""TLS on the data port of a node: certificates of both ends, and their acceptance.

A node proves its role by the name ``node.kvstore`` in its certificate, and its own name by the
certified identity, which the master reports. A client proves that it belongs to the cluster;
capabilities limit its reads and writes (``kvstore.runtime.tcp_protocol``).
"""

from __future__ import annotations

import socket
from typing import Final

from kvstore.security.credentials import NODE_NAME, Credentials, shown_identity
from kvstore.security.holder_ids import holder_of
from kvstore.security.identity import MASTER
from kvstore.security.revocation_list import RevocationList
from kvstore.security.tls_stream import TlsStream


class NodeTls:
    """The node's end. Threads: any."""

    def __init__(self, credentials: Credentials, revoked: RevocationList) -> None:
        """Raise ConfigError if clients would not accept this identity from a node."""
        credentials.check_serves(NODE_NAME)
        self._context = credentials.server()
        self._revoked = revoked

    def stream(self, sock: socket.socket) -> TlsStream:
        """Take over ``sock``."""
        return TlsStream(sock, self._context)

    def accepts(self, certificate: object) -> bool:
        """Return whether a certificate of our CA names an identity that is not revoked."""
        who = shown_identity(certificate)
        return bool(who.name) and not self._revoked.has(who)

    def is_holder(self, certificate: object, holder: int) -> bool:
        """Return whether capabilities of ``holder`` are for this certificate."""
        who = shown_identity(certificate)
        return MASTER in who.roles or holder_of(who) == holder  # a master's probe has no identity


class ClientTls:
    """The client's end. Threads: any."""

    def __init__(self, credentials: Credentials, *, demands: bool = False) -> None:
        """Create it. ``demands``: refuse nodes that do not encrypt."""
        self.demands: Final = demands
        self._credentials = credentials

    def stream(self, sock: socket.socket, stall_s: float) -> TlsStream:
        """Take over ``sock``. The handshake accepts nodes only."""
        context = self._credentials.client()
        return TlsStream(sock, context, server_name=NODE_NAME, stall_s=stall_s)

    def accepts(self, certificate: object, node: str, certified: str = "") -> bool:
        """Return whether this certificate belongs to the node ``node``. ``certified``: as
        ``SegmentInfo.certified``."""
        who = shown_identity(certificate)
        return who.may_be_node(node) and certified in ("", who.certified)
