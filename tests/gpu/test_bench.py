"""The benchmark and the command for a whole machine: that they work, not what they measure."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench.gpu import PATHS, SHAPES, cells_of, row_of, sentences, shapes, slowdown
from tests.gpu.bench_on_a_fake import NOTE
from tests.gpu.machine import IS_REAL
from tests.support.processes import ROOT, run_python


def test_every_row_is_measured_and_written(tmp_path: Path) -> None:
    module = "bench.gpu" if IS_REAL else "tests.gpu.bench_on_a_fake"
    done = run_python("-m", module, "--quick", "--out", str(tmp_path), within_s=170)
    assert done.returncode == 0, done.stderr
    assert (NOTE in done.stdout) == (not IS_REAL)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [(row["way"], row["path"], row["page_bytes"]) for row in found["rows"]] == [
        (way, path, shape.page)
        for path in PATHS
        for shape in shapes(path)
        for way in ("save", "load")
    ]
    assert all(each["saved_blocks"] > 0 for each in found["engine"].values())
    assert len(found["engine"]) == 2
    assert (tmp_path / "gpu.md").read_text().count("\n| save |") == len(found["rows"]) / 2


def test_a_row_meets_its_goal_by_the_median_of_its_rounds() -> None:
    def cells(path: str, plain_ms: list[float]) -> tuple[str, ...]:
        return cells_of(row_of("save", path, SHAPES[0], 100, [10.0, 10.0, 10.0], plain_ms))

    assert cells("shm", [9.5, 2.0, 9.0])[5:] == ("0.90", "0.20 to 0.95", "0.9", "met")
    assert cells("shm", [8.9, 2.0, 9.0])[-1] == "not met"
    assert cells("tcp", [8.9, 2.0, 9.0])[-2:] == ("", "")


def test_the_slowdown_is_of_a_round() -> None:
    engine = {"alone_ms": [100, 200], "beside_ms": [102, 206], "saved_blocks": 5}
    found = {
        "rounds": 2, "note": "", "engine": {"shm": engine}, "describe_ms": [1], "call_ms": [2],
        "page_locked_mib": {"shm": 64},
    }  # fmt: skip
    assert slowdown(engine) == pytest.approx(0.025)
    assert "+2.5%" in sentences(found)[0]
    assert "3%: met" in sentences(found)[0]


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
