"""What ``kvstore quickstart`` takes, and what it prints; tests/integration runs it."""

from __future__ import annotations

import json
import os
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.cli import quickstart
from kvstore.console.diagnostics import host
from kvstore.errors import SharedMemoryTooSmallError
from kvstore.memory import cgroup

DOCS = Path(__file__).parents[3] / "docs"
MASTER = "10.0.0.7:50001"
MIB = 1 << 20
GIB = 1 << 30


def offers(
    monkeypatch: pytest.MonkeyPatch, *, shared: int, free: int | None, limit: int | None
) -> None:
    """``shared``: free bytes of /dev/shm; 0: it is unlimited."""
    room = SimpleNamespace(f_bavail=shared // 4096, f_blocks=shared // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    monkeypatch.setattr(host, "memory_available", lambda: free)
    limits = [] if limit is None else [cgroup.CgroupLimit("/sys/fs/cgroup/one", limit, 0)]
    monkeypatch.setattr(cgroup, "limits", lambda: limits)


@pytest.mark.parametrize(
    ("shared", "free", "limit", "taken"),
    [
        (64 * GIB, 128 * GIB, None, 4 * GIB),  # a server: what is taken in seconds
        (64 * MIB, 128 * GIB, None, 32 * MIB),  # a container of Docker's defaults
        (64 * GIB, 4 * GIB, None, GIB),  # a laptop
        (64 * GIB, 128 * GIB, GIB, 512 * MIB),  # a limited container
        (0, None, None, 4 * GIB),  # nothing is known
        (100 * MIB, 8 * GIB, None, 48 * MIB),
    ],
)
def test_the_memory_that_is_spare(
    monkeypatch: pytest.MonkeyPatch, shared: int, free: int | None, limit: int | None, taken: int
) -> None:
    offers(monkeypatch, shared=shared, free=free, limit=limit)
    assert quickstart.spare_memory() == taken


@pytest.mark.parametrize(
    ("shared", "free", "limit", "where"),
    [
        (16 * MIB, 8 * GIB, None, "/dev/shm"),
        (GIB, 8 * GIB, 30 * MIB, "control group"),
        (GIB, 40 * MIB, None, "this host"),
    ],
)
def test_too_little_is_an_error_that_says_of_what(
    monkeypatch: pytest.MonkeyPatch, shared: int, free: int, limit: int | None, where: str
) -> None:
    offers(monkeypatch, shared=shared, free=free, limit=limit)
    with pytest.raises(SharedMemoryTooSmallError, match=where):
        quickstart.spare_memory()


def test_a_taken_port_or_lane_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert quickstart.free_port("127.0.0.1", port) == port + quickstart.PORT_STEP
        assert quickstart.free_port("127.0.0.1", port - 1) == port - 1 + quickstart.PORT_STEP


def command_of(page: str, first: str) -> list[str]:
    """The words of the command in a page of docs that begins so, over its indented lines."""
    lines = iter((DOCS / page).read_text().splitlines())
    text = next(line for line in lines if line.strip().startswith(first)).strip()
    while "}'" not in text:
        text = text.removesuffix("\\") + next(lines).strip()
    return shlex.split(text)


@pytest.mark.parametrize(
    ("line", "page", "first"),
    [
        (quickstart.vllm_line(MASTER), "vllm.md", "vllm serve MODEL"),
        (quickstart.sglang_line(MASTER), "engines/sglang.md", "python -m sglang.launch_server"),
    ],
)
def test_the_lines_are_those_of_the_docs(line: str, page: str, first: str) -> None:
    said, documented = shlex.split(line), command_of(page, first)
    assert said[:-1] == documented[:-1]
    assert json.loads(said[-1]) == json.loads(documented[-1])
