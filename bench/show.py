"""Shared by the benchmark's commands: progress bar, exit, files."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore.demo.processes import SIGNALS, ChildError
from kvstore.errors import KVStoreError

out_option = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Folder for a page, its numbers and a picture.",
)  # fmt: skip

redraw_option = click.option(
    "--redraw", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Do not measure: draw page and picture from this JSON file.",
)  # fmt: skip

PAGE_COLUMNS = 150


def output() -> Console:
    """Standard output; if it is not a terminal, wide enough for all tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PAGE_COLUMNS)


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on standard error. Yields a function to call with the current work and the
    number of finished steps.
    Prints lines instead if standard error is not a terminal."""
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


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes every ending signal act like Ctrl-C, so that nothing is left behind."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exit_with(name: str) -> Iterator[None]:
    """Prints an error in one line, then the output of the failed process."""
    try:
        yield
    except (ChildError, KVStoreError) as error:
        what, _, output = str(error).partition("\n")
        if output:
            click.echo(output, err=True)
        click.echo(f"{name}: FAILED: {what}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo(f"{name}: interrupted", err=True)
        sys.exit(128 + signal.SIGINT)


def write_page(out: Path, name: str, page: str, numbers: dict[str, Any]) -> None:
    """Writes ``name.md`` and ``name.json`` into that folder, which is created if necessary."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(page)
    (out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
