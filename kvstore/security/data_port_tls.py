"""TLS on the data port of a node: what both ends show, and whom they accept.

A node proves its role by the name ``node.kvstore`` in its certificate, and by the identity there
that it is the one that has joined under its name: the master says which one that was. A client
proves that it is one of the cluster; what it may read and write there is said by its capabilities
(``kvstore.runtime.tcp_protocol``).
"""

from __future__ import annotations

import socket
from typing import Final

from kvstore.security.credentials import NODE_NAME, Credentials, shown_identity
from kvstore.security.revocation_list import RevocationList
from kvstore.security.tls_stream import TlsStream


class NodeTls:
    """The node's end. Threads: any."""

    def __init__(self, credentials: Credentials, revoked: RevocationList) -> None:
        """Raises ConfigError: clients would not accept this identity from a node."""
        credentials.check_serves(NODE_NAME)
        self._context = credentials.server()
        self._revoked = revoked

    def stream(self, sock: socket.socket) -> TlsStream:
        """Takes over ``sock``."""
        return TlsStream(sock, self._context)

    def accepts(self, certificate: object) -> bool:
        """Whether a certificate of our authority names an identity that is not revoked."""
        who = shown_identity(certificate)
        return bool(who.name) and not self._revoked.has(who)


class ClientTls:
    """The client's end. Threads: any."""

    def __init__(self, credentials: Credentials, *, demands: bool = False) -> None:
        """``demands``: refuse nodes that do not encrypt."""
        self.demands: Final = demands
        self._credentials = credentials

    def stream(self, sock: socket.socket, stall_s: float) -> TlsStream:
        """Takes over ``sock``. The handshake accepts nodes only."""
        context = self._credentials.client()
        return TlsStream(sock, context, server_name=NODE_NAME, stall_s=stall_s)

    def accepts(self, certificate: object, node: str, certified: str = "") -> bool:
        """Whether a node with this certificate is the one of the name ``node``. ``certified``: as
        ``SegmentInfo.certified``."""
        who = shown_identity(certificate)
        return who.may_be_node(node) and certified in ("", who.certified)
