"""Channel between a master and its HTTP child: a socket pair, both ends here.

    master ── frames: replies, events, batches of a snapshot ──► child
           ◄──────── queries, requests for batches ────────────

Replies are made in the master's event loop, so a hanging loop does not reply. A child sends a query
every ``ASK_S``, so a silent child hangs.

Events of a term are numbered from 1, and a frame holds the number of earlier events, so the child
detects dropped ones: the master drops events that do not fit its buffer, and never waits for the
child. Without a child it only counts them. Events are encoded by ``marshal``, the fastest way
between two ends of one interpreter and release.
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
"""Environment variable with the child's options as JSON, which hold a token."""

FLUSH_S: Final = 0.005
"""Maximum delay of an event, to send several together."""

BATCH_EVENTS: Final = 1_024
"""Events that one step of the loop sends: half a millisecond."""

WAITING_EVENTS_MAX: Final = 1 << 17
"""Limit of unsent events, those of eight of the largest calls; then all are dropped."""

BUFFER_BYTES_MAX: Final = 16 << 20
"""Maximum of unsent bytes: 200,000 events, which a child receives in milliseconds."""

SOCKET_BYTES: Final = 1 << 20

SNAPSHOT_STEPS: Final = 1_024
"""Records in a batch of a snapshot, 1 ms of the loop. At most one batch is made per ``FLUSH_S``."""

SURVEYS_MAX: Final = 128
"""Maximum number of snapshots, more than a child has subscribers. Each holds the list of one
dictionary, 300 KiB at ten million objects."""

ASKED_MAX: Final = 4
"""Concurrent batch requests of a child; further subscribers wait there, until they disconnect."""

PAGE_S: Final = 10.0
"""Timeout of a batch."""

ASK_S: Final = 2.0
SILENT_S: Final = 15.0
"""Silence after which a child hangs: half of Kubernetes' time for a container."""

LOOKS: Final = 5
"""Checks of the child within ``SILENT_S``; a pause of the master itself is one check."""

EVENTS: Final = 0
PAGE: Final = 1
LAST_PAGE: Final = 2
ANSWER: Final = 3
_NONE: Final = marshal.dumps([])

_HEADER: Final = struct.Struct("<IBIQQI")
"""Payload length in bytes, kind, number of the snapshot or query, epoch, number of events before
this frame, number of events or rows in it."""

QUESTION: Final = 1
NEXT_PAGE: Final = 2
END_SNAPSHOT: Final = 3
_REQUEST: Final = struct.Struct("<BIH")
"""Kind, number of the query or snapshot, length of the following text (query or namespace)."""

Answers = Mapping[str, Callable[..., Mapping[str, object]]]
"""Functions by query name; called in the loop's thread with the numbers that follow the name."""

Event = tuple[str, bytes, bytes, int, int, bool]
"""Namespace, key, parent, size, depth, on disk, as in ``kvstore.master.state.object_events``."""

REMOVED_SIZE: Final = -1


class SnapshotSource(Protocol):
    @property
    def done(self) -> bool: ...

    def take(self, steps: int) -> list[Event]: ...


class Source(Protocol):
    @property
    def epoch(self) -> int: ...

    @property
    def waiting_events(self) -> int: ...

    def take_events(self, count: int) -> list[Event]: ...

    def snapshot(self, namespace: str) -> SnapshotSource: ...


