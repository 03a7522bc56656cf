"""The metadata servers that Mooncake's engines meet at, as its users run them; for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import free_port
from tests.support.programs import need_engine, need_program

READY_S = 30.0


@contextlib.contextmanager
def metadata_server(kind: str, directory: Path) -> Iterator[str]:
    """Start one of this kind; its URL, as the setting ``metadata_server`` has it."""
    if kind == "P2PHANDSHAKE":
        yield kind
        return
    port, peers = free_port(), free_port()
    here = f"http://127.0.0.1:{port}"
    if kind == "etcd":
        command = [
            need_program("etcd", "etcd-server"), f"--data-dir={directory / 'etcd'}",
            f"--listen-client-urls={here}", f"--advertise-client-urls={here}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-cluster=default=http://127.0.0.1:{peers}",
        ]  # fmt: skip
        url = f"etcd://127.0.0.1:{port}"
    elif kind == "http":
        need_engine()
        command = [
            sys.executable, "-m", "mooncake.http_metadata_server", "--host=127.0.0.1",
            f"--port={port}",
        ]  # fmt: skip
        url = f"{here}/metadata"
    else:
        assert kind == "redis"
        command = [
            need_program("redis-server", "redis-server"), "--bind", "127.0.0.1",
            "--port", str(port), "--save", "", "--dir", str(directory),
        ]  # fmt: skip
        url = f"redis://127.0.0.1:{port}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:  # type: ignore[call-overload]
        try:
            _wait_for(process, port)
            yield url
        finally:
            process.kill()


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return
        except OSError:
            assert process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it does not listen"
            time.sleep(0.02)
