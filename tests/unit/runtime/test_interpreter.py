"""The path and the flags of Python processes that we start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.runtime import interpreter
from tests.support.processes import ROOT

CHILD = """
import json, sys, click
flags = sys.flags
print(json.dumps([click.__file__, sys.path, flags.optimize, sys.warnoptions, flags.no_user_site]))
"""
PARENT = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from kvstore.runtime import interpreter
done = subprocess.run(
    interpreter.command("-c", {CHILD!r}), env=interpreter.environment(), stdout=subprocess.PIPE
)
sys.stdout.buffer.write(done.stdout)
"""


def child_of(folder: Path, *flags: str, program: str = "-c", **environ: str) -> list[object]:
    """What a child says whose parent runs in ``folder``, with a ``click.py`` there."""
    (folder / "click.py").write_text("raise SystemExit('executed')\n")
    done = subprocess.run(
        [sys.executable, *flags, *((program, PARENT) if program == "-c" else (program,))],
        cwd=folder, capture_output=True, text=True, timeout=60, check=True,
        env=os.environ | environ,
    )  # fmt: skip
    said: list[object] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("flags", [(), ("-P",), ("-I",), ("-E", "-s"), ("-O",), ("-Werror",)])
def test_a_child_imports_nothing_from_the_working_folder(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    click, path, *_ = child_of(tmp_path, *flags)
    assert str(click).endswith("click/__init__.py")
    assert isinstance(path, list)
    assert str(ROOT) in path
    assert str(tmp_path) not in path
    assert "" not in path


def test_a_path_that_the_user_gave_is_handed_over(tmp_path: Path) -> None:
    folder, given = tmp_path / "folder", tmp_path / "given"
    folder.mkdir()
    given.mkdir()
    _, path, *_ = child_of(folder, PYTHONPATH=str(given))
    assert isinstance(path, list)
    assert path.index(str(ROOT)) < path.index(str(given)), "in our order"


def test_kvstore_itself_may_be_in_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(interpreter.HOME)
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert interpreter.path().split(os.pathsep) == [interpreter.HOME, "/elsewhere"]
