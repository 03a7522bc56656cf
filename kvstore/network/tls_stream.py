"""A ``Stream`` within TLS.

TLS works on bytes in memory here (``ssl.MemoryBIO``), and the ``Stream`` below it does all waiting:
so deadlines, stalls and ``shutdown`` are those of a ``Stream``, and one system call receives many
records. Received bytes are decrypted into the caller's buffers.

The end of a connection is not announced (``close_notify``): every message has a length that both
ends know, so one that is cut off is an error anyway.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Final, cast

from kvstore.network.stream import EndedError, StalledError, Stream

PIECE_BYTES: Final = 128 << 10
"""Encrypted bytes in one system call. A connection holds about three such pieces."""

RECORD_BYTES: Final = 16 << 10
"""The most that one record holds."""

HEARD_BYTES: Final = 8


class TlsError(ConnectionError):
    """The other end is not one that we trust, does not trust us, speaks no TLS 1.3; or bytes were
    changed on their way. The connection is of no use any more."""

    def __init__(self, error: ssl.SSLError, heard: bytes = b"") -> None:
        """``heard``: the first ``HEARD_BYTES`` that came, as they came: a server without TLS, or
        one that is busy, may have answered in plain."""
        self.heard = heard
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        super().__init__(errno.EBADMSG, why.replace("_", " ").lower())


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
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
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
        return self._tls.getpeercert()

    def begin(self, deadline: float) -> None:
        """The handshake.

        Raises:
            TlsError: one end does not trust the other. A server may say so later, in the first
                ``receive``.
            StalledError, EndedError, OSError: as ``receive``.
        """
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._take(deadline)
            self._flush(deadline)
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):
                self._flush(deadline)  # tells the other end why
            raise TlsError(error, self._heard) from None

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
                    try:
                        count = cast(int, self._tls.read(wanted - at, buffer[at:]))
                    except ssl.SSLWantReadError:
                        came += self._take(deadline)
                        continue
                    if count == 0:  # it has announced its end
                        raise EndedError(came)
                    at += count
        except ssl.SSLError as error:
            raise TlsError(error) from None
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
        return not (self._incoming.pending or self._tls.pending()) and super().is_quiet()

    def _encrypt(self, buffer: bytes | bytearray | memoryview, deadline: float) -> None:
        at, wanted = 0, len(buffer)
        with memoryview(buffer) as rest:
            while at < wanted:
                try:
                    at += self._tls.write(rest[at:])  # one record
                except ssl.SSLError as error:
                    raise TlsError(error) from None
                if self._outgoing.pending >= PIECE_BYTES:
                    self._flush(deadline)

    def _take(self, deadline: float) -> int:
        """Receives encrypted bytes; how many."""
        self._flush(deadline)
        count = self.receive_some(self._taken, deadline)
        self._incoming.write(self._taken[:count])
        if len(self._heard) < HEARD_BYTES:
            self._heard = (self._heard + bytes(self._taken[:count]))[:HEARD_BYTES]
        return count

    def _flush(self, deadline: float) -> None:
        if self._outgoing.pending:
            super().send([self._outgoing.read()], deadline)
