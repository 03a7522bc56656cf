"""Everything that wants a GPU, by one command on a bare machine: ``make gpu``.

    python3 tests/gpu/all.py [--fake] [--wheels FOLDER] [--minutes 8] [--only STEP,...]

Makes an environment in ``build/gpu`` that also sees the packages of the interpreter that runs
this file, such as its torch, and installs kvstore there from the checkout, with the steps in C.
Then runs every step with a time limit of its own, goes on after a failure, and ends with a summary.
The output of all steps goes to ``gpu.log`` in ``$OUT``, or ``gpu-logs``, and the numbers to JSON
files beside it. The exit status is 0 if every step that could run has passed.

It imports nothing but the standard library, and needs no network if ``--wheels`` names a folder
with the packages that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build/gpu"
PYTHON = str(ENVIRONMENT / "bin/python")
OUT = Path(os.environ.get("OUT") or ROOT / "gpu-logs").resolve()
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
END_SECONDS = 5.0
"""A step has so long to end once its time is over."""


class Step(NamedTuple):
    name: str
    seconds: float
    """Its limit."""
    commands: list[list[str]]
    needs: str = ""
    """A module; where it cannot be imported the step is left out."""
    must: bool = False
    """The steps after it need it."""


def steps(wheels: str) -> list[Step]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", PYTHON,
           "install", "--quiet"]  # fmt: skip
    found = ["--no-index", "--find-links", wheels] if wheels else []
    return [
        Step("machine", 20, [["sh", "-c", _MACHINE]]),
        Step(
            "install", 200,
            [
                [sys.executable, "-m", "venv", "--without-pip", str(ENVIRONMENT)],
                [PYTHON, "-c", _SEE_THE_OTHERS, *_folders()],
                [*pip, *found, "setuptools>=77", *TESTS],
                # mypyc compiles the master's state; where it is missing the state runs as it is.
                ["sh", "-c", '"$@" || true', "sh", *pip, *found, "mypy>=1.19"],
                [*pip, *found, "--no-build-isolation", "--editable", "."],
            ],
            must=True,
        ),
        Step("compiled", 20, [[PYTHON, "-c", _IS_COMPILED]]),
        Step(
            "test-gpu", 210,
            [[PYTHON, "-m", "pytest", "tests/gpu", "-W", "default", "-q", "--timeout", "100",
              "--durations", "15", "-p", "no:cacheprovider"]],
        ),
        Step("demo", 60, [[PYTHON, "-m", "examples.demo", "--no-stay"]], needs="transformers"),
        Step("bench", 150, [[PYTHON, "-m", "bench", "--quick", "--out", str(OUT)]],
             needs="mooncake.engine"),
    ]  # fmt: skip


_MACHINE = "nvidia-smi; uname -r; nproc; free -m; df -m /dev/shm; ulimit -l; true"

_SEE_THE_OTHERS = """
import pathlib, sys, sysconfig
lines = [f"import site; site.addsitedir({folder!r})" for folder in sys.argv[1:]]
path = pathlib.Path(sysconfig.get_path("purelib"), "others.pth")
path.write_text("\\n".join(lines) + "\\n")
"""

_IS_COMPILED = """
from kvstore.console.diagnostics.software import installation
bad = [row for row in installation() if row.state != "ok"]
print(*(bad or ["steps in C and the master's state are compiled"]), sep="\\n")
raise SystemExit(bool(bad))
"""


def _folders() -> list[str]:
    """Where the packages of this interpreter are."""
    return [folder for folder in dict.fromkeys(sys.path) if folder.endswith("-packages")]


def run(step: Step, seconds: float, log: Path) -> str:
    """Carries out a step; "passed", or how it ended otherwise."""
    end = time.monotonic() + seconds
    for command in step.commands:
        with log.open("a") as file:
            file.write(f"\n=== {step.name}: {' '.join(command)[:200]}\n")
            file.flush()
            try:
                process = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True, env=_variables(),
                )  # fmt: skip
            except OSError as error:
                return f"failed: {error}"
            try:
                status = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
                return f"not within {seconds:.0f} s"
        if status:
            return f"failed with status {status}"
    return "passed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group: by Ctrl-C, so that it says where it was, then by force."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_real: dict[str, str] = {}


def _variables() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"} | _real


def is_there(module: str) -> bool:
    """Whether the new environment has a module, and the libraries that it loads."""
    command = [PYTHON, "-c", f"import {module}"]
    return not subprocess.run(
        command, check=False, timeout=60, stderr=subprocess.DEVNULL, env=_variables()
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fake", action="store_true", help="without a GPU: test this command")
    parser.add_argument("--wheels", default="", help="a folder of packages, instead of an index")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parser.add_argument("--only", default="", help="steps, besides machine and install")
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    if importlib.util.find_spec("torch") is None:
        print(f"torch is missing in {sys.executable}: name an interpreter that has it"
              " (make gpu PYTHON=...)")  # fmt: skip
        return 1
    if not asked.fake:
        _real["TEST_GPU"] = "1"
    OUT.mkdir(parents=True, exist_ok=True)
    log = OUT / "gpu.log"
    log.write_text("")
    summary: list[str] = []
    outcomes: list[str] = []
    for step in steps(str(Path(asked.wheels).resolve()) if asked.wheels else ""):
        wanted = asked.only.split(",") if asked.only else []
        if wanted and step.name not in (*wanted, "machine", "install"):
            continue
        begun = time.monotonic()
        left = end - begun
        if left < END_SECONDS:
            outcome = "left out: no time is left"
        elif step.needs and not is_there(step.needs):
            outcome = f"left out: {step.needs} cannot be imported"
        else:
            print(f"{step.name} ...", flush=True)
            outcome = run(step, min(step.seconds, left - END_SECONDS), log)
        outcomes.append(outcome)
        summary.append(f"{step.name:14} {time.monotonic() - begun:6.0f} s  {outcome}")
        print(summary[-1], flush=True)
        if step.must and outcome != "passed":
            break
    text = log.read_text(errors="replace")
    print("\n".join(_heart(text)))
    report = "\n".join([*summary, "", f"All output: {log}"])
    (OUT / "summary.txt").write_text(report + "\n")
    print(report)
    return int(not all(each == "passed" or each.startswith("left out") for each in outcomes))


def _heart(text: str) -> list[str]:
    """The lines of the log that a reader wants first: failures, and the tables."""
    marks = ("FAILED", "ERROR", " passed", " failed", "demo:", "goals are met")
    return [line for line in text.splitlines() if any(mark in line for mark in marks)][:120]


if __name__ == "__main__":
    sys.exit(main())
