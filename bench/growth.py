"""The command ``python -m bench.growth``: this store as the work grows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from bench import growth_chains, growth_clients, growth_master, growth_report
from bench.growth_results import Growth
from bench.machine import machine, today
from bench.show import (
    bar,
    ended_by_signals,
    exit_with,
    out_option,
    output,
    redraw_option,
    write_page,
)

PACKAGES = ("numpy", "grpcio")
NAME = "growth"
PARTS = ("clients", "master", "chains")
CLIENTS = (1, 2, 4, 8)
CLIENT_ROUNDS = 3
OBJECTS = (10_000, 1_000_000, 10_000_000)
BLOCKS = (16, 64, 256, 1024, 4096, 16_384, 65_536, 131_072)
QUICK_OBJECTS = (10_000, 100_000)
QUICK_SECONDS = 0.05
EXAMPLE = """\b
Examples:
  python -m bench.growth
  python -m bench.growth --parts master --objects 1000000
  python -m bench.growth --redraw docs/benchmarks/growth.json
"""


def _parts(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    parts = [part.strip() for part in value.split(",")]
    for part in parts:
        if part not in PARTS:
            raise click.BadParameter(f"{part!r} is not one of {', '.join(PARTS)}")
    return parts


@click.command(epilog=EXAMPLE)
@click.option("--parts", metavar="PART,...", default=",".join(PARTS), show_default=True,
              callback=_parts, help="The parts to measure.")  # fmt: skip
@click.option("--objects", type=click.IntRange(1024), multiple=True, default=OBJECTS,
              show_default=True, help="Number of objects; may be repeated.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.01), default=1.0, show_default=True,
              help="Seconds per measurement.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Short and small, to test that the benchmark works.")
@out_option
@redraw_option
def main(
    parts: list[str],
    objects: tuple[int, ...],
    seconds: float,
    quick: bool,
    out: Path | None,
    redraw: Path | None,
) -> None:
    """Measure this store with more clients, a master with more objects, and longer chains.

    With --out writes growth.md, growth.json and growth.png, which needs matplotlib.
    10 million objects take 4 GB of memory. The exit status is 0 when everything was measured,
    whether or not the goals are met.
    """
    if redraw is not None:
        growth = Growth.from_json(json.loads(redraw.read_text()))
    else:
        if quick:
            objects, seconds = QUICK_OBJECTS, QUICK_SECONDS
        with ended_by_signals(), exit_with("bench"):
            growth = measure(parts, sorted(objects), seconds, 1 if quick else CLIENT_ROUNDS)
        growth.machine = machine(PACKAGES) | {"date": today()}
    console = output()
    growth_report.show(growth, console)
    if out is not None:
        write(growth, out)
        console.print(f"Written: {out}/{NAME}.md, .json and .png")


def measure(parts: list[str], objects: list[int], seconds: float, rounds: int) -> Growth:
    """Measures the wanted parts.

    Raises:
        ChildError, KVStoreError: a process failed.
    """
    growth = Growth()
    before = os.getloadavg()[0]
    if "clients" in parts:
        with bar(growth_clients.steps(CLIENTS, rounds)) as progress:
            growth.clients = growth_clients.measure(CLIENTS, rounds, seconds, progress)
    if "chains" in parts:
        with bar(len(BLOCKS)) as progress:
            growth.chains = growth_chains.measure(BLOCKS, seconds, progress)
    if "master" in parts:
        with bar(growth_master.steps(objects)) as progress:
            growth.master = growth_master.measure(objects, seconds, progress)
    growth.load = before, os.getloadavg()[0]
    return growth


def write(growth: Growth, out: Path) -> None:
    """Writes the three files."""
    from bench.picture import draw_growth

    page = growth_report.as_markdown(growth, picture=f"{NAME}.png")
    write_page(out, NAME, page, growth.as_json())
    draw_growth(growth, out / f"{NAME}.png")


if __name__ == "__main__":
    main()
