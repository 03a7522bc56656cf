"""Plants faults in a file or folder with cosmic-ray, and lists those that its tests do not detect.

    python -m tests.mutants master/state/leases.py kvstore/memory
    python -m tests.mutants client --jobs 4 --sample 200
    python -m tests.mutants --by-hand            # C, and code that needs an engine

Each process has a copy of the tree, changes one expression in it and runs the tests of that file.
The copies have no compiled modules of the master's state, so the changed sources run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Final

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

from tests.mutants import by_hand

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = {
    "client": "tests/unit/client tests/conformance/test_objects.py",
    "connectors": "tests/unit/connectors",
    "connectors/lmcache": "tests/engines/lmcache",
    "connectors/mooncake": "tests/conformance/test_mooncake_store.py",
    "connectors/sglang": "tests/engines/sglang",
    "connectors/vllm_tier": "tests/e2e/engines/test_tier.py",
    "kvstore/memory": "tests/unit/memory tests/model/test_allocator.py tests/unit/node",
    "kvstore/native": "tests/unit/native/test_native.py",
    "kvstore/transport": "tests/unit/transport tests/conformance/test_transports.py",
    "master": "tests/unit/master",
    "master/state/allocator.py": "tests/model/test_allocator.py tests/unit/master",
    "master/state/forest.py": "tests/model/test_forest.py tests/unit/master",
}
"""By file or folder; the longest name that fits counts. Others: ``tests/unit/NAME``."""
LEFT_OUT: Final = (".venv*", ".git", "build", "dist", "__pycache__", ".*_cache", "*__mypyc*")
SKIPPED: Final = (
    "core/(NumberReplacer|ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul)"
    "|ReplaceComparisonOperator_(?!Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt)"
    ")"
)
"""Operators that change little (a number by one), or one place in many ways."""
TEST_S: Final = 300.0


def main() -> int:
    options = parse()
    if options.by_hand:
        return by_hand.run()
    modules = [path for given in options.paths for path in sources(Path(given))]
    if not modules:
        sys.exit("mutants: name a file or folder, as master/state/leases.py")
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        return run(modules, options, Path(directory))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.mutants")
    parser.add_argument("paths", nargs="*", help="files or folders of sources")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at once")
    parser.add_argument("--sample", type=int, default=0, help="this many faults at random; 0: all")
    parser.add_argument("--by-hand", action="store_true", help="the faults of by_hand.py")
    return parser.parse_args()


def sources(given: Path) -> list[str]:
    """The Python files below a path of the repository, without links."""
    path = (ROOT / given).resolve()
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [each.relative_to(ROOT).as_posix() for each in found if "_pb2" not in each.name]


def tests_of(module: str) -> str:
    fitting = [name for name in TESTS if module == name or module.startswith(f"{name}/")]
    if fitting:
        return TESTS[max(fitting, key=len)]
    name = module.split("/")[1].removesuffix(".py")
    folder = f"tests/unit/{name}"
    return folder if (ROOT / folder).is_dir() else f"tests/unit/test_{name}.py"


def python_for(tests: str) -> Path:
    """The interpreter of the environment that the tests need."""
    engine = tests.split("/")[2] if tests.startswith("tests/engines/") else ""
    return ROOT / f".venv-{engine}/bin/python" if engine else Path(sys.executable)


def specs(modules: Sequence[str], directory: Path, sample: int) -> list[MutationSpec]:
    """The faults to plant, each with the name of its file."""
    with use_db(directory / "session", WorkDB.Mode.create) as database:
        init(map(Path, modules), database, {})
        found = [spec for item in database.work_items for spec in item.mutations]
    found = [spec for spec in found if not re.match(SKIPPED, spec.operator_name)]
    if sample:
        found = random.Random(0).sample(found, min(sample, len(found)))
    return found


def enter(trees: SimpleQueue[Path]) -> None:
    """Makes a process work in a copy of its own."""
    tree = trees.get()
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def plant(spec: MutationSpec) -> tuple[bool, str]:
    """Whether the tests detect the fault, and the fault."""
    tests = tests_of(spec.module_path.as_posix())
    command = f"{python_for(tests)} -m pytest -x -q -p no:cacheprovider {tests}"
    result = mutate_and_test([spec], command, TEST_S)
    return result.is_killed, result.diff or result.output or ""


def run(modules: list[str], options: argparse.Namespace, directory: Path) -> int:
    """Prints the faults that survive; returns the exit status."""
    trees: SimpleQueue[Path] = multiprocessing.SimpleQueue()
    for tree in (directory / str(number) for number in range(options.jobs)):
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        trees.put(tree)
    for tests in sorted({tests_of(module) for module in modules}):
        print(f"mutants: without a fault: {tests}", flush=True)
        command = f"{python_for(tests)} -m pytest -q -p no:cacheprovider {tests}".split()
        environ = os.environ | {"PYTHONPATH": str(directory / "0")}
        if subprocess.run(command, cwd=directory / "0", env=environ, check=False).returncode:
            sys.exit("mutants: error: tests fail where nothing was planted")
    faults = specs(modules, directory, options.sample)
    survivors = 0
    with ProcessPoolExecutor(options.jobs, initializer=enter, initargs=(trees,)) as pool:
        for number, (is_killed, diff) in enumerate(pool.map(plant, faults), 1):
            end = "killed" if is_killed else "survives"
            print(f"mutants: {number} of {len(faults)}: {end}", flush=True)
            if not is_killed:
                survivors += 1
                print(diff, flush=True)
    print(f"mutants: {len(faults)} planted, {len(faults) - survivors} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
