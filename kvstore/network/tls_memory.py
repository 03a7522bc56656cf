"""``TlsEnd``: TLS on bytes in memory. Its owner moves encrypted bytes, and does all waiting.

The end of a connection is not announced (``close_notify``): every message has a length that both
ends know, so one that is cut off is an error anyway.
"""

from __future__ import annotations

import errno
import ssl
from typing import Final, cast

RECORD_BYTES: Final = 16 << 10
"""The most that one record holds."""


class TlsError(ConnectionError):
    """The other end is not one that we trust, does not trust us, speaks no TLS 1.3; or bytes were
    changed on their way. The connection is of no use any more."""

    def __init__(self, error: ssl.SSLError, heard: bytes = b"") -> None:
        """``heard``: the first bytes that came, as they came, where the owner keeps them: a server
        without TLS, or one that is busy, may have answered in plain."""
        self.heard = heard
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        super().__init__(errno.EBADMSG, why.replace("_", " ").lower())


class TlsEnd:
    """One end of a connection. Threads: one at a time."""

    __slots__ = ("_incoming", "_is_full", "_outgoing", "_tls")

    def __init__(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """``server_name``: the name that the server must have in its certificate; None: we are the
        server."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._is_full = False
        """Whether the last ``read`` filled its buffer: only then a record may have more bytes."""

    @property
    def connection(self) -> ssl.SSLObject:
        """What ``ssl`` knows of the other end, once the handshake is over."""
        return self._tls

    @property
    def has_unread(self) -> bool:
        """Whether bytes have come that ``read`` has not returned: also those of half a record that
        it has not looked at yet."""
        return bool(self._incoming.pending or (self._is_full and self._tls.pending()))

    @property
    def unsent(self) -> int:
        """Encrypted bytes that ``take`` would return."""
        return self._outgoing.pending

    def take(self) -> bytes:
        """The encrypted bytes that are to be sent now."""
        return self._outgoing.read()

    def feed(self, came: bytes | memoryview) -> None:
        """Takes encrypted bytes that have come."""
        self._incoming.write(came)

    def shake(self) -> bool:
        """Goes on with the handshake; whether it is over. ``take`` afterwards, also after an error:
        it tells the other end why.

        Raises:
            TlsError: one end does not trust the other.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsError(error) from None
        return True

    def read(self, buffer: memoryview) -> int | None:
        """Decrypts into ``buffer``, which has room; how many bytes. 0: the other end has announced
        its end; None: more has to come.

        Raises:
            TlsError: bytes were changed on their way, or the other end does not trust us.
        """
        # To ask first costs less than the error that says so.
        if not self._incoming.pending and not (self._is_full and self._tls.pending()):
            return None
        try:
            count = cast(int, self._tls.read(len(buffer), buffer))
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLError as error:
            raise TlsError(error) from None
        self._is_full = count == len(buffer)
        return count

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts all of ``data``, which is not empty.

        Raises:
            TlsError: the connection is over.
        """
        try:
            at = self._tls.write(data)
            if at < len(data):
                with memoryview(data) as rest:
                    while at < len(data):
                        at += self._tls.write(rest[at:])  # one record
        except ssl.SSLError as error:
            raise TlsError(error) from None
