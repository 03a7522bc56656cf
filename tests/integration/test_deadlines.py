"""No call of a client takes longer than its deadline, whatever dies, stops or is cut off.

Every public call, of both clients, over both carriers and both transports, from clients that were
connected before the fault and from new ones, against each fault of the master and of the node. All
calls of one kind of client run at the same time: each test takes little more than one deadline.

A call may return anything that is true, or raise a typed error that may be tried again. What it may
not do is take longer than ``TIMEOUT_MS`` and ``SLACK_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from kvstore import AsyncClient, Client
from kvstore.calls import HintAction
from kvstore.calls.hint_envelopes import EnvelopeAction
from kvstore.client.rpc import lane_client
from kvstore.errors import InvalidArgumentError, KVStoreError, MasterUnreachableError
from tests.integration.conftest import OF_MASTER, OF_NODE
from tests.support.cluster import Cluster
from tests.support.network_namespaces import IsolatedNetwork

TIMEOUT_MS = 1_200
SLACK_S = 0.8
"""Hundreds of threads wake up at the same moment, on two cores; alone it is milliseconds."""

TICK_S = 0.02
"""How often ``SchedulingDelays`` looks whether a thread that wants to run does."""

HUNG_S = 15.0
LARGE = 4 << 20
KEYS = ["a", "b", "c"]
ACTIONS = [EnvelopeAction("", HintAction.RETAIN, 1), EnvelopeAction("", duration_ms=1)]
VALUE = np.arange(LARGE, dtype=np.uint8)

Verb = Callable[[Any], Any]
"""Makes a call; what it returns is awaited if it can be."""

CALLS: dict[str, Verb] = {
    "put": lambda c: c.put("new", VALUE),
    "put_many": lambda c: c.put_many([("m1", VALUE), ("m2", b"small")], replicas=2),
    "put_chain": lambda c: c.put_chain(["c1", "c2"], [b"1", VALUE]),
    "allocate": lambda c: c.allocate(LARGE, kind="numpy"),
    "get": lambda c: c.get("a"),
    "get a view": lambda c: c.get("a", copy=False),
    "get_many": lambda c: c.get_many(KEYS),
    "get_into": lambda c: c.get_into("b", bytearray(LARGE)),
    "get_ranges": lambda c: c.get_ranges("c", [(7, bytearray(LARGE - 7))]),
    "match_prefix": lambda c: c.match_prefix(KEYS),
    "matches": lambda c: c.matches(KEYS, namespaces=["default", "other"]),
    "match_all": lambda c: c.match_all(KEYS, namespaces=["default"], states=["other"]),
    "lookup": lambda c: c.lookup(KEYS),
    "pin": lambda c: c.pin(KEYS, 60),
    "unpin": lambda c: c.unpin(KEYS),
    "hint": lambda c: c.hint([("retain", "a")]),
    "retain": lambda c: c.retain("a", 1),
    "end_session": lambda c: c.end_session("b"),
    "demote": lambda c: c.demote("b"),
    "prefetch": lambda c: c.prefetch("b"),
    "apply_hints": lambda c: c.apply_hints(ACTIONS, {"default": ["a"]}),
    "exists": lambda c: c.exists("a"),
    "exists_many": lambda c: c.exists_many(KEYS),
    "stat": lambda c: c.stat("a"),
    "status": lambda c: c.status(),
    "http": lambda c: c.http(),
    "traffic": lambda c: c.traffic(),
    "chains": lambda c: c.chains(),
    "blocks": lambda c: c.blocks(KEYS),
    "list_objects": lambda c: c.list_objects(),
    "list_page": lambda c: c.list_page("", b"", 0),
    "remove": lambda c: c.remove("never"),
    "remove_many": lambda c: c.remove_many(["removed"]),
    "clear": lambda c: c.clear("nobody's"),
    "drain": lambda c: c.drain("nobody"),
    "move_page": lambda c: c.move_page("nobody"),
}
NO_CALLS = {
    "close", "config", "device", "embedded", "lease", "memory_at", "payload_at", "register",
    "release", "release_match", "stats", "unregister",
}  # fmt: skip
"""Public names that ask nobody, or are tested apart."""


either = pytest.mark.parametrize("kind", [Client, AsyncClient])
"""One after the other: the loop of the one does not wait for hundreds of threads of the other."""


@either
def test_every_public_call_is_in_the_table(kind: type) -> None:
    public = {name for name in dir(kind) if not name.startswith("_")} | {"config"}
    called = {name.split()[0] for name in CALLS}
    assert public == called | NO_CALLS
    for name in called:
        assert inspect.signature(getattr(kind, name)).parameters["timeout_ms"].default is None


# --- calls that run at the same time, each on its own ------------------------------------------


class SchedulingDelays:
    """How long threads of this process that wanted to run did not: the machine's part of how long a
    call takes. A thread sleeps again and again; what each sleep takes too long is added up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="stalls", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            self.seconds += now - before - TICK_S
            before = now


