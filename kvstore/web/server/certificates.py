"""TLS of a port for HTTP, from PEM files that may be replaced while the port serves."""

from __future__ import annotations

import logging
import ssl
from typing import Final

from kvstore.errors import ConfigError
from kvstore.network.tls import mark_of, no_passphrase, renewing

log = logging.getLogger("kvstore.web")

PROTOCOLS: Final = ["http/1.1"]


def tls_of(cert: str, key: str) -> ssl.SSLContext:
    """The TLS context of a server. Each handshake looks whether the files have changed, and takes
    the new ones once they belong together; until then the old ones serve.

    Raises:
        ConfigError: a file is missing, unreadable, no PEM, or the two do not belong together.
    """
    return renewing(lambda: _loaded(cert, key), lambda: (mark_of(cert), mark_of(key)), log, of=cert)


def _loaded(cert: str, key: str) -> ssl.SSLContext:
    for name, path in (("http_cert", cert), ("http_key", key)):
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(f"{name} {path} cannot be read: {error.strerror}", key=name) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(PROTOCOLS)
    try:
        context.load_cert_chain(cert, key, password=no_passphrase)
    except (ssl.SSLError, OSError, ValueError) as error:
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        what = "do not belong together" if mismatch else f"are no certificate and key: {error}"
        raise ConfigError(
            f"http_cert {cert} and http_key {key} {what}",
            advice="Both are files of PEM, the key without a passphrase.",
            key="http_cert",
        ) from None
    return context
