"""The channel of events between both of its ends, and what subscribers of a journal are sent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from aiohttp.test_utils import make_mocked_request

from kvstore.console.events import journal as journal_module
from kvstore.console.events.journal import EventPosition, EventStreams, Journal
from kvstore.console.events.paths import PATH, EventsAPI
from kvstore.errors import UnavailableError
from kvstore.http.access_control import IdentityAccessControl
from kvstore.http.operations import endpoints_of
from kvstore.http.serving import Readiness
from kvstore.master import ipc_channel as channel_module
from kvstore.master.ipc_channel import (
    REMOVED_SIZE,
    ChildChannel,
    Event,
    MasterChannel,
    SnapshotPage,
)
from kvstore.security.identity import validated_identity
from kvstore.security.revocation_list import RevocationList
from tests.support.wait import until_async


class Rows:
    def __init__(self, rows: list[Event]) -> None:
        self._rows = rows

    @property
    def done(self) -> bool:
        return not self._rows

    def take(self, steps: int) -> list[Event]:
        del steps
        taken, self._rows = self._rows[:2], self._rows[2:]
        return taken


class Term:
    """A term of a master: events are made by hand."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.events: list[Event] = []
        self.made = 0
        self.visible: dict[bytes, Event] = {}
        self.surveys = 0

    @property
    def waiting_events(self) -> int:
        return len(self.events)

    def take_events(self, count: int) -> list[Event]:
        taken = self.events[:count]
        del self.events[:count]
        return taken

    def snapshot(self, namespace: str) -> Rows:
        del namespace
        self.surveys += 1
        return Rows(list(self.visible.values()))

    def store(self, count: int, key: int | None = None) -> None:
        for _ in range(count):
            self.made += 1
            event = ("n", b"%d" % (self.made if key is None else key), b"", 1, 0, False)
            self.visible[event[1]] = event
            self.events.append(event)

    def remove(self, key: int) -> None:
        self.made += 1
        del self.visible[b"%d" % key]
        self.events.append(("n", b"%d" % key, b"", REMOVED_SIZE, 0, False))


class Pair:
    """A feed with its child."""

    def __init__(self) -> None:
        self.feed = MasterChannel()
        self.hangs = False
        self.journal = Journal()
        self.channel: ChildChannel
        self.streams: EventStreams

    async def lives(self) -> bool:
        return not self.hangs

    @contextlib.asynccontextmanager
    async def child(self, *, reads: bool = True) -> AsyncIterator[asyncio.Task[None]]:
        ours, theirs = socket.socketpair()
        self.journal = Journal()
        self.channel = ChildChannel(theirs, self.journal.append)
        self.streams = EventStreams(self.journal, self.channel, self.lives)
        self.feed.attach(ours, {})
        task = asyncio.create_task(self.channel.run() if reads else asyncio.sleep(3600))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.feed.detach()
            theirs.close()

    async def page(self) -> SnapshotPage:
        """The first one of a new survey."""
        with self.channel.snapshot() as survey:
            return await self.channel.page(survey, "")

    async def told(self, count: int, since: str = "", *, whole: bool = False) -> list[str]:
        """The first ``count`` events of a new subscriber, as ``name key id``."""
        found: list[str] = []
        place = EventPosition.parse(since) if since else None
        async with contextlib.aclosing(
            self.streams.events(place, snapshot=whole, namespace="")
        ) as texts:
            async for text in texts:
                for block in text.decode().split("\n\n"):
                    fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
                    if "event" in fields:
                        key = fields["data"].partition('"key":"')[2].partition('"')[0]
                        words = fields["event"], bytes.fromhex(key).decode(), fields.get("id", "")
                        found.append(" ".join(filter(None, words)))
                if len(found) >= count:
                    break
        return found


def run(test: Callable[[Pair, Term], AsyncIterator[None]]) -> None:
    async def with_pair() -> None:
        pair, term = Pair(), Term(7)
        pair.feed.lead(cast(Any, term))
        async for _ in test(pair, term):
            pass

    asyncio.run(with_pair())


def test_events_arrive_in_order_with_their_numbers() -> None:
    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            await until_async(lambda: pair.journal.epoch == 7)
            term.store(3000)
            pair.feed.changed()
            await until_async(lambda: pair.journal.end == 3000)
            assert await pair.told(2, "7-2998") == ["stored 2999 7-2999", "stored 3000 7-3000"]
            assert (await pair.told(1, "7-0"))[:2] == ["stored 1 7-1", "stored 2 7-2"]
        yield

    run(test)


