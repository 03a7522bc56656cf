"""The command for a machine with a GPU: what it does with its steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes import ROOT


@pytest.fixture
def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_all", ROOT / "tests/gpu/all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_that_hangs_is_ended_and_one_that_fails_is_said_to(
    command: ModuleType, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    python = [sys.executable, "-c"]

    def run(*code: str, seconds: float = 60.0) -> object:
        return command.run(
            command.Step("step", 1, [[*python, each] for each in code]), seconds, log
        )

    assert run("print('one')", "print('two')") == "passed"
    assert run("raise SystemExit(3)", "print('three')") == "failed with status 3"
    assert run("import time; time.sleep(600)", "print('three')", seconds=2.0) == "not within 2 s"
    said = log.read_text().splitlines()
    assert "one" in said
    assert "two" in said
    assert "three" not in said
    assert "KeyboardInterrupt" in said
