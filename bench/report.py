"""The results of the comparison, as a table on a terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.machine import in_words
from bench.results import Comparison, Measured, Shares
from bench.rows import HICACHE, LMCACHE
from bench.worker import MOONCAKE, OURS
from kvstore.bench.timing import Spread

COLUMNS = ("work", "path", "ours", "Mooncake", "ratio", "rounds", "goal", "")
PROCESSES = ("client", "master", "storage")
PROCESSOR = (
    "Processor time of one call, in the mean: client, master and storage process; polling for an"
    " answer counts, sleeping does not. Ratio as above, of the sums."
)
TITLES = {
    "": "Side by side with Mooncake Store",
    LMCACHE: "Behind LMCache, beside Mooncake Store",
    HICACHE: "Behind SGLang's HiCache, beside Mooncake Store",
}
COMMANDS = {"": "make bench", LMCACHE: "make bench-lmcache", HICACHE: "make bench-hicache"}


def show(measured: Measured, console: Console) -> None:
    """Prints the table, its notes, and whether the goals are met."""
    notes = notes_of(measured)
    table = _empty_table()
    for each in measured.comparisons:
        cells = cells_of(each, notes)
        colour = "green" if each.met else "red"
        table.add_row(*cells[:-1], f"[{colour}]{cells[-1]}[/{colour}]")
    console.print(table)
    console.print()
    for number, note in enumerate(notes, 1):
        console.print(f"[{number}] {note}", markup=False)
    console.print(summary(measured))
    if processor := measured.with_processor:
        console.print()
        console.print(PROCESSOR)
        table = _empty_table()
        for each in processor:
            table.add_row(*processor_cells(each))
        console.print(table)


def as_markdown(measured: Measured, *, picture: str = "") -> str:
    """The results as a page.

    Args:
        picture: the file name of the picture beside it.
    """
    notes = notes_of(measured)
    lines = [
        f"# {TITLES[measured.behind]}",
        "",
        f"Written by `{COMMANDS[measured.behind]}`; do not edit. {in_words(measured.machine)}",
        f"Load of the machine {measured.load[0]:.2f} before and {measured.load[1]:.2f} after,"
        f" {measured.rounds} rounds, {measured.seconds:g} s per row, round and system,"
        f" pools of {measured.pool_bytes / (1 << 30):g} GiB.",
        "",
        "Time of one call, the median of the rounds' medians. Ratio: Mooncake's time over ours"
        " within a round, the median of the rounds (smallest to largest); above 1 ours is faster.",
        "",
        *_markdown_table([cells_of(each, notes) for each in measured.comparisons]),
        "",
        summary(measured),
    ]
    if copied := [each for each in measured.comparisons if each.memcpy_part]:
        lines += ["", *[f"* {_memcpy_line(each)}" for each in copied]]
    lines += ["", *[f"{number}. {note}" for number, note in enumerate(notes, 1)]]
    if processor := measured.with_processor:
        met = sum(each.processor_met for each in processor)
        lines += [
            "",
            "## Processor time",
            "",
            PROCESSOR,
            "",
            *_markdown_table([processor_cells(each) for each in processor]),
            "",
            f"{met} of {len(processor)} goals are met.",
        ]
    idle = "; ".join(
        f"{name} {Spread.of(values).median:.1f} %"
        for name, values in ((OURS, measured.idle_percent.get(OURS)),
                             (MOONCAKE, measured.idle_percent.get(MOONCAKE)))
        if values
    )  # fmt: skip
    if idle:
        lines += ["", f"Processor time of all idle processes of a system, of one core: {idle}."]
    if picture:
        lines += ["", f"![Ratios, goals and spread]({picture})"]
    return "\n".join(lines) + "\n"


def cells_of(comparison: Comparison, notes: Sequence[str]) -> tuple[str, ...]:
    """One line of the table, in the order of ``COLUMNS``."""
    row, ratio = comparison.row, comparison.ratio
    numbers = sorted(notes.index(note) + 1 for note in row.notes)
    marks = "".join(f" [{number}]" for number in numbers)
    met = "met" if comparison.met else "not met"
    if part := comparison.memcpy_part:
        met += f", {part.median:.0%} of memcpy (goal {row.memcpy_goal:.0%})"
    return (
        row.title + marks,
        row.mode,
        microseconds(Spread.of(comparison.ours_us).median),
        microseconds(Spread.of(comparison.theirs_us).median),
        f"{ratio.median:.2f}",
        f"{ratio.smallest:.2f} to {ratio.largest:.2f}",
        f"{row.goal:g}",
        met,
    )


def processor_cells(comparison: Comparison) -> tuple[str, ...]:
    """One line of the second table, in the order of ``COLUMNS``."""
    row, ratio = comparison.row, comparison.processor_ratio
    assert ratio is not None
    return (
        row.title,
        row.mode,
        _shares(comparison.ours_processor),
        _shares(comparison.theirs_processor),
        f"{ratio.median:.2f}",
        f"{ratio.smallest:.2f} to {ratio.largest:.2f}",
        f"{row.processor_goal:g}",
        "met" if comparison.processor_met else "not met",
    )


def _empty_table() -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    return table


def _markdown_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table with ``COLUMNS``."""
    ruler = "|---|---|" + "---:|" * (len(COLUMNS) - 3) + "---|"
    lines = ["| " + " | ".join(row) + " |" for row in (COLUMNS, *rows)]
    return [lines[0], ruler, *lines[1:]]


def _shares(rounds: Sequence[Shares]) -> str:
    """``71 µs = 40 + 30 + 1``: the rounds' median of the sum, and of each process."""
    total = Spread.of([sum(each.values()) for each in rounds]).median
    parts = [Spread.of([each[name] for each in rounds]).median for name in PROCESSES]
    return f"{microseconds(total)} = " + " + ".join(f"{part:,.0f}" for part in parts)


def notes_of(measured: Measured) -> list[str]:
    """Each note once, in the order of the rows."""
    return list(dict.fromkeys(note for each in measured.comparisons for note in each.row.notes))


def summary(measured: Measured) -> str:
    """How many goals are met, and which are not."""
    missed = [f"{row.title} ({row.mode})" for row in measured.missed]
    count = len(measured.comparisons)
    said = f"{count - len(missed)} of {count} goals are met."
    return said + (f" Not met: {'; '.join(missed)}." if missed else "")


def microseconds(value: float) -> str:
    """``12.3 µs``, ``1,234 µs``."""
    return f"{value:,.1f} µs" if value < 100 else f"{value:,.0f} µs"


def _memcpy_line(comparison: Comparison) -> str:
    part = comparison.memcpy_part
    assert part is not None
    return (
        f"{comparison.row.title}: one memcpy of the same bytes (one numpy copy in one thread, warm,"
        f" in the same process and round) takes {part.median:.0%} of our time"
        f" ({part.smallest:.0%} to {part.largest:.0%}), goal {comparison.row.memcpy_goal:.0%}."
    )
