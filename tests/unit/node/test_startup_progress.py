"""What a node says while it reserves its memory."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from kvstore.http.ports import NOT_SECURED
from kvstore.node import startup_progress as module
from kvstore.node.http_server import NodeHttpServer
from kvstore.node.startup_progress import StartupProgress
from tests.support.http import get, metric

GIB = 1 << 30


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_the_log_hears_of_it_at_once_and_every_ten_seconds(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    starting = StartupProgress(100 * GIB)
    assert caplog.messages == [f"reserving_memory bytes=0 of={100 * GIB} seconds=0"]
    assert starting.text == "reserves memory: 0 B of 100 GiB"
    for second in range(1, 31):
        clock.now += 1
        starting(second * GIB, 100 * GIB)
    assert [text.partition("seconds=")[2] for text in caplog.messages] == ["0", "10", "20", "30"]
    assert starting.text == "reserves memory: 30.0 GiB of 100 GiB, 1 min 10 s left"


def test_health_answers_meanwhile_and_leaves_the_socket() -> None:
    starting = StartupProgress(4 * GIB)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = NodeHttpServer(listener, NOT_SECURED)
        port = listener.getsockname()[1]
        for done in (0, GIB):
            starting(done, 4 * GIB)
            with http.serve_startup(starting):
                status, text = get(port, "/healthz")
                assert status == 200
                assert text.startswith("ok: reserves memory: ")
                assert get(port, "/readyz")[0] == 503
                assert metric(port, "kvstore_node_memory_bytes") == done
                assert metric(port, "kvstore_node_joined") == 0
        with socket.create_connection(("127.0.0.1", port), 5):  # still listens
            pass
    assert not [each for each in threading.enumerate() if each.name == "kvstore-starting"]
