"""The last events of a term, and streams of them for subscribers, as text of server-sent events.

A subscriber is only a position in the journal, so a slow one costs no memory: it falls behind the
oldest event kept, and gets a ``gap``. A subscriber that begins, or has missed events, can get a
snapshot within the stream (ended by ``complete``): its rows stand between the events, so that
applying all in order is correct.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Final, NamedTuple

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.master.ipc_channel import REMOVED_SIZE, ChildChannel, Event, Frame

JOURNAL_BYTES_MAX: Final = 64 << 20
"""Bytes that the journal keeps: some 800,000 events, which is 8 s at 100,000 a second."""

FRAME_BYTES: Final = 250
"""Memory overhead of a frame."""

HEARTBEAT_S: Final = 2.0
"""Heartbeat interval of a stream without events: a subscriber assumes that a stream is dead if it
is silent for several intervals (``kvstore.client.sse_client``)."""

CHUNK_EVENTS: Final = 8_192
"""Approximate number of events written to a subscriber at once."""


class EventPosition(NamedTuple):
    """A position in the stream of events: after ``number`` events of ``epoch``."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> EventPosition:
        """Raises InvalidArgumentError."""
        epoch, dash, number = text.partition("-")
        if not (dash and epoch.isdecimal() and number.isdecimal() and len(text) < 64):
            raise InvalidArgumentError(f"{text[:64]!r} is no EPOCH-NUMBER")
        return cls(int(epoch), int(number))


class EventFilter(NamedTuple):
    namespace: str = ""
    """Only events of this namespace; empty: of all."""
    under: str = ""
    """Only events of namespaces with this prefix."""

    def has(self, namespace: str) -> bool:
        return self.namespace in ("", namespace) and namespace.startswith(self.under)


