"""Judges the results of ``growth`` by goals, and makes the page about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.page import Found, ResultsPage, ResultsTable, microseconds, verdict
from kvstore.bench.timing import Spread

NAME: Final = "growth"
KEPT: Final = 0.9
"""A total throughput of at least this part of the best one with fewer clients does not count as
falling: machines are noisy."""
SLOWEST: Final = 0.5
FLAT: Final = 2.0
"""Growth by at most this factor counts as nearly flat, while objects grow a thousandfold."""
LARGE: Final = 500_000
"""Below this number of objects, the buffers of the master process distort the bytes per object."""
PAUSE_MS: Final = 10.0
LOGARITHMIC: Final = 2.0
"""The search may grow by this factor more than the logarithm of the length does."""

CLIENTS: Final = (
    "Processes on one machine with {cores} cores, which master, node and clients share; begun"
    " together. Objects or keys a second, of all clients; the slowest client's rate over the"
    " mean; the median time of a call."
)
CALLS: Final = (
    "Time of a call as a client sees it, about objects chosen at random; put 64 is both of its"
    " calls. Memory: by which the process has grown, per object."
)
PAUSES: Final = (
    "How long an `exists` of one key waits, asked every half millisecond from outside, the"
    " machine's own pauses included."
)
CHAINS: Final = (
    "All blocks are there. Search: the master's state alone, in one process, without sending;"
    " it grows with the logarithm. Call: `Client.match_prefix`, which also checks, sends and"
    " decodes every key; that grows with their number."
)


class Goal(NamedTuple):
    """One line of the verdict."""

    what: str
    found: str
    met: bool


def goals(found: Found) -> list[Goal]:
    """The goals that the measured parts can decide."""
    return [
        *_of_clients(found["clients"]), *_of_master(found["master"]), *_of_chains(found["chains"])
    ]  # fmt: skip


def _of_clients(rows: Sequence[Found]) -> list[Goal]:
    found = []
    for work in dict.fromkeys(each["work"] for each in rows):
        some = [each for each in rows if each["work"] == work]
        totals = [each["per_second"] for each in some]
        parts = [totals[at] / max(totals[:at]) for at in range(1, len(totals))]
        if parts:
            what = f"{work}: the total does not fall ({KEPT:.0%} of the best with fewer clients)"
            found.append(Goal(what, f"{min(parts):.0%}", min(parts) >= KEPT))
        slowest = min(each["slowest_part"] for each in some)
        what = f"{work}: the slowest client is at least half as fast as the mean"
        found.append(Goal(what, f"{slowest:.0%}", slowest >= SLOWEST))
    return found


def _of_master(rows: Sequence[Found]) -> list[Goal]:
    found: list[Goal] = []

    def flat(what: str, times: float) -> None:
        found.append(Goal(what, f"{times:.2f} times", times <= FLAT))

    if rows and rows[-1]["objects"] > rows[0]["objects"]:
        first, last = rows[0], rows[-1]
        grown = f"from {first['objects']:,} to {last['objects']:,} objects"
        for name, before in first["call_us"].items():
            what = f"{name}: time per call nearly flat {grown} (at most {FLAT:g} times)"
            flat(what, last["call_us"][name] / before)
        several = [each for each in rows if each["objects"] >= LARGE] or [last]
        each_bytes = Spread.of([each["bytes_per_object"] for each in several])
        what = f"bytes per object nearly flat from {several[0]['objects']:,} objects"
        flat(what, each_bytes.largest / each_bytes.smallest)
    for each in rows:
        pauses = [each["idle"], each["mixed"]]
        pauses += [some["pauses"] for some in (*each["evictions"], *each["large"])]
        longest = max(some["longest_ms"] for some in pauses)
        what = f"{each['objects']:,} objects: the loop's longest step under {PAUSE_MS:g} ms"
        step_ms = each["longest_step_us"] / 1e3
        seen = f"{step_ms:.1f} ms; longest wait seen from outside {longest:.1f} ms"
        found.append(Goal(what, seen, step_ms < PAUSE_MS))
    return found


def _of_chains(rows: Sequence[Found]) -> list[Goal]:
    if len(rows) < 2:
        return []
    first, last = rows[0], rows[-1]
    expected = math.log2(last["blocks"]) / math.log2(first["blocks"])
    times = last["search_us"] / first["search_us"]
    what = (
        f"the search for the tip grows with the logarithm from {first['blocks']:,} to"
        f" {last['blocks']:,} blocks (which alone gives {expected:.1f} times; at most"
        f" {LOGARITHMIC:g} times that)"
    )
    return [Goal(what, f"{times:.1f} times", times <= LOGARITHMIC * expected)]


def page_of(found: Found) -> ResultsPage:
    parts: list[str | ResultsTable] = []
    if found["clients"]:
        text = CLIENTS.format(cores=found["machine"].get("cores", "?"))
        lines = [
            (each["work"], str(each["clients"]), f"{each['per_second']:,.0f}",
             f"{each['slowest_part']:.0%}", microseconds(each["call_us"]))
            for each in found["clients"]
        ]  # fmt: skip
        columns: tuple[str, ...] = ("work", "clients", "a second", "slowest / mean", "one call")
        parts += ["## Clients at once", text, ResultsTable(columns, lines)]
    if found["master"]:
        names = tuple(found["master"][0]["call_us"])
        columns = ("objects", "bytes each", "put a second", *names)
        calls = [
            (f"{each['objects']:,}", f"{each['bytes_per_object']:.0f}",
             f"{each['fill_per_second']:,.0f}",
             *(microseconds(each["call_us"][name]) for name in names))
            for each in found["master"]
        ]  # fmt: skip
        parts += ["## A master with many objects", CALLS, ResultsTable(columns, calls)]
        columns = ("objects", "meanwhile", "how long", "longest", "99.9 %", "median")
        pauses = [line for each in found["master"] for line in _pauses(each)]
        parts += ["## Pauses and eviction", PAUSES, ResultsTable(columns, pauses)]
    if found["chains"]:
        columns = ("blocks", "search", "call", "calls to the master", "call, per key")
        lines = [
            (f"{each['blocks']:,}", microseconds(each["search_us"]), microseconds(each["call_us"]),
             str(each["requests"]), f"{each['call_us'] / each['blocks'] * 1e3:,.0f} ns")
            for each in found["chains"]
        ]  # fmt: skip
        parts += ["## Chains", CHAINS, ResultsTable(columns, lines)]
    judged = [(each.what, each.found, verdict(each.met)) for each in goals(found)]
    parts += ["## Goals", ResultsTable(("goal", "found", ""), judged)]

    def draw(path: Path) -> None:
        from bench.picture import draw_growth

        draw_growth(found, path)

    title, command, shown = (
        "As the work grows",
        "make bench-growth",
        "Throughput, time per call, chains",
    )
    return ResultsPage(NAME, title, command, parts, "", shown, draw)


def _pauses(row: Found) -> list[tuple[str, ...]]:
    """The lines about the pauses at one number of objects."""
    objects = f"{row['objects']:,}"
    some: list[tuple[str, str, dict[str, Any]]] = [
        ("idle", "", row["idle"]),
        ("another client puts, matches, removes", "", row["mixed"]),
    ]
    for each in row["evictions"]:
        how = f"{each['evicted']:,} in {each['seconds']:.2f} s, a put"
        how += f" {microseconds(each['put_us'])}"
        some.append((f"evicting: {each['how']}", how, each["pauses"]))
    some += [
        (each["what"], f"{each['seconds'] * 1e3:,.1f} ms", each["pauses"]) for each in row["large"]
    ]
    step_ms = row["longest_step_us"] / 1e3
    return [
        *(
            (objects, what, how, f"{pauses['longest_ms']:.1f} ms", f"{pauses['p999_ms']:.2f} ms",
             microseconds(pauses["p50_us"]))
            for what, how, pauses in some
        ),
        (objects, "the loop's longest step since its start", "", f"{step_ms:.1f} ms", "", ""),
    ]  # fmt: skip
