"""The command ``python -m bench``: measures the rows of a table on its systems, in turn."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from bench.tables import TABLES
from kvstore.bench import harness, page
from kvstore.bench.processes import failures_reported
from kvstore.bench.rows import choose
from kvstore.console.diagnostics.software import compiled_parts

QUICK_SECONDS = 0.1
QUICK_PART = 4
"""The pools of a quick round are smaller by this factor."""
EXAMPLE = """\b
Examples:
  python -m bench
  python -m bench --table redis --rows 'put,match_prefix,*/shm/4KiB/1' --rounds 9 --out /tmp/found
  python -m bench --table vllm --systems 'kvstore,no store' --quick
"""


@click.command(epilog=EXAMPLE)
@click.option("--table", "name", type=click.Choice(list(TABLES)), default="mooncake",
              show_default=True, help="What is compared.")  # fmt: skip
@click.option("--rows", "patterns", metavar="PATTERN,...", default="*", show_default=True,
              help="Only these rows: OP/PATH/SIZE/BATCH or a prefix, such as 'put' or 'get/tcp'."
              )  # fmt: skip
@click.option("--systems", metavar="NAME,...", default="",
              help="Only these systems of the table, which begin with this store.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 1000),
              help="Rounds that count.  [default: 5, of vllm 3]")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.01),
              help="Seconds per row, round and system.  [default: 0.5, of vllm 8]")  # fmt: skip
@click.option("--quick", is_flag=True, help="One short round, to test that the benchmark works.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Folder for a page and its numbers, TABLE.md and TABLE.json.")  # fmt: skip
def main(
    name: str,
    patterns: str,
    systems: str,
    rounds: int | None,
    seconds: float | None,
    quick: bool,
    out: Path | None,
) -> None:
    """Measure this store and others on this machine, row by row, in turn.

    Needs the extra bench (pip install '.[bench]' in a checkout). The exit status is 0 when
    everything was measured, whether or not the goals are met.
    """
    table = TABLES[name]
    try:
        rows = choose(patterns, table.rows)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if systems:
        named = [text.strip() for text in systems.split(",")]
        if unknown := [text for text in named if text not in table.systems]:
            have = ", ".join(table.systems)
            raise click.BadParameter(f"{unknown[0]!r} is no system of {name}: {have}")
        if len(named) < 2:
            raise click.BadParameter("name two systems at least: the first one, and its peers")
        table = replace(table, systems={each: table.systems[each] for each in named})
    if reason := table.missing():
        raise click.ClickException(reason)
    if (parts := compiled_parts()).state != "ok":
        raise click.ClickException(f"{parts.found}. {parts.advice}")
    plan = harness.ComparisonPlan(
        rounds=1 if quick else rounds or table.rounds,
        seconds=QUICK_SECONDS if quick else seconds or table.seconds,
        pool_bytes=table.pool_bytes // QUICK_PART if quick else table.pool_bytes,
    )
    before = os.getloadavg()[0]
    with (
        failures_reported("bench", partial(click.echo, err=True)),
        page.progress_bar(plan.rounds * len(rows)) as progress,
    ):
        results = harness.measure(table, rows, plan, progress)
    found = {
        "machine": page.machine(table.packages), "load": [before, os.getloadavg()[0]],
        "table": name, "plan": plan._asdict(), "rows": [result.as_json() for result in results],
    }  # fmt: skip
    page.publish(name, harness.page_of(table, results, plan, found), found, out)


if __name__ == "__main__":
    main()
