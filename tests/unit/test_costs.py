"""A case that costs too much and is not marked slow fails where continuous integration runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = """
import time
import pytest

def spends(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def test_cheap(): pass

def test_unsteady(): spends(0.12)

def test_dear(): spends(0.5)

@pytest.mark.slow
def test_slow(): spends(0.3)
"""

PROGRAM = (
    "import sys, pytest; from tests.support import costs;"
    "costs.QUICK_S = 0.1; costs.slowness = lambda: float(sys.argv[1]);"
    "sys.exit(pytest.main(sys.argv[2:], plugins=[costs.Costs(strict=True)]))"
)


@pytest.mark.parametrize(("slowness", "failed"), [(1, {"test_dear"}), (9, set())])
def test_a_dear_case_fails_in_ci(tmp_path: Path, slowness: int, failed: set[str]) -> None:
    (tmp_path / "test_some.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n")
    arguments = [str(slowness), "-p", "no:cacheprovider", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True, text=True, check=False, cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    said = [line.split("::")[1].split()[0] for line in done.stdout.splitlines() if "FAILED" in line]
    assert set(said) == failed, done.stdout
    assert "s of processor time in all" in done.stdout
