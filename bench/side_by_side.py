"""Rounds of two systems, row by row.

A round begins with new processes: each system's master and storage process, and one client of each
system per transport. The pools are written once. Then the rows follow each other. In each row the
systems are measured directly after each other, each twice (A, B, B, A), so that a ratio compares
measurements within a few seconds. The first system alternates from row to row and from round to
round. The system that is not measured is idle; the processor time of its processes is measured as
well.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import mooncake
from bench.results import Comparison, Measured
from bench.rows import SHM, Row, memory_needed
from bench.worker import MOONCAKE, OURS, Settings, Worker, environment
from kvstore.bench.ours import own_store
from kvstore.bench.session import MEMCPY
from kvstore.bench.timing import median_us, processor_seconds
from kvstore.demo.processes import Children

STOP_SECONDS = 20.0
IDLE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int
    seconds: float
    """Seconds per row, round and system."""
    pool_bytes: int
    """Size of each store's pool."""


def compare(rows: Sequence[Row], plan: Plan, progress: Callable[[str, int], None]) -> Measured:
    """Measures all rounds.

    Args:
        progress: called with the current work and the number of finished steps (of ``steps``).

    Raises:
        ChildError: a process failed.
        KVStoreError: kvstore failed.
    """
    comparisons = {row.id: Comparison(row) for row in rows}
    idle: dict[str, list[float]] = {OURS: [], MOONCAKE: []}
    load = os.getloadavg()[0]
    for number in range(plan.rounds):
        _round(number, rows, plan, comparisons, idle, progress)
    return Measured(
        rounds=plan.rounds,
        seconds=plan.seconds,
        pool_bytes=plan.pool_bytes,
        comparisons=list(comparisons.values()),
        idle_percent=idle,
        load=(load, os.getloadavg()[0]),
    )


def steps(rows: Sequence[Row], plan: Plan) -> int:
    """Number of progress steps of all rounds."""
    return plan.rounds * len(rows)


def _round(
    number: int,
    rows: Sequence[Row],
    plan: Plan,
    comparisons: dict[str, Comparison],
    idle: dict[str, list[float]],
    progress: Callable[[str, int], None],
) -> None:
    what = f"round {number + 1} of {plan.rounds}"
    progress(f"{what}: starting", 0)
    with (
        own_store(plan.pool_bytes) as ours,
        Children(environment(), stop_seconds=STOP_SECONDS) as children,
    ):
        theirs = mooncake.start(children, plan.pool_bytes)
        servers = {OURS: ours.pids, MOONCAKE: theirs.pids}
        for mode in sorted({row.mode for row in rows}):
            some = [row for row in rows if row.mode == mode]
            behind = some[0].behind
            progress(f"{what}, {mode}: writing both pools through", 0)
            addresses = {
                OURS: ours.address,
                # Its shared-memory client has no way through LMCache.
                MOONCAKE: theirs.storage if mode == SHM and not behind else theirs.master,
            }
            with contextlib.ExitStack() as stack:
                workers = {}
                for system, address in addresses.items():
                    settings = Settings(
                        system=system, behind=behind, mode=mode, address=address,
                        pool_bytes=plan.pool_bytes,
                        memory_bytes=memory_needed(some), warm=True, processes=servers[system],
                    )  # fmt: skip
                    worker = workers[system] = Worker(children, f"{system}-{mode}", settings)
                    stack.callback(worker.close)
                    worker.ready()
                _note_idle(
                    idle, {name: [*servers[name].values(), workers[name].pid] for name in workers}
                )
                for index, row in enumerate(some):
                    progress(f"{what}: {row.title}, {mode}", 1)
                    _measure(row, comparisons[row.id], workers, plan, (number + index) % 2 == 0)


def _measure(
    row: Row, comparison: Comparison, workers: dict[str, Worker], plan: Plan, ours_first: bool
) -> None:
    """Measures one row of one round: A, B, B, A, so that a machine that slows down slows both."""
    order = (OURS, MOONCAKE) if ours_first else (MOONCAKE, OURS)
    samples: dict[str, list[float]] = {OURS: [], MOONCAKE: []}
    processor: dict[str, Counter[str]] = {OURS: Counter(), MOONCAKE: Counter()}
    copies: list[float] = []
    seconds = plan.seconds / 2
    for system in (*order, *reversed(order)):
        worker = workers[system]
        op = row.op if system == OURS else row.their_op
        samples[system] += worker.measure(op, row.size, row.batch, seconds)
        processor[system].update(worker.processor)
        if system == OURS and row.memcpy_goal:
            copies += worker.measure(MEMCPY, row.size, row.batch, seconds)
    for system, some in samples.items():
        per_call = {name: 1e6 * each / len(some) for name, each in processor[system].items()}
        comparison.add(system, median_us(some), per_call)
    if copies:
        comparison.memcpy_us.append(median_us(copies))


def _note_idle(idle: dict[str, list[float]], pids: dict[str, list[int]]) -> None:
    """Measures the processor time of both systems while they are idle."""
    before = {system: sum(map(processor_seconds, some)) for system, some in pids.items()}
    time.sleep(IDLE_SECONDS)
    for system, some in pids.items():
        used = sum(map(processor_seconds, some)) - before[system]
        idle[system].append(100 * used / IDLE_SECONDS)
