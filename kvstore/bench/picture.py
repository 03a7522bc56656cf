"""What was measured, as pictures. Needs matplotlib, which the extra ``kvstore[bench]`` brings."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from kvstore.bench.results import Measured

MET, MISSED, GOAL = "#3b7a57", "#c0503c", "#202020"
DPI = 130
ROW_INCHES = 0.29
TICKS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)


def draw_comparison(measured: Measured, path: Path) -> None:
    """One bar per row: the median ratio on a logarithmic scale, from 1; a line from the smallest to
    the largest of the rounds; a mark at the goal."""
    rows = measured.comparisons
    figure = Figure(figsize=(9.5, 1.6 + ROW_INCHES * len(rows)), layout="constrained")
    axes = figure.subplots()
    for at, each in enumerate(rows):
        ratio = each.ratio
        colour = MET if each.met else MISSED
        axes.barh(at, ratio.median - 1, left=1, height=0.62, color=colour, alpha=0.85)
        axes.plot([ratio.smallest, ratio.largest], [at, at], color="#808080", linewidth=1.4)
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
        "Mooncake's time over ours: right of 1 ours is faster. Black mark: the goal."
        " Grey line: smallest to largest round."
    )
    axes.set_xlabel(explained, fontsize=8)
    machine = f"{measured.machine.get('cpu', '')}, {measured.machine.get('cores', '?')} cores"
    title = f"kvstore and Mooncake Store side by side, {measured.rounds} rounds ({machine})"
    axes.set_title(title, fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
