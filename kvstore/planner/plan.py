"""The table of ``kvstore plan``: hits by memory, policy and hints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pkgutil import resolve_name
from typing import Final, NamedTuple

from kvstore.calls.tenants import TenantRule
from kvstore.config.servers import EVICTION_POLICIES
from kvstore.errors import InternalError
from kvstore.planner.hint_model import HintModel
from kvstore.planner.traces import Trace
from kvstore.runtime.child_process import end_with_parent

BEST: Final = "best possible"

SAMPLED_BLOCKS: Final = 20_000
"""Blocks of a sample. LRU was within 0.7 points on eight samples of a trace, at six sizes; with
6,000 blocks within 2.2."""

MS_PER_DAY: Final = 86_400_000

KNEE_PART: Final = 0.9


@dataclass(frozen=True)
class Plan:
    """What to replay."""

    memory_bytes: Sequence[int]
    block_bytes: int
    policies: Sequence[str]
    hints: Sequence[HintModel] = (HintModel(),)
    tenants: Sequence[TenantRule] | None = None
    rate: float = 1.0
    """The part of the blocks that is replayed: above 0, at most 1."""
    disk_bytes: int = 0
    """Of disks below the memory; 0: none."""
    writes_per_day: float = 0.0
    """Of the disks' size, on average; 0: no limit."""


class PlanRow(NamedTuple):
    memory_bytes: int
    blocks: int
    hits: dict[str, float]
    """By policy and hints: found blocks, of all that requests asked for. Also of ``BEST``."""
    writes_per_day: dict[str, float]
    """How often a day the disks are overwritten, at the rate of the trace. Empty without disks."""


class _Cell(NamedTuple):
    blocks: int
    disk_blocks: int
    writes_per_day: float
    policy: str
    hints: HintModel


class _Found(NamedTuple):
    hits: int
    written: int


def run_plan(
    trace: Trace, plan: Plan, on_progress: Callable[[int, int], None] = lambda _done, _all: None
) -> list[PlanRow]:
    """Replay the trace for each memory, policy and model of hints, on all processors.

    Raises:
        InternalError: a process was killed.
    """
    from kvstore.planner.replay import next_uses_of  # here, because it imports numpy

    sampled = trace if plan.rate == 1 else trace.sample(plan.rate)
    disk_blocks = _blocks(plan, plan.disk_bytes)
    cells = [
        _Cell(_blocks(plan, size), disk_blocks, plan.writes_per_day, policy, hints)
        for size in plan.memory_bytes
        for policy, hints in _columns(plan)
    ]
    found: list[_Found] = []
    # Forked processes inherit the trace: as an argument it would be copied for every cell.
    inherited = os.getpid(), sampled, plan.tenants, next_uses_of(sampled)
    try:
        with ProcessPoolExecutor(None, get_context("fork"), _inherit, inherited) as pool:
            for each in pool.map(_replay, cells):
                found.append(each)
                on_progress(len(found), len(cells))
    except BrokenProcessPool:
        raise InternalError(
            "a process of the replay was killed, perhaps for lack of memory",
            advice="Replay a sample (--sample).",
        ) from None
    # The correction of SHARDS: a sample with too many accesses has found too many blocks.
    expected = trace.accesses * plan.rate
    surplus = expected - sampled.accesses
    parts = [min(1.0, max(0.0, (each.hits + surplus) / expected)) for each in found]
    days = max(1, trace.times_ms[-1] - trace.times_ms[0]) / MS_PER_DAY
    disk = disk_blocks * days
    names = [_name(policy, hints) for policy, hints in _columns(plan)]
    rows: list[PlanRow] = []
    for index, size in enumerate(plan.memory_bytes):
        own = slice(index * len(names), (index + 1) * len(names))
        hits = dict(zip(names, parts[own], strict=True))
        written = {name: each.written / disk for name, each in zip(names, found[own]) if disk}
        written.pop(BEST, None)
        rows.append(PlanRow(size, size // plan.block_bytes, hits, written))
    return rows


def _blocks(plan: Plan, size: int) -> int:
    return max(1, round(size // plan.block_bytes * plan.rate)) if size else 0


def _columns(plan: Plan) -> list[tuple[str, HintModel]]:
    columns = [(policy, hints) for policy in plan.policies for hints in plan.hints]
    return [*columns, (BEST, HintModel())]


def _name(policy: str, hints: HintModel) -> str:
    return f"{policy}, {hints.knowledge}" if hints.knowledge else policy


_inherited: tuple[Trace, Sequence[TenantRule] | None, list[list[int]]]
"""Of a forked process: the trace, the rules of its cells, and the next uses of blocks."""


def _inherit(
    parent: int, trace: Trace, tenants: Sequence[TenantRule] | None, next_uses: list[list[int]]
) -> None:
    end_with_parent(parent)
    global _inherited  # noqa: PLW0603  # the initializer of a process
    _inherited = trace, tenants, next_uses


def _replay(cell: _Cell) -> _Found:
    from kvstore.planner.replay import Replay, best_hits  # here, because it imports numpy

    trace, tenants, next_uses = _inherited
    if cell.policy == BEST:
        return _Found(best_hits(trace, next_uses, cell.blocks + cell.disk_blocks), 0)
    policy = resolve_name(EVICTION_POLICIES[cell.policy])()
    replay = Replay(
        trace, cell.blocks, policy, cell.hints, tenants, next_uses, cell.disk_blocks,
        cell.writes_per_day,
    )  # fmt: skip
    return _Found(replay.run(), replay.written_blocks)


def knee_of(rows: Sequence[PlanRow], name: str) -> PlanRow:
    """Return the first row with ``KNEE_PART`` of the hits of the last one."""
    wanted = KNEE_PART * rows[-1].hits[name]
    return next(row for row in rows if row.hits[name] >= wanted)


def sampling_rate(blocks: int) -> float:
    """Return the rate that samples ``SAMPLED_BLOCKS`` of a trace."""
    return min(1.0, SAMPLED_BLOCKS / blocks)
