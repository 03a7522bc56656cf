"""Faults in C, which no tool plants: each is a text that occurs once, and its replacement."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
NATIVE: Final = Path("kvstore/native")
LIBRARY: Final = NATIVE / f"fast{sysconfig.get_config_var('EXT_SUFFIX')}"


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str = "tests/unit/native/test_native.py tests/conformance/test_transports.py"


FAULTS: Final = (
    Fault("the-checksum-of-a-header-is-ignored", "rows.h",
          "batch->seed ^ row->offset) != load64(head + 8))", "batch->seed ^ row->offset) == 0)"),
    Fault("another-key-is-read", "rows.h",
          "        memcmp(head + FIXED_BYTES + name, row->key, key) ||\n", ""),
    Fault("another-version-is-read", "rows.h", "load64(head + 48) != row->counter)", "0)"),
    Fault("another-generation-is-read", "rows.h", "!= batch->generation)",
          "== ~batch->generation)"),
    Fault("the-deadline-is-ignored", "rows.h",
          "return now_ns() >= batch->deadline_ns ? LATE : DONE;", "return DONE;"),
    Fault("a-payload-is-not-verified", "rows.h",
          "if (!ended && batch->verify && xxh3_end(&state) != checksum)", "if (0)"),
    Fault("a-payload-of-tcp-is-not-verified", "tcp.h",
          "row->status == WHOLE && xxh3_end(&state) != row->checksum)", "0)",
          "tests/conformance/test_objects.py tests/unit/transport"),
    Fault("a-copy-is-not-scrambled", "checksum.h",
          "XXH3_scrambleAcc_##isa(acc, XXH3_kSecret + hash->secretLimit);", ""),
    Fault("the-last-stripe-of-a-copy-is-lost", "checksum.h",
          "(state->streams ? from : to) - XXH_STRIPE_LEN", "(state->streams ? from : to)"),
    Fault("a-capability-covers-the-header-alone", "capability.h",
          ".length = HEADER_BYTES + size,", ".length = HEADER_BYTES,",
          "tests/unit/native/test_capabilities.py"),
)  # fmt: skip


def run() -> int:
    """Plants each fault; returns the exit status."""
    survivors = []
    for fault in FAULTS:
        source = (ROOT / NATIVE / fault.file).read_text()
        if source.count(fault.old) != 1:
            sys.exit(f"mutants: {fault.name}: its text occurs {source.count(fault.old)} times")
        with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
            is_killed = plant(fault, Path(directory) / "tree")
        print(f"mutants: {fault.name}: {'killed' if is_killed else 'survives'}", flush=True)
        survivors += [] if is_killed else [fault.name]
    return 1 if survivors else 0


def plant(fault: Fault, tree: Path) -> bool:
    """Whether the tests detect the fault in a copy of the repository."""
    ignored = shutil.ignore_patterns(".venv*", ".git", "build", "dist", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    path = tree / NATIVE / fault.file
    path.write_text(path.read_text().replace(fault.old, fault.new))
    include = sysconfig.get_paths()["include"]
    compiler = [
        "cc",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{include}",
        f"{NATIVE}/_native.c",
        "-o",
        str(LIBRARY),
    ]
    subprocess.run(compiler, cwd=tree, check=True)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    tests = subprocess.run(
        [*command, *fault.tests.split()], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return tests.returncode != 0
