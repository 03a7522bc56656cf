"""Measures two systems in rounds, row by row, and makes the page about the results.

A round begins with new processes: each system's master and storage process, and one client of each
system per transport. The pools are written once. Then the rows follow each other. In each row the
systems are measured directly after each other, each twice (A, B, B, A), so that a ratio compares
measurements within a few seconds. The system that begins alternates from row to row and from round
to round. While one system is measured, the other is idle. The processor time of each system's
processes is measured, too, both during its calls and while it is idle.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import history, mooncake, redis
from bench.client import MOONCAKE, OURS, REDIS, ClientProcess, Settings, environment
from bench.page import Advance, Found, ResultsPage, ResultsTable, microseconds, verdict
from bench.rows import BUSY, HICACHE, LMCACHE, TABLES, TCP, Row, memory_needed
from kvstore.bench.ours import Store, own_store
from kvstore.bench.session import MEMCPY
from kvstore.bench.timing import Spread, median_us, processor_seconds
from kvstore.demo.processes import Children
from kvstore.process import interpreter

STOP_SECONDS: Final = 20.0
IDLE_SECONDS: Final = 0.5
PROCESSES: Final = ("client", "master", "storage")
PEERS: Final = {MOONCAKE: "Mooncake", REDIS: "Redis"}
"""The other systems, as pages call them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int
    seconds: float
    """Time per row, round and system."""
    pool_bytes: int
    """Size of each store's pool."""


# --- the rounds --------------------------------------------------------------------------------


def compare(rows: Sequence[Row], plan: Plan, progress: Advance) -> Found:
    """Measures all rounds, with a step for each row.

    Raises:
        ChildError: a process failed.
        KVStoreError: kvstore failed.
    """
    comparisons = {row.id: Comparison(row) for row in rows}
    peer = rows[0].peer
    idle: dict[str, list[float]] = {OURS: [], peer: []}
    for number in range(plan.rounds):
        what = f"round {number + 1} of {plan.rounds}"
        progress(f"{what}: starting", 0)
        with _stores(peer, plan.pool_bytes) as (children, ours, theirs):
            for mode in sorted({row.mode for row in rows}):
                some = [row for row in rows if row.mode == mode]
                progress(f"{what}, {mode}: writing both pools through", 0)
                with _clients(children, ours, theirs, some, plan) as clients:
                    pids = {OURS: ours.pids, peer: theirs.pids}
                    for system, client in clients.items():
                        idle[system].append(_idle_percent([*pids[system].values(), client.pid]))
                    for index, row in enumerate(some):
                        progress(f"{what}: {row.title}, {mode}", 1)
                        is_odd = bool((number + index) % 2)
                        with _busy_loops(row.busy):
                            _measure(comparisons[row.id], clients, plan.seconds / 2, is_odd)
    return {
        "rounds": plan.rounds, "seconds": plan.seconds, "pool_bytes": plan.pool_bytes,
        "table": rows[0].table, "behind": rows[0].behind, "idle_percent": idle,
        "rows": [each.as_json() for each in comparisons.values()],
    }  # fmt: skip


@contextlib.contextmanager
def _stores(
    peer: str, pool_bytes: int
) -> Iterator[tuple[Children, Store, mooncake.Servers | redis.Server]]:
    with (
        own_store(pool_bytes) as ours,
        Children(environment(), stop_seconds=STOP_SECONDS) as children,
    ):
        is_redis = peer == REDIS
        yield (
            children, ours,
            redis.start(children) if is_redis else mooncake.start(children, pool_bytes),
        )  # fmt: skip


@contextlib.contextmanager
def _clients(
    children: Children,
    ours: Store,
    theirs: mooncake.Servers | redis.Server,
    rows: Sequence[Row],
    plan: Plan,
) -> Iterator[dict[str, ClientProcess]]:
    """A client of each system, for rows of one mode."""
    mode, behind = rows[0].mode, rows[0].behind
    stores = {
        OURS: (ours.address, ours.pids),
        # LMCache cannot use Mooncake's shared-memory client.
        rows[0].peer: (theirs.at(TCP if behind else mode), theirs.pids),
    }
    with contextlib.ExitStack() as stack:
        clients = {}
        for system, (address, pids) in stores.items():
            settings = Settings(
                system, mode, address, plan.pool_bytes, memory_needed(rows), behind, pids
            )
            clients[system] = ClientProcess(children, f"{system}-{mode}", settings)
            stack.callback(clients[system].close)
        yield clients


