"""Findings, and a runner of checks in which no check delays another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

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
    """What to do about it, as a command where there is one."""


Check = Callable[[], Iterable[Finding]]


def ok(found: str, advice: str = "", subject: str = "") -> Finding:
    return Finding(subject, "ok", found, advice)


def warning(found: str, advice: str, subject: str = "") -> Finding:
    return Finding(subject, "warning", found, advice)


def problem(found: str, advice: str, subject: str = "") -> Finding:
    return Finding(subject, "problem", found, advice)


def warning_if(is_bad: bool, found: str, advice: str, subject: str = "") -> Finding:
    return warning(found, advice, subject) if is_bad else ok(found, subject=subject)


def under(subject: str, found: Iterable[Finding]) -> Iterator[Finding]:
    """The findings; those without a subject of their own get this one."""
    return (each._replace(subject=each.subject or subject) for each in found)


def run_all(checks: Sequence[tuple[str, Check]], timeout_s: float) -> Iterator[Finding]:
    """Runs all checks in parallel, each in a thread, and yields their findings in their order.

    A check that has not returned after ``timeout_s``, or that raises, is a finding itself. The
    thread of a late check keeps running, so a check must not hold a lock that others need.
    """
    running = [_Running(subject, check) for subject, check in checks]
    deadline = time.monotonic() + timeout_s
    for each in running:
        yield from each.findings(deadline, timeout_s)


class _Running:
    def __init__(self, subject: str, check: Check) -> None:
        self._subject = subject
        self._check = check
        self._found: Sequence[Finding] = ()
        self._thread = threading.Thread(target=self._run, name=f"check {subject}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = list(under(self._subject, self._check()))
        except Exception as error:  # noqa: BLE001 - one check that fails must not hide the others
            what = f"could not be checked: {type(error).__name__}: {error}"
            advice = "If no other line explains it, report this as a bug."
            self._found = [warning(what, advice, self._subject)]

    def findings(self, deadline: float, timeout_s: float) -> Sequence[Finding]:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            what = f"no answer within {timeout_s:.0f} s"
            return [problem(what, "Try a longer --timeout-ms.", self._subject)]
        return self._found
