"""Reports of a benchmark: JSON, and Markdown, which is printed, too.

The results are a dict, which the JSON file contains: ``machine``, ``load``, and the numbers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore._version import __version__

Found = dict[str, Any]
Advance = Callable[[str, int], None]
"""Takes the current work, and the number of steps finished since the last call."""

GIT_SECONDS: Final = 5.0


def publish(name: str, text: str, found: Found, out: Path | None) -> None:
    """Print a report; with ``out``, a folder, also write it and the JSON there."""
    click.echo(text)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    click.echo(f"Written: {out}/{name}.md, .json")


def table_of(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, whose first two columns and whose last one are no numbers."""
    texts = (0, 1, len(columns) - 1)
    ends = ["---" if at in texts else "---:" for at in range(len(columns))]
    rows = ["| " + " | ".join(cells) + " |" for cells in (columns, *lines)]
    return "\n".join([rows[0], "|" + "|".join(ends) + "|", *rows[1:]])


def microseconds(value: float) -> str:
    """Format as ``12.3 µs``, ``1,234 µs``."""
    return f"{value:,.1f} µs" if value < 100 else f"{value:,.0f} µs"


def verdict(met: bool) -> str:
    return "met" if met else "not met"


def machine(packages: Sequence[str] = ()) -> dict[str, str | int]:
    """Return the machine, the date, and the versions of the given packages, on which the numbers
    depend, without host names and paths."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found: dict[str, str | int] = {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(memory_bytes / (1 << 30)),
        "kernel": re.split(r"[^0-9.]", platform.release(), maxsplit=1)[0],
        "python": platform.python_version(),
        "kvstore": __version__,
    }
    if commit := _commit():
        found["commit"] = commit
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | {"date": dt.datetime.now(dt.UTC).date().isoformat()}


def in_words(found: dict[str, str | int]) -> str:
    known = dict(found)
    date = known.pop("date", None)
    cores, memory = known.pop("cores"), known.pop("memory_gib")
    cpu, kernel = known.pop("cpu"), known.pop("kernel")
    versions = ", ".join(f"{name} {version}" for name, version in known.items())
    when = f", {date}" if date else ""
    return f"{cpu}, {cores} cores, {memory} GiB of memory, Linux {kernel}; {versions}{when}."


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """Return the commit of the running source, if that is a clone; ``-dirty``: other files than
    docs differ."""
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


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Advance]:
    """Show a progress bar on standard error; lines, if that is not a terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def advance(what: str, steps: int) -> None:
            progress.update(task, description=what, advance=steps)
            if not console.is_terminal:
                console.print(what)

        yield advance