def test_a_child_that_does_not_read_costs_a_bounded_buffer_and_learns_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "BUFFER_BYTES_MAX", 1 << 16)
    monkeypatch.setattr(channel_module, "SOCKET_BYTES", 1 << 12)

    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child(reads=False) as task:
            await until_async(lambda: pair.feed._writer is not None)
            term.store(100_000)
            pair.feed.changed()
            await until_async(lambda: not term.waiting_events)
            assert 0 < pair.feed.dropped < 100_000
            assert pair.feed._buffered <= 1 << 17
            task.cancel()
            reading = asyncio.create_task(pair.channel.run())
            await until_async(lambda: pair.journal.end == 100_000)  # though no event followed
            assert not pair.journal.has(EventPosition(7, 99_000))
            assert await pair.told(1, "7-99000") == ["gap 7-100000"]
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        yield

    run(test)


def test_another_term_begins_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "HEARTBEAT_S", 0.01)

    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            term.store(1)
            pair.feed.changed()
            await until_async(lambda: pair.journal.end == 1)
            subscriber = asyncio.create_task(pair.told(4))
            await asyncio.sleep(0.05)
            page = asyncio.create_task(pair.page())
            await asyncio.sleep(0)
            later = Term(9)
            pair.feed.lead(cast(Any, later))
            with pytest.raises(UnavailableError):
                await page
            later.store(2)
            pair.feed.changed()
            assert await subscriber == ["begin 7-1", "cleared 9-0", "stored 1 9-1", "stored 2 9-2"]
            assert await pair.told(1, "7-1") == ["cleared 9-0"]
            pair.feed.lead(None)
            await until_async(lambda: pair.journal.epoch == 0)
            assert await pair.told(1) == []  # the stream ends
            with pytest.raises(UnavailableError):
                await pair.page()
        yield

    run(test)


def test_a_journal_keeps_a_bounded_number_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "JOURNAL_BYTES_MAX", 1 << 16)

    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            for count in range(3_000):
                term.store(1 + count % 50)
                pair.feed.changed()
                await asyncio.sleep(0 if count % 100 else 0.01)
            await until_async(lambda: pair.journal.end == term.made)
            journal = pair.journal
            assert journal.start > 0
            assert journal._bytes <= 1 << 16
            assert len(journal._frames) < 5_000
            since = EventPosition(7, journal.start)
            told = await pair.told(journal.end - journal.start, str(since))
            expected = range(journal.start + 1, journal.end + 1)
            assert told == [f"stored {number} 7-{number}" for number in expected]
            assert (await pair.told(1, f"7-{journal.start - 1}"))[0].startswith("gap")
            assert (await pair.told(1, f"7-{journal.end + 1}"))[0].startswith("gap")
        yield

    run(test)


def test_the_whole_set_comes_amid_the_events() -> None:
    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            term.store(5)
            pair.feed.changed()
            await until_async(lambda: pair.journal.end == 5)
            told = asyncio.create_task(pair.told(9, whole=True))
            await until_async(lambda: term.surveys == 1)
            term.remove(1)
            term.remove(5)
            pair.feed.changed()
            visible: set[str] = set()
            events = await told
            assert events[0] == "cleared"
            for event in events[1:-1]:
                name, key, *place = event.split()
                assert not place, "nothing to resume from until all is told"
                (visible.add if name == "stored" else visible.discard)(key)
                if event.startswith("complete"):
                    break
            await until_async(lambda: pair.journal.end == 7)
            # Those after the survey come with numbers.
            assert visible - {"1", "5"} == {"2", "3", "4"}
        yield

    run(test)


@pytest.mark.usefixtures("files_at_once")
def test_a_stream_ends_once_its_identity_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "HEARTBEAT_S", 0.01)
    revoked = tmp_path / "revoked"
    revoked.touch()
    engine = validated_identity("e", ["engine"], reads=["n"], number="77")
    shown = {"peercert": {"subjectAltName": [("URI", engine.uri)]}}
    writer = mock.Mock(**{f"write{what}": mock.AsyncMock() for what in ("", "_headers", "_eof")})
    request = make_mocked_request(
        "GET", f"{PATH}?namespace=n", writer=writer,
        transport=mock.Mock(get_extra_info=shown.get),
    )  # fmt: skip

    async def ready() -> Readiness:
        return Readiness(True, "leads")

    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            await until_async(lambda: pair.journal.epoch == 7)
            [events] = endpoints_of(EventsAPI(pair.journal, pair.channel, ready))
            access = IdentityAccessControl(None, RevocationList(str(revoked)))
            stream = asyncio.ensure_future(access.require_read(events.handle)(request))
            await until_async(lambda: writer.write.await_count > 5)
            revoked.write_text("77\n")
            await asyncio.wait_for(stream, 10)
        yield

    run(test)


def test_only_namespaces_that_begin_so() -> None:
    wanted = journal_module.EventFilter("", "vllm/f/")
    assert [
        name for name in ("vllm/f/g0/p0t0", "vllm/f", "vllm/f2/g0/p0t0", "") if wanted.has(name)
    ] == ["vllm/f/g0/p0t0"]
    both = journal_module.EventFilter("vllm/f/g0/p0t0", "vllm/f/")
    assert both.has("vllm/f/g0/p0t0")
    assert not both.has("vllm/f/g1/p0t0")
    assert journal_module.EventFilter().has("any")
