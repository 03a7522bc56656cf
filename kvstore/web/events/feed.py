"""The channel by which a master hands its events to the child that serves HTTP: a socket pair, both
ends here.

    master ── frames: events, pages of a survey ──► child
           ◄────────── requests for pages ─────────

Each event of a term has a number, from 1. A frame says how many came before it, so the child knows
if some were dropped: the master drops what does not fit into its buffer, and never waits for the
child. Where there is no child, it only counts. Values travel as ``marshal`` encodes them, the
fastest that there is: both ends are one interpreter and one release.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kvstore.errors import UnavailableError

log = logging.getLogger("kvstore.master")

FLUSH_S: Final = 0.005
"""How long an event waits for others before it is sent."""

BATCH_EVENTS: Final = 1_024
"""Events that one step of the loop sends: half a millisecond."""

WAITING_EVENTS_MAX: Final = 1 << 17
"""Events that may wait to be sent; else all of them are dropped. It is what eight of the largest
calls make."""

BUFFER_BYTES_MAX: Final = 16 << 20
"""What the child has not read yet, beside the kernel's buffer: what 200,000 events take."""

SEND_BYTES: Final = 1 << 18
"""Handed to the kernel in one step of the loop."""

SOCKET_BYTES: Final = 1 << 20

SURVEY_STEPS: Final = 1_024
"""Records of a page: a millisecond, at most once every ``FLUSH_S``, whatever subscribers ask."""

SURVEYS_MAX: Final = 128
"""More than a child has subscribers. Each holds the list of one dictionary, 300 KiB at ten million
objects."""

ASKED_MAX: Final = 4
"""Pages that a child asks for at once. Subscribers that wait for one stand in a line of the child,
and leave it when they go: the master makes no pages for those who have left."""

PAGE_S: Final = 10.0
"""A master that sends no page for so long hangs."""

EVENTS: Final = 0
PAGE: Final = 1
LAST_PAGE: Final = 2
_NONE: Final = marshal.dumps([])

_HEADER: Final = struct.Struct("<IBIQQI")
"""Bytes that follow, kind, survey, epoch, events before these, how many these are."""

_REQUEST: Final = struct.Struct("<IH")
"""Number of a survey, bytes of a namespace that follow. Another request for the same survey brings
its next page; ``_ENDED`` instead of bytes ends it."""

_ENDED: Final = (1 << 16) - 1

Event = tuple[str, bytes, bytes, int, int]
"""As in ``kvstore.master.state.events``."""

GONE_SIZE: Final = -1


class Survey(Protocol):
    @property
    def done(self) -> bool: ...

    def take(self, steps: int) -> list[Event]: ...


class Source(Protocol):
    """A term of the master."""

    @property
    def epoch(self) -> int: ...

    @property
    def waiting_events(self) -> int: ...

    def take_events(self, count: int) -> list[Event]: ...

    def survey(self, namespace: str) -> Survey: ...


