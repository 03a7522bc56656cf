"""Questions of the child that serves HTTP, and the answers of its parent: lines of JSON over a
socket pair, one question at a time.

The answer is made in the parent's event loop, so a parent whose loop hangs does not answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvstore.errors import UnavailableError

QUESTION_BYTES_MAX: Final = 256
ANSWER_BYTES_MAX: Final = 1 << 20

Answers = Mapping[str, Callable[..., Mapping[str, object]]]
"""How to answer each question; called in the loop's thread, with the numbers that follow the
question's name."""


async def answer_forever(sock: socket.socket, answers: Answers) -> None:
    """The parent's side; returns when the child has closed its end. The socket is closed then."""
    reader, writer = await asyncio.open_connection(sock=sock, limit=QUESTION_BYTES_MAX)
    try:
        while line := await reader.readline():
            name, *numbers = line.decode().split()
            found = answers[name](*map(int, numbers))
            writer.write(json.dumps(found).encode() + b"\n")
            await writer.drain()
    except ConnectionError:
        pass  # the child was killed
    finally:
        writer.close()


class Link:
    """The child's side. Use it in one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._asking = asyncio.Lock()
        self._unread = 0
        """Answers that are still to come to questions that were given up."""

    async def ask(self, question: str, timeout_s: float) -> dict[str, Any]:
        """
        Raises:
            UnavailableError: the parent has not answered in time, or is gone.
        """
        try:
            async with asyncio.timeout(timeout_s), self._asking:
                return await self._ask(question)
        except TimeoutError:
            raise UnavailableError(f"no answer within {timeout_s:.1f} s") from None
        except (OSError, ValueError) as error:
            raise UnavailableError(f"the process that this belongs to is gone: {error}") from None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()

    async def _ask(self, question: str) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket, limit=ANSWER_BYTES_MAX)
        reader, writer = self._streams
        while self._unread:  # a question at a time: a parent that hangs gets no pile of them
            await self._line(reader)
            self._unread -= 1
        writer.write(question.encode() + b"\n")
        self._unread += 1
        line = await self._line(reader)
        self._unread -= 1
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    async def _line(reader: asyncio.StreamReader) -> bytes:
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("the link is closed")
        return line
