"""How the demo ends what it has started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvstore.demo.processes import _stop

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
