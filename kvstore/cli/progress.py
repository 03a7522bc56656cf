"""A progress bar on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click


@contextlib.contextmanager
def progress(what: str, *, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the progress and the total."""
    if not wanted or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with click.progressbar(length=1, label=what, file=sys.stderr) as bar:

        def report(done: int, total: int) -> None:
            bar.length = total
            bar.update(min(done, total) - bar.pos)

        yield report
