"""Processes that have no descriptor left: they wait, and go on once there are some."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.integration.test_http import child_of
from tests.support.cluster import Cluster
from tests.support.http import get
from tests.support.processes import Server, free_port
from tests.support.wait import until


@contextlib.contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """The process may open none beside those that it has. Linux tells it EMFILE then, as it tells
    all processes ENFILE when the table of the host is full."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_now = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("which", ["master", "node"])
def test_a_server_without_descriptors_goes_on(cluster: Cluster, which: str) -> None:
    port, other = free_port(), free_port()
    cluster.settings["http_port"] = port if which == "master" else other
    master = cluster.master()
    node = cluster.node(http_port=other if which == "master" else port)
    server: Server = master if which == "master" else node
    child = child_of(master)
    with cluster.client() as client, contextlib.ExitStack() as stack:
        client.put("connect", b"now")
        stack.enter_context(no_descriptors(server.pid))
        if which == "master":
            os.kill(child, signal.SIGKILL)
        until_s = time.monotonic() + 3.5
        number = 0
        while time.monotonic() < until_s:
            client.put(f"key-{number}", b"value")
            assert client.get(f"key-{number}") == b"value"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                pass
            number += 1
        assert server.process.poll() is None, server.errors
    with cluster.client(transports=["tcp"]) as client:
        assert client.get("key-0") == b"value"
    until(lambda: _answers(port))


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return get(port, "/healthz")[0] == 200
    return False
