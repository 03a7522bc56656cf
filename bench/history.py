"""The last runs of each side-by-side benchmark, in ``history.json`` in the folder of its page.

One run is one sample of a machine and of a commit. A page therefore says, beside the numbers of its
own run, the range over the last runs, for each kind of machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.page import Found, ResultsTable
from kvstore.bench.timing import Spread

if TYPE_CHECKING:
    from bench.rows import Row
    from bench.side_by_side import Comparison

FILE: Final = "history.json"
RUNS_MAX: Final = 20
"""Runs of one page that are kept; the oldest are dropped."""
MACHINE: Final = ("cpu", "cores", "commit", "date")


def read(folder: Path, name: str) -> list[Found]:
    """The runs of the page ``name``, the oldest first; empty if there is no file."""
    path = folder / FILE
    runs: list[Found] = json.loads(path.read_text()).get(name, []) if path.exists() else []
    return runs


def write(folder: Path, name: str, runs: Sequence[Found]) -> None:
    """Writes the runs of a page; those of other pages stay. Without runs, writes nothing."""
    if not runs:
        return
    path = folder / FILE
    pages = json.loads(path.read_text()) if path.exists() else {}
    pages[name] = list(runs)
    path.write_text(json.dumps(pages, indent=1, sort_keys=True) + "\n")


def entry(found: Found, rows: Sequence[Comparison]) -> Found:
    """What is kept of a run: the machine and its load, the goals met, and each row's medians."""
    return {
        "machine": {name: found["machine"].get(name, "") for name in MACHINE},
        "load": found["load"], "rounds": found["rounds"], "met": sum(each.met for each in rows),
        "rows": {
            each.row.id: {
                "ours_us": round(Spread.of(each.ours_us).median, 1),
                "theirs_us": round(Spread.of(each.theirs_us).median, 1),
                "ratio": each.ratio.median,
            }
            for each in rows
        },
    }  # fmt: skip


def in_short(runs: Sequence[Found]) -> str:
    """The ratios of all rows and runs, the rows in which ours is faster, and the goals met."""
    ratios = [each["ratio"] for run in runs for each in run["rows"].values()]
    rows = max(len(run["rows"]) for run in runs)
    return (
        f"{_span(ratios, '.2f')}; faster in {_span([_faster(run) for run in runs])} of {rows} rows,"
        f" {_span([run['met'] for run in runs])} of {rows} goals met;"
        f" {_many(len(runs), 'run')} on {_many(len(_machines(runs)), 'kind')} of machine"
    )


def parts(runs: Sequence[Found], rows: Sequence[Row]) -> list[str | ResultsTable]:
    """The part of a page about the last runs; empty for fewer than two."""
    if len(runs) < 2:
        return []
    machines = _machines(runs)
    listed = [
        (
            run["machine"]["date"], run["machine"]["commit"], _machine(run),
            " and ".join(f"{load:.2f}" for load in run["load"]), str(run["rounds"]),
            f"{_faster(run)} of {len(run['rows'])}", f"{run['met']} of {len(run['rows'])}",
        )
        for run in reversed(runs)
    ]  # fmt: skip
    ranges = []
    for row in rows:
        cells = []
        for machine in machines:
            ratios = [run["rows"][row.id]["ratio"] for run in runs
                      if _machine(run) == machine and row.id in run["rows"]]  # fmt: skip
            cells.append(_span(ratios, ".2f"))
        ranges.append((row.title, row.mode, *cells))
    columns = [f"{machine}: {_many(count, 'run')}" for machine, count in machines.items()]
    return [
        "## Over the last runs",
        f"Ratios {in_short(runs)}. Each run is of the code and the harness of its commit. The last"
        f" {RUNS_MAX} runs are kept; [{FILE}]({FILE}) has their medians.",
        ResultsTable(
            ("date", "commit", "machine", "load before and after", "rounds", "faster in",
             "goals met"),
            listed, (0, 1, 2),
        ),
        "The smallest to the largest of the runs' ratios, each the median of its rounds:",
        ResultsTable(("work", "path", *columns), ranges, (0, 1)),
    ]  # fmt: skip


def _machine(run: Found) -> str:
    return f"{run['machine']['cpu']}, {run['machine']['cores']} cores"


def _machines(runs: Sequence[Found]) -> Counter[str]:
    """How many runs each kind of machine has, that of the newest run first."""
    return Counter(map(_machine, reversed(runs)))


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _faster(run: Found) -> int:
    return sum(each["ratio"] > 1 for each in run["rows"].values())


def _span(values: Sequence[float], form: str = "d") -> str:
    """``12 to 21``, or ``12`` if all are equal; empty for no values."""
    if not values:
        return ""
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"
