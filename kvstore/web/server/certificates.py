"""TLS of a port for HTTP, from PEM files that may be replaced while the port serves."""

from __future__ import annotations

import ssl
from typing import Final

from kvstore.network.tls import Certificate, load_chain, renewing

PROTOCOLS: Final = ["http/1.1"]


def tls_of(cert: str, key: str) -> ssl.SSLContext:
    """The TLS context of a server, which shows what the files hold at each handshake.

    Raises:
        ConfigError: as ``Certificate``.
    """
    shown = Certificate(cert, key)

    def load(pair: tuple[bytes, bytes]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(PROTOCOLS)
        load_chain(context, *pair)
        return context

    return renewing(lambda: shown.value, load)
