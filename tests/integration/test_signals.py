"""Signal handlers that raise in the middle of a call: Ctrl-C that a program catches, time-outs by
SIGALRM, ``sys.exit`` on SIGTERM. Afterwards the client works, and gives everything back.

``cut`` raises at each place where CPython runs signal handlers, one after the other.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client
from kvstore.client.rpc import lane_client as lane_module
from kvstore.native import pure_python
from kvstore.transport import shm, tcp_client
from tests.support.cluster import Cluster
from tests.support.leaks import leaked, snapshot
from tests.support.signal_injection import cut
from tests.support.wait import until

PLACES = 120
"""Of each kind of call, evenly over the call; a get by shared memory has some 200."""

KEYS = 4
SIZE = 5_000


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, with objects on both."""
    with Cluster(Path(tmp_path_factory.mktemp("signals"))) as cluster:
        cluster.start(nodes=2)
        client = cluster.client()
        for key in range(KEYS):
            client.put(f"k{key}", value(key), replicas=2)
        yield cluster


@pytest.fixture(autouse=True)
def unraisable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a finalizer raises goes nowhere: Python says so, and goes on. Pytest's hook would keep
    the exception until the test has ended, with the frames and the memory that it refers to."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def value(key: int) -> np.ndarray[Any, Any]:
    return np.full(SIZE, key, np.uint8)


def check(client: Client) -> None:
    """All kinds of calls give what they should."""
    for key in range(KEYS):
        assert np.array_equal(client.get(f"k{key}", timeout_ms=5_000), value(key))  # type: ignore[arg-type]


def in_time(work: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """In another thread, because it would hang for ever where a lock was left taken."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"hangs: {what}"
    if errors:
        raise AssertionError(f"{what}: {errors[0]!r}") from errors[0]


def calls_of(client: Client) -> dict[str, Callable[[], object]]:
    buffer = np.empty(SIZE, np.uint8)
    new = iter(range(1 << 30))

    def put() -> None:
        name = f"n{next(new)}"
        client.put(name, b"x" * 100)
        client.remove(name)

    def allocate() -> None:
        array = client.allocate(100, "uint8", kind="numpy")
        client.put(f"a{next(new)}", array)

    def put_to_both() -> None:
        client.put(f"b{next(new)}", b"x" * 100, replicas=2)

    return {
        "get": lambda: client.get("k1"),
        "view": lambda: client.get("k2", copy=False),
        "get_into": lambda: client.get_into("k3", buffer),
        "get_many": lambda: client.get_many([f"k{key}" for key in range(KEYS)]),
        "put": put,
        "put_to_both": put_to_both,
        "allocate": allocate,
        "match": lambda: client.match_prefix(["k1", "k2"]),
    }


def places(work: Callable[[], object]) -> list[int]:
    """The numbers of up to ``PLACES`` places of the call."""
    last = 1
    while cut(work, last):
        last *= 2
    low = last // 2
    while last - low > max(1, last // 50):
        middle = (low + last) // 2
        low, last = (middle, last) if cut(work, middle) else (low, middle)
    return sorted({last * each // PLACES for each in range(PLACES)})


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["lane", "lane-slow", "grpc"])
def test_a_call_may_be_cut_anywhere(
    stored: Cluster, monkeypatch: pytest.MonkeyPatch, transport: str, how: str
) -> None:
    lane = how != "grpc"
    if how == "lane-slow":  # as where no step is compiled
        for module in (lane_module, tcp_client, shm):
            monkeypatch.setattr(module, "steps", pure_python)
    before = snapshot()
    client = Client(stored.address, transports=(transport,), lane=lane, timeout_ms=10_000)
    check(client)
    calls = calls_of(client)
    if transport == "tcp":
        del calls["allocate"]
    if not lane:  # each call to the master has a thread of its own
        calls = {name: calls[name] for name in ("get_into", "match")}
    for name, call in calls.items():
        call()
        for place in places(call):
            where = cut(call, place)
            in_time(lambda: check(client), f"{name} cut at {where}")
    gc.collect()
    until(lambda: client.stats().views == 0)
    in_time(client.close, "close")
    assert not leaked(before)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_first_calls_may_be_cut_anywhere(stored: Cluster, transport: str) -> None:
    """Where the client joins, connects, maps memory and starts threads."""
    before = snapshot()
    numbers: list[int] = []

    def begin() -> None:
        clients.append(Client(stored.address, transports=(transport,), timeout_ms=10_000))
        clients[-1].get("k1", copy=False)

    client: Client | None
    clients: list[Client] = []
    numbers = places(begin)[::3]
    for place in numbers:
        where = cut(begin, place)
        for client in clients:
            in_time(lambda c=client: check(c), f"first call cut at {where}")  # type: ignore[misc]
            in_time(client.close, f"close after the first call was cut at {where}")
        client = None
        clients.clear()
        assert not leaked(before), f"first call cut at {where}"


def test_close_may_be_cut_anywhere(stored: Cluster) -> None:
    before = snapshot()
    client: Client | None = None

    def close() -> None:
        assert client is not None
        client.close()

    for place in range(0, 200, 7):
        client = Client(stored.address, timeout_ms=10_000)
        view = client.get("k1", copy=False)
        where = cut(close, place)
        in_time(client.close, f"close cut at {where}")
        assert np.array_equal(view, value(1))  # type: ignore[arg-type]
        del view
        if not where:
            break
    else:
        raise AssertionError("close has more places than that")
    assert not leaked(before)
