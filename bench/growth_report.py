"""The results of the growth benchmark, as tables on a terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench.growth_results import Growth
from bench.machine import in_words
from bench.report import microseconds

COMMAND = "make bench-growth"


class Part(NamedTuple):
    """A table and its explanation."""

    title: str
    text: str
    columns: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]


def parts(growth: Growth) -> list[Part]:
    """A table for each measured part, and the verdict."""
    found = []
    if growth.clients:
        found.append(_clients(growth))
    if growth.master:
        found += [_calls(growth), _pauses(growth)]
    if growth.chains:
        found.append(_chains(growth))
    lines = [(each.what, each.found, "met" if each.met else "not met") for each in growth.goals()]
    found.append(Part("Goals", "", ("goal", "found", ""), lines))
    return found


def show(growth: Growth, console: Console) -> None:
    """Prints all tables."""
    for part in parts(growth):
        table = Table(title=part.title, title_justify="left", box=None, pad_edge=False)
        for number, column in enumerate(part.columns):
            table.add_column(column, justify="right" if number else "left")
        for line in part.lines:
            table.add_row(*line)
        console.print(table)
        console.print(part.text)


def as_markdown(growth: Growth, *, picture: str = "") -> str:
    """The results as a page.

    Args:
        picture: the file name of the picture beside it.
    """
    lines = [
        "# As the work grows",
        "",
        f"Written by `{COMMAND}`; do not edit. {in_words(growth.machine)}",
        f"Load of the machine {growth.load[0]:.2f} before and {growth.load[1]:.2f} after.",
    ]
    for part in parts(growth):
        lines += ["", f"## {part.title}", ""]
        lines += [part.text, ""] if part.text else []
        lines.append(_line(part.columns))
        lines.append("|---|" + "---:|" * (len(part.columns) - 1))
        lines += [_line(cells) for cells in part.lines]
    if picture:
        lines += ["", f"![Throughput, time per call, chains]({picture})"]
    return "\n".join(lines) + "\n"


def _clients(growth: Growth) -> Part:
    cores = growth.machine.get("cores", "?")
    return Part(
        "Clients at once",
        f"Processes on one machine with {cores} cores, which master, node and clients share; begun"
        " together. Objects or keys a second, of all clients; the slowest client's rate over the"
        " mean; the median time of a call.",
        ("work", "clients", "a second", "slowest / mean", "one call"),
        [
            (each.work, str(each.clients), f"{each.per_second:,.0f}", f"{each.slowest_part:.0%}",
             microseconds(each.call_us))
            for each in growth.clients
        ],
    )  # fmt: skip


def _calls(growth: Growth) -> Part:
    names = tuple(growth.master[0].call_us)
    return Part(
        "A master with many objects",
        "Time of a call as a client sees it, about objects chosen at random; put 64 is both of its"
        " calls. Memory: by which the process has grown, per object.",
        ("objects", "bytes each", "put a second", *names),
        [
            (f"{each.objects:,}", f"{each.bytes_per_object:.0f}", f"{each.fill_per_second:,.0f}",
             *(microseconds(each.call_us[name]) for name in names))
            for each in growth.master
        ],
    )  # fmt: skip


def _pauses(growth: Growth) -> Part:
    lines = []
    for each in growth.master:
        rows = [("idle", "", each.idle), ("another client puts, matches, removes", "", each.mixed)]
        rows += [
            (f"evicting: {e.how}", f"{e.evicted:,} in {e.seconds:.2f} s, a put"
             f" {microseconds(e.put_us)}", e.pauses)
            for e in each.evictions
        ]  # fmt: skip
        rows += [(e.what, f"{e.seconds * 1e3:,.1f} ms", e.pauses) for e in each.large]
        for what, how, pauses in rows:
            lines.append(
                (f"{each.objects:,}", what, how, f"{pauses.longest_ms:.1f} ms",
                 f"{pauses.p999_ms:.2f} ms", microseconds(pauses.p50_us))
            )  # fmt: skip
        lines.append(
            (f"{each.objects:,}", "the loop's longest step since its start", "",
             f"{each.longest_step_us / 1e3:.1f} ms", "", "")
        )  # fmt: skip
    return Part(
        "Pauses and eviction",
        "How long an `exists` of one key waits, asked every half millisecond from outside, the"
        " machine's own pauses included.",
        ("objects", "meanwhile", "how long", "longest", "99.9 %", "median"),
        lines,
    )


def _chains(growth: Growth) -> Part:
    return Part(
        "Chains",
        "All blocks are there. Search: the master's state alone, in one process, without sending;"
        " it grows with the logarithm. Call: `Client.match_prefix`, which also checks, sends and"
        " decodes every key; that grows with their number.",
        ("blocks", "search", "call", "calls to the master", "call, per key"),
        [
            (f"{each.blocks:,}", microseconds(each.search_us), microseconds(each.call_us),
             str(each.requests), f"{each.call_us / each.blocks * 1e3:,.0f} ns")
            for each in growth.chains
        ],
    )  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
