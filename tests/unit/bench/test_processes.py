"""How the demo ends what it has started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvstore.bench import processes
from kvstore.bench.processes import _stop, free_port
from tests.support.processes import free_port as free_port_of_tests

LEAVES_A_CHILD = "trap '' TERM; sleep 60 & echo $!"
"""A child that ignores SIGTERM, as its parent did, which ends at once."""


def test_nothing_of_a_group_is_there_when_it_was_stopped() -> None:
    process = subprocess.Popen(
        ["sh", "-c", LEAVES_A_CHILD], stdout=subprocess.PIPE, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        child = Path("/proc", process.stdout.readline().decode().strip())
        assert child.exists()
        _stop(process, 5)
        assert not child.exists() or "zombie" in (child / "status").read_text()


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers that start at once would both listen on it, or one would find it taken."""
    ports = {free_port_of_tests() for _ in range(5)}
    assert len(ports) == 5
    free = min(ports)
    monkeypatch.setattr(processes, "PORTS", range(free, free + 2, 2))
    assert free_port() == free
    with pytest.raises(OSError, match="is free"):
        free_port()
