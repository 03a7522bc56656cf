"""More connections than a master wants: bounded, and cut when they are idle."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.config import MasterConfig
from kvstore.errors import MasterUnreachableError
from kvstore.master.main import _connection_limit_per_port
from kvstore.memory import cgroup
from kvstore.runtime import descriptors
from tests.support.cluster import MASTER
from tests.support.processes import ROOT, Server

BOUND = 20


@contextmanager
def started(port: int, log: Path) -> Iterator[Server]:
    constants = {"kvstore.master.grpc_server:CONNECTIONS_MAX": BOUND}
    server = Server(MASTER, ["--port", str(port)], log=log, constants=constants)
    try:
        yield server
    finally:
        server.process.terminate()
        server.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def test_connections_that_say_nothing_are_cut(tmp_path: Path) -> None:
    with started(0, tmp_path / "master.log") as master, ExitStack() as stack:
        port = int(master.line(r"listening on \S+:(\d+) ").group(1))
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in range(3 * BOUND)
        ]
        for sock in silent:
            with suppress(ConnectionError):
                while sock.recv(1 << 16):  # its greeting, then the end
                    pass
        with Client(f"127.0.0.1:{port}") as client:
            assert not client.exists("a")


def test_a_client_of_a_full_master_is_told_so(tmp_path: Path) -> None:
    with started(0, tmp_path / "master.log") as master, ExitStack() as stack:
        port = int(master.line(r"listening on \S+:(\d+) ").group(1))
        clients = [Client(f"127.0.0.1:{port}", timeout_ms=3_000) for _ in range(BOUND + 1)]
        with pytest.raises(MasterUnreachableError, match="may have no free connection"):
            any(stack.enter_context(client).exists("a") for client in clients)


def test_connections_are_limited_by_memory_and_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "limits", lambda: [cgroup.CgroupLimit("/", 2 << 30, 0)])
    for files, expected in ((1 << 20, (2_048, "memory")), (1_256, (500, "open f"))):
        monkeypatch.setattr(descriptors, "raise_limit", lambda wanted, files=files: files)
        number, reason = _connection_limit_per_port(MasterConfig())
        assert (number, reason[:6]) == expected


def test_a_low_limit_of_descriptors_is_raised_or_kept() -> None:
    program = (
        "import resource, sys; from kvstore.runtime import descriptors; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1]))); "
        "raised = descriptors.raise_limit(int(sys.argv[2])); "
        "print(raised, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
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
