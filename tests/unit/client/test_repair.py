"""The thread that restores replicas for a node: woken, left idle, stopped."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client import client, repair
from kvstore.client.repair import Repairer
from kvstore.config import ClientConfig, NodeConfig

LONG_S = 20.0
NOTHING = SimpleNamespace(objects=0, size=0, failed=0, corrupt=0)


class Clients:
    """Stands where ``Client`` is, and says which were made, asked and closed."""

    def __init__(self) -> None:
        self.made = 0
        self.asked = threading.Semaphore(0)
        self.closed = threading.Semaphore(0)

    def __call__(self, *, config: ClientConfig) -> Clients:
        del config
        self.made += 1
        return self

    def move_page(self, node: str, *, repair: bool) -> Any:
        assert (node, repair) == ("n1", True)
        self.asked.release()
        return NOTHING

    def close(self) -> None:
        self.closed.release()


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Clients:
    clients = Clients()
    monkeypatch.setattr(client, "Client", clients)
    return clients


def test_a_woken_repairer_asks_and_keeps_its_client(clients: Clients) -> None:
    mender = Repairer(NodeConfig(), "n1")
    for _ in range(3):
        mender.wake()
        assert clients.asked.acquire(timeout=LONG_S)
    mender.stop()
    assert clients.made == 1
    assert clients.closed.acquire(timeout=LONG_S)


def test_an_idle_repairer_gives_its_client_back_and_makes_none_to_stop(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "IDLE_S", 0.01)
    mender = Repairer(NodeConfig(), "n1")
    mender.wake()
    assert clients.asked.acquire(timeout=LONG_S)
    assert clients.closed.acquire(timeout=LONG_S)
    thread = mender._thread
    assert thread is not None
    mender.stop()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert clients.made == 1
