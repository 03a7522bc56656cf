"""The watchman watched: what ``tests.support.leaks`` finds, and what it lets pass."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from tests.support import leaks


def test_nothing_is_nothing() -> None:
    assert leaks.leaked(leaks.snapshot()) == []


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


def test_a_child_running_or_not_waited_for() -> None:
    before = leaks.snapshot()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = leaks.leaked(before, grace_s=0)
    assert any("input()" in line for line in found), found
    assert child.stdin is not None
    child.stdin.close()
    time.sleep(0.2)  # over, and a zombie
    assert any(f"child process {child.pid}" in line for line in leaks.leaked(before, grace_s=0))
    child.wait()
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


def test_what_is_on_its_way_out_gets_time() -> None:
    before = leaks.snapshot()
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()
    assert leaks.leaked(before) == []
    thread.join()


def test_a_socket_in_place_of_another_is_none() -> None:
    first = socket.socket()
    before = leaks.snapshot()
    with socket.socket(), socket.socket():
        first.close()
        (left,) = {line.split(":")[1] for line in leaks.leaked(before, grace_s=0)}
        assert left == " socket"
    with socket.socket():
        assert leaks.leaked(before, grace_s=0) == []
