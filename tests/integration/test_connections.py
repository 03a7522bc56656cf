"""More connections than a master wants: bounded, cut when they are idle, and told of."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.demo.processes import free_port
from tests.integration.cluster import MASTER, ROOT, Server, until

BOUND = 20


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Server]:
    server = Server(
        MASTER, ["--port", "0", "--connections-max", str(BOUND)], log=tmp_path / "master.log"
    )
    try:
        yield server
    finally:
        server.process.terminate()
        server.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def test_connections_that_say_nothing_are_bounded_logged_and_cut(master: Server) -> None:
    port = int(master.line(r"listening on \S+:(\d+) ").group(1))
    with ExitStack() as stack:
        sockets: list[socket.socket] = []

        def is_full() -> bool:
            """A busy master may have cut the first ones before it looks."""
            sockets.extend(
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(3 * BOUND)
            )
            return "grpc_port_full" in master.errors

        until(is_full, every_s=2.0)
        for sock in sockets:
            sock.settimeout(20)
            try:
                while sock.recv(1 << 16):  # its greeting, then the end
                    pass
            except ConnectionError:
                continue
        with Client(f"127.0.0.1:{port}") as client:
            counters = until(lambda: dict(client.status().counters))
        assert counters["grpc_connections"] <= 2 * BOUND
    until(lambda: "grpc_port_free" in master.errors)


def test_connections_that_wait_for_the_master_to_start_count(tmp_path: Path) -> None:
    """Clients and nodes whose master has restarted are there before it has said a word."""
    port = free_port()
    flags = ["--port", str(port), "--connections-max", str(BOUND)]
    master = Server(MASTER, flags, log=tmp_path / "master.log")
    try:
        with ExitStack() as stack:

            def connect() -> bool:
                with suppress(ConnectionRefusedError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    return True
                return False

            def is_full() -> bool:
                """A busy master may have cut the first ones before it looks."""
                for _ in range(3 * BOUND):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                return "grpc_port_full" in master.errors

            until(connect, every_s=0.0005)
            until(is_full, every_s=2.0)
    finally:
        master.process.terminate()
        master.wait()
        assert master.process.stdout is not None
        master.process.stdout.close()


def test_a_low_limit_of_descriptors_is_raised_or_kept() -> None:
    program = (
        "import resource, sys; from kvstore import descriptors; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1]))); "
        "print(descriptors.allow(int(sys.argv[2])), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    high = 4_096 if hard == resource.RLIM_INFINITY else min(4_096, hard)

    def allowed(hard: int, wanted: int) -> list[int]:
        command = [sys.executable, "-c", program, str(hard), str(wanted)]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        return list(map(int, said.split()))

    assert allowed(high, 500) == [500, 500]
    assert allowed(300, 500) == [300, 300]
    assert allowed(300, 20) == [64, 64]