class Journal:
    """The last events of the present term. Use it in one event loop."""

    def __init__(self) -> None:
        self.epoch = 0
        """0: this master does not lead, or has not reported yet."""
        self.start = 0
        """Number of events of the term before the first one kept."""
        self.end = 0
        """Number of events of the term."""
        self._frames: list[Frame] = []
        self._skipped = 0
        """Frames at the front of the list that are no longer kept."""
        self._bytes = 0
        self._changed = asyncio.Event()

    def append(self, frame: Frame) -> None:
        if frame.epoch != self.epoch:
            self.epoch = frame.epoch
            self._restart(frame.before)
        if frame.before != self.end:  # some were dropped
            self._restart(frame.before)
        if frame.count:
            self.end += frame.count
            self._frames.append(frame)
            self._bytes += len(frame.payload) + FRAME_BYTES
            while self._bytes > JOURNAL_BYTES_MAX:
                self._drop_oldest()
        self._changed.set()
        self._changed = asyncio.Event()

    def _restart(self, number: int) -> None:
        self._frames, self._skipped, self._bytes = [], 0, 0
        _text.cache_clear()
        _events.cache_clear()
        self.start = self.end = number

    def _drop_oldest(self) -> None:
        oldest = self._frames[self._skipped]
        self._bytes -= len(oldest.payload) + FRAME_BYTES
        self.start = oldest.before + oldest.count
        self._frames[self._skipped] = _NO_FRAME
        self._skipped += 1
        if self._skipped > 1_024 and self._skipped > len(self._frames) // 2:
            del self._frames[: self._skipped]
            self._skipped = 0

    async def change(self, timeout_s: float) -> bool:
        """Wait for the next frame for up to ``timeout_s``; return whether one came."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
                return True
        except TimeoutError:
            return False

    def has(self, place: EventPosition) -> bool:
        """Return whether all events after this position are kept."""
        return place.epoch == self.epoch and self.start <= place.number <= self.end

    def after(self, number: int, until: int) -> list[Frame]:
        """Return frames with the events after ``number``, up to ``until``; only the first ones if
        they are many. The first frame may begin before ``number``."""
        frames = self._frames
        if number >= min(until, self.end):
            return []
        at = bisect_right(frames, number, lo=self._skipped, key=attrgetter("before")) - 1
        found: list[Frame] = []
        count = 0
        for index in range(max(at, self._skipped), len(frames)):
            frame = frames[index]
            if count >= CHUNK_EVENTS or frame.before >= until:
                break
            found.append(frame)
            count += frame.count
        return found


_NO_FRAME: Final = Frame(0, 0, 0, 0, 0, b"")


class EventStreams:
    """Builds the streams for the subscribers of one journal."""

    def __init__(
        self, journal: Journal, channel: ChildChannel, lives: Callable[[], Awaitable[bool]]
    ) -> None:
        """``lives`` returns whether the master answers; if it hangs, streams end, because another
        one may lead."""
        self._journal = journal
        self._channel = channel
        self._lives = lives

    async def events(
        self, since: EventPosition | None, *, snapshot: bool, namespace: str, under: str = ""
    ) -> AsyncGenerator[bytes]:
        """Yield text for one subscriber, in chunks, until this master no longer leads, or hangs.

        ``cleared``: forget all; ``stored`` and ``removed``: apply in order; ``complete``:
        the snapshot is complete; ``gap``: take a snapshot; ``begin``: events follow, without a
        snapshot.

        Args:
            since: the last event received; None: a new subscriber.
            snapshot: send a snapshot to a new subscriber, or if events after ``since`` are missing.
            namespace: only objects of this namespace; ``""``: of all.
            under: only objects of namespaces with this prefix, filtered from a snapshot of the
                store.
        """
        wanted = EventFilter(namespace, under)
        journal = self._journal
        place = since
        while epoch := journal.epoch:
            if place is not None and journal.has(place):
                number = place.number
            elif snapshot:
                number = -1
                async with contextlib.aclosing(self._snapshot_then_follow(epoch, wanted)) as texts:
                    async for told, text in texts:
                        number = told
                        yield text
                if number < 0 or journal.epoch != epoch:
                    continue  # the snapshot was interrupted: start again
            elif place is not None and place.epoch != epoch and journal.start == 0:
                number = 0
                yield _note("cleared", EventPosition(epoch, 0))
            else:
                number = journal.end
                yield _note("gap" if place is not None else "begin", EventPosition(epoch, number))
            async for told, text in self._follow(epoch, number, wanted):
                number = told
                yield text
            place = EventPosition(epoch, number)

    async def _follow(
        self, epoch: int, number: int, wanted: EventFilter
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield texts of the events after ``number``, each with the number it reaches; end at a
        gap."""
        journal = self._journal
        due = time.monotonic() + HEARTBEAT_S
        while journal.has(EventPosition(epoch, number)):
            frames = journal.after(number, journal.end)
            text = b"".join(_text(frame, max(0, number - frame.before), wanted) for frame in frames)
            if frames:
                number = frames[-1].before + frames[-1].count
            if text:
                yield number, text
            elif time.monotonic() >= due:  # also if the filter excludes all events of the frames
                if not await self._lives():
                    raise UnavailableError("the master does not answer")
                yield number, b"id: %d-%d\n\n" % (epoch, number)  # a position without an event
            else:
                await (asyncio.sleep(0) if frames else journal.change(due - time.monotonic()))
                continue
            due = time.monotonic() + HEARTBEAT_S

    async def _snapshot_then_follow(
        self, epoch: int, wanted: EventFilter
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield text of a snapshot, with the events meanwhile. Each chunk has the number -1, except
        the last one, which has that of the last event. Ends early, without it, if events are
        missing."""
        # Without a complete snapshot there is no position to resume from, so clear the subscriber's
        # id.
        yield -1, b'id\nevent: cleared\ndata: {"epoch":%d}\n\n' % epoch
        number = -1
        async with contextlib.aclosing(self.changes(epoch, wanted.namespace)) as changes:
            async for after, events in changes:
                number = after
                yield -1, "".join(_lines(epoch, None, events, wanted)).encode()
        if number >= 0:
            yield number, _note("complete", EventPosition(epoch, number))

    async def changes(self, epoch: int, namespace: str) -> AsyncGenerator[tuple[int, list[Event]]]:
        """Yield lists of events to apply in order, which make a snapshot. The last one has the
        number of the last event, all others -1. Ends early, after a -1, if events were missed or
        the term is over. Raises UnavailableError: the master hangs."""
        journal = self._journal
        number: int | None = None
        is_last = False
        with self._channel.snapshot() as scan:
            while not is_last:
                try:
                    before, rows, is_last = await self._channel.page(scan, namespace)
                except UnavailableError:
                    if journal.epoch == epoch:
                        raise
                    return
                number = before if number is None else number
                while number < before:
                    if not journal.has(EventPosition(epoch, number)):
                        return
                    for frame in journal.after(number, before):
                        number = frame.before + frame.count
                        yield -1, marshal.loads(frame.payload)  # noqa: S302  # of our own parent
                if journal.epoch != epoch:
                    return
                yield number if is_last else -1, rows


@lru_cache(maxsize=64)
def _text(frame: Frame, skipped: int, wanted: EventFilter) -> bytes:
    """Return text of a frame's events after the first ``skipped``. Subscribers share it."""
    first = frame.before + 1 + skipped
    return "".join(_lines(frame.epoch, first, _events(frame)[skipped:], wanted)).encode()


@lru_cache(maxsize=16)
def _events(frame: Frame) -> list[Event]:
    """Return the events of a frame. Subscribers with different filters share them."""
    events: list[Event] = marshal.loads(frame.payload)  # noqa: S302  # of our own parent
    return events


def _lines(
    epoch: int, number: int | None, events: list[Event], wanted: EventFilter
) -> Iterator[str]:
    """Yield text of events. ``number``: that of the first event; None: they get no id."""
    for index, event in enumerate(events):
        if not wanted.has(event[0]):
            continue
        name = "removed" if event[3] == REMOVED_SIZE else "stored"
        at = "" if number is None else f"id: {epoch}-{number + index}\n"
        yield f"{at}event: {name}\ndata: {_data(event)}\n\n"


def _data(event: Event) -> str:
    namespace, key, parent, size, depth, on_disk = event
    name = f'{{"namespace":{_quoted(namespace)},"key":"{key.hex()}"'
    if size == REMOVED_SIZE:
        return name + "}"
    above = f'"{parent.hex()}"' if parent else "null"
    medium = "disk" if on_disk else "memory"
    return f'{name},"parent":{above},"size":{size},"depth":{depth},"medium":"{medium}"}}'


@lru_cache(maxsize=1_024)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _note(name: str, place: EventPosition) -> bytes:
    return f'id: {place}\nevent: {name}\ndata: {{"epoch":{place.epoch}}}\n\n'.encode()
