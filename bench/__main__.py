"""The command ``python -m bench``: this store and Mooncake Store, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from bench import hicache, lmcache, mooncake, report
from bench.machine import machine, today
from bench.results import Measured
from bench.rows import HICACHE, LMCACHE, TABLES, Row, chosen
from bench.show import (
    bar,
    ended_by_signals,
    exit_with,
    out_option,
    output,
    redraw_option,
    write_page,
)
from bench.side_by_side import Plan, compare, steps

PACKAGES = (
    mooncake.PACKAGE, lmcache.PACKAGE, hicache.PACKAGE, "torch", "numpy", "grpcio", "xxhash",
)  # fmt: skip
MISSING = {LMCACHE: lmcache.missing, HICACHE: hicache.missing}
POOL_BYTES = 2 << 30
QUICK_SECONDS = 0.1
NAME = "mooncake"
EXAMPLE = """\b
Examples:
  python -m bench
  python -m bench --rows 'exist,match_prefix,*/shm/4KiB/1' --rounds 9 --out /tmp/found
  python -m bench --quick
  python -m bench --redraw docs/benchmarks/mooncake.json
"""


def _rows(context: click.Context, parameter: click.Parameter, value: str) -> list[Row]:
    table = TABLES[context.params["behind"] or ""]
    rows = chosen([pattern.strip() for pattern in value.split(",")], table)
    if not rows:
        ids = ", ".join(row.id for row in table)
        raise click.BadParameter(f"there is no row {value!r}; the rows are {ids}")
    return rows


@click.command(epilog=EXAMPLE)
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Rounds, each with new processes on both sides.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.01), default=0.5, show_default=True,
              help="Seconds per row, round and system.")  # fmt: skip
@click.option(
    "--behind", type=click.Choice(list(MISSING)), is_eager=True,
    help="Measure both systems as storage of LMCache, or of SGLang's HiCache, which must be"
    " installed.",
)  # fmt: skip
@click.option(
    "--rows", metavar="PATTERN,...", default="*", show_default=True, callback=_rows,
    help="Only these rows: OP/PATH/SIZE/BATCH or a prefix, such as 'put' or 'get/tcp'.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="One short round, to test that the benchmark works.")
@out_option
@redraw_option
def main(
    rounds: int,
    seconds: float,
    behind: str | None,
    rows: list[Row],
    quick: bool,
    out: Path | None,
    redraw: Path | None,
) -> None:
    """Measure this store and Mooncake Store on this machine, row by row, in turn.

    Needs the extra bench (pip install '.[bench]' in a checkout). Writes mooncake.md, mooncake.json
    and mooncake.png, or lmcache.md and so on. The exit status is 0 when everything was measured,
    whether or not the goals are met.
    """
    console = output()
    if redraw is not None:
        measured = Measured.from_json(json.loads(redraw.read_text()))
    else:
        if reason := mooncake.missing() or (MISSING[behind]() if behind else None):
            raise click.ClickException(reason)
        plan = Plan(rounds=rounds, seconds=seconds, pool_bytes=POOL_BYTES)
        if quick:
            plan = Plan(rounds=1, seconds=QUICK_SECONDS, pool_bytes=POOL_BYTES)
        with ended_by_signals(), exit_with("bench"), bar(steps(rows, plan)) as progress:
            measured = compare(rows, plan, progress)
        measured.machine = machine(PACKAGES) | {"date": today()}
    report.show(measured, console)
    if out is not None:
        write(measured, out)
        console.print(f"Written: {out}/{measured.behind or NAME}.md, .json and .png")


def write(measured: Measured, out: Path) -> None:
    """Writes the three files."""
    from bench.picture import draw_comparison

    name = measured.behind or NAME
    write_page(out, name, report.as_markdown(measured, picture=f"{name}.png"), measured.as_json())
    draw_comparison(measured, out / f"{name}.png")


if __name__ == "__main__":
    main()
