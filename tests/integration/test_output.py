"""Servers whose output cannot be written, or is not read, and what strangers get into the log."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.runtime.logs import BURST
from tests.integration.test_http import child_of
from tests.support.cluster import Cluster
from tests.support.http import get, http_port_of, metric
from tests.support.processes import free_port
from tests.support.wait import until

STRANGERS = 3 * BURST


@contextlib.contextmanager
def unread_pipe(path: Path) -> Iterator[Path]:
    """A pipe that is full, and that nobody reads."""
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, bytes(4096))
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, b"\n")
        yield path
    finally:
        os.close(fd)


def writes_errors_to(cluster: Cluster, path: Path) -> None:
    """From now on processes are started so."""
    cluster.prefix = ["sh", "-c", f'exec "$@" 2> {path}', "sh"]


def call_lane(cluster: Cluster) -> bytes:
    """A stranger on the lane; what it is told."""
    with socket.create_connection(("127.0.0.1", cluster.lane_port), 5) as stranger:
        stranger.settimeout(5)
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            return stranger.recv(100)
        return b""


def test_a_master_whose_output_is_not_read_serves(cluster: Cluster, tmp_path: Path) -> None:
    cluster.settings["http_port"] = port = free_port()
    with unread_pipe(tmp_path / "pipe") as pipe:
        writes_errors_to(cluster, pipe)
        master = cluster.master()
        cluster.prefix = []
        cluster.node()
        for _ in range(STRANGERS):
            call_lane(cluster)
        with cluster.client() as client:
            client.put("key", b"value")
            assert client.get("key") == b"value"
        until(lambda: metric(port, "kvstore_master_log_lines_suppressed_total"))
        os.kill(child_of(master), signal.SIGKILL)  # said in the log, too
        until(lambda: _answers(port))


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return get(port, "/healthz") == (200, "ok\n")
    return False


MALFORMED = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nX\0Y: 1\r\n\r\n",
    b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
)


def test_a_malformed_request_is_one_line(cluster: Cluster) -> None:
    """Also a client of gRPC that has been given this port."""
    port = free_port()
    cluster.settings["http_port"] = port
    server = cluster.master()
    http_port_of(server)
    for request in MALFORMED:
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.settimeout(5)
            stranger.sendall(request)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/kvstore.v1.Master/Join", bytes, bytes)(b"", timeout=1)
    assert get(port, "/healthz")[0] == 200
    lines = server.errors.splitlines()
    said = [line for line in lines if "malformed_request peer=127.0.0.1" in line]
    assert len(said) > len(MALFORMED) // 2
    assert all(line.isprintable() for line in lines)
    assert "Traceback" not in server.errors
