"""A master tells systemd when it and its own memory serve."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.cluster import Cluster


def test_a_master_says_when_it_serves(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        master = cluster.master(memory="16MiB")
        assert systemd.recv(300).startswith(b"STATUS=starts its memory\nEXTEND_TIMEOUT_USEC=")
        assert systemd.recv(300).startswith(b"READY=1\nSTATUS=serves on port ")
        assert cluster.status().nodes
        assert master.terminate() == 0
        assert systemd.recv(300) == b"STOPPING=1"  # nothing of its node before
        cluster.master_server = None
