"""Plants small faults and says which of them the tests do not notice.

    python -m tests.mutants                    # all; a release's worth of patience
    python -m tests.mutants -k lease --jobs 2
    python -m tests.mutants --list             # what there is, and whether each still applies

Each fault goes into a copy of the tree, and the tests that the table names for it run there. Tests
that fail, or do not end in time, have killed it. One that survives is a test that is missing, or a
fault that makes no difference: then it leaves the table. Before all, the same tests must pass where
nothing was planted. A fault whose tests need what is not installed, or an engine's environment
that is not there, is left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

ROOT: Final = Path(__file__).parents[2]
NO_TEST: Final = "no test was collected"
LEFT_OUT: Final = shutil.ignore_patterns(
    ".venv*", ".git", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
HAS_VLLM: Final = importlib.util.find_spec("vllm") is not None
NEED_VLLM: Final = ("tests/unit/connectors", "tests/e2e/engines")
FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "vllm.v1.core.sched.scheduler"])
FORKED: Final = (
    "--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning",
    "-W", "ignore::ResourceWarning",
)  # fmt: skip
"""Options of a fork's: what was imported before it is not rewritten, and its files stay open."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    words = options.k.split(",")
    chosen = [each for each in MUTANTS if any(w in each.name or w in each.file for w in words)]
    broken = [f"{each.name}: {why}" for each in chosen if (why := misfit(each))]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:45} {mutant.file}")
    for line in broken:
        print(f"mutants: error: {line}", file=sys.stderr)
    if broken or options.list:
        return 2 if broken else 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        return Run(options, Path(directory)).run(chosen)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
    parser.add_argument(
        "-k", default="", help="only those whose name or file contains one of these words (a,b,c)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="so many at once")
    parser.add_argument("--seconds", type=float, default=600, help="for the tests of one")
    parser.add_argument("--trust", action="store_true", help="do not test the tree as it is first")
    return parser.parse_args(arguments)


def misfit(mutant: Mutant) -> str:
    """Why it cannot be planted; empty: it can."""
    path = ROOT / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    times = path.read_text().count(mutant.old)
    if times != 1:
        return f"its text occurs {times} times in {mutant.file}: change its entry in table.py"
    missing = [test for test in mutant.tests if not exists(test)]
    return f"there are no tests {missing}" if missing else ""


def exists(test: str) -> bool:
    """A name that no test has would be an error of pytest's, and count as a kill."""
    place, *names = test.split("::")
    path = ROOT / place
    return path.exists() and (not names or f"def {names[-1]}(" in path.read_text())


def interpreter(engine: str) -> Path | None:
    """What runs the tests of faults of this engine; None: its environment is not ready."""
    environment = ROOT / f".venv-{engine}"
    if not engine:
        return Path(sys.executable)
    return environment / "bin/python" if (environment / ".ready").exists() else None


class Run:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._lock = threading.Lock()
        self._done = 0

    def run(self, mutants: Sequence[Mutant]) -> int:
        """The exit status: 1 if any survived."""
        if not self._options.trust:
            for kind in sorted({(mutant.engine, mutant.native) for mutant in mutants}):
                its = [each.tests for each in mutants if (each.engine, each.native) == kind]
                tests = tuple(dict.fromkeys(test for each in its for test in each))
                print(f"mutants: the tree as it is: {' '.join(tests)}", flush=True)
                failed = self._tests(self._copy("as-it-is"), tests, *kind)
                if failed not in (None, NO_TEST):
                    print(f"mutants: error: tests fail where nothing was planted:\n{failed}")
                    return 2
        with ThreadPoolExecutor(self._options.jobs) as pool:
            ends = list(pool.map(lambda each: self._try(each, len(mutants)), mutants))
        count = {end: ends.count(end) for end in ("killed", "survives", "left out")}
        print(
            f"mutants: {len(mutants) - count['left out']} planted, {count['killed']} killed, "
            f"{count['left out']} left out"
        )
        for mutant, end in zip(mutants, ends, strict=True):
            if end != "killed":
                print(f"mutants: {end}: {mutant.name} ({mutant.file})")
        return 1 if count["survives"] else 0

    def _try(self, mutant: Mutant, of: int) -> str:
        started = time.monotonic()
        tree = self._copy(mutant.name)
        path = tree / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        failed = self._tests(tree, mutant.tests, mutant.engine, mutant.native)
        shutil.rmtree(tree)
        by = ""
        if failed is None:
            end = "survives"
        elif failed == NO_TEST:
            end = "left out"
        else:
            end, by = "killed", f" by {failed.splitlines()[0][:90]}"
        with self._lock:
            self._done += 1
            seconds = time.monotonic() - started
            print(f"mutants: {self._done:3} of {of}  {mutant.name:42} {seconds:4.0f} s  {end}{by}",
                  flush=True)  # fmt: skip
        return end

    def _copy(self, name: str) -> Path:
        tree = self._directory / name
        if not tree.exists():
            shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        return tree

    def _tests(self, tree: Path, tests: Sequence[str], engine: str, native: bool) -> str | None:
        """None: they pass. Else which one failed, and the end of what was printed; or NO_TEST."""
        python = interpreter(engine)
        if python is None:
            return NO_TEST
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header",
                     "-rfE", *tests]  # fmt: skip
        environ = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        if not native:
            environ["KVSTORE_NATIVE"] = "0"
        is_slow = HAS_VLLM and not engine and all(test.startswith(NEED_VLLM) for test in tests)
        started = self._fork if is_slow else self._start
        try:
            status, output = started(python, tree, arguments, environ)
        except subprocess.TimeoutExpired:
            return f"the clock: {self._options.seconds:.0f} s"
        if status == pytest.ExitCode.OK:
            return None
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            return NO_TEST
        lines = output.splitlines()
        first = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or ["a crash"]
        return "\n".join([*first, *lines[-30:]])

    def _start(
        self, python: Path, tree: Path, arguments: list[str], environ: dict[str, str]
    ) -> tuple[int, str]:
        """Pytest's exit status, and what it has printed."""
        done = subprocess.run(
            [str(python), "-m", "pytest", *arguments], cwd=tree, env=os.environ | environ,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=self._options.seconds, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def _fork(
        self, _: Path, tree: Path, arguments: list[str], environ: dict[str, str]
    ) -> tuple[int, str]:
        """The same, in a fork of a process that has imported vLLM."""
        output = tree.with_suffix(".out")
        process = FORKS.Process(target=forked, args=(tree, output, arguments, environ))
        process.start()
        process.join(self._options.seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired("pytest", self._options.seconds)
        return process.exitcode, output.read_text(errors="replace")


def forked(tree: Path, output: Path, arguments: list[str], environ: dict[str, str]) -> None:
    """What a fork does: as if Python had been started in the tree."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(tree)
    os.environ.update(environ)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    for name in [each for each in sys.modules if each.split(".")[0] in ("kvstore", "tests")]:
        del sys.modules[name]  # of the tree that is not the copy; so are the finders of that
    sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in str(each)]
    sys.exit(pytest.main([*FORKED, *arguments]))
