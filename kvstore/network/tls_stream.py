"""A ``Stream`` within TLS.

``TlsEnd`` works on bytes in memory, and the ``Stream`` below it does all waiting: so deadlines,
stalls and ``shutdown`` are those of a ``Stream``, and one system call receives many records.
Received bytes are decrypted into the caller's buffers.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Final

from kvstore.network.stream import EndedError, StalledError, Stream
from kvstore.network.tls_memory import RECORD_BYTES, TlsEnd, TlsError

PIECE_BYTES: Final = 128 << 10
"""Encrypted bytes in one system call. A connection holds about three such pieces."""

HEARD_BYTES: Final = 8


class TlsStream(Stream):
    """See the module. Nothing but ``begin`` may be called before it has returned."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_name: str | None = None,
        stall_s: float = float("inf"),
    ) -> None:
        """As ``Stream``. ``server_name``: the name that the server must have in its certificate;
        None: we are the server."""
        super().__init__(sock, stall_s=stall_s)
        self._tls = TlsEnd(context, server_name)
        self._taken = memoryview(bytearray(PIECE_BYTES))
        self._small = bytearray()
        """Buffers that share a record, with those of the next call."""
        self._heard = b""

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def certificate(self) -> object:
        """As ``Stream.certificate``, once ``begin`` has returned."""
        return self._tls.connection.getpeercert()

    def begin(self, deadline: float) -> None:
        """The handshake.

        Raises:
            TlsError: one end does not trust the other. A server may say so later, in the first
                ``receive``.
            StalledError, EndedError, OSError: as ``receive``.
        """
        try:
            while not self._tls.shake():
                self._take(deadline)
            self._flush(deadline)
        except TlsError as error:
            with contextlib.suppress(OSError):
                self._flush(deadline)  # tells the other end why
            error.heard = self._heard
            raise

    def receive(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """As ``Stream.receive``; what arrived of changed records is in no buffer.

        Raises:
            TlsError: bytes were changed on their way, or the other end does not trust us.
        """
        came = 0
        try:
            for buffer in buffers:
                at, wanted = 0, len(buffer)
                while at < wanted:
                    count = self._tls.read(buffer[at:])
                    if count is None:
                        came += self._take(deadline)
                    elif count == 0:
                        raise EndedError(came)
                    else:
                        at += count
        except StalledError:
            raise StalledError(came) from None

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float, flags: int = 0) -> None:
        """As ``Stream.send``. With ``MSG_MORE`` the last bytes may wait here for those of the next
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
            self._flush(deadline)

    def is_quiet(self) -> bool:
        """As ``Stream.is_quiet``."""
        return not self._tls.has_unread and super().is_quiet()

    def _encrypt(self, buffer: bytes | bytearray | memoryview, deadline: float) -> None:
        with memoryview(buffer) as whole:
            for at in range(0, len(whole), PIECE_BYTES):
                self._tls.write(whole[at : at + PIECE_BYTES])
                if self._tls.unsent >= PIECE_BYTES:
                    self._flush(deadline)

    def _take(self, deadline: float) -> int:
        """Receives encrypted bytes; how many."""
        self._flush(deadline)
        count = self.receive_some(self._taken, deadline)
        self._tls.feed(self._taken[:count])
        if len(self._heard) < HEARD_BYTES:
            self._heard = (self._heard + bytes(self._taken[:count]))[:HEARD_BYTES]
        return count

    def _flush(self, deadline: float) -> None:
        if self._tls.unsent:
            super().send([self._tls.take()], deadline)
