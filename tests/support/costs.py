"""What each case costs, in seconds of processor time: its own, and that of processes that it
started and waited for. What fixtures cost counts in the sum alone: the first case that needs a
shared one is another one in each run.

``make test`` runs the cases that are not marked ``slow``, and stays quick by itself: where
``CI=true``, a case without the mark that costs more than ``QUICK_S`` fails. The clock plays no
part, but a virtual machine counts the time that others take from its processors: equal cases have
cost up to six times as much. So a case that was recorded as cheap may cost four times the bound in
one run. ``--record-costs`` writes ``costs.json``, which says what a case cost when it was recorded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

QUICK_S: Final = 1.5
OF_SUITE_S: Final = {"stories": 5.0}
"""A story starts a store of its own, half a second a process."""
UNSTEADY: Final = 4.0
"""How many times its bound a case may cost in one run, unless it was recorded above the bound."""
RECORDED_S: Final = 0.5
"""Cheaper cases are not in the file."""
SHOWN: Final = 10
FILE: Final = Path(__file__).with_name("costs.json")


def spent() -> float:
    """By this process and by its children that have ended."""
    return sum(os.times()[:4])


def recorded() -> dict[str, float]:
    costs: dict[str, float] = json.loads(FILE.read_text())
    return costs


class Costs:
    """A plugin of pytest: each worker measures, the process that started them adds up."""

    def __init__(self, *, strict: bool, record: bool) -> None:
        """
        Args:
            strict: too dear a case fails.
            record: into the file, at the end.
        """
        self._strict = strict
        self._record = record
        self._costs: dict[str, float] = {}
        self._sum = 0.0
        self._spent = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._spent = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._spent = self._spent, spent()
        cost = self._spent - before
        report.user_properties.append(("cost", cost))
        may_fail = self._strict and report.when == "call" and report.passed
        if may_fail and (why := too_dear(item, cost)):
            report.outcome, report.longrepr = "failed", why
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = dict(report.user_properties).get("cost", 0.0)  # none of a worker that has crashed
        assert isinstance(cost, float)
        self._sum += cost
        if report.when == "call":
            self._costs[report.nodeid] = cost

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        before = recorded()
        terminalreporter.section("costs")
        terminalreporter.line(f"{self._sum:.0f} s of processor time in all")
        for case in sorted(self._costs, key=self._costs.__getitem__, reverse=True)[:SHOWN]:
            was = f"{before[case]:.1f} s" if case in before else f"under {RECORDED_S} s"
            terminalreporter.line(f"{self._costs[case]:6.1f} s  {case}  (recorded: {was})")
        if self._record:
            self._write(before)

    def _write(self, before: dict[str, float]) -> None:
        """Keeps what is in the file of cases that have not run."""
        costs = {case: cost for case, cost in before.items() if case not in self._costs}
        costs |= {case: cost for case, cost in self._costs.items() if cost >= RECORDED_S}
        rounded = {case: round(costs[case], 1) for case in sorted(costs)}
        FILE.write_text(json.dumps(rounded, indent=0) + "\n")


def too_dear(item: pytest.Item, cost: float) -> str:
    """Why a case may not cost so much; empty: it may."""
    marks = {mark.name for mark in item.iter_markers()}
    bound = next((OF_SUITE_S[name] for name in marks & OF_SUITE_S.keys()), QUICK_S)
    if cost <= bound or "slow" in marks:
        return ""
    was = recorded().get(item.nodeid, RECORDED_S)
    if was <= bound and cost <= UNSTEADY * bound:
        return ""
    return (
        f"{item.nodeid} cost {cost:.1f} s of processor time ({was} s when it was recorded), and "
        f"one that is not marked slow may cost {bound} s: see tests/support/costs.py"
    )