class MasterChannel:
    """The master's end. Its methods belong to the loop's thread and never wait."""

    def __init__(self) -> None:
        self.dropped = 0
        """Events that the child never received."""
        self._source: Source | None = None
        self._number = 0
        """Number of events of this term taken from the state."""
        self._timer: asyncio.Handle | None = None
        self._serving: asyncio.Task[str] | None = None
        self._writer: asyncio.StreamWriter | None = None
        """None: there is no child."""
        self._handlers: Answers = {}
        self._missed = False
        """Whether events were dropped and the child does not know yet."""
        self._snapshots: dict[int, SnapshotSource] = {}
        self._requests: deque[tuple[int, str]] = deque()

    def counters(self) -> dict[str, int]:
        return {"events": self._number, "events_dropped": self.dropped}

    # --- the term -------------------------------------------------------------------------------

    def lead(self, source: Source | None) -> None:
        """Begin a term, without visible objects; None: this master does not lead any more."""
        self._source = source
        self._number = 0
        self._snapshots.clear()
        self._requests.clear()
        self._send_position()

    def changed(self) -> None:
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

    # --- snapshots ----------------------------------------------------------------------------

    def _send_page(self, source: Source) -> None:
        """Send the next requested batch, after all events so far."""
        number, namespace = self._requests.popleft()
        snapshot = self._snapshots.get(number)
        if snapshot is None:
            if len(self._snapshots) >= SURVEYS_MAX:
                del self._snapshots[next(iter(self._snapshots))]
            snapshot = self._snapshots[number] = source.snapshot(namespace)
        rows = snapshot.take(SNAPSHOT_STEPS)
        kind = LAST_PAGE if snapshot.done else PAGE
        if snapshot.done:
            del self._snapshots[number]
        self._frame(kind, number, len(rows), marshal.dumps(rows))

    def _end_snapshot(self, number: int) -> None:
        self._snapshots.pop(number, None)
        pending = [request for request in self._requests if request[0] == number]
        for request in pending:  # the child waits for a reply to each
            self._requests.remove(request)
            self._frame(LAST_PAGE, number, 0, _NONE)

    # --- the socket -----------------------------------------------------------------------------

    def attach(self, sock: socket.socket, handlers: Answers) -> asyncio.Task[str]:
        """Connect a started child, and take ownership of ``sock``. Return a task that ends with the
        child's end or an error, its result; ``detach`` cancels it."""
        self.detach()
        self._handlers = handlers
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._serving = start_task("http channel", self._serve(sock))
        return self._serving

    def detach(self) -> None:
        """Disconnect an ended child. Idempotent."""
        if self._serving is not None:
            self._serving.cancel()
        self._forget()

    def _forget(self) -> None:
        self._writer = None
        self._missed = False
        self._snapshots.clear()
        self._requests.clear()

    async def _serve(self, sock: socket.socket) -> str:
        loop, silent, error = asyncio.get_running_loop(), 0, ""
        with sock:
            reader, writer = await asyncio.open_connection(sock=sock)
            self._writer = writer
            timer: asyncio.TimerHandle

            def check() -> None:
                nonlocal timer, silent, error
                silent += 1
                if silent == LOOKS:
                    error = f"no message for {SILENT_S:g} s"
                    writer.transport.abort()
                timer = loop.call_later(SILENT_S / LOOKS, check)

            timer = loop.call_later(SILENT_S / LOOKS, check)
            self._send_position()
            self.changed()
            try:
                while not error:
                    head = await reader.readexactly(_REQUEST.size)
                    kind, number, length = _REQUEST.unpack(head)
                    error = self._handle_request(kind, number, await reader.readexactly(length))
                    silent = 0
            except (asyncio.IncompleteReadError, OSError):
                pass
            finally:
                timer.cancel()
                writer.transport.abort()
                if self._writer is writer:
                    self._forget()
        return error

    @property
    def _buffered(self) -> int:
        """Unsent bytes, besides those in the kernel's buffer."""
        return 0 if self._writer is None else self._writer.transport.get_write_buffer_size()

    def _frame(self, kind: int, number: int, count: int, payload: bytes) -> None:
        if self._writer is not None:
            epoch = 0 if self._source is None else self._source.epoch
            header = _HEADER.pack(len(payload), kind, number, epoch, self._number, count)
            self._writer.write(header + payload)

    def _handle_request(self, kind: int, number: int, text: bytes) -> str:
        """Handle one request. Return its error or ""."""
        if kind == END_SNAPSHOT:
            self._end_snapshot(number)
            return ""
        if kind == NEXT_PAGE and len(self._requests) >= ASKED_MAX:
            return "too many pending requests"
        try:
            if kind == NEXT_PAGE:
                if self._source is not None:  # else the child learns that the term has ended
                    self._requests.append((number, text.decode()))
                    self.changed()
                return ""
            name, *numbers = text.decode().split()
            reply = json.dumps(self._handlers[name](*map(int, numbers))).encode()
        except Exception:
            log.exception("http_child_not_answered question=%r", text)
            return "invalid request"
        self._frame(ANSWER, number, 0, reply)
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    kind: int
    number: int
    """Number of the snapshot or query replied to; 0: events."""
    epoch: int
    """0: the master does not lead."""
    before: int
    """Number of events of this epoch before those in the frame, or before this batch."""
    count: int
    payload: bytes


