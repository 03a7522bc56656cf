"""``TlsTransport``: TLS between a connection of asyncio and a protocol, for servers.

It takes the place of asyncio's own, which has a buffer of 256 KiB for each connection, and takes
longer over a small call (``docs/performance.md``). Encrypted bytes wait nowhere but in the
transport below: so its limits, and the pauses that it asks for, are those of the connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from kvstore.network.tls_memory import TlsEnd, TlsError

RECEIVED_BYTES: Final = 32 << 10
"""Encrypted bytes in one turn of the loop. 27 of them can ask for new keys, which takes some
microseconds."""


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """A protocol towards the connection, a transport towards the protocol that it makes once the
    handshake is over. Threads: the loop's."""

    def __init__(
        self,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.BufferedProtocol],
        received: memoryview,
    ) -> None:
        """``received``: ``RECEIVED_BYTES`` to receive into. All connections of a loop may share
        them: they are empty again before the loop does something else."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._tls = TlsEnd(context)
        self._make = make
        self._received = received
        self._below: asyncio.Transport | None = None
        self._above: asyncio.BufferedProtocol | None = None
        self._is_paused = False
        self.begun: asyncio.Future[str] = self._loop.create_future()
        """Done when the handshake is over. Empty: it has succeeded; otherwise why it has not, and
        the connection has been cut."""

    def give_up(self, why: str) -> None:
        """Cuts the connection, unless the handshake is over."""
        if not self.begun.done():
            self.begun.set_result(why)
            self.abort()

    # --- what the connection calls ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        if self.begun.done():  # given up before
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self._tls.feed(self._received[:nbytes])
        self._go_on()

    def eof_received(self) -> bool:
        self.give_up("the peer has left")
        return False if self._above is None else bool(self._above.eof_received())

    def pause_writing(self) -> None:
        if self._above is not None:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        if self._above is not None:
            self._above.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.give_up("the peer has left")
        above, self._above, self._below = self._above, None, None  # no cycles
        if above is not None:
            above.connection_lost(exc)

    # --- what the protocol calls ------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls.connection
        return default if self._below is None else self._below.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self.is_closing():
            self._tls.write(data)
            self._flush()

    def pause_reading(self) -> None:
        self._is_paused = True
        if self._below is not None:
            self._below.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._below is not None:
            self._below.resume_reading()
            if self._tls.has_unread:
                self._loop.call_soon(self._go_on)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._below is not None:
            self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return 0 if self._below is None else self._below.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._below is None or self._below.is_closing()

    def close(self) -> None:
        if self._below is not None:
            self._below.close()

    def abort(self) -> None:
        if self._below is not None:
            self._below.abort()

    # --- TLS --------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        try:
            if self._above is not None or self._shake():
                self._decrypt()
        except TlsError as error:
            self._flush()  # tells the peer why
            self.give_up(str(error.strerror))
            self.abort()

    def _shake(self) -> bool:
        """Whether the handshake is over, and has succeeded."""
        if self.begun.done():  # it was given up
            return False
        is_over = self._tls.shake()
        self._flush()
        if is_over:
            self.begun.set_result("")
            self._above = self._make()
            self._above.connection_made(self)
        return is_over

    def _decrypt(self) -> None:
        """Hands on what has come, until the protocol pauses."""
        more = True
        while more and not self._is_paused and self._above is not None and not self.is_closing():
            space = memoryview(self._above.get_buffer(-1))
            room, filled = len(space), 0
            while filled < room:
                count = self._tls.read(space[filled:])
                if not count:
                    more = False
                    if count == 0:  # the peer has announced its end
                        self.close()
                    break
                filled += count
            if self._tls.unsent:  # an answer to a change of keys
                self._flush()
            if filled:
                self._above.buffer_updated(filled)

    def _flush(self) -> None:
        encrypted = self._tls.take()
        if encrypted and self._below is not None:
            self._below.write(encrypted)
