"""The datagrams that systemd gets."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.runtime import sd_notify


@pytest.fixture(params=["path", "abstract"])
def systemd(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    name = f"@kvstore-test-{secrets.token_hex(8)}"
    address = str(tmp_path / "notify") if request.param == "path" else name
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0") if address == name else address)
        listening.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        yield listening


def test_what_it_is_told(systemd: socket.socket) -> None:
    sd_notify.still_starting("reserves memory")
    assert systemd.recv(200) == b"STATUS=reserves memory\nEXTEND_TIMEOUT_USEC=60000000"
    sd_notify.ready("serves")
    assert systemd.recv(200) == b"READY=1\nSTATUS=serves"
    sd_notify.stopping()
    assert systemd.recv(200) == b"STOPPING=1"
