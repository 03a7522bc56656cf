"""The metadata servers that Mooncake's engines meet at, as its users run them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import etcd
from tests.support.processes import START_S, free_port
from tests.support.programs import need_engine, need_program
from tests.support.wait import until


@contextlib.contextmanager
def metadata_server(kind: str, directory: Path) -> Iterator[str]:
    """Start one of this kind; its URL, as the setting ``metadata_server`` has it."""
    if kind == "P2PHANDSHAKE":
        yield kind
        return
    if kind == "etcd":
        with etcd.running(directory / "etcd") as server:
            yield f"etcd://127.0.0.1:{server.port}"
        return
    port = free_port()
    if kind == "http":
        need_engine()
        module = "mooncake.http_metadata_server"
        command = [sys.executable, "-m", module, "--host=127.0.0.1", f"--port={port}"]
        url = f"http://127.0.0.1:{port}/metadata"
    else:
        assert kind == "redis"
        command = [
            need_program("redis-server", "redis-server"), "--bind", "127.0.0.1",
            "--port", str(port), "--save", "", "--dir", str(directory),
        ]  # fmt: skip
        url = f"redis://127.0.0.1:{port}"
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nothing, stderr=nothing) as process:

        def listens() -> bool:
            assert process.poll() is None, "it ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        try:
            until(listens, within_s=START_S)
            yield url
        finally:
            process.kill()
