"""The channel between a master and the child that serves its HTTP: a socket pair, both ends here.

    master ── frames: answers, events, pages of a survey ──► child
           ◄──────── questions, requests for pages ─────────

Answers are made in the master's event loop, so a master whose loop hangs does not answer. A child
asks something every ``ASK_S``, so a silent child hangs.

Each event of a term has a number, from 1. A frame says how many events came before it, so the child
knows if some were dropped: the master drops what does not fit into its buffer, and never waits for
the child. While there is no child, the master only counts events. Events travel as ``marshal``
encodes them, which is the fastest way: both ends are one interpreter and one release.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import marshal
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from kvstore.errors import UnavailableError
from kvstore.runtime.tasks import start_task

log = logging.getLogger("kvstore.master")

SERVED: Final = "KVSTORE_WEB"
"""The variable with what the master gives its child, as JSON: every user of the host can read
flags, and it holds a token."""

FLUSH_S: Final = 0.005
"""How long an event waits for others before it is sent."""

BATCH_EVENTS: Final = 1_024
"""Events that one step of the loop sends: half a millisecond."""

WAITING_EVENTS_MAX: Final = 1 << 17
"""Events that may wait to be sent: as many as eight of the largest calls make. If there are more,
all that wait are dropped."""

BUFFER_BYTES_MAX: Final = 16 << 20
"""Bytes that may wait for the child, beside the kernel's buffer: what 200,000 events take. A child
that reads takes them in milliseconds, so that an answer behind them is in time."""

SOCKET_BYTES: Final = 1 << 20

SURVEY_STEPS: Final = 1_024
"""Records in a page of a survey, which takes the loop a millisecond. At most one page is made every
``FLUSH_S``, whatever subscribers ask."""

SURVEYS_MAX: Final = 128
"""Surveys under way, more than a child has subscribers. Each survey holds the list of one
dictionary, 300 KiB at ten million objects."""

ASKED_MAX: Final = 4
"""Pages that a child asks for at once. Further subscribers wait in the child, and stop when they
disconnect, so the master makes no pages for those who have left."""

PAGE_S: Final = 10.0
"""A master that sends no page for so long hangs."""

ASK_S: Final = 2.0
SILENT_S: Final = 15.0
"""A child that asks nothing for so long hangs: half of what Kubernetes waits until it kills a
container that is not healthy."""

LOOKS: Final = 5
"""How often the master looks at its child within ``SILENT_S``. It counts looks, not seconds, so
that after a pause of the master itself the child still has time to be heard."""

EVENTS: Final = 0
PAGE: Final = 1
LAST_PAGE: Final = 2
ANSWER: Final = 3
_NONE: Final = marshal.dumps([])

_HEADER: Final = struct.Struct("<IBIQQI")
"""Length of the payload in bytes, kind, number of the survey or question, epoch, number of events
before this frame, number of events or rows in this frame."""

QUESTION: Final = 1
NEXT_PAGE: Final = 2
END_SURVEY: Final = 3
_REQUEST: Final = struct.Struct("<BIH")
"""Kind, number of the question or survey, length of the text that follows: the question, or the
namespace of the survey."""

Answers = Mapping[str, Callable[..., Mapping[str, object]]]
"""The function that answers each question, by the question's name; called in the loop's thread with
the numbers that follow the name."""

Event = tuple[str, bytes, bytes, int, int]
"""Namespace, key, parent, size, depth, as in ``kvstore.master.state.object_events``."""

GONE_SIZE: Final = -1


class SnapshotSource(Protocol):
    @property
    def done(self) -> bool: ...

    def take(self, steps: int) -> list[Event]: ...


class Source(Protocol):
    """A term of the master, from which events and surveys come."""

    @property
    def epoch(self) -> int: ...

    @property
    def waiting_events(self) -> int: ...

    def take_events(self, count: int) -> list[Event]: ...

    def snapshot(self, namespace: str) -> SnapshotSource: ...


class MasterChannel:
    """The master's end. Its methods belong to the loop's thread; none of them waits."""

    def __init__(self) -> None:
        self.dropped = 0
        """Events that were dropped, so that the child never got them."""
        self._source: Source | None = None
        self._number = 0
        """Number of events of this term that were taken from the state."""
        self._timer: asyncio.Handle | None = None
        self._serving: asyncio.Task[str] | None = None
        self._writer: asyncio.StreamWriter | None = None
        """None: there is no child."""
        self._answers: Answers = {}
        self._missed = False
        """Whether events were dropped and the child has not been told yet."""
        self._surveys: dict[int, SnapshotSource] = {}
        self._requests: deque[tuple[int, str]] = deque()

    def counters(self) -> dict[str, int]:
        return {"events": self._number, "events_dropped": self.dropped}

    # --- the term -------------------------------------------------------------------------------

    def lead(self, source: Source | None) -> None:
        """Called when a term begins, with no object visible; None: when this master leads no
        longer."""
        self._source = source
        self._number = 0
        self._surveys.clear()
        self._requests.clear()
        self._send_position()

    def changed(self) -> None:
        """Called when there are new events."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _send_position(self) -> None:
        self._missed = False
        self._frame(EVENTS, 0, 0, _NONE)

    def _flush(self) -> None:
        self._timer = None
        source = self._source
        if source is None:
            return
        waiting = source.waiting_events
        if self._writer is None or waiting > WAITING_EVENTS_MAX:
            self._drop(len(source.take_events(waiting)))
        elif waiting:
            events = source.take_events(BATCH_EVENTS)
            payload = marshal.dumps(events)
            if self._buffered + len(payload) > BUFFER_BYTES_MAX:
                self._drop(len(events))
            else:
                self._frame(EVENTS, 0, len(events), payload)
                self._number += len(events)
        if self._missed and not self._buffered:
            self._send_position()
        if source.waiting_events:
            self._timer = asyncio.get_running_loop().call_soon(self._flush)
            return
        if self._requests and self._buffered < BUFFER_BYTES_MAX // 2:
            self._send_page(source)
        if self._requests or self._missed:
            self.changed()

    def _drop(self, count: int) -> None:
        self._number += count
        if count and self._writer is not None:
            self.dropped += count
            self._missed = True

    # --- surveys --------------------------------------------------------------------------------

    def _send_page(self, source: Source) -> None:
        """Sends the next page that the child asked for. All events so far were sent before it."""
        number, namespace = self._requests.popleft()
        survey = self._surveys.get(number)
        if survey is None:
            if len(self._surveys) >= SURVEYS_MAX:
                del self._surveys[next(iter(self._surveys))]
            survey = self._surveys[number] = source.snapshot(namespace)
        rows = survey.take(SURVEY_STEPS)
        kind = LAST_PAGE if survey.done else PAGE
        if survey.done:
            del self._surveys[number]
        self._frame(kind, number, len(rows), marshal.dumps(rows))

    def _end_snapshot(self, number: int) -> None:
        self._surveys.pop(number, None)
        asked = [each for each in self._requests if each[0] == number]
        for each in asked:  # the child waits for a reply to each of these requests
            self._requests.remove(each)
            self._frame(LAST_PAGE, number, 0, _NONE)

    # --- the socket -----------------------------------------------------------------------------

    def attach(self, sock: socket.socket, answers: Answers) -> asyncio.Task[str]:
        """Connects a child that has started. Owns ``sock`` from now on.

        Returns:
            A task that ends when the child's end is closed, or something is wrong with the child:
            it says what; empty: nothing. ``detach`` cancels it.
        """
        self.detach()
        self._answers = answers
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._serving = start_task("http channel", self._serve(sock))
        return self._serving

    def detach(self) -> None:
        """Called when the child has ended. Idempotent."""
        if self._serving is not None:
            self._serving.cancel()
        self._forget()

    def _forget(self) -> None:
        self._writer = None
        self._missed = False
        self._surveys.clear()
        self._requests.clear()

    async def _serve(self, sock: socket.socket) -> str:
        loop, silent, why = asyncio.get_running_loop(), 0, ""
        with sock:
            reader, writer = await asyncio.open_connection(sock=sock)
            self._writer = writer
            looking: asyncio.TimerHandle

            def look() -> None:
                nonlocal looking, silent, why
                silent += 1
                if silent == LOOKS:
                    why = f"it is silent for {SILENT_S:g} s"
                    writer.transport.abort()
                looking = loop.call_later(SILENT_S / LOOKS, look)

            looking = loop.call_later(SILENT_S / LOOKS, look)
            self._send_position()
            self.changed()
            try:
                while not why:
                    head = await reader.readexactly(_REQUEST.size)
                    kind, number, length = _REQUEST.unpack(head)
                    why = self._handle_request(kind, number, await reader.readexactly(length))
                    silent = 0
            except (asyncio.IncompleteReadError, OSError):
                pass
            finally:
                looking.cancel()
                writer.transport.abort()
                if self._writer is writer:
                    self._forget()
        return why

    @property
    def _buffered(self) -> int:
        """Bytes that wait for the child, beside those in the kernel's buffer."""
        return 0 if self._writer is None else self._writer.transport.get_write_buffer_size()

    def _frame(self, kind: int, number: int, count: int, payload: bytes) -> None:
        if self._writer is not None:
            epoch = 0 if self._source is None else self._source.epoch
            header = _HEADER.pack(len(payload), kind, number, epoch, self._number, count)
            self._writer.write(header + payload)

    def _handle_request(self, kind: int, number: int, text: bytes) -> str:
        """Handles one request. Returns what is wrong with it; empty: nothing."""
        if kind == END_SURVEY:
            self._end_snapshot(number)
            return ""
        if kind == NEXT_PAGE and len(self._requests) >= ASKED_MAX:
            return "it asks for too many pages"
        try:
            if kind == NEXT_PAGE:
                if self._source is not None:  # else the child hears that the term is over
                    self._requests.append((number, text.decode()))
                    self.changed()
                return ""
            name, *numbers = text.decode().split()
            answer = json.dumps(self._answers[name](*map(int, numbers))).encode()
        except Exception:
            log.exception("http_child_not_answered question=%r", text)
            return "it could not be answered"
        self._frame(ANSWER, number, 0, answer)
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame as the child gets it."""

    kind: int
    number: int
    """Number of the survey or question that the frame replies to; 0: the frame holds events."""
    epoch: int
    """0: the master does not lead."""
    before: int
    """How many events of this epoch came before those in the frame, or before this page."""
    count: int
    payload: bytes


class SnapshotPage(NamedTuple):
    before: int
    """The rows are what is visible after so many events."""
    rows: list[Event]
    is_last: bool


class ActiveSnapshot(NamedTuple):
    """One survey of the child."""

    number: int
    epoch: int


class ChildChannel:
    """The child's end. Use it in one event loop."""

    def __init__(self, sock: socket.socket, took: Callable[[Frame], None]) -> None:
        """``took``: called with each frame of events, in order."""
        sock.setblocking(False)
        self._socket = sock
        self._took = took
        self._epoch = 0
        self._numbers = itertools.count(1)
        self._page_turns = asyncio.Semaphore(ASKED_MAX)
        self._question_turns = asyncio.Semaphore(1)
        """One question at a time, so that none pile up for a master that hangs."""
        self._asked: dict[int, tuple[asyncio.Semaphore, asyncio.Future[Frame]]] = {}
        """The surveys and questions whose reply is on its way, by number, whether or not somebody
        still waits for it. The reply releases the semaphore."""
        self._connected = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Reads frames until the master closes its end, or is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=1 << 20)
        self._connected.set()
        try:
            while True:
                header = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                length, kind, number, epoch, before, count = header
                payload = await reader.readexactly(length)
                self._on_frame(Frame(kind, number, epoch, before, count, payload))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer.close()
            self._on_frame(Frame(EVENTS, 0, 0, 0, 0, _NONE))
            self._forget(self._question_turns, "the process that this belongs to is gone")

    async def request(self, question: str, timeout_s: float) -> dict[str, Any]:
        """The master's answer. Raises UnavailableError: it is late, or the master is gone."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
                await self._question_turns.acquire()
                number = next(self._numbers)
                frame = await self._reply(QUESTION, number, question, self._question_turns)
        except TimeoutError:
            raise UnavailableError(f"no answer within {timeout_s:.1f} s") from None
        answer: dict[str, Any] = json.loads(frame.payload)
        return answer

    async def request_until_reply(self, question: str, timeout_s: float) -> None:
        """Asks again and again, which shows the master that this process does not hang."""
        while True:
            await asyncio.sleep(ASK_S)
            with contextlib.suppress(UnavailableError):
                await self.request(question, timeout_s)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[ActiveSnapshot]:
        """A new survey, which ends with the block."""
        survey = ActiveSnapshot(next(self._numbers), self._epoch)
        try:
            yield survey
        finally:
            if self._writer is not None and 0 < survey.epoch == self._epoch:
                self._writer.write(_REQUEST.pack(END_SURVEY, survey.number, 0))

    async def page(self, survey: ActiveSnapshot, namespace: str) -> SnapshotPage:
        """The next page of a survey, which may have one caller at a time.

        Raises:
            UnavailableError: the master leads no longer, hangs or is gone; the survey has ended.
        """
        try:
            async with asyncio.timeout(PAGE_S):
                await self._page_turns.acquire()
                if not self._epoch or self._epoch != survey.epoch:
                    self._page_turns.release()
                    raise UnavailableError("this term of the master is over")
                frame = await self._reply(NEXT_PAGE, survey.number, namespace, self._page_turns)
        except TimeoutError:
            raise UnavailableError("the master does not answer") from None
        rows = marshal.loads(frame.payload)  # noqa: S302  # of our own parent
        return SnapshotPage(frame.before, rows, frame.kind == LAST_PAGE)

    async def _reply(self, kind: int, number: int, said: str, turns: asyncio.Semaphore) -> Frame:
        """Sends a request and waits for the reply. The caller has acquired one of ``turns``."""
        assert self._writer is not None, "it is connected"
        if self._writer.is_closing():
            turns.release()
            raise UnavailableError("the process that this belongs to is gone")
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._asked[number] = turns, reply
        text = said.encode()
        self._writer.write(_REQUEST.pack(kind, number, len(text)) + text)
        return await reply

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind != EVENTS:
            if (asked := self._asked.pop(frame.number, None)) is not None:
                turns, reply = asked
                turns.release()
                if not reply.done():
                    reply.set_result(frame)
            return
        if frame.epoch != self._epoch:
            self._epoch = frame.epoch
            self._forget(self._page_turns, "this term of the master is over")
        self._took(frame)

    def _forget(self, turns: asyncio.Semaphore, why: str) -> None:
        """Tells those who hold one of these turns that their reply does not come."""
        for number in [each for each, (its, _) in self._asked.items() if its is turns]:
            _, reply = self._asked.pop(number)
            turns.release()
            if not reply.done():
                reply.set_exception(UnavailableError(why))
