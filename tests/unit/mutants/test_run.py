"""The command that plants faults: entries that do not fit, that survive, that are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of one line, and its test."""
    (tmp_path / "program.py").write_text("def larger(a, b):\n    return a if a > b else b\n")
    (tmp_path / "test_program.py").write_text(
        "from program import larger\n\ndef test_larger():\n    assert larger(1, 2) == 2\n"
    )
    monkeypatch.setattr(run, "ROOT", tmp_path)
    return tmp_path


def test_every_fault_can_be_planted() -> None:
    assert [f"{mutant.name}: {why}" for mutant in MUTANTS if (why := run.misfit(mutant))] == []


def planted(old: str, new: str) -> Mutant:
    return Mutant("fault", "program.py", old, new, ("test_program.py",))


def main(monkeypatch: pytest.MonkeyPatch, mutant: Mutant, *arguments: str) -> int:
    monkeypatch.setattr(run, "MUTANTS", (mutant,))
    return run.main(["--trust", *arguments])


def test_a_fault_that_tests_notice_is_killed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, planted("a > b", "a < b")) == 0
    assert "killed by FAILED test_program.py::test_larger" in capsys.readouterr().out
    assert "a > b" in (tree / "program.py").read_text()


def test_a_fault_that_no_test_notices_survives(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, planted("a > b", "a >= b")) == 1
    assert "survives: fault (program.py)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fault_whose_tests_are_not_collected_is_left_out(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "test_program.py").write_text("")
    assert main(monkeypatch, planted("a > b", "a < b")) == 0
    out = capsys.readouterr().out
    assert "0 planted, 0 killed, 1 left out" in out
    assert "left out: fault (program.py)" in out
    monkeypatch.setattr(run, "MUTANTS", (planted("a > b", "a < b"),))
    assert run.main([]) == 0


def test_a_test_that_is_not_there_kills_nothing(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for test, status in (("test_larger", 0), ("test_large", 2)):
        fault = planted("a > b", "a < b")._replace(tests=(f"test_program.py::{test}",))
        assert main(monkeypatch, fault) == status
    assert "there are no tests ['test_program.py::test_large']" in capsys.readouterr().err


def test_a_fault_of_an_engine_is_tested_in_its_environment(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = planted("a > b", "a < b")._replace(engine="some")
    assert main(monkeypatch, fault) == 0
    assert "left out: fault (program.py)" in capsys.readouterr().out, "there is none yet"
    environment = tree / ".venv-some"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin/python"
    python.write_text(f'#!/bin/sh\ntouch {tree}/used\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (environment / ".ready").touch()
    assert main(monkeypatch, fault) == 0
    assert "killed by FAILED test_program.py::test_larger" in capsys.readouterr().out
    assert (tree / "used").exists()


def test_a_fork_tests_the_copy_and_not_what_was_imported_before(tree: Path) -> None:
    (tree / "kvstore").mkdir()
    (tree / "kvstore/__init__.py").write_text("IS_COPY = True\n")
    (tree / "test_copy.py").write_text(
        "import kvstore\n\ndef test_copy():\n    assert kvstore.IS_COPY\n"
    )
    script = (
        "import kvstore.errors, pathlib, sys; from tests.mutants.run import forked;"
        "tree = pathlib.Path(sys.argv[1]);"
        "forked(tree, tree / 'out', ['-q', 'test_copy.py'], {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tree)], cwd=Path(__file__).parents[3], check=False
    )
    assert done.returncode == 0, (tree / "out").read_text()


@pytest.mark.parametrize("text", ["a == b", "a"])
def test_a_text_that_does_not_occur_once_is_an_error(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert main(monkeypatch, planted(text, "x")) == 2
    assert f"its text occurs {0 if text == 'a == b' else 4} times" in capsys.readouterr().err
    assert main(monkeypatch, planted(text, "x"), "--list") == 2


def test_tests_that_fail_anyway_are_no_proof(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "test_program.py").write_text("def test_larger():\n    assert False\n")
    monkeypatch.setattr(run, "MUTANTS", (planted("a > b", "a < b"),))
    assert run.main([]) == 2
    assert "tests fail where nothing was planted" in capsys.readouterr().out


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
