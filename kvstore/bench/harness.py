"""Compares systems in one run, row by row, in turn, and makes the report.

A round starts new processes: each system's servers, and its clients for one path after another. The
pools are written once. In each row the systems are measured one directly after the other, each
twice (A, B, B, A), so that a ratio compares measurements within a few seconds. The first system
changes from row to row and from round to round. While one is measured, the others are idle.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from kvstore.bench.client import ClientProcess, Settings
from kvstore.bench.page import Advance, Found, in_words, microseconds, table_of, verdict
from kvstore.bench.processes import Children
from kvstore.bench.rows import ComparisonCase, Table, memory_needed
from kvstore.bench.session import GET_DISK, GET_VIEW, PUT_FULL
from kvstore.bench.timing import Spread, percentile
from kvstore.runtime import interpreter

FOUND_MIN: Final = 0.001
"""Minimum hit ratio for the ratio of two systems."""


class ComparisonPlan(NamedTuple):
    rounds: int
    seconds: float
    """Time per row, round and system."""
    pool_bytes: int
    """Size of each system's memory."""


@dataclass(frozen=True)
class Sample:
    """One system's calls of one row and round. Times are per call, whatever its batch."""

    calls: int
    per_second: float
    """Calls, of all clients together."""
    p50_us: float
    p99_us: float
    processor_us: dict[str, float]
    """Mean processor time of a call by process, polling included."""
    found: float = 1.0
    """The hit ratio of its reads: 1, except in a full pool."""

    @property
    def processor_total_us(self) -> float:
        return sum(self.processor_us.values())


@dataclass
class Result:
    """The results of one row: for each system a sample per round."""

    row: ComparisonCase
    samples: dict[str, list[Sample]]

    def ratio(self, peer: str, of: Callable[[Sample], float]) -> Spread:
        """Return the peer's number per hit over this store's, for each round."""

        def each(samples: Sequence[Sample]) -> list[float]:
            return [of(some) / max(some.found, FOUND_MIN) for some in samples]

        ours, *_ = self.samples.values()
        return Spread.of_ratios(each(self.samples[peer]), each(ours))

    @property
    def peers(self) -> list[str]:
        return list(self.samples)[1:]

    @property
    def met(self) -> bool:
        """Whether the median ratio reaches the goal."""
        return self.ratio(self.peers[0], _time).median >= self.row.goal

    def as_json(self) -> Found:
        systems = {name: [asdict(each) for each in some] for name, some in self.samples.items()}
        return {"id": self.row.id, "title": self.row.title, "goal": self.row.goal} | systems


def _time(sample: Sample) -> float:
    return sample.p50_us


def _processor(sample: Sample) -> float:
    return sample.processor_total_us


def numbers(row: ComparisonCase, sample: Sample) -> Found:
    """Return one sample in the form of ``kvstore bench --json``."""
    per_second = row.batch * sample.per_second
    moved = 0 if row.op == GET_VIEW else row.size
    return {
        "system": "kvstore", "mode": row.mode, "op": row.op, "size_bytes": row.size,
        "batch": row.batch, "per_second": round(per_second, 1),
        "gb_per_second": round(per_second * moved / 1e9, 3), "p50_us": round(sample.p50_us, 1),
        "p99_us": round(sample.p99_us, 1), "processor_us": round(sample.processor_total_us, 1),
    }  # fmt: skip


def measure(
    table: Table,
    rows: Sequence[ComparisonCase],
    plan: ComparisonPlan,
    progress: Advance,
    on_sample: Callable[[ComparisonCase, str, Sample], None] = lambda row, system, sample: None,
) -> list[Result]:
    """Measure all rounds, with a step of ``progress`` for each row.

    Raises:
        ChildError: a process failed.
        KVStoreError: kvstore failed.
    """
    results = [Result(row, {name: [] for name in table.systems}) for row in rows]
    with contextlib.ExitStack() as stack:
        servers: dict[str, Any] = {}
        for number in range(plan.rounds):
            what = f"round {number + 1} of {plan.rounds}"
            if not number or not table.keeps_processes:
                progress(f"{what}: starting", 0)
                stack.close()
                for name, system in table.systems.items():
                    servers[name] = stack.enter_context(system.start(plan.pool_bytes))
            for mode in dict.fromkeys(row.mode for row in rows):
                some = [result for result in results if result.row.mode == mode]
                progress(f"{what}, {mode}: writing the pools", 0)
                with _clients(table, servers, [each.row for each in some], plan) as clients:
                    for index, result in enumerate(some):
                        progress(f"{what}: {result.row.title}, {mode}", 1)
                        with _busy_loops(result.row.loops):
                            for name, sample in _measure(
                                result.row, clients, plan.seconds / 2, number + index
                            ):
                                result.samples[name].append(sample)
                                on_sample(result.row, name, sample)
    return results


@contextlib.contextmanager
def _clients(
    table: Table, servers: Mapping[str, Any], rows: Sequence[ComparisonCase], plan: ComparisonPlan
) -> Iterator[dict[str, list[ClientProcess]]]:
    """Run the clients of each system, for rows of one mode."""
    mode, count = rows[0].mode, max(row.clients for row in rows)
    with Children() as children, contextlib.ExitStack() as stack:
        clients: dict[str, list[ClientProcess]] = {}
        for system, (_, driver, options) in table.systems.items():
            running = servers[system]
            settings = Settings(
                driver, dict(options), mode, running.address(mode), plan.pool_bytes // count,
                memory_needed(rows), running.pids,
            )  # fmt: skip
            clients[system] = []
            for number in range(count):
                client = ClientProcess(children, f"{len(clients)}-{mode}-{number}", settings)
                stack.callback(client.close)
                clients[system].append(client)
        yield clients


