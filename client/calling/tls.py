"""``TlsWire``: a lane's connection within TLS, for one call at a time.

TLS works on bytes in memory, and a step (``Steps.send_and_receive``) moves the encrypted ones as
``Steps.exchange`` does those of a plain lane: by as few system calls, and it polls as that does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl

from kvstore.errors import ProtocolError
from kvstore.native import steps
from kvstore.native.kinds import (
    ANSWERED,
    BROKEN,
    ENDED,
    GARBLED,
    NOT_SENT,
    TIMED_OUT,
    UNASKED,
)
from kvstore.network.stream import EndedError
from kvstore.network.tls_memory import TlsEnd, TlsError
from kvstore.wire.frames import Frame, FrameReader


class TlsWire:
    """See the module. Threads: one at a time; ``shutdown``: any. ``close`` it after an error."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        """Takes over ``sock``. ``server_name``: the name that the master's certificate must
        have."""
        sock.setblocking(False)
        self._sock = sock
        self._tls = TlsEnd(context, server_name)
        self._reader = FrameReader()

    def begin(self, deadline: float) -> None:
        """The handshake. Our last message of it leaves with the first frame.

        Raises:
            TimeoutError
            OSError: ``TlsError`` if one end does not trust the other; the master may say so later,
                to ``greet``.
        """
        try:
            while not self._tls.shake():
                self._receive(deadline)
        except TlsError:
            with contextlib.suppress(OSError):
                self._sock.send(self._tls.take())  # tells the master why
            raise

    def greet(self, hello: bytes, deadline: float) -> Frame:
        """Sends the first frame; the answer to it.

        Raises:
            ProtocolError, TimeoutError, OSError
        """
        self._tls.write(hello)
        while (answer := self._next()) is None:
            self._receive(deadline)
        return answer

    def exchange(
        self, request: bytes, call_id: int, spin_s: float, deadline: float, length_max: int
    ) -> tuple[int, int, int, bytes | None]:
        """As ``kvstore.native.kinds.Steps.exchange``."""
        if self._tls.has_unread:
            return UNASKED, 0, 0, None
        self._reader.length_max = length_max
        try:
            self._tls.write(request)
            status, number, came = steps.send_and_receive(
                self._sock, self._tls.take(), True, spin_s, deadline
            )
            polled = number
            while status == ANSWERED and came is not None:
                self._tls.feed(came)
                if (answer := self._next()) is not None:
                    return self._checked(answer, call_id, polled)
                status, number, came = steps.send_and_receive(
                    self._sock, self._tls.take(), False, 0.0, deadline
                )
                if status == NOT_SENT:
                    status = BROKEN  # the request has left
        except TlsError:
            return BROKEN, errno.EBADMSG, 0, None
        except EndedError:
            return ENDED, 0, 0, None
        except ProtocolError:
            return GARBLED, 0, 0, None
        return status, number, 0, None

    def shutdown(self, how: int) -> None:
        """As ``socket.socket.shutdown``; wakes a thread that waits here."""
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def _checked(
        self, answer: Frame, call_id: int, polled: int
    ) -> tuple[int, int, int, bytes | None]:
        answered, kind, name, payload = answer
        if name or self._reader.held or self._tls.has_unread:
            return GARBLED, 0, 0, None
        return (ANSWERED if answered == call_id else GARBLED), polled, kind, payload

    def _receive(self, deadline: float) -> None:
        """Sends what is to be sent, and receives something."""
        data = self._tls.take()
        status, number, came = steps.send_and_receive(self._sock, data, False, 0.0, deadline)
        if status == TIMED_OUT:
            raise TimeoutError
        if status == ENDED:
            raise ConnectionError("the master closed the connection")
        if status != ANSWERED or came is None:
            raise OSError(number, os.strerror(number))
        self._tls.feed(came)

    def _next(self) -> Frame | None:
        """The frame that has come; None: more has to come. Raises TlsError, ProtocolError,
        EndedError."""
        while count := self._tls.read(self._reader.space()):
            self._reader.received(count)
            if (answer := self._reader.next()) is not None:
                return answer
        if count == 0:
            raise EndedError(0)
        return None
