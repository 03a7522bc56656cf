"""Checks that hang or fail are findings, and keep no other from being told."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

from kvstore.cli import doctor
from kvstore.console.diagnostics import findings
from kvstore.console.diagnostics.findings import Finding, ok, run_all
from kvstore.console.diagnostics.rows import CHECKS


def test_findings_come_in_the_order_of_the_checks() -> None:
    first_may_end = threading.Event()

    def slow() -> list[Finding]:
        first_may_end.wait(10)
        return [ok("1"), ok("2", subject="own")]

    def quick() -> list[Finding]:
        first_may_end.set()  # so both run at once
        return [ok("3")]

    found = list(run_all([("slow", slow), ("quick", quick)], 10))
    assert [finding.found for finding in found] == ["1", "2", "3"]
    assert [finding.subject for finding in found] == ["slow", "own", "quick"]


def test_a_check_that_hangs_is_a_problem_and_delays_no_other() -> None:
    released = threading.Event()

    def hangs() -> list[Finding]:
        released.wait()
        return [ok("too late")]

    started = time.monotonic()
    try:
        found = list(run_all([("hangs", hangs), ("hangs", hangs), ("well", list)], 0.2))
        assert time.monotonic() - started < 5
    finally:
        released.set()
    assert [(f.subject, f.state) for f in found] == [("hangs", "problem")] * 2
    assert "no answer within" in found[0].found


def test_a_check_that_raises_is_told() -> None:
    def fails() -> list[Finding]:
        raise FileNotFoundError("no such thing")

    [found] = run_all([("thing", fails)], 5)
    assert (found.subject, found.state) == ("thing", "warning")
    assert "FileNotFoundError: no such thing" in found.found


def test_each_row_is_found_by_some_check() -> None:
    files = [*Path(findings.__file__).parent.glob("*.py"), Path(doctor.__file__)]
    texts = "".join(each.read_text() for each in files)
    assert [name for name in CHECKS if f'"{name}"' not in texts] == []
    assert set(re.findall(r'\bof_row\(\s*"(\w+)"', texts)) <= CHECKS.keys()
