"""TLS of servers whose files are replaced while they run."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvstore.errors import ConfigError
from kvstore.runtime.host import SHM_DIRECTORY
from kvstore.runtime.watched_files import WatchedFile, read_file

T = TypeVar("T")

PLAIN_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 55\r\n\r\n"
    b"This port needs HTTPS: begin the address with https://\n"
)


class _HttpsConnection(ssl.SSLObject):
    outgoing: ssl.MemoryBIO | None = None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST" or self.outgoing is None:
                raise
            self.outgoing.write(PLAIN_HTTP)
            self.outgoing = None
            raise ssl.SSLWantReadError from None  # sends it; then the client closes, or is late


class HttpsContext(ssl.SSLContext):
    """The context of an HTTP port in an event loop: plain HTTP gets ``PLAIN_HTTP``."""

    sslobject_class = _HttpsConnection

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **more: Any
    ) -> ssl.SSLObject:
        connection = super().wrap_bio(incoming, outgoing, *args, **more)
        assert isinstance(connection, _HttpsConnection)
        connection.outgoing = outgoing
        return connection


def reloading_context(
    content: Callable[[], T], load: Callable[[T], ssl.SSLContext]
) -> ssl.SSLContext:
    """Return the context of a server, each handshake of which uses the current content of its
    files.

    Args:
        content: returns the content of the files without waiting for a disk.
        load: builds a context from it.
    """
    used = content()
    current = load(used)

    def choose(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        del name, first
        nonlocal used, current
        if (found := content()) != used:
            used, current = found, load(found)
        connection.context = current

    context = load(used)
    context.sni_callback = choose  # called even if the client sends no server name
    return context


class Certificate(WatchedFile[tuple[bytes, bytes]]):
    """The key and certificate chain of an HTTP port, as PEM."""

    def __init__(self, cert: str, key: str) -> None:
        """
        Raises:
            ConfigError: a file cannot be read, is no PEM, or the two do not belong together.
        """

        def load() -> tuple[bytes, bytes]:
            pair = read_file(key, "http_key"), read_file(cert, "http_cert")
            try:
                load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *pair)
            except (ssl.SSLError, OSError, ValueError) as error:
                mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
                what = "do not belong together" if mismatch else f"are no PEM of both: {error}"
                raise ConfigError(
                    f"http_cert {cert} and http_key {key} {what}",
                    advice="Both are files of PEM, the key without a passphrase.",
                    key="http_cert",
                ) from None
            return pair

        super().__init__("http_cert", cert, load, files=lambda: (cert, key))


def load_chain(context: ssl.SSLContext, key: bytes, chain: bytes) -> None:
    """Load a key from memory; ``ssl`` loads keys from files only.

    Raises:
        ssl.SSLError, OSError, ValueError: they cannot be used.
    """
    try:
        descriptor = os.memfd_create("kvstore-tls", os.MFD_CLOEXEC)
    except OSError:  # refused: a file in memory that has no name, either
        descriptor = os.open(SHM_DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, key + b"\n" + chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_passphrase)
    finally:
        os.close(descriptor)


def _no_passphrase() -> str:
    """Fail, without a prompt at the terminal, for an encrypted key."""
    raise ValueError("the key has a passphrase")
