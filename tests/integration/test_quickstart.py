"""``kvstore quickstart`` as a user runs it: its lines work, and nothing stays when it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvstore import Client
from kvstore.config.setting_types import DEFAULT_PORT
from tests.support.http import get
from tests.support.processes import ROOT, STOP_S, is_running
from tests.support.quickstarts import Quickstart
from tests.support.wait import until


@pytest.fixture
def quickstart() -> Iterator[Callable[..., Quickstart]]:
    started: list[Quickstart] = []

    def start(*arguments: str) -> Quickstart:
        started.append(Quickstart(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_the_lines_that_it_prints_work(quickstart: Callable[..., Quickstart]) -> None:
    store = quickstart("--memory", "32MiB")
    store.ready()
    line = store.line("python -c").replace("python", sys.executable, 1)
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "b'v'\n"
    assert "<html" in get(store.http_port, "/").text
    assert get(store.http_port, "/readyz").status == 200
    assert f'"master": "127.0.0.1:{store.port}"' in store.line("vllm serve")
    assert f'"master": "127.0.0.1:{store.port}"' in store.line("python -m sglang")


ENDS: dict[str, Callable[[Quickstart], object]] = {
    "ctrl-c": lambda store: os.write(store.terminal, b"\x03"),
    "sigterm": lambda store: store.process.send_signal(signal.SIGTERM),
    "terminal": Quickstart.close_terminal,
    "kill-9": lambda store: store.process.kill(),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_stays(quickstart: Callable[..., Quickstart], end: str) -> None:
    store = quickstart("--memory", "32MiB")
    store.ready()
    assert store.entries()
    assert len(store.group()) == 2  # the master and its node
    get(store.http_port, "/readyz")
    everyone = store.group()
    assert len(everyone) == 3  # the page, since somebody asked for it
    ENDS[end](store)
    status = store.process.wait(STOP_S)
    assert status == (-signal.SIGKILL if end == "kill-9" else 0), store.text
    until(lambda: not any(map(is_running, everyone)))
    assert not store.entries()
    if end in ("ctrl-c", "sigterm"):  # a node may miss its master before its parent
        after = store.text.rpartition("Dashboard")[2].splitlines()[1:]
        assert [line for line in after if line not in ("", "^C")] == []


def try_to_bind(stack: ExitStack, port: int) -> bool:
    try:
        stack.enter_context(socket.create_server(("127.0.0.1", port)))
    except OSError:
        return False
    return True


def test_a_second_one_takes_other_ports_and_says_so(quickstart: Callable[..., Quickstart]) -> None:
    first = quickstart("--memory", "16MiB")
    first.ready()
    # The default port stays taken, although stores of other tests come and go.
    with ExitStack() as stack:
        if first.port != DEFAULT_PORT:
            until(lambda: try_to_bind(stack, DEFAULT_PORT), within_s=60)
        second = quickstart("--memory", "16MiB")
        second.ready()
    assert {first.port, first.http_port}.isdisjoint({second.port, second.http_port})
    (line,) = re.findall("^Port .* was taken.*$", second.text, re.MULTILINE)
    assert re.match(r"Port \d+ or \d+ was taken, so give ", line)
    assert f"--master 127.0.0.1:{second.port}" in line
    for store in (first, second):
        with Client(f"127.0.0.1:{store.port}") as client:
            client.put("who", str(store.port).encode())
            assert client.get("who") == str(store.port).encode()
