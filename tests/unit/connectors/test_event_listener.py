"""The listener against a server whose every byte the test writes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvstore.client import sse_client
from kvstore.connectors.vllm.scheduler import event_listener
from kvstore.connectors.vllm.scheduler.event_listener import EventListener, ReceivedEvents
from kvstore.errors import KVStoreError, UnavailableError
from tests.support.wait import until

GROUPS = {"vllm/f/g0/p0t0": 0, "vllm/f/g1/p0t0": 1}
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b"retry: 1000\n\n"
)
BEGIN = b'id: 7-0\nevent: begin\ndata: {"epoch":7}\n\n'


def removal(number: int, key: bytes, namespace: str = "vllm/f/g0/p0t0") -> bytes:
    data = f'{{"namespace":"{namespace}","key":"{key.hex()}"}}'
    return f"id: 7-{number}\nevent: removed\ndata: {data}\n\n".encode()


class Place:
    """Serves HTTP as the test says."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []

    def accept(self, answer: bytes = STREAM + BEGIN) -> tuple[socket.socket, str]:
        """The next connection, with its request, which is answered so."""
        connection, _ = self.listener.accept()
        connection.settimeout(10)
        self.connections.append(connection)
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += connection.recv(1 << 12)
        connection.sendall(answer)
        return connection, request.decode()

    def close(self) -> None:
        for each in (self.listener, *self.connections):
            each.close()


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (event_listener, sse_client):
        monkeypatch.setattr(module, "PAUSE_S", 0.001)


@contextlib.contextmanager
def listener(find: Callable[[], str]) -> Iterator[EventListener]:
    each = EventListener(find, "vllm/f/", GROUPS)
    try:
        yield each
    finally:
        each.close()
    assert not each.is_alive
    assert not each.take().listening


def heard(each: EventListener, enough: Callable[[ReceivedEvents], bool]) -> ReceivedEvents:
    """All that was heard until it is enough."""
    found = each.take()

    def more() -> bool:
        nonlocal found
        listens, missed, blocks = each.take()
        found = ReceivedEvents(listens, found.missed or missed, found.blocks + blocks)
        return enough(found)

    until(more)
    return found


def test_it_hears_what_is_gone_and_asks_only_for_its_own_namespaces(place: Place) -> None:
    with listener(lambda: place.address) as each:
        connection, request = place.accept()
        assert request.startswith("GET /api/v1/events?under=vllm%2Ff%2F HTTP")
        assert heard(each, lambda found: found.missed).listening
        connection.sendall(removal(1, b"a") + removal(2, b"b", "vllm/f/g0/p0t9"))
        connection.sendall(removal(3, b"c", "vllm/f/g1/p0t0"))
        assert heard(each, lambda found: len(found.blocks) == 2) == ReceivedEvents(
            listening=True, missed=False, blocks=[(0, b"a"), (1, b"c")]
        )


def test_a_stream_that_ends_is_resumed_and_nothing_counts_as_missed(place: Place) -> None:
    with listener(lambda: place.address) as each:
        connection, _ = place.accept()
        connection.sendall(removal(1, b"a"))
        heard(each, lambda found: bool(found.blocks))
        connection.close()
        until(lambda: not each.take().listening)
        connection, request = place.accept(STREAM)
        assert "Last-Event-ID: 7-1" in request
        connection.sendall(removal(2, b"b"))
        found = heard(each, lambda found: bool(found.blocks))
        assert found == ReceivedEvents(listening=True, missed=False, blocks=[(0, b"b")])


@pytest.mark.parametrize("note", ["gap", "cleared", "complete"])
def test_where_events_were_missed_any_block_may_have_gone(place: Place, note: str) -> None:
    with listener(lambda: place.address) as each:
        connection, _ = place.accept()
        heard(each, lambda found: found.missed)
        connection.sendall(removal(1, b"a"))
        connection.sendall(f'id: 9-0\nevent: {note}\ndata: {{"epoch":9}}\n\n'.encode())
        found = heard(each, lambda found: found.missed)
        assert found.listening


def test_blocks_that_nobody_takes_are_bounded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_listener, "RECEIVED_MAX", 4)
    with listener(lambda: place.address) as each:
        connection, _ = place.accept()
        heard(each, lambda found: found.missed)
        connection.sendall(b"".join(removal(number, b"%d" % number) for number in range(6)))
        until(lambda: each._missed)
        found = heard(each, lambda found: bool(found.blocks))
        assert found.missed
        assert found.blocks == [(0, b"5")]


def test_a_silent_stream_is_not_heard(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_client, "SILENT_S", 0.2)
    with listener(lambda: place.address) as each:
        place.accept()
        heard(each, lambda found: found.missed)
        until(lambda: not each.take().listening)
        place.accept(STREAM)
        until(lambda: each.take().listening)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno",
        b"not HTTP\r\n\r\n",
        STREAM + b"data: {\n\n",
        STREAM + b"\xff\n\n",
        STREAM + b"x" * (2 << 20),
    ],
)
def test_other_answers_are_not_heard_and_it_tries_again(place: Place, answer: bytes) -> None:
    with listener(lambda: place.address) as each:
        connection, _ = place.accept()
        connection.sendall(removal(1, b"a"))
        heard(each, lambda found: bool(found.blocks))
        connection.close()
        with contextlib.suppress(ConnectionError):
            place.accept(answer)[0].close()
        _, request = place.accept(STREAM)
        until(lambda: each.take().listening)
        assert "Last-Event-ID: 7-1" in request


def test_a_master_without_events_is_asked_again(place: Place) -> None:
    found: list[str | KVStoreError] = [place.address, UnavailableError("no master answers"), ""]

    def find() -> str:
        where = found.pop() if found else place.address
        if isinstance(where, KVStoreError):
            raise where
        return where

    with listener(find) as each:
        assert not each.take().listening
        place.accept()
        until(lambda: each.take().listening)


def test_a_name_that_the_master_does_not_know_is_replaced_by_its_address(place: Place) -> None:
    port = place.listener.getsockname()[1]
    with listener(lambda: f"localhost:{port}") as each:
        connection, request = place.accept(
            b"HTTP/1.1 421 Misdirected Request\r\nContent-Length: 2\r\n\r\nno"
        )
        assert f"Host: localhost:{port}\r\n" in request
        request = connection.recv(1 << 12).decode()
        assert f"Host: 127.0.0.1:{port}\r\n" in request
        connection.sendall(STREAM + BEGIN)
        until(lambda: each.take().listening)


def test_it_stops_in_every_state(place: Place) -> None:
    begun = threading.Event()
    ended = threading.Event()

    def hangs() -> str:
        begun.set()
        ended.wait(10)
        return ""

    each = EventListener(hangs, "vllm/f/", GROUPS)
    assert begun.wait(10)
    each.stop()  # does not wait for ``find``
    assert each.is_alive
    ended.set()
    each.close()
    with listener(lambda: ""):  # while it waits for a master with events
        pass
    with listener(lambda: place.address):  # while it waits for the answer
        place.accept(b"")
