"""Draws results as pictures. Needs matplotlib, which the extra ``bench`` installs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from bench.page import Found
from bench.side_by_side import Comparison

MET, MISSED, GOAL = "#3b7a57", "#c0503c", "#202020"
DPI = 130
ROW_INCHES = 0.29
TICKS = tuple(2.0**power for power in range(-6, 8))


def draw_comparison(
    found: Found, rows: Sequence[Comparison], path: Path, title: str, peer: str
) -> None:
    """Draws one bar per row: from 1 to the median ratio on a logarithmic scale; with a line from
    the smallest to the largest of the rounds, and a mark at the goal."""
    figure = Figure(figsize=(9.5, 1.6 + ROW_INCHES * len(rows)), layout="constrained")
    axes = figure.subplots()
    for at, each in enumerate(rows):
        ratio = each.ratio
        colour = MET if each.met else MISSED
        axes.barh(at, ratio.median - 1, left=1, height=0.62, color=colour, alpha=0.85)
        axes.plot([ratio.smallest, ratio.largest], [at, at], color="#505050", linewidth=1.4)
        axes.plot([each.row.goal] * 2, [at - 0.42, at + 0.42], color=GOAL, linewidth=2.2)
        part = each.memcpy_part
        copied = f", {part.median:.0%} of memcpy, goal {each.row.memcpy_goal:.0%}" if part else ""
        right = max(ratio.largest, each.row.goal, 1.0)
        axes.text(right * 1.06, at, f"{ratio.median:.2f}{copied}", va="center", fontsize=8)
    axes.set_xscale("log", base=2)
    low = min([0.5, *(each.ratio.smallest for each in rows)]) * 0.9
    high = max([2.0, *(max(each.ratio.largest, each.row.goal) for each in rows)]) * 1.5
    axes.set_xlim(low, high)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks(range(len(rows)), [f"{each.row.title}  {each.row.mode}" for each in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(1, color="#404040", linewidth=0.8)
    axes.grid(axis="x", color="#e0e0e0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", labelsize=8, length=0)
    explained = (
        f"{peer}'s time over ours: right of 1 ours is faster. Black mark: the goal."
        " Grey line: smallest to largest round."
    )
    axes.set_xlabel(explained, fontsize=8)
    machine = f"{found['machine'].get('cpu', '')}, {found['machine'].get('cores', '?')} cores"
    axes.set_title(f"{title}, {found['rounds']} rounds ({machine})", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def draw_growth(found: Found, path: Path) -> None:
    """Draws three panels: throughput by clients, time per call by objects, match by blocks."""
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    clients, master, chains = figure.subplots(1, 3)
    for work in dict.fromkeys(each["work"] for each in found["clients"]):
        some = [each for each in found["clients"] if each["work"] == work]
        parts = [each["per_second"] / some[0]["per_second"] for each in some]
        clients.plot([each["clients"] for each in some], parts, marker="o", label=work)
    _panel(clients, "Total throughput", "clients at once", "times that of one client")
    clients.set_ylim(bottom=0)
    for name in found["master"][0]["call_us"] if found["master"] else ():
        times = [each["call_us"][name] for each in found["master"]]
        master.plot([each["objects"] for each in found["master"]], times, marker="o", label=name)
    _panel(master, "A master with many objects", "objects", "one call, µs")
    blocks = [each["blocks"] for each in found["chains"]]
    chains.plot(blocks, [each["call_us"] for each in found["chains"]], marker="o", label="call")
    chains.plot(blocks, [each["search_us"] for each in found["chains"]], marker="o", label="search")
    _panel(chains, "match_prefix, all blocks there", "blocks of the chain", "µs")
    clients.set_xticks(sorted({each["clients"] for each in found["clients"]}))
    for axes in (master, chains):
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_ylim(1, 10 ** math.ceil(math.log10(max(10.0, axes.get_ylim()[1]))))
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _panel(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.grid(color="#e0e0e0", linewidth=0.6)
    if axes.lines:
        axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