class SnapshotPage(NamedTuple):
    before: int
    """The rows are visible after this number of events."""
    rows: list[Event]
    is_last: bool


class ActiveSnapshot(NamedTuple):
    number: int
    epoch: int


class ChildChannel:
    """The child's end. Use it in one event loop."""

    def __init__(self, sock: socket.socket, took: Callable[[Frame], None]) -> None:
        """``took`` receives each frame of events, in order."""
        sock.setblocking(False)
        self._socket = sock
        self._took = took
        self._epoch = 0
        self._numbers = itertools.count(1)
        self._batch_slots = asyncio.Semaphore(ASKED_MAX)
        self._query_slots = asyncio.Semaphore(1)
        """One query at a time, so that none pile up for a hanging master."""
        self._pending: dict[int, tuple[asyncio.Semaphore, asyncio.Future[Frame]]] = {}
        """Requests without a reply, by number, with the semaphore that the reply releases."""
        self._connected = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Read frames until the master's end is closed."""
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
            self._forget(self._query_slots, "the master process has ended")

    async def request(self, query: str, timeout_s: float) -> dict[str, Any]:
        """Return the master's reply. Raise UnavailableError if there is none in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
                await self._query_slots.acquire()
                number = next(self._numbers)
                frame = await self._reply(QUESTION, number, query, self._query_slots)
        except TimeoutError:
            raise UnavailableError(f"no reply within {timeout_s:.1f} s") from None
        reply: dict[str, Any] = json.loads(frame.payload)
        return reply

    async def request_until_reply(self, query: str, timeout_s: float) -> None:
        """Send the query periodically, which shows the master that this process does not hang."""
        while True:
            await asyncio.sleep(ASK_S)
            with contextlib.suppress(UnavailableError):
                await self.request(query, timeout_s)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[ActiveSnapshot]:
        """Begin a snapshot that ends with the block."""
        snapshot = ActiveSnapshot(next(self._numbers), self._epoch)
        try:
            yield snapshot
        finally:
            if self._writer is not None and 0 < snapshot.epoch == self._epoch:
                self._writer.write(_REQUEST.pack(END_SNAPSHOT, snapshot.number, 0))

    async def page(self, snapshot: ActiveSnapshot, namespace: str) -> SnapshotPage:
        """Return the next batch of a snapshot; one caller at a time. Raise UnavailableError if the
        term, the snapshot or the master has ended, or the master hangs."""
        try:
            async with asyncio.timeout(PAGE_S):
                await self._batch_slots.acquire()
                if not self._epoch or self._epoch != snapshot.epoch:
                    self._batch_slots.release()
                    raise UnavailableError("the master's term has ended")
                frame = await self._reply(NEXT_PAGE, snapshot.number, namespace, self._batch_slots)
        except TimeoutError:
            raise UnavailableError("no reply from the master") from None
        rows = marshal.loads(frame.payload)  # noqa: S302  # of our own parent
        return SnapshotPage(frame.before, rows, frame.kind == LAST_PAGE)

    async def _reply(self, kind: int, number: int, query: str, slots: asyncio.Semaphore) -> Frame:
        """Send a request and wait for the reply. The caller has acquired one of ``slots``."""
        assert self._writer is not None, "it is connected"
        if self._writer.is_closing():
            slots.release()
            raise UnavailableError("the master process has ended")
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[number] = slots, reply
        text = query.encode()
        self._writer.write(_REQUEST.pack(kind, number, len(text)) + text)
        return await reply

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind != EVENTS:
            if (pending := self._pending.pop(frame.number, None)) is not None:
                slots, reply = pending
                slots.release()
                if not reply.done():
                    reply.set_result(frame)
            return
        if frame.epoch != self._epoch:
            self._epoch = frame.epoch
            self._forget(self._batch_slots, "the master's term has ended")
        self._took(frame)

    def _forget(self, slots: asyncio.Semaphore, error: str) -> None:
        """Fail the requests that hold these slots, as their replies do not come."""
        for number in [
            request for request, (held_slots, _) in self._pending.items() if held_slots is slots
        ]:
            _, reply = self._pending.pop(number)
            slots.release()
            if not reply.done():
                reply.set_exception(UnavailableError(error))
