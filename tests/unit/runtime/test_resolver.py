"""Names of hosts: whatever the name server does, nobody waits longer than he wants to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvstore.errors import ClosedError
from kvstore.runtime import resolver
from kvstore.runtime.cancellation import CancelToken
from kvstore.runtime.clock import uptime
from kvstore.runtime.resolver import NameResolutionError, connect, grpc_target, resolve
from tests.support.wait import until

Rows = list[tuple[object, ...]]


class Server:
    """Stands in for the name server: answers, is silent until it is released, or fails."""

    def __init__(self) -> None:
        self.places = ["10.0.0.1"]
        self.failure: socket.gaierror | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.asked: list[str] = []

    def __call__(self, host: str, port: int, **kind: object) -> Rows:
        self.asked.append(host)
        assert self.answers.wait(10)
        if self.failure is not None:
            raise self.failure
        return [
            (socket.AF_INET6, 1, 6, "", (place, port, 0, 0))
            if ":" in place
            else (socket.AF_INET, 1, 6, "", (place, port))
            for place in self.places
        ]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    lookups = resolver._Resolver()
    monkeypatch.setattr(resolver, "_lookups", lookups)
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.answers.set()
    until(lambda: not lookups.waiting)  # a thread that begins later would ask a real server


def found(host: str, within_s: float = 5.0) -> list[str]:
    return [each.text for each in resolve(host, 7, uptime() + within_s)]


def took(call: Callable[[], object]) -> float:
    started = uptime()
    call()
    return uptime() - started


def test_a_name_has_the_addresses_that_the_server_says(server: Server) -> None:
    server.places = ["10.0.0.1", "fd00::5"]
    assert found("cache") == ["10.0.0.1:7", "[fd00::5]:7"]


def test_a_silent_server_costs_the_time_that_the_caller_gives(server: Server) -> None:
    server.answers.clear()

    def look() -> None:
        with pytest.raises(NameResolutionError, match="no name server has answered for 'cache'"):
            resolve("cache", 7, uptime() + 0.1)

    assert took(look) < 2


def test_a_server_that_fails_or_is_silent_leaves_the_last_good_addresses(server: Server) -> None:
    found("cache")
    server.failure = socket.gaierror(socket.EAI_AGAIN, "try again")
    assert found("cache") == ["10.0.0.1:7"]
    server.answers.clear()
    assert found("cache") == ["10.0.0.1:7"]


def test_one_thread_asks_for_one_name(server: Server) -> None:
    server.answers.clear()
    results: list[list[resolver.Address]] = []
    callers = [
        threading.Thread(target=lambda: results.append(resolve("cache", 7, uptime() + 5)))
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    while sum(len(each) for each in resolver._lookups.waiting.values()) < len(callers):
        pass
    server.answers.set()
    for caller in callers:
        caller.join(5)
    assert server.asked == ["cache"]
    assert len(results) == len(callers)


def test_a_stopped_call_stops_waiting(server: Server) -> None:
    server.answers.clear()
    stop = CancelToken()
    outcome: list[BaseException] = []

    def look() -> None:
        with stop.here():
            try:
                resolve("cache", 7, uptime() + 30)
            except ClosedError as error:
                outcome.append(error)

    caller = threading.Thread(target=look)
    caller.start()
    while not resolver._lookups.waiting:
        pass
    stop.set()
    caller.join(5)
    assert not caller.is_alive()
    assert outcome


def test_each_address_of_a_name_is_tried(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server.places = ["127.9.9.9", "127.0.0.1"]  # the first one refuses
        with connect("cache", port, uptime() + 5) as sock:
            assert sock.getpeername() == ("127.0.0.1", port)


@pytest.mark.parametrize("places", [["127.9.9.9", "127.0.0.1"], ["::1", "127.0.0.1"]])
def test_grpc_uses_the_addresses_of_this_resolver(server: Server, places: list[str]) -> None:
    master = grpc.server(ThreadPoolExecutor(1))
    port = master.add_insecure_port("127.0.0.1:0")
    master.start()
    server.places = places
    target, named = grpc_target(f"cache:{port}", uptime() + 5)
    with grpc.insecure_channel(target, options=named) as channel:
        grpc.channel_ready_future(channel).result(5)
    master.stop(None)
