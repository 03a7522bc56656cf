"""The state compiled by mypyc: that it runs where it should, and does the same as its sources."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.master import state
from kvstore.native import compiled

ROOT = Path(__file__).parents[3]
FOLDER = state.__path__[0]
PROGRAM = "import kvstore.master.state.memory_pool as module; print(module.__file__)"


def runs(**variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    return Path(done.stdout.strip()).suffix


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    if not compiled.library(FOLDER).exists():
        why = f"the sources in {FOLDER} have changed since they were compiled: pip install -e ."
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)


EAGER = {
    "all", "any", "sum", "next", "tuple", "list", "set", "dict", "min", "max", "sorted",
    "join", "update", "extend", "fromkeys",
}  # fmt: skip
"""What is handed a generator expression and takes all of it, or for what mypyc makes a loop."""


def test_no_generator_expression_is_meant_to_be_taken_in_part() -> None:
    """mypyc makes a list of it: ``islice`` of one over a table took 3 s with 10 million objects."""
    lazy = []
    for path in sorted(Path(FOLDER).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            children: set[Any]
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                children = set(node.args) if name not in EAGER else set()
            else:
                children = set(ast.iter_child_nodes(node))
            lazy += [
                f"{path.name}:{child.lineno}: {ast.unparse(child)}"
                for child in children
                if isinstance(child, ast.GeneratorExp)
            ]
    assert not lazy, "write a list or a generator function"


@pytest.mark.usefixtures("built")
def test_what_is_compiled_runs_unless_it_is_not_wanted() -> None:
    assert runs() == ".so"
    assert runs(KVSTORE_NATIVE="0") == ".py"


def test_what_was_compiled_of_other_sources_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, chosen = str(tmp_path), sys.path_importer_cache
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "module.py").write_text("NUMBER = 1\n")
    assert compiled.modules(folder) == [tmp_path / "module.py"]
    compiled.library(folder).touch()
    compiled.select_compiled_or_source(folder)
    assert folder not in chosen
    (tmp_path / "module.py").write_text("NUMBER = 2\n")
    compiled.select_compiled_or_source(folder)
    assert chosen.pop(folder) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("built")
@pytest.mark.skipif("STATE_COMPILED" in os.environ, reason="this is what it runs")
@pytest.mark.timeout(400)
def test_all_that_is_tested_of_the_sources_holds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "tests/unit/master", "tests/model"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=390,
        check=False,
        cwd=ROOT,
        env={**os.environ, "STATE_COMPILED": "1"},
    )
    assert done.returncode == 0, done.stdout[-4_000:]