def _measure(
    comparison: Comparison, clients: dict[str, ClientProcess], seconds: float, theirs_first: bool
) -> None:
    """Measures one row of one round: A, B, B, A, so that a machine that slows down slows both."""
    row = comparison.row
    order = (row.peer, OURS) if theirs_first else (OURS, row.peer)
    samples: dict[str, list[float]] = {OURS: [], row.peer: []}
    processor: dict[str, Counter[str]] = {OURS: Counter(), row.peer: Counter()}
    copies: list[float] = []
    for system in (*order, *reversed(order)):
        client = clients[system]
        op = row.op if system == OURS else row.their_op
        samples[system] += client.measure(op, row.size, row.batch, seconds)
        processor[system].update(client.processor)
        if system == OURS and row.memcpy_goal:
            copies += client.measure(MEMCPY, row.size, row.batch, seconds)
    for system, some in samples.items():
        per_call = {name: 1e6 * each / len(some) for name, each in processor[system].items()}
        comparison.add(system, median_us(some), per_call)
    if copies:
        comparison.memcpy_us.append(median_us(copies))


@contextlib.contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """Runs processes of the same priority that always want a core."""
    loops = [subprocess.Popen(interpreter.command("-c", "while True: pass")) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _idle_percent(pids: Sequence[int]) -> float:
    """Percent of one processor core that the idle processes of a system take."""
    before = sum(map(processor_seconds, pids))
    time.sleep(IDLE_SECONDS)
    return 100 * (sum(map(processor_seconds, pids)) - before) / IDLE_SECONDS


# --- the arithmetic ----------------------------------------------------------------------------


@dataclass
class Comparison:
    """The results of one row: for each round the median time of a call, whatever its batch."""

    row: Row
    ours_us: list[float] = field(default_factory=list)
    theirs_us: list[float] = field(default_factory=list)
    memcpy_us: list[float] = field(default_factory=list)
    """Times of a memcpy of the same bytes, inside the client's process; only if the row has a goal
    for it."""
    ours_processor_us: list[dict[str, float]] = field(default_factory=list)
    """Mean processor time of a call, by process, for each round; polling included."""
    theirs_processor_us: list[dict[str, float]] = field(default_factory=list)

    def add(self, system: str, microseconds: float, processor: dict[str, float]) -> None:
        """Adds one round of a system."""
        is_ours = system == OURS
        (self.ours_us if is_ours else self.theirs_us).append(microseconds)
        (self.ours_processor_us if is_ours else self.theirs_processor_us).append(processor)

    @property
    def ratio(self) -> Spread:
        """The peer's time over ours, within each round: above 1 ours is faster."""
        return Spread.of_ratios(self.theirs_us, self.ours_us)

    @property
    def memcpy_part(self) -> Spread | None:
        """The time of one memcpy over ours, within each round; None: not measured."""
        return Spread.of_ratios(self.memcpy_us, self.ours_us) if self.memcpy_us else None

    @property
    def processor_ratio(self) -> Spread | None:
        """The peer's processor time over ours, of all processes; None: not measured."""
        if not self.ours_processor_us:
            return None
        theirs, ours = (
            [sum(each.values()) for each in rounds]
            for rounds in (self.theirs_processor_us, self.ours_processor_us)
        )
        return Spread.of_ratios(theirs, ours)

    @property
    def met(self) -> bool:
        """Whether the median of the rounds reaches the goal, and also the memcpy goal if there is
        one."""
        part = self.memcpy_part
        return self.ratio.median >= self.row.goal and (
            part is None or part.median >= self.row.memcpy_goal
        )

    @property
    def processor_met(self) -> bool:
        ratio = self.processor_ratio
        return ratio is not None and ratio.median >= self.row.processor_goal

    def as_json(self) -> Found:
        row, part = self.row, self.memcpy_part
        measured = {name: value for name, value in vars(self).items() if name != "row"}
        return {
            "id": row.id, "title": row.title, "mode": row.mode, "peer_op": row.their_op,
            "size_bytes": row.size, "batch": row.batch, **measured,
            "processor_goal": row.processor_goal, "ratio": self.ratio._asdict(), "goal": row.goal,
            "memcpy_part": part._asdict() if part else None, "memcpy_goal": row.memcpy_goal,
            "met": self.met,
        }  # fmt: skip


def comparisons(found: Found) -> list[Comparison]:
    """The comparisons in the results of ``compare``, but for rows that the table no longer has."""
    known = {row.id: row for row in TABLES[table_of(found)]}
    fields = ("ours_us", "theirs_us", "memcpy_us", "ours_processor_us", "theirs_processor_us")
    return [
        Comparison(known[each["id"]], *(each[name] for name in fields))
        for each in found["rows"]
        if each["id"] in known
    ]


def table_of(found: Found) -> str:
    """The name of the table in ``TABLES`` that was measured."""
    return str(found.get("table", found.get("behind", "")))  # older results say only the latter


# --- the page ----------------------------------------------------------------------------------

NAMES: Final = {
    "": ("mooncake", "Side by side with Mooncake Store", "make bench"),
    BUSY: (BUSY, "Both stores next to busy loops", "make bench ARGS='--beside busy'"),
    LMCACHE: (LMCACHE, "Behind LMCache, beside Mooncake Store", "make bench-lmcache"),
    HICACHE: (HICACHE, "Behind SGLang's HiCache, beside Mooncake Store", "make bench-hicache"),
    REDIS: (REDIS, "Side by side with Redis", "make bench-redis"),
}
COLUMNS: Final = ("work", "path", "ours", "{peer}", "ratio", "rounds", "goal", "")
LEFT: Final = (0, 1, 7)
TIME: Final = (
    "Time of one call, the median of the rounds' medians. Ratio: {peer}'s time over ours within a"
    " round, the median of the rounds (smallest to largest); above 1 ours is faster."
)
PROCESSOR: Final = (
    "Processor time of one call, in the mean: client, master and storage process; polling for an"
    " answer counts, sleeping does not. Ratio as above, of the sums."
)


def page_of(found: Found, runs: Sequence[Found] = ()) -> ResultsPage:
    """The page of the results of ``compare``, and of the last ``runs`` (``history.entry``)."""
    rows = comparisons(found)
    table = table_of(found)
    name, title, command = NAMES[table]
    peer = PEERS[TABLES[table][0].peer]
    columns = [column.format(peer=peer) for column in COLUMNS]
    how = (
        f", {found['rounds']} rounds, {found['seconds']:g} s per row, round and system,"
        f" pools of {found['pool_bytes'] / (1 << 30):g} GiB"
    )
    notes = list(dict.fromkeys(note for each in rows for note in each.row.notes))
    parts: list[str | ResultsTable] = [
        TIME.format(peer=peer),
        ResultsTable(columns, [_cells(each, notes) for each in rows], LEFT),
        _summary(rows),
        "\n".join(_memcpy_line(each, each.memcpy_part) for each in rows if each.memcpy_part),
        "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1)),
    ]
    if processor := [each for each in rows if each.processor_ratio]:
        met = sum(each.processor_met for each in processor)
        parts += [
            "## Processor time",
            PROCESSOR,
            ResultsTable(columns, [_processor_cells(each) for each in processor], LEFT),
            f"{met} of {len(processor)} goals are met.",
        ]
    if idle := "; ".join(
        f"{system} {Spread.of(values).median:.1f} %"
        for system, values in found["idle_percent"].items()
    ):
        parts.append(f"Processor time of all idle processes of a system, of one core: {idle}.")
    parts += history.parts(runs, [each.row for each in rows])

    def draw(path: Path) -> None:
        from bench.picture import draw_comparison

        draw_comparison(found, rows, path, title, peer)

    return ResultsPage(name, title, command, parts, how, "Ratios, goals and spread", draw)


def _cells(comparison: Comparison, notes: Sequence[str]) -> tuple[str, ...]:
    """One line of the table, in the order of ``COLUMNS``."""
    row, ratio = comparison.row, comparison.ratio
    numbers = sorted(notes.index(note) + 1 for note in row.notes)
    marks = "".join(f" [{number}]" for number in numbers)
    met = verdict(comparison.met)
    if part := comparison.memcpy_part:
        met += f", {part.median:.0%} of memcpy (goal {row.memcpy_goal:.0%})"
    ours, theirs = Spread.of(comparison.ours_us), Spread.of(comparison.theirs_us)
    return (
        row.title + marks, row.mode, microseconds(ours.median), microseconds(theirs.median),
        f"{ratio.median:.2f}", ratio.range, f"{row.goal:g}", met,
    )  # fmt: skip


def _processor_cells(comparison: Comparison) -> tuple[str, ...]:
    """One line of the second table, in the order of ``COLUMNS``."""
    row, ratio = comparison.row, comparison.processor_ratio
    assert ratio is not None
    return (
        row.title, row.mode, _shares(comparison.ours_processor_us),
        _shares(comparison.theirs_processor_us), f"{ratio.median:.2f}", ratio.range,
        f"{row.processor_goal:g}", verdict(comparison.processor_met),
    )  # fmt: skip


def _shares(rounds: Sequence[dict[str, float]]) -> str:
    """``71 µs = 40 + 30 + 1``: the rounds' median of the sum, and of each process."""
    total = Spread.of([sum(each.values()) for each in rounds]).median
    parts = [Spread.of([each.get(name, 0.0) for each in rounds]).median for name in PROCESSES]
    return f"{microseconds(total)} = " + " + ".join(f"{part:,.0f}" for part in parts)


def _summary(rows: Sequence[Comparison]) -> str:
    """How many goals are met, and which are not."""
    missed = [f"{each.row.title} ({each.row.mode})" for each in rows if not each.met]
    said = f"{len(rows) - len(missed)} of {len(rows)} goals are met."
    return said + (f" Not met: {'; '.join(missed)}." if missed else "")


def _memcpy_line(comparison: Comparison, part: Spread) -> str:
    return (
        f"* {comparison.row.title}: one memcpy of the same bytes (one numpy copy in one thread,"
        f" warm, in the same process and round) takes {part.median:.0%} of our time"
        f" ({part.smallest:.0%} to {part.largest:.0%}), goal {comparison.row.memcpy_goal:.0%}."
    )
