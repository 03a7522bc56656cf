"""TLS of a port for HTTP, from PEM files that may be replaced while the port serves."""

from __future__ import annotations

import logging
import os
import ssl
from typing import Final

from kvstore.errors import ConfigError

log = logging.getLogger("kvstore.web")

PROTOCOLS: Final = ["http/1.1"]


def tls_of(cert: str, key: str) -> ssl.SSLContext:
    """The TLS context of a server. Each handshake looks whether the files have changed, and takes
    the new ones once they belong together; until then the old ones serve.

    Raises:
        ConfigError: a file is missing, unreadable, no PEM, or the two do not belong together.
    """
    seen = _seen(cert, key)
    now = _loaded(cert, key)

    def choose(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        del name, first
        nonlocal now, seen
        if (found := _seen(cert, key)) != seen:
            seen = found
            try:
                now = _loaded(cert, key)
                log.info("certificate_renewed cert=%s", cert)
            except ConfigError as error:
                log.warning("certificate_not_renewed reason=%s", error)
        connection.context = now

    context = _loaded(cert, key)
    context.sni_callback = choose  # is called even if the client sends no server name
    return context


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
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except (ssl.SSLError, OSError, ValueError) as error:
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        what = "do not belong together" if mismatch else f"are no certificate and key: {error}"
        raise ConfigError(
            f"http_cert {cert} and http_key {key} {what}",
            advice="Both are files of PEM, the key without a passphrase.",
            key="http_cert",
        ) from None
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")


def _seen(cert: str, key: str) -> tuple[object, ...]:
    def one(path: str) -> object:
        try:
            stat = os.stat(path)  # follows links, as those by which Kubernetes replaces secrets
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    return one(cert), one(key)