class Feed:
    """The master's end. Its methods belong to the loop's thread; none of them waits."""

    def __init__(self) -> None:
        self.dropped = 0
        """Events that the child never got."""
        self._source: Source | None = None
        self._number = 0
        """Events of this term that were taken from the state."""
        self._timer: asyncio.Handle | None = None
        self._socket: socket.socket | None = None
        self._refused: Callable[[], None] = lambda: None
        self._buffer: deque[memoryview] = deque()
        self._buffered = 0
        self._missed = False
        """Whether events were dropped, and the child was not told so."""
        self._received = b""
        self._surveys: dict[int, Survey] = {}
        self._requests: deque[tuple[int, str]] = deque()

    def counters(self) -> dict[str, int]:
        return {"events": self._number, "events_dropped": self.dropped}

    # --- the term -------------------------------------------------------------------------------

    def begin(self, source: Source) -> None:
        """A term begins, with nothing visible."""
        self._change(source)

    def end(self) -> None:
        """This master leads no longer."""
        self._change(None)

    def _change(self, source: Source | None) -> None:
        self._source = source
        self._number = 0
        self._surveys.clear()
        self._requests.clear()
        self._missed = False
        self._say_where()

    def changed(self) -> None:
        """Called when there are new events."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _say_where(self) -> None:
        if self._source is not None:
            self._frame(EVENTS, 0, self._number, 0, _NONE)
        else:
            self._put(_HEADER.pack(len(_NONE), EVENTS, 0, 0, 0, 0), _NONE)

    def _flush(self) -> None:
        self._timer = None
        source = self._source
        if source is None:
            return
        waiting = source.waiting_events
        if self._socket is None or waiting > WAITING_EVENTS_MAX:
            self._drop(len(source.take_events(waiting)))
        elif waiting:
            events = source.take_events(BATCH_EVENTS)
            payload = marshal.dumps(events)
            if self._buffered + len(payload) > BUFFER_BYTES_MAX:
                self._drop(len(events))
            else:
                self._frame(EVENTS, 0, self._number, len(events), payload)
                self._number += len(events)
        if source.waiting_events:
            self._timer = asyncio.get_running_loop().call_soon(self._flush)
        elif self._requests and self._buffered < BUFFER_BYTES_MAX // 2:
            self._answer(source)
            if self._requests:
                self.changed()

    def _drop(self, count: int) -> None:
        self._number += count
        if count and self._socket is not None:
            self.dropped += count
            self._missed = True
            if not self._buffer:
                self._tell_missed()

    # --- surveys --------------------------------------------------------------------------------

    def _answer(self, source: Source) -> None:
        """Sends a page. All events so far have been sent before it."""
        number, namespace = self._requests.popleft()
        survey = self._surveys.get(number)
        if survey is None:
            if len(self._surveys) >= SURVEYS_MAX:
                del self._surveys[next(iter(self._surveys))]
            survey = self._surveys[number] = source.survey(namespace)
        rows = survey.take(SURVEY_STEPS)
        kind = LAST_PAGE if survey.done else PAGE
        if survey.done:
            del self._surveys[number]
        self._frame(kind, number, self._number, len(rows), marshal.dumps(rows))

    def _end_survey(self, number: int) -> None:
        self._surveys.pop(number, None)
        asked = [each for each in self._requests if each[0] == number]
        for each in asked:  # the child waits for each
            self._requests.remove(each)
            self._frame(LAST_PAGE, number, self._number, 0, _NONE)

    # --- the socket -----------------------------------------------------------------------------

    def attach(self, sock: socket.socket, refused: Callable[[], None] = lambda: None) -> None:
        """A child has started. Owns ``sock`` from now on.

        ``refused``: called if the child breaks the rules of the channel, and is detached for it.
        """
        self.detach()
        self._refused = refused
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._socket = sock
        asyncio.get_running_loop().add_reader(sock, self._readable)
        self._say_where()
        self.changed()

    def detach(self) -> None:
        """The child has ended. Idempotent."""
        sock, self._socket = self._socket, None
        if sock is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(sock)
            loop.remove_writer(sock)
            sock.close()
        self._buffer.clear()
        self._buffered = 0
        self._missed = False
        self._received = b""
        self._surveys.clear()
        self._requests.clear()

    def _frame(self, kind: int, survey: int, before: int, count: int, payload: bytes) -> None:
        assert self._source is not None
        header = _HEADER.pack(len(payload), kind, survey, self._source.epoch, before, count)
        self._put(header, payload)

    def _put(self, header: bytes, payload: bytes) -> None:
        if self._socket is None:
            return
        is_idle = not self._buffer
        self._buffer.append(memoryview(header + payload))
        self._buffered += len(header) + len(payload)
        if is_idle:
            self._send()

    def _send(self) -> None:
        sock, left = self._socket, SEND_BYTES
        if sock is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while self._buffer and left > 0:
                sent = sock.send(self._buffer[0][:left])
                left -= sent
                self._buffered -= sent
                self._buffer[0] = self._buffer[0][sent:]
                if not self._buffer[0]:
                    self._buffer.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.detach()
            return
        if self._buffer:
            loop.add_writer(sock, self._send)
            return
        loop.remove_writer(sock)
        if self._missed:
            self._tell_missed()

    def _tell_missed(self) -> None:
        self._missed = False
        self._say_where()

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 14)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        if not data:
            self.detach()
            return
        size = _REQUEST.size
        while len(self._received) >= size:
            number, length = _REQUEST.unpack_from(self._received)
            if length == _ENDED:
                self._received = self._received[size:]
                self._end_survey(number)
                continue
            if len(self._received) < size + length:
                break
            name = self._received[size : size + length]
            self._received = self._received[size + length :]
            if len(self._requests) >= ASKED_MAX or not _is_text(name):
                log.error("events_child_refused: it has broken the rules of its channel")
                self.detach()
                self._refused()
                return
            if self._source is not None:  # else the child hears that the term is over
                self._requests.append((number, name.decode()))
        if self._requests:
            self.changed()


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """As the child gets it."""

    kind: int
    survey: int
    epoch: int
    """0: the master does not lead."""
    before: int
    """How many events of this epoch came before these, or before this page."""
    count: int
    payload: bytes


class Page(NamedTuple):
    before: int
    """These are visible after so many events."""
    rows: list[Event]
    is_last: bool


@dataclass(slots=True, eq=False)
class Surveying:
    """One survey of the child."""

    number: int
    epoch: int
    has_begun: bool = False


class Channel:
    """The child's end. Use it in one event loop."""

    def __init__(self, sock: socket.socket, took: Callable[[Frame], None]) -> None:
        """``took``: called with each frame of events, in order."""
        sock.setblocking(False)
        self._socket = sock
        self._took = took
        self._epoch = 0
        self._number = 0
        self._pages: dict[int, asyncio.Future[Page]] = {}
        self._turns = asyncio.Semaphore(ASKED_MAX)
        self._asked: set[int] = set()
        """Surveys of which a page is on its way, whether somebody still waits for it or not. Each
        has one of the turns."""
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Reads until the master closes its end, or is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=1 << 20)
        try:
            while True:
                header = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                length, kind, survey, epoch, before, count = header
                payload = await reader.readexactly(length)
                self._got(Frame(kind, survey, epoch, before, count, payload))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._got(Frame(EVENTS, 0, 0, 0, 0, _NONE))
            self._writer.close()

    @contextlib.contextmanager
    def survey(self) -> Iterator[Surveying]:
        """A new survey, which ends with the block."""
        self._number += 1
        survey = Surveying(self._number, self._epoch)
        try:
            yield survey
        finally:
            if survey.has_begun and self._writer is not None and self._epoch == survey.epoch:
                self._writer.write(_REQUEST.pack(survey.number, _ENDED))

    async def page(self, survey: Surveying, namespace: str) -> Page:
        """The next page. One caller per survey.

        Raises:
            UnavailableError: the master leads no longer, hangs or is gone; the survey has ended.
        """
        text = namespace.encode()
        page: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(PAGE_S):
                await self._turns.acquire()
                if self._writer is None or not self._epoch or self._epoch != survey.epoch:
                    self._turns.release()
                    raise UnavailableError("this term of the master is over")
                survey.has_begun = True
                self._pages[survey.number] = page
                self._asked.add(survey.number)
                self._writer.write(_REQUEST.pack(survey.number, len(text)) + text)
                return await page
        except TimeoutError:
            raise UnavailableError("the master does not answer") from None
        finally:
            self._pages.pop(survey.number, None)

    def _got(self, frame: Frame) -> None:
        if frame.kind != EVENTS:
            if frame.survey in self._asked:
                self._asked.remove(frame.survey)
                self._turns.release()
            page = self._pages.get(frame.survey)
            if page is not None and not page.done():
                rows = marshal.loads(frame.payload)  # noqa: S302  # of our own parent
                page.set_result(Page(frame.before, rows, frame.kind == LAST_PAGE))
            return
        if frame.epoch != self._epoch:
            self._epoch = frame.epoch
            self._forget("this term of the master is over")
        self._took(frame)

    def _forget(self, why: str) -> None:
        while self._asked:
            self._asked.pop()
            self._turns.release()
        pages, self._pages = self._pages, {}
        for page in pages.values():
            with contextlib.suppress(asyncio.InvalidStateError):
                page.set_exception(UnavailableError(why))
