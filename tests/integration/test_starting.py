"""A node says that it is alive, and how far it is, before its memory is reserved."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.http import get
from tests.support.processes import free_port
from tests.support.waiting import until


def test_health_answers_while_the_memory_is_reserved(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.master()
    port = free_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        node = cluster.launch_node(http_port=port, memory="1GiB")
        seen: set[str] = set()

        def is_joined() -> bool:
            with contextlib.suppress(OSError):
                status, text = get(port, "/healthz")
                assert status == 200
                seen.add(text.partition(" of 1.00 GiB")[0].rstrip("0123456789. GMKiB"))
                return text == "ok\n"
            return False

        until(is_joined, every_s=0.005)
        assert "ok: reserves memory:" in seen
        assert "reserving_memory bytes=0" in node.errors
        assert b"STATUS=reserves memory" in systemd.recv(300)
        assert f"serves 1.00 GiB as node {node.name}" in systemd.recv(300).decode()
        assert node.terminate() == 0
        assert systemd.recv(300) == b"STOPPING=1"


def test_a_master_says_when_it_serves(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        master = cluster.master(memory="16MiB")
        assert systemd.recv(300).startswith(b"READY=1\nSTATUS=serves on port ")
        until(lambda: cluster.status().nodes)
        assert master.terminate() == 0
        assert systemd.recv(300) == b"STOPPING=1"  # nothing of its node before
        cluster.master_server = None
