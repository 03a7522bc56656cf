"""Questions of the child that serves HTTP, and the answers of its parent: lines of JSON over a
socket pair, one question at a time.

The answer is made in the parent's event loop, so a parent whose loop hangs does not answer. A child
asks something every ``ASK_S``, so one that asks nothing hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvstore.errors import UnavailableError

QUESTION_BYTES_MAX: Final = 256
ANSWER_BYTES_MAX: Final = 1 << 20

ASK_S: Final = 2.0
SILENT_S: Final = 15.0
"""A child that asks nothing for so long hangs: half of what Kubernetes waits until it kills a
container that is not healthy."""

LOOKS: Final = 5
"""How often the parent looks within that time. It counts looks, not seconds: after a stop of its
own the child has its time to be heard."""

Answers = Mapping[str, Callable[..., Mapping[str, object]]]
"""How to answer each question; called in the loop's thread, with the numbers that follow the
question's name."""


async def answer_forever(sock: socket.socket, answers: Answers) -> str:
    """The parent's side. The child is not believed: it serves strangers.

    Returns:
        Why it ended: what is wrong with the child; empty: the child has closed its end. The socket
        is closed then.
    """
    reader, writer = await asyncio.open_connection(sock=sock, limit=QUESTION_BYTES_MAX)
    silent = 0
    try:
        while True:
            try:
                async with asyncio.timeout(SILENT_S / LOOKS):
                    await writer.drain()
                    line = await reader.readline()
            except TimeoutError:
                silent += 1
                if silent == LOOKS:
                    return f"it is silent for {SILENT_S:g} s"
                continue
            silent = 0
            if not line:
                return ""
            answer = _answer(line, answers)
            if answer is None:
                return "it asks what is no question"
            writer.write(json.dumps(answer).encode() + b"\n")
    except ConnectionError:
        return ""  # the child was killed
    except ValueError:  # of readline: a line of more than QUESTION_BYTES_MAX
        return "it asks without end"
    finally:
        writer.close()


def _answer(question: bytes, answers: Answers) -> Mapping[str, object] | None:
    """None: it is no question."""
    name, *numbers = question.decode("ascii", "replace").split() or [""]
    if name not in answers or not all(each.isdecimal() and len(each) < 20 for each in numbers):
        return None
    try:
        given = inspect.signature(answers[name]).bind(*map(int, numbers))
    except TypeError:  # too many numbers, or too few
        return None
    return answers[name](*given.args)


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

    async def ask_forever(self, question: str, timeout_s: float) -> None:
        """Shows the parent that this process does not hang."""
        while True:
            await asyncio.sleep(ASK_S)
            with contextlib.suppress(UnavailableError):
                await self.ask(question, timeout_s)

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
