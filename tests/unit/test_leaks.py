"""The watchman watched: what ``tests.support.leaks`` finds, and what it lets pass."""

from __future__ import annotations

import socket
import threading
import uuid
from pathlib import Path

import pytest

from tests.support import leaks


def test_a_thread() -> None:
    before = leaks.snapshot()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    assert leaks.leaked(before, grace_s=0) == ["thread forgotten"]
    stop.set()
    thread.join()
    assert leaks.leaked(before) == []


def test_a_socket_and_a_file(tmp_path: Path) -> None:
    before = leaks.snapshot()
    (tmp_path / "file").touch()
    with socket.socket(), (tmp_path / "file").open():
        found = leaks.leaked(before, grace_s=0)
    assert len(found) == 2
    assert "socket:" in found[0] + found[1]
    assert str(tmp_path / "file") in found[0] + found[1]
    assert leaks.leaked(before) == []


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Test processes of a user who is not root ignore it.
    monkeypatch.setattr(leaks, "_shm_is_ours", True)
    before = leaks.snapshot()
    path = leaks.SHM / f"{leaks.SHM_PREFIX}-test-{uuid.uuid4().hex}"
    path.write_bytes(b"x")
    try:
        assert f"shared memory {path}" in leaks.leaked(before, grace_s=0)
    finally:
        path.unlink()
    assert f"shared memory {path}" not in leaks.leaked(before, grace_s=0)
