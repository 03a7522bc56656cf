"""Findings, and a runner of checks in which no check delays another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, cast

from kvstore.console.diagnostics.rows import ADVICE, CHECKS

State = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """One line of the report."""

    subject: str
    """Empty: the subject of the check."""
    state: State
    """problem: something that a user needs does not work; warning: it works, but slower or less
    safely than it could."""
    found: str
    advice: str = ""
    """The remedy, as a command where there is one."""


Check = Callable[[], Iterable[Finding]]


def ok(found: str, advice: str = "", subject: str = "") -> Finding:
    return Finding(subject, "ok", found, advice)


def of_row(check: str, *, holds: bool = True, **words: object) -> Finding:
    """Return the finding of a row of ``CHECKS``; ok and without advice unless ``holds``."""
    row = CHECKS[check]
    if not holds:
        return ok(row.found.format(**words), subject=row.subject)
    advice = ADVICE[row.row] if row.row else row.advice.format(**words)
    return Finding(row.subject, cast("State", row.state), row.found.format(**words), advice)


def under(subject: str, found: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings, with this subject where they have none."""
    return (finding._replace(subject=finding.subject or subject) for finding in found)


def run_all(checks: Sequence[tuple[str, Check]], timeout_s: float) -> Iterator[Finding]:
    """Run all checks in parallel, each in a thread, and yield their findings in order.

    A check that raises, or runs longer than ``timeout_s``, is a finding itself. The thread of a
    late check continues, so a check must not hold a lock that others need.
    """
    found: dict[int, list[Finding]] = {}

    def run(number: int, check: Check) -> None:
        try:
            found[number] = list(check())
        except Exception as error:  # noqa: BLE001 - one check that fails must not hide the others
            what = f"{type(error).__name__}: {error}"
            found[number] = [of_row("unfinished", error=what)]

    threads = [
        threading.Thread(target=run, args=(number, check), name=f"check {subject}", daemon=True)
        for number, (subject, check) in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for number, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        late = [of_row("late", seconds=timeout_s)] if thread.is_alive() else None
        yield from under(checks[number][0], late or found[number])
