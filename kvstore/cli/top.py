"""``kvstore top``: a live view of the cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from kvstore.calls import ClusterStatus
from kvstore.cli.cluster import status_json
from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import print_json
from kvstore.cli.options import Duration, command
from kvstore.cli.tables import (
    console_of_names,
    head_text,
    namespaces_of,
    nodes_of,
    table_of,
)
from kvstore.errors import KVStoreError
from kvstore.runtime.addresses import shown_place
from kvstore.runtime.formatting import size_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

NAMESPACES: Final = 10
"""Displayed namespaces, the largest ones."""


class Snapshot(NamedTuple):
    """The status of the cluster, and the changes since the previous snapshot."""

    status: ClusterStatus | None
    """None: no master answers."""
    rates: dict[str, float]
    """Growth per second, by counter; empty at first, and after a change of the master."""
    error: str = ""


@command(
    epilog="\b\nExamples:\n  kvstore top\n  kvstore top --interval-s 10 --count 6 --json",
    help="Watch the cluster: hits, traffic, memory by node, the largest namespaces. "
    "Ctrl-C ends it; the last look stays in the terminal.",
)
@client_command()
@click.option("--interval-s", metavar="DURATION", type=Duration(min=0.2, max=3600),
              default=2.0, show_default=True, help="Refresh interval.")  # fmt: skip
@click.option("--count", metavar="N", type=click.IntRange(min=1), help="End after N refreshes.")
def top(invocation: Invocation, interval_s: float, count: int | None) -> int:
    looks = _looks(invocation, interval_s, count)
    try:
        if invocation.as_json:
            for seen in looks:
                status = None if seen.status is None else status_json(seen.status)
                print_json({"status": status, "per_second": seen.rates, "error": seen.error})
                sys.stdout.flush()
            return 0
        place = shown_place(invocation.config.master)
        console = console_of_names(fits=True)
        if not console.is_terminal or console.is_dumb_terminal:
            for seen in looks:
                console.print(page(seen, place), "")
                sys.stdout.flush()
            return 0
        show(looks, console, place)
    except KeyboardInterrupt:
        pass
    return 0


def show(looks: Iterator[Snapshot], console: Console, place: str) -> None:
    """Show each snapshot on an alternate screen, and leave the last one in the terminal."""
    from rich.live import Live  # here, because shell completion imports this module

    last: RenderableType | None = None
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for seen in looks:
                last = page(seen, place)
                live.update(last, refresh=True)
    finally:
        if last is not None:
            console.print(last)


def _looks(invocation: Invocation, interval_s: float, count: int | None) -> Iterator[Snapshot]:
    """Yield snapshots of the cluster. Raises KVStoreError: the first one found no master."""
    before: ClusterStatus | None = None
    then = 0.0
    with invocation.client() as client:
        number = 0
        while True:
            now = time.monotonic()
            try:
                status = client.status()
            except KVStoreError as error:
                if not number:
                    raise
                yield Snapshot(None, {}, str(error))
                before = None
            else:
                yield Snapshot(status, rates(before, status, now - then))
                before, then = status, now
            number += 1
            if number == count:
                return
            time.sleep(max(0.0, now + interval_s - time.monotonic()))


def rates(before: ClusterStatus | None, after: ClusterStatus, seconds: float) -> dict[str, float]:
    """Return the growth of each counter per second. Counters restart with each master."""
    if before is None or before.epoch != after.epoch or seconds <= 0:
        return {}
    earlier = dict(before.counters)
    return {name: (value - earlier.get(name, 0)) / seconds for name, value in after.counters}


def page(seen: Snapshot, master: str) -> RenderableType:
    """Return the content of the terminal."""
    from rich.console import Group

    status = seen.status
    if status is None:
        return f"no answer from {master}: {seen.error}"
    traffic = (
        _traffic(dict(status.counters), seen.rates)
        if status.counters
        else "What was done since the start is for the roles admin, node and observer."
    )
    largest = sorted(status.namespaces, key=lambda each: each.size, reverse=True)[:NAMESPACES]
    spaces = [namespaces_of(largest)] if largest else []
    return Group(head_text(status, master), "", traffic, "", nodes_of(status), *spaces)


def _traffic(totals: dict[str, int], now: dict[str, float]) -> Table:
    table = table_of("", right=("per second", "since start"))
    hits_now = _share(now.get("matched_objects", 0), now.get("missed_objects", 0))
    hits = _share(totals.get("matched_objects", 0), totals.get("missed_objects", 0))
    table.add_row("blocks found by matches", hits_now, hits)
    for text, name in (
        ("objects stored", "stored_objects"),
        ("objects evicted", "evicted_objects"),
        ("puts refused: no space", "refused_no_space"),
        ("objects lost with a node", "lost_objects"),
        ("objects corrupt", "corrupt_objects"),
    ):
        table.add_row(text, f"{now.get(name, 0):,.0f}", f"{totals.get(name, 0):,}")
    stored = size_text(now.get("stored_bytes", 0)), size_text(totals.get("stored_bytes", 0))
    table.add_row("bytes stored", *stored)
    return table


def _share(found: float, missed: float) -> str:
    asked = found + missed
    return f"{100 * found / asked:.1f} % of {asked:,.0f}" if asked else "-"
