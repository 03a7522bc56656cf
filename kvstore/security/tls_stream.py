"""A ``Stream`` with TLS: the ``SSLSocket`` of Python's ``ssl``.

With timeouts of the kernel ``ssl`` only tries again, so the socket has Python's timeout, set before
each record. A connection is for one thread at a time: concurrent reads and writes would change the
TLS state without a lock.

There is no ``close_notify``: both ends know the length of every message, so truncation is an error
anyway.
"""

from __future__ import annotations

import errno
import math
import socket
import ssl
from collections.abc import Sequence
from typing import Final

from kvstore.runtime.stream import ConnectionEndedError, StalledError, Stream

RECORD_BYTES: Final = 16 << 10
"""Maximum size of a record."""

BUSY: Final = b"\x15\x03\x03\x00\x02\x02\x50"
"""The reply of a server that is too busy for a handshake: a fatal alert, ``internal_error``."""

_PLAIN: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")


class TlsError(ConnectionError):
    """One end does not trust the other or does not support TLS 1.3, or bytes were modified in
    transit. The connection is unusable."""

    def __init__(self, error: ssl.SSLError) -> None:
        self.is_busy: Final = error.reason == "TLSV1_ALERT_INTERNAL_ERROR"
        self.is_plain: Final = error.reason in _PLAIN
        """Whether the peer does not use TLS."""
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        why = why.replace("_", " ").lower()
        super().__init__(errno.EBADMSG, "it does not speak TLS" if self.is_plain else why)


class TlsStream(Stream):
    """A stream that requires ``begin`` before any other call."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_name: str | None = None,
        stall_s: float = math.inf,
    ) -> None:
        """As ``Stream``. ``server_name``: the required name in the server's certificate; None: we
        are the server."""
        super().__init__(sock, stall_s=stall_s)
        self._context = context
        self._server_name = server_name
        self._small = bytearray()
        """Small buffers that share a record with those of the next call."""

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def certificate(self) -> object:
        """As ``Stream.certificate``, once ``begin`` has returned."""
        return self._tls.getpeercert()

    def begin(self, deadline: float) -> None:
        """Perform the handshake.

        Raises:
            TlsError: one end does not trust the other. A server may report it later, in the first
                ``receive``.
            StalledError, ConnectionEndedError, OSError: as ``receive``.
        """
        with self._ending:  # ``shutdown`` finds either socket
            self._sock = self._tls = self._context.wrap_socket(
                self._sock,
                server_side=self._server_name is None,
                server_hostname=self._server_name,
                do_handshake_on_connect=False,
            )
        self._tls.settimeout(self._remaining_s(deadline, 0))
        try:
            self._tls.do_handshake()
        except TimeoutError:
            raise StalledError(0) from None
        except ssl.SSLEOFError:
            raise ConnectionEndedError(0) from None
        except ssl.SSLError as error:
            raise TlsError(error) from None

    def receive(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """As ``Stream.receive``; bytes of modified records are in no buffer.

        Raises:
            TlsError: bytes were modified in transit, or the peer does not trust us.
        """
        tls, received = self._tls, 0
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                tls.settimeout(self._remaining_s(deadline, received))
                try:
                    count = tls.recv_into(buffer[at:])
                except TimeoutError:
                    if self._moves(deadline):
                        continue
                    raise StalledError(received) from None
                except ssl.SSLError as error:
                    raise TlsError(error) from None
                if count == 0:
                    raise ConnectionEndedError(received)
                at += count
                received += count

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float, flags: int = 0) -> None:
        """As ``Stream.send``. With ``MSG_MORE`` the last bytes may wait for those of the next
        call."""
        small = self._small
        for buffer in buffers:
            if len(small) + len(buffer) <= RECORD_BYTES:
                small += buffer
                continue
            self._encrypt(small, deadline)
            small.clear()
            self._encrypt(buffer, deadline)
        if not flags & socket.MSG_MORE:
            self._encrypt(small, deadline)
            small.clear()

    def is_idle(self) -> bool:
        """As ``Stream.is_idle``."""
        self._tls.setblocking(False)
        return not self._tls.pending() and super().is_idle()

    def _encrypt(self, buffer: bytes | bytearray | memoryview, deadline: float) -> None:
        tls, at = self._tls, 0
        with memoryview(buffer) as whole:
            while at < len(whole):
                tls.settimeout(self._remaining_s(deadline, 0))
                try:
                    at += tls.send(whole[at:])  # one record
                except TimeoutError:
                    if self._moves(deadline):
                        continue
                    raise StalledError(0) from None
                except ssl.SSLError as error:
                    raise TlsError(error) from None
                self._note_unsent()
