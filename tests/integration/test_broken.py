"""Processes in which something dies that they cannot do without: they end, and lose nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.runtime.tasks import EXIT_BROKEN
from tests.support.cluster import entry, unique_name
from tests.support.processes import ROOT, run_python

NODE = """
import sys
from kvstore.node import agent, main
async def beat(self, link, accepted):
    raise MemoryError("no more")
agent.NodeAgent._send_heartbeat = beat
from kvstore.runtime import logs
logs.configure("info")
sys.exit(main.run(main.NodeConfig(master=sys.argv[2], name=sys.argv[1], memory=16 << 20)))
"""


def run(program: str, *arguments: str) -> tuple[int, str]:
    done = run_python("-c", program, *arguments)
    return done.returncode, done.stderr


@pytest.fixture
def memory() -> tuple[str, Path]:
    name = unique_name()
    return name, entry(name)


def test_a_node_whose_beat_dies_ends_and_its_memory_stays(memory: tuple[str, Path]) -> None:
    name, left = memory
    master = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli.master", "--port", "0", "--http-port", "0"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert master.stdout is not None
        port = master.stdout.readline().split()[3].split(":")[1]
        status, errors = run(NODE, name, f"127.0.0.1:{port}")
        assert status == EXIT_BROKEN
        assert "background_task_failed name=beat" in errors
        assert left.exists()
    finally:
        left.unlink(missing_ok=True)
        master.terminate()
        master.communicate(timeout=20)
