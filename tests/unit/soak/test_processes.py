"""The clock of the soak's servers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.soak.nemesis import set_clock
from tests.soak.processes import clock_reason, faked
from tests.support.programs import skip

SLEEPS = """
import subprocess, time
began = time.monotonic()
time.sleep(0.05)
subprocess.run(["sleep", "0.05"], timeout=30)
print(time.time(), time.monotonic() - began)
"""


@pytest.mark.parametrize("by_s", [0, 3_600, -3_600])
def test_a_process_whose_clock_is_off_sleeps_as_ever(tmp_path: Path, by_s: int) -> None:
    if reason := clock_reason():
        skip(reason)
    clock = tmp_path / "clock"
    set_clock(clock, by_s)
    command = [sys.executable, "-c", SLEEPS]
    done = subprocess.run(command, env=faked(clock), capture_output=True, text=True, check=True)
    now, slept_s = map(float, done.stdout.split())
    assert abs(now - time.time() - by_s) < 60
    assert 0.1 <= slept_s < 30
