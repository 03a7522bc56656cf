"""Stores for integration tests: one of their own, or one shared by a module's tests."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import AsyncClient, Client
from tests.support.browser import Browser, browsing
from tests.support.certificates import Identities
from tests.support.cluster import SHORT, Cluster
from tests.support.network_namespaces import IsolatedNetwork, island_with


class Blocking:
    """An ``AsyncClient`` whose verbs are called like those of ``Client``."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        if inspect.isasyncgenfunction(attribute):
            return lambda *args, **named: self._runner.run(_all(attribute(*args, **named)))
        if inspect.iscoroutinefunction(attribute):
            return lambda *args, **named: self._runner.run(attribute(*args, **named))
        return attribute


async def _all(rows: Any) -> list[Any]:
    return [row async for row in rows]


@contextlib.contextmanager
def either_client(kind: str, address: str, **settings: Any) -> Iterator[Any]:
    """A ``Client`` or, for "async", an ``AsyncClient`` to be called in the same way."""
    if kind == "sync":
        with Client(address, **settings) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        blocking = Blocking(AsyncClient(address, **settings), runner)
        try:
            yield blocking
        finally:
            blocking.close()


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    """An authority, and the files that it issues."""
    return Identities(tmp_path)


@pytest.fixture(autouse=True)
def logs_hold_nothing(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Captured records hold errors, which hold frames, which hold mapped memory."""
    yield
    caplog.get_records("call").clear()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Of this test alone, with promises that end within seconds. Nothing is started yet."""
    with Cluster(tmp_path, settings=SHORT) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and a node as they are by default, for tests that leave them as they were."""
    with Cluster(tmp_path_factory.mktemp("store")) as cluster:
        cluster.start(memory="256MiB")
        yield cluster


@pytest.fixture
def store(shared: Cluster) -> Iterator[Cluster]:
    """The module's store, empty; still serving when the test is over."""
    yield shared
    shared.check()
    shared.close_clients()
    shared.clear()


WAYS = [
    pytest.param(("sync", "shm", True), id="shm-lane"),
    pytest.param(("sync", "tcp", True), id="tcp-lane"),
    pytest.param(("sync", "shm", False), id="shm-grpc"),
    pytest.param(("sync", "tcp", False), id="tcp-grpc"),
    pytest.param(("async", "shm", True), id="async-shm-lane"),
    pytest.param(("async", "tcp", True), id="async-tcp-lane"),
    pytest.param(("async", "shm", False), id="async-shm-grpc"),
    pytest.param(("async", "tcp", False), id="async-tcp-grpc"),
]


@pytest.fixture(params=WAYS)
def verbs(request: pytest.FixtureRequest, store: Cluster) -> Iterator[Any]:
    """A client of each kind, over each transport and each carrier, with the same verbs."""
    kind, transport, lane = request.param
    with either_client(kind, store.address, transports=(transport,), lane=lane) as client:
        yield client


OF_MASTER, OF_NODE = f"198.19.{os.getpid() % 128}", f"198.19.{128 + os.getpid() % 128}"
"""Of this process: tests that run side by side have an island each, and share the host's routes."""


@pytest.fixture(scope="module")
def island() -> Iterator[IsolatedNetwork]:
    with island_with(OF_MASTER, OF_NODE) as island:
        yield island


@pytest.fixture
def port(cluster: Cluster) -> int:
    """Of the master's HTTP."""
    return int(cluster.settings["http_port"])


@pytest.fixture
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser
