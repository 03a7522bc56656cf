"""HTTP ports: their sockets and their protection. Imports no server."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import time
from typing import Final, NamedTuple

from kvstore.config import HttpConfig, read_token
from kvstore.errors import AddressInUseError, StartupError
from kvstore.runtime.addresses import join_address
from kvstore.runtime.listeners import listen
from kvstore.security.credentials import Credentials
from kvstore.security.revocation_list import RevocationList
from kvstore.security.tls import Certificate, HttpsContext, load_chain, reloading_context
from kvstore.wire.port_probe import identify_service

log = logging.getLogger("kvstore.http")

PORTS: Final = 16
"""Ports to try, from the default one: several processes may run on one host."""

TAKEN_S: Final = 2.0
"""Time for which the child of a killed master may still use a port."""


class HttpSecurity(NamedTuple):
    """The protection of a port."""

    token: str = ""
    reads: str = "all"
    cert: str = ""
    key: str = ""
    auth: str = ""
    """The file of this process's identity, if the port uses it."""
    revoked: str = ""
    """File with the numbers of revoked identities."""

    @property
    def scheme(self) -> str:
        """The scheme of the port's URLs."""
        return "https" if self.cert or self.auth else "http"

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None: plain HTTP. Raises ConfigError."""
        if self.auth:
            own = {"cert": self.cert, "key": self.key} if self.cert else {}
            return Credentials(self.auth).server(is_optional=True, **own)
        if not self.cert:
            return None
        shown = Certificate(self.cert, self.key)
        return reloading_context(lambda: shown.value, _loaded)


NOT_SECURED: Final = HttpSecurity()


def _loaded(pair: tuple[bytes, bytes]) -> ssl.SSLContext:
    context = HttpsContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_chain(context, *pair)
    return context


def load_security(config: HttpConfig) -> HttpSecurity:
    """Read the files of the settings.

    Raises:
        ConfigError: a file cannot be read or is invalid.
    """
    token = read_token(config.http_token_file) if config.http_token_file else ""
    secured = HttpSecurity(
        token, config.http_reads, config.http_cert, config.http_key, config.auth,
        config.auth_revoked,
    )  # fmt: skip
    secured.tls()
    if secured.auth:
        RevocationList(secured.revoked)
    return secured


def bind(host: str, port: int, *, is_given: bool, flag: str = "--http-port") -> socket.socket:
    """Return a socket that listens on ``port``, or on the next free one unless ``is_given``. Blocks
    for up to ``TAKEN_S``. ``flag``: that of the port.

    Raises:
        AddressInUseError, StartupError
    """
    patience = time.monotonic() + TAKEN_S
    while True:
        for candidate in range(port, port + (1 if is_given else PORTS)):
            try:
                listener = listen(host, candidate)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise StartupError(
                    f"HTTP cannot listen on {join_address(host, candidate)}: "
                    f"{error.strerror or error}",
                    advice="Give --host an address of this host.",
                ) from None
            if candidate != port:
                log.warning(
                    "http_port_taken wanted=%d port=%d: choose one with --http-port",
                    port,
                    candidate,
                )
            return listener
        if time.monotonic() >= patience:
            by = identify_service(join_address(host, port))
            said = f": {by} answers there" if by else ""
            raise AddressInUseError(
                f"port {port} for HTTP is taken on {host}{said}",
                advice=f"Give another one with {flag}.",
                port=port,
            )
        time.sleep(0.05)
