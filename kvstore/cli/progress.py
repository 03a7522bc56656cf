"""Progress bars on stderr, if that is a terminal. Only then is rich imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class ByteProgress:
    """Progress bars, one after the other, each of which counts bytes."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def step(self, what: str, size: int | None) -> None:
        """Begins the next bar, of ``size`` bytes; None: the size is unknown."""
        if self._progress is None:
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=size)

    def reach(self, done: int, size: int) -> None:
        """Sets the bar to ``done`` of ``size`` bytes."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=min(done, size), total=size)

    def advance(self, size: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, size)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextlib.contextmanager
def byte_progress(*, wanted: bool) -> Iterator[ByteProgress]:
    if not wanted or not sys.stderr.isatty():
        yield ByteProgress(None)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=_console(), transient=True) as progress:
        yield ByteProgress(progress)


@contextlib.contextmanager
def count_progress(what: str, *, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with the number of items done and the number that remain."""
    if not wanted or not sys.stderr.isatty():
        yield lambda done, remaining: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console(), transient=True) as progress:
        task = progress.add_task("", total=None)

        def report(done: int, remaining: int) -> None:
            progress.update(task, completed=done, total=done + remaining)

        yield report


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