class CallTiming:
    """One call: how long it took, and what came of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: float | None = None
        self.outcome: object = "hangs"
        self.stalled_s = 0.0
        """Of those seconds, at most."""

    def __repr__(self) -> str:
        took = "never ends" if self.seconds is None else f"{self.seconds:.2f} s"
        return f"{self.name}: {took}, stalled {self.stalled_s:.2f} s, {self.outcome!r:.120}"

    @property
    def is_wrong(self) -> bool:
        if self.seconds is None or self.seconds > TIMEOUT_MS / 1000 + SLACK_S + self.stalled_s:
            return True
        error = self.outcome
        if not isinstance(error, BaseException):
            return False
        if isinstance(error, InvalidArgumentError):
            return False  # the master's answer: there is no such node
        # ``sent`` says: the connection broke in the middle of what may not be done twice.
        return not (isinstance(error, KVStoreError) and (error.retriable or "sent" in error.fields))


class Clients:
    """One client per way, each connected and warm or new; ``run`` makes every call of each."""

    def __init__(self, kind: type, address: str) -> None:
        self._kind = kind
        self._address = address
        self._clients: list[tuple[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aio", daemon=True)
        self._thread.start()

    def add(self, age: str) -> None:
        for transport in ("shm", "tcp"):
            for lane in (True, False):
                name = f"{transport} {'lane' if lane else 'grpc'} {age}"
                settings: dict[str, Any] = {"timeout_ms": TIMEOUT_MS, "lane": lane}
                client = self._kind(self._address, transports=(transport,), **settings)
                self._clients.append((name, client))

    def warm(self) -> None:
        """Every client has joined, is connected to the node and knows some placements."""
        with Client(self._address) as first:
            for key in [*KEYS, "removed"]:
                first.put(key, VALUE)
        for _, client in self._clients:
            for verb in (lambda c: c.get_many(KEYS), lambda c: c.status()):
                self._now(verb, client)

    def run(self) -> list[CallTiming]:
        """All at the same time; returns when they have ended, or hang."""
        all_took: list[CallTiming] = []
        threads: list[threading.Thread] = []
        ended: list[Any] = []
        for name, client in self._clients:
            for what, verb in CALLS.items():
                took = CallTiming(f"{name}: {what}")
                all_took.append(took)
                if isinstance(client, AsyncClient):
                    call = self._awaited(took, verb, client)
                    ended.append(asyncio.run_coroutine_threadsafe(call, self._loop))
                else:
                    call_it = threading.Thread(
                        target=self._timed, args=(took, verb, client), name=took.name, daemon=True
                    )
                    threads.append(call_it)
        with SchedulingDelays() as stalls:
            for thread in threads:
                thread.start()
            give_up = time.monotonic() + HUNG_S
            for thread in threads:
                thread.join(max(0.0, give_up - time.monotonic()))
            for future in ended:
                with contextlib.suppress(TimeoutError):
                    future.result(max(0.0, give_up - time.monotonic()))
        for took in all_took:
            took.stalled_s = stalls.seconds
        return all_took

    def close(self) -> list[CallTiming]:
        """How long each took to close, one after the other."""
        all_took = []
        for name, client in self._clients:
            took = CallTiming(f"{name}: close")
            all_took.append(took)
            started = time.monotonic()
            self._now(lambda c: c.close(), client)
            took.seconds, took.outcome = time.monotonic() - started, None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._clients.clear()
        return all_took

    def _now(self, verb: Verb, client: Any) -> None:
        if isinstance(client, AsyncClient):
            call = _drive(verb, client)
            asyncio.run_coroutine_threadsafe(call, self._loop).result(HUNG_S)
        else:
            verb(client)

    @staticmethod
    def _timed(took: CallTiming, verb: Verb, client: Client) -> None:
        started = time.monotonic()
        try:
            outcome = verb(client)
            took.outcome = list(outcome) if inspect.isgenerator(outcome) else type(outcome)
        except BaseException as error:
            took.outcome = error.with_traceback(None)
        took.seconds = time.monotonic() - started

    @staticmethod
    async def _awaited(took: CallTiming, verb: Verb, client: AsyncClient) -> None:
        started = time.monotonic()
        try:
            took.outcome = type(await _drive(verb, client))
        except Exception as error:
            took.outcome = error.with_traceback(None)
        took.seconds = time.monotonic() - started


async def _drive(verb: Verb, client: AsyncClient) -> Any:
    outcome = verb(client)
    if inspect.isasyncgen(outcome):
        return [row async for row in outcome]
    return await outcome if inspect.isawaitable(outcome) else outcome


def check(cluster: Cluster, kind: type, fault: Callable[[], object]) -> None:
    """No call of old and new clients takes longer than it may, after ``fault``."""
    clients = Clients(kind, cluster.address)
    try:
        clients.add("old")
        clients.warm()
        fault()
        clients.add("new")
        wrong = [took for took in clients.run() if took.is_wrong]
    finally:
        wrong_ends = [took for took in clients.close() if took.is_wrong]
    assert not wrong, "\n".join(map(repr, wrong))
    assert not wrong_ends, "\n".join(map(repr, wrong_ends))


# --- what dies and what stops ------------------------------------------------------------------


@either
@pytest.mark.parametrize("who", ["master", "node"])
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_after_a_signal(cluster: Cluster, who: str, fault: str, kind: type) -> None:
    cluster.start(2, memory="256MiB")
    master = cluster.master_server
    server = master if who == "master" else cluster.nodes[0]
    try:
        check(cluster, kind, getattr(server, fault))
    finally:
        if fault == "freeze":
            server.resume()
    if who == "master" and fault == "kill":
        cluster.master()


@either
def test_both_stop(cluster: Cluster, kind: type) -> None:
    """What clients hold and know is of no use then, and costs them no second deadline."""
    cluster.start(2, memory="256MiB")
    servers = (cluster.master_server, *cluster.nodes)

    def freeze() -> None:
        for server in servers:
            server.freeze()

    try:
        check(cluster, kind, freeze)
    finally:
        for server in servers:
            server.resume()


def test_memory_is_not_given_to_a_master_that_does_not_answer(cluster: Cluster) -> None:
    cluster.start()
    cluster.master_server.freeze()
    started = time.monotonic()
    try:
        with pytest.raises(KVStoreError) as caught:
            Client(cluster.address, memory="8MiB", timeout_ms=TIMEOUT_MS)
    finally:
        cluster.master_server.resume()
    assert caught.value.retriable
    assert time.monotonic() - started < TIMEOUT_MS / 1000 + SLACK_S


# --- a network that drops everything -----------------------------------------------------------


@pytest.mark.netns
@either
@pytest.mark.parametrize("who", ["master", "node"])
def test_after_the_network_is_cut(
    island: IsolatedNetwork, tmp_path: Path, who: str, kind: type
) -> None:
    with island.cluster(tmp_path) as cluster:
        cluster.master()
        master = f"{OF_MASTER}.1:{cluster.settings['port']}"
        cluster.node(host=f"{OF_NODE}.1", master=master, memory="256MiB")
        try:
            check(cluster, kind, lambda: island.cut(OF_MASTER if who == "master" else OF_NODE))
        finally:
            island.mend()


@pytest.mark.netns
def test_a_call_that_waits_learns_that_its_master_has_vanished(
    island: IsolatedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_client, "SILENCE_S", 2)
    with island.cluster(tmp_path) as cluster:
        cluster.master()
        master = f"{OF_MASTER}.1:{cluster.settings['port']}"
        with Client(master, timeout_ms=4_000) as client:
            assert not client.exists("a")
            island.cut(OF_MASTER)
            try:
                with pytest.raises(MasterUnreachableError, match="connection timed out"):
                    client.exists("a")
            finally:
                island.mend()
