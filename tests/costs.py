"""What each case costs, in seconds of processor time: its own, its fixtures', and that of processes
which it started and that have ended.

``make test`` runs the cases that are not marked ``slow``, and stays quick by itself: where
``CI=true``, a case without the mark that costs more than ``QUICK_S`` fails. The clock plays no
part, so a busy machine changes little. ``--record-costs`` writes ``costs.json``, which says what a
case cost when it was recorded.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

QUICK_S: Final = 1.5
OF_SUITE_S: Final = {"model": 4.0, "stories": 5.0}
"""Fifty examples of a rule machine; a story starts a store of its own, half a second a process."""
RECORDED_S: Final = 0.5
"""Cheaper cases are not in the file."""
SHOWN: Final = 10
FILE: Final = Path(__file__).with_name("costs.json")
_SPENT: Final = pytest.StashKey[float]()
_COST: Final = pytest.StashKey[float]()


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
        self._costs: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.stash[_SPENT], item.stash[_COST] = spent(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = spent()
        cost = now - item.stash[_SPENT]
        item.stash[_SPENT] = now
        item.stash[_COST] += cost
        report.user_properties.append(("cost", cost))
        is_last = report.when == "teardown" and report.passed
        if self._strict and is_last and (why := too_dear(item, item.stash[_COST])):
            report.outcome, report.longrepr = "failed", why
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = dict(report.user_properties).get("cost", 0.0)
        assert isinstance(cost, float)
        self._costs[report.nodeid] += cost

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        before = recorded()
        terminalreporter.section("costs")
        terminalreporter.line(f"{sum(self._costs.values()):.0f} s of processor time in all")
        for case, cost in sorted(self._costs.items(), key=lambda each: -each[1])[:SHOWN]:
            was = f"{before[case]:.1f} s" if case in before else f"under {RECORDED_S} s"
            terminalreporter.line(f"{cost:6.1f} s  {case}  (recorded: {was})")
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
    return (
        f"{item.nodeid} cost {cost:.1f} s of processor time ({was} s when it was recorded), and "
        f"one that is not marked slow may cost {bound} s: see tests/costs.py"
    )
