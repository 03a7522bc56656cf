"""What each case costs, in seconds of processor time: its own, and that of processes that it
started and waited for. What fixtures cost counts in the sum alone: the first case that needs a
shared one is another one in each run.

``make test`` runs the cases that are not marked ``slow``, and stays quick by itself: where
``CI=true``, a case without the mark that costs more than twice its bound fails. The clock plays no
part. A virtual machine counts the time that others take from its processors, so a case is judged by
what its processor could do at that time: ``slowness`` is measured after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Final

import pytest

QUICK_S: Final = 1.5
"""On a processor of slowness 1."""
OF_SUITE_S: Final = {"stories": 5.0}
"""A story starts a store of its own, half a second a process."""
UNSTEADY: Final = 2.0
"""Multiple of its bound that a case may cost in one run."""
SHOWN: Final = 10

LOOPS: Final = 5_000_000
LOOPS_S: Final = 0.055
"""Processor time of so many loops of ``sum`` at a slowness of 1: of an idle AMD EPYC."""


def spent() -> float:
    """By this process and by its children that have ended."""
    return sum(os.times()[:4])


def slowness() -> float:
    """The processor time of a loop now, as a multiple of ``LOOPS_S``; at least 1."""
    began = time.process_time()
    sum(range(LOOPS))
    return max(1.0, (time.process_time() - began) / LOOPS_S)


class Costs:
    """A plugin of pytest: each worker measures, the process that started them adds up."""

    def __init__(self, *, strict: bool) -> None:
        """
        Args:
            strict: too dear a case fails.
        """
        self._strict = strict
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
        terminalreporter.section("costs")
        terminalreporter.line(f"{self._sum:.0f} s of processor time in all")
        for case in sorted(self._costs, key=self._costs.__getitem__, reverse=True)[:SHOWN]:
            terminalreporter.line(f"{self._costs[case]:6.1f} s  {case}")


def too_dear(item: pytest.Item, cost: float) -> str:
    """Why a case may not cost so much; empty: it may."""
    marks = {mark.name for mark in item.iter_markers()}
    bound = next((OF_SUITE_S[name] for name in marks & OF_SUITE_S.keys()), QUICK_S)
    if "slow" in marks or cost <= UNSTEADY * bound:
        return ""
    now = slowness()
    if cost <= UNSTEADY * bound * now:
        return ""
    return (
        f"{item.nodeid} cost {cost:.1f} s of processor time at a slowness of {now:.1f}, and one "
        f"that is not marked slow should cost {bound} s at most: see tests/support/costs.py"
    )
