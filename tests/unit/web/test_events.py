"""The channel of events between both of its ends, and what subscribers of a journal are sent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.web import channel as channel_module
from kvstore.web.channel import ASKED_MAX, GONE_SIZE, ChildEnd, Event, MasterEnd, SurveyPage
from kvstore.web.events import journal as journal_module
from kvstore.web.events.journal import EventPosition, Journal, Streams
from tests.support.waiting import until_async


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

    @property
    def waiting_events(self) -> int:
        return len(self.events)

    def take_events(self, count: int) -> list[Event]:
        taken = self.events[:count]
        del self.events[:count]
        return taken

    def survey(self, namespace: str) -> Rows:
        del namespace
        return Rows(list(self.visible.values()))

    def store(self, count: int, key: int | None = None) -> None:
        for _ in range(count):
            self.made += 1
            event = ("n", b"%d" % (self.made if key is None else key), b"", 1, 0)
            self.visible[event[1]] = event
            self.events.append(event)

    def remove(self, key: int) -> None:
        self.made += 1
        del self.visible[b"%d" % key]
        self.events.append(("n", b"%d" % key, b"", GONE_SIZE, 0))


class Pair:
    """A feed with its child."""

    def __init__(self) -> None:
        self.feed = MasterEnd()
        self.hangs = False
        self.journal = Journal()
        self.channel: ChildEnd
        self.streams: Streams

    async def lives(self) -> bool:
        return not self.hangs

    @contextlib.asynccontextmanager
    async def child(self, *, reads: bool = True) -> AsyncIterator[asyncio.Task[None]]:
        ours, theirs = socket.socketpair()
        self.journal = Journal()
        self.channel = ChildEnd(theirs, self.journal.took)
        self.streams = Streams(self.journal, self.channel, self.lives)
        self.feed.attach(ours, {})
        task = asyncio.create_task(self.channel.run() if reads else asyncio.sleep(3600))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.feed.detach()
            theirs.close()

    async def page(self) -> SurveyPage:
        """The first one of a new survey."""
        with self.channel.survey() as survey:
            return await self.channel.page(survey, "")

    async def told(self, count: int, since: str = "", *, whole: bool = False) -> list[str]:
        """The first ``count`` events of a new subscriber, as ``name key id``."""
        found: list[str] = []
        place = EventPosition.parse(since) if since else None
        async with contextlib.aclosing(
            self.streams.events(place, whole=whole, namespace="")
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
        pair.feed.begin(term)
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
            term.store(100_000)
            pair.feed.changed()
            await until_async(lambda: not term.waiting_events)
            assert 0 < pair.feed.dropped < 100_000
            assert sum(map(len, pair.feed._buffer)) == pair.feed._buffered <= 1 << 17
            task.cancel()
            reading = asyncio.create_task(pair.channel.run())
            await until_async(lambda: pair.journal.end == 100_000)  # though no event followed
            assert not pair.journal.has(EventPosition(7, 99_000))
            assert await pair.told(1, "7-99000") == ["gap 7-100000"]
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        yield

    run(test)


def test_without_a_child_events_are_only_counted() -> None:
    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        term.store(10)
        pair.feed.changed()
        await until_async(lambda: not term.waiting_events)
        assert pair.feed.dropped == 0
        async with pair.child():
            await until_async(lambda: pair.journal.end == 10)
            assert await pair.told(1) == ["begin 7-10"]
            assert await pair.told(1, "7-9") == ["gap 7-10"]
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
            pair.feed.begin(later)
            with pytest.raises(UnavailableError):
                await page
            later.store(2)
            pair.feed.changed()
            assert await subscriber == ["begin 7-1", "cleared 9-0", "stored 1 9-1", "stored 2 9-2"]
            assert await pair.told(1, "7-1") == ["cleared 9-0"]
            pair.feed.end()
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


def test_all_is_known_after_the_last_page_and_not_before() -> None:
    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            term.store(5)
            pair.feed.changed()
            await until_async(lambda: pair.journal.end == 5)
            told = [
                (number, [row[1] for row in rows])
                async for number, rows in pair.streams.changes(7, "")
            ]
            assert told == [(-1, [b"1", b"2"]), (-1, [b"3", b"4"]), (5, [b"5"])]
        yield

    run(test)


def test_the_whole_set_comes_amid_the_events() -> None:
    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            term.store(5)
            pair.feed.changed()
            await until_async(lambda: pair.journal.end == 5)
            told = asyncio.create_task(pair.told(9, whole=True))
            await asyncio.sleep(0.007)  # a page or two
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
                if event.startswith("whole"):
                    break
            await until_async(lambda: pair.journal.end == 7)
            # Those after the survey come with numbers.
            assert visible - {"1", "5"} == {"2", "3", "4"}
        yield

    run(test)


def test_those_who_begin_a_snapshot_and_leave_cost_the_master_a_page_or_none() -> None:
    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        pages = 0
        survey_of = term.survey

        def counted(namespace: str) -> Rows:
            nonlocal pages
            pages += 1
            return survey_of(namespace)

        term.survey = counted  # type: ignore[method-assign]

        async def leave() -> None:
            async with contextlib.aclosing(pair.streams.changes(7, "")) as changes:
                await anext(changes)

        async with pair.child():
            term.store(20)
            pair.feed.changed()
            await until_async(lambda: pair.journal.end == 20)
            leaving = [asyncio.create_task(leave()) for _ in range(500)]
            await until_async(lambda: pages > 0)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            pieces = [piece async for piece in pair.streams.changes(7, "")]
            assert (pieces[-1][0], sum(len(events) for _, events in pieces)) == (20, 20)
            assert pages <= 2 * ASKED_MAX + 1
            await asyncio.sleep(0.05)
            assert not pair.feed._surveys, "the master keeps none for those who have left"
        yield

    run(test)


def test_a_survey_does_not_go_on_in_another_term() -> None:
    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            term.store(20)
            pair.feed.changed()
            await until_async(lambda: pair.journal.end == 20)
            async with contextlib.aclosing(pair.streams.changes(7, "")) as changes:
                assert (await anext(changes))[0] == -1
                later = Term(9)
                later.store(20)
                pair.feed.begin(later)
                await until_async(lambda: pair.journal.epoch == 9)
                assert all([number < 0 async for number, _ in changes])
            assert await pair.page(), "and all turns are there again"
        yield

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        b"\2\1\0\0\0\2\0\xff\xff", b"\2\1\0\0\0\0\0" * (ASKED_MAX + 1), b"\0" * (1 << 17),
        b"\xff" * (1 << 17),
    ],
)  # fmt: skip
def test_a_child_that_breaks_the_rules_is_let_go(said: bytes) -> None:
    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child(reads=False):
            pair.channel._socket.setblocking(True)
            sending = asyncio.create_task(asyncio.to_thread(_send, pair.channel._socket, said))
            await until_async(lambda: pair.feed._socket is None)
            await sending
            term.store(1)
            pair.feed.changed()
            await until_async(lambda: not term.waiting_events)
        yield

    run(test)


def test_a_page_that_a_full_buffer_put_off_is_sent_when_the_child_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "SOCKET_BYTES", 1 << 12)
    monkeypatch.setattr(channel_module, "BUFFER_BYTES_MAX", 1 << 18)

    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child(reads=False):
            feed, theirs = pair.feed, pair.channel._socket
            while feed._buffered < 1 << 17:
                term.store(1_000)
                feed.changed()
                await until_async(lambda: not term.waiting_events)
            await asyncio.get_running_loop().sock_sendall(theirs, b"\2\1\0\0\0\0\0")
            await until_async(lambda: bool(feed._requests) and feed._timer is None)
            reading = asyncio.create_task(_read(theirs))
            await until_async(lambda: not feed._requests)
            assert feed._socket is not None, "it waited for the child to ask once more"
            reading.cancel()
        yield

    run(test)


async def _read(sock: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
        pass


def _send(sock: socket.socket, said: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(said)


def test_a_quiet_stream_lives_as_long_as_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "HEARTBEAT_S", 0.01)

    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async with pair.child():
            await until_async(lambda: pair.journal.epoch == 7)
            texts = pair.streams.events(None, whole=False, namespace="")
            assert b"event: begin" in await anext(texts)
            assert await anext(texts) == b"id: 7-0\n\n"
            pair.hangs = True
            with pytest.raises(UnavailableError):
                await anext(texts)
        yield

    run(test)


def test_a_stream_without_events_of_its_own_lives_while_others_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "HEARTBEAT_S", 0.05)

    async def test(pair: Pair, term: Term) -> AsyncIterator[None]:
        async def change_forever() -> None:
            while True:
                term.store(1, 1)
                pair.feed.changed()
                await asyncio.sleep(0.005)

        async with pair.child():
            await until_async(lambda: pair.journal.epoch == 7)
            texts = pair.streams.events(None, whole=False, namespace="", under="other/")
            assert b"event: begin" in await anext(texts)
            changing = asyncio.create_task(change_forever())
            async with asyncio.timeout(5):
                text = await anext(texts)
            place = EventPosition.parse(text.decode().removeprefix("id: ").strip())
            assert place.number > 0, "it can resume after the events of others"
            changing.cancel()
            await asyncio.gather(changing, return_exceptions=True)
            await texts.aclose()
        yield

    run(test)


def test_only_namespaces_that_begin_so() -> None:
    wanted = journal_module.Wanted("", "vllm/f/")
    assert [
        name for name in ("vllm/f/g0/p0t0", "vllm/f", "vllm/f2/g0/p0t0", "") if wanted.has(name)
    ] == ["vllm/f/g0/p0t0"]
    both = journal_module.Wanted("vllm/f/g0/p0t0", "vllm/f/")
    assert both.has("vllm/f/g0/p0t0")
    assert not both.has("vllm/f/g1/p0t0")
    assert journal_module.Wanted().has("any")


@pytest.mark.parametrize("text", ["", "7", "7-", "-7", "x-1", "1-x", "1" * 80 + "-1", "1--1"])
def test_a_place_that_is_none(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        EventPosition.parse(text)
