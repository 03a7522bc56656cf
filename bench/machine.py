"""The machine and the versions that the numbers depend on, without host names and paths."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvstore._version import __version__

MEMORY_UNIT = 1 << 30
GIT_SECONDS = 5.0


def machine(packages: Sequence[str]) -> dict[str, str | int]:
    """The machine, and the installed versions of the given packages."""
    found: dict[str, str | int] = {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(_memory_bytes() / MEMORY_UNIT),
        "kernel": re.split(r"[^0-9.]", platform.release(), maxsplit=1)[0],
        "python": platform.python_version(),
        "kvstore": __version__,
    }
    if commit := _commit():
        found["commit"] = commit
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def today() -> str:
    """ISO date, UTC."""
    return dt.datetime.now(dt.UTC).date().isoformat()


def in_words(found: dict[str, str | int]) -> str:
    """The result of ``machine`` as one sentence."""
    known = dict(found)
    date = known.pop("date", None)
    cores, memory = known.pop("cores"), known.pop("memory_gib")
    cpu, kernel = known.pop("cpu"), known.pop("kernel")
    versions = ", ".join(f"{name} {version}" for name, version in known.items())
    when = f", {date}" if date else ""
    return f"{cpu}, {cores} cores, {memory} GiB of memory, Linux {kernel}; {versions}{when}."


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _commit() -> str:
    """The commit of the running source, if that is a clone; ``-dirty``: more than docs differs."""
    commit = _git("describe", "--always")
    differs = _git("status", "--porcelain", "--", ":(top)", ":(top,exclude)docs")
    return f"{commit}-dirty" if commit and differs else commit


def _git(*arguments: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        said = subprocess.run(git, capture_output=True, text=True, check=False, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