def _measure(
    row: ComparisonCase, clients: dict[str, list[ClientProcess]], seconds: float, turn: int
) -> Iterator[tuple[str, Sample]]:
    """Measure one row of one round: A, B, B, A, so that a slower machine slows all systems."""
    ours, *peers = clients
    names = [ours, *peers]
    turn %= len(names)
    order = names[turn:] + names[:turn]
    times: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, Counter[str]] = {name: Counter() for name in names}
    found = dict.fromkeys(names, 1.0)
    for name in (*order, *reversed(order)) if peers else order * 2:
        some = clients[name][: row.clients]
        op = row.op if name == ours else row.peers_op
        for client in some:
            client.prepare(op, row.size, row.batch, seconds)
        for client in some:
            client.go()
        for number, client in enumerate(some):
            times[name] += client.samples()
            found[name] = client.found
            used = client.processor
            # The servers work for all clients: their time counts once.
            processor[name].update(used if not number else {"client": used.get("client", 0.0)})
    for name, time in times.items():
        yield name, _sample(time, row.clients, processor[name], found[name])


def _sample(
    times: Sequence[float], clients: int, processor: Mapping[str, float], found: float
) -> Sample:
    return Sample(
        len(times), clients * len(times) / sum(times), 1e6 * statistics.median(times),
        percentile(times, 0.99) * 1e6,
        {name: 1e6 * seconds / len(times) for name, seconds in processor.items()}, found,
    )  # fmt: skip


@contextlib.contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """Run processes of the same priority that always want a core."""
    loops = [subprocess.Popen(interpreter.command("-c", "while True: pass")) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


# --- the report --------------------------------------------------------------------------------

TIME: Final = (
    "Time of one call: P50 and P99, each the median of the rounds. Ratio: the other system's P50"
    " over that of kvstore within a round, the median of the rounds (smallest to largest); above 1"
    " kvstore is faster."
)
PROCESSOR: Final = (
    "Mean processor time of one call in {processes}; polling counts, sleeping does not. Ratio as"
    " above, of the sums."
)


def page_of(table: Table, results: Sequence[Result], plan: ComparisonPlan, found: Found) -> str:
    """Return the report in Markdown. ``found``: the contents of its JSON file."""
    names = list(table.systems)
    notes = list(dict.fromkeys(note for result in results for note in result.row.notes))
    ratios = [text for peer in results[0].peers for text in (f"{peer} / {names[0]}", "rounds")]
    before, after = found["load"]
    processes = dict.fromkeys(
        name
        for result in results
        for some in result.samples.values()
        for name in some[0].processor_us
    )
    parts = [
        f"# {table.title}",
        f"Written by `make bench ARGS='--table {table.name}'`; do not edit."
        f" {in_words(found['machine'])}\nLoad of the machine {before:.2f} before and {after:.2f}"
        f" after, {plan.rounds} rounds, {plan.seconds:g} s per row, round and system, pools of"
        f" {plan.pool_bytes / (1 << 30):g} GiB.",
        TIME,
        table_of(
            ["work", "path", *(f"{name}, P50 / P99" for name in names), *ratios, "goal", ""],
            [_cells(result, notes) for result in results],
        ),
        _summary(results),
        "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1)),
        "## Processor time",
        PROCESSOR.format(processes=", ".join(processes)),
        table_of(
            ["work", "path", *names, *ratios, "goal", ""], list(map(_processor_cells, results))
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cells(result: Result, notes: Sequence[str]) -> tuple[str, ...]:
    row = result.row
    marks = "".join(f" [{notes.index(note) + 1}]" for note in row.notes)
    times = [
        f"{_median(some, _time)} / {_median(some, lambda each: each.p99_us)}{_found(row, some)}"
        for some in result.samples.values()
    ]
    ends = (f"{row.goal:g}", verdict(result.met))
    return (row.title + marks, row.mode, *times, *_ratios(result, _time), *ends)


def _processor_cells(result: Result) -> tuple[str, ...]:
    goal = result.row.processor_goal
    met = result.ratio(result.peers[0], _processor).median >= goal
    shares = []
    for some in result.samples.values():
        parts = [
            statistics.median(each.processor_us[name] for each in some)
            for name in some[0].processor_us
        ]
        sums = " + ".join(f"{part:,.0f}" for part in parts)
        shares.append(f"{_median(some, _processor)} = {sums}")
    ratios = _ratios(result, _processor)
    return (result.row.title, result.row.mode, *shares, *ratios, f"{goal:g}", verdict(met))


def _ratios(result: Result, of: Callable[[Sample], float]) -> list[str]:
    spreads = [result.ratio(peer, of) for peer in result.peers]
    return [text for spread in spreads for text in (f"{spread.median:.2f}", spread.range)]


def _median(samples: Sequence[Sample], of: Callable[[Sample], float]) -> str:
    return microseconds(statistics.median(map(of, samples)))


def _found(row: ComparisonCase, samples: Sequence[Sample]) -> str:
    found = statistics.median(sample.found for sample in samples)
    return f", {found:.0%} found" if row.op in (PUT_FULL, GET_DISK) else ""


def _summary(results: Sequence[Result]) -> str:
    missed = [f"{result.row.title} ({result.row.mode})" for result in results if not result.met]
    text = f"{len(results) - len(missed)} of {len(results)} goals are met."
    return text + (f" Not met: {'; '.join(missed)}." if missed else "")
