"""``kvstore plan``: hits by memory, eviction policy and hints, replayed from a trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click

from kvstore.cli.json_output import print_json
from kvstore.cli.options import command, json_option
from kvstore.cli.progress import progress
from kvstore.cli.tables import console_of_names, table_of
from kvstore.config.servers import EVICTION_POLICIES, MasterConfig
from kvstore.config.setting_types import parse_size
from kvstore.config.tenants import load_tenants
from kvstore.errors import InvalidArgumentError
from kvstore.planner.hint_model import HintModel, Knowledge
from kvstore.planner.plan import BEST, Plan, PlanRow, knee_of, run_plan, sampling_rate
from kvstore.planner.traces import Trace, load_trace
from kvstore.runtime.formatting import size_text

EXAMPLE = """\b
Examples:
  kvstore plan conversation.jsonl --memory 64GiB..2TiB --block-bytes 64MiB
  kvstore plan requests.jsonl --memory 16GiB..256GiB --eviction density,lru
  kvstore plan conversation.jsonl --memory 128GiB --block-bytes 64MiB --hints 0.8:0.05
  kvstore plan conversation.jsonl --memory 128GiB --block-bytes 64MiB --disk 3TiB
  kvstore plan requests.jsonl --memory 1TiB..16TiB --eviction lru --sample auto

\b
A trace has one request per line: Mooncake's format ({"timestamp": ms, "input_length": tokens,
"hash_ids": [...]}), or what kvstore-master --record wrote (its hints are a column, too).
Every cell replays the whole trace on the master's own state; nothing is copied or started.
"""

BAR_WIDTH: Final = 40

LEGEND: Final = {
    "recorded": "with the hints that clients gave",
    "goes on": "clients retain what is used again",
    "soon": "only what is used again soon",
    "over": "they release what is not",
    BEST: "no policy finds more",
}

SIZES_MAX: Final = 16


class _Sizes(click.ParamType[list[int]]):
    name = "SIZE[..SIZE],..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        sizes: set[int] = set()
        for part in str(value).split(","):
            first, dots, last = part.partition("..")
            try:
                size, end = parse_size(first), parse_size(last if dots else first)
            except ValueError as error:
                self.fail(f"{part!r}: {error}", param, ctx)
            if not 0 < size <= end or end // size >= 1 << SIZES_MAX:
                self.fail(f"{part!r} is no range of sizes: write 16GiB..2TiB", param, ctx)
            while size <= end:
                sizes.add(size)
                size *= 2
        return sorted(sizes)


@command(
    epilog=EXAMPLE,
    help="Show what more memory, another eviction policy or hints would bring, from a trace.",
)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--memory", type=_Sizes(), required=True,
              help="Memory of the pool; in a range, each size is twice the last.")  # fmt: skip
@click.option("--block-bytes", metavar="SIZE", default="",
              help="Memory of one block of the trace, for all ranks: tokens of a block times bytes "
              "of a token. Default: that of the recording.")  # fmt: skip
@click.option("--disk", metavar="SIZE", default="", help="Size of all disks below the memory.")
@click.option("--disk-writes-per-day", type=float, default=0, metavar="N",
              help="How often a day the disks may be overwritten; 0: no limit.")  # fmt: skip
@click.option("--eviction", metavar="NAME[,NAME]", show_default=True,
              default=MasterConfig.model_fields["eviction"].default,
              help=f"Eviction policies: {', '.join(EVICTION_POLICIES)}.")  # fmt: skip
@click.option("--hints", metavar="RIGHT[:WRONG]", default="",
              help="Also with clients that give a hint in this part of the cases that deserve it, "
              "and wrongly in that part of the others (0.05).")  # fmt: skip
@click.option("--tenants", metavar="FILE", default="", help="Rules of tenants, as for the master.")
@click.option("--sample", metavar="RATE", default="1", show_default=True,
              help="Replay this part of the blocks; auto: 20,000 of them (an error below one "
              "point) for LRU without hints, else all.")  # fmt: skip
@json_option
def plan(
    trace: Path, memory: list[int], block_bytes: str, disk: str, disk_writes_per_day: float,
    eviction: str, hints: str, tenants: str, sample: str, as_json: bool,
) -> int:  # fmt: skip
    policies = [name.strip() for name in eviction.split(",")]
    if unknown := [name for name in policies if name not in EVICTION_POLICIES]:
        raise click.UsageError(f"no policy {unknown[0]!r}; use {', '.join(EVICTION_POLICIES)}")
    loaded = load_trace(trace)
    size = _block_bytes(block_bytes, loaded)
    if memory[0] < size:
        too_small = f"--memory {size_text(memory[0])} holds no block of {size_text(size)}"
        raise InvalidArgumentError(too_small)
    rules = load_tenants(tenants) if tenants else None
    models = _hint_models(hints)
    if loaded.hints:
        models.insert(1, HintModel("recorded"))
    # Samples err more with other policies, and with hints.
    is_plain = policies == ["lru"] and len(models) == 1 and not disk
    rate = _rate(sample, loaded.blocks if is_plain else 1)
    disk_bytes = _size("--disk", disk) if disk else 0
    request = Plan(memory, size, policies, models, rules, rate, disk_bytes, disk_writes_per_day)
    with progress("replay", wanted=not as_json) as report:
        rows = run_plan(loaded, request, report)
    names = list(rows[0].hits)
    if as_json:
        print_json(
            {
                "requests": len(loaded.chains), "accesses": loaded.accesses,
                "blocks": loaded.blocks, "rate": rate, "rows": [row._asdict() for row in rows],
            }
        )  # fmt: skip
    else:
        _show(loaded, rows, names, rate)
    return 0


def _show(trace: Trace, rows: list[PlanRow], names: list[str], rate: float) -> None:
    console = console_of_names(fits=True)
    what = f"{len(trace.chains):,} requests, {trace.accesses:,} blocks asked for, {trace.blocks:,}"
    what += " different ones"
    if trace.repetitions:
        what += f"; {trace.repetitions:,} repetitions within a second left out"
    console.print(what + (f"; sampled: {rate:.1%}" if rate < 1 else ""))
    table = table_of("memory", right=("blocks", *names))
    for row in rows:
        table.add_row(
            size_text(row.memory_bytes), f"{row.blocks:,}",
            *(f"{100 * row.hits[name]:.2f} %" for name in names),
        )  # fmt: skip
    console.print(table)
    knowledge = {name.rpartition(", ")[2] for name in names}
    legend = [f"{name}: {text}" for name, text in LEGEND.items() if name in knowledge]
    console.print("Blocks found, of those asked for. " + "; ".join(legend) + ".")
    written = rows[-1].writes_per_day
    if written:
        table = table_of("\nmemory", right=tuple(f"\n{name}" for name in written))
        for row in rows:
            table.add_row(
                size_text(row.memory_bytes), *(f"{row.writes_per_day[n]:.1f}" for n in written)
            )
        console.print(table)
        console.print("How often a day the disks are overwritten, at the rate of this trace.")
    shown = names[0]
    highest = max(row.hits[shown] for row in rows) or 1.0
    for row in rows:
        bar = "█" * round(BAR_WIDTH * row.hits[shown] / highest)
        console.print(f"{size_text(row.memory_bytes):>10} {bar} {100 * row.hits[shown]:.1f} %")
    knee = knee_of(rows, shown)
    largest = size_text(rows[-1].memory_bytes)
    if knee is not rows[-1]:
        console.print(f"{size_text(knee.memory_bytes)} find 90 % of what {largest} find ({shown}).")
    elif len(rows) > 1:
        console.print(f"No smaller size finds 90 % of what {largest} find ({shown}).")
    if trace.block_tokens:
        saved = knee.hits[shown] * trace.accesses * trace.block_tokens
        console.print(f"With {size_text(knee.memory_bytes)}, {saved:,.0f} tokens need no prefill.")


def _size(option: str, text: str) -> int:
    try:
        return max(1, parse_size(text))
    except ValueError as error:
        raise click.UsageError(f"{option} {text!r}: {error}") from None


def _block_bytes(text: str, trace: Trace) -> int:
    if text:
        return _size("--block-bytes", text)
    if trace.block_bytes:
        return trace.block_bytes
    raise click.UsageError("this trace does not say how large a block is: give --block-bytes")


def _rate(text: str, blocks: int) -> float:
    if text == "auto":
        return sampling_rate(blocks)
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise click.UsageError("--sample is auto, or a number above 0, at most 1")
    return rate


def _hint_models(text: str) -> list[HintModel]:
    if not text:
        return [HintModel()]
    found = re.fullmatch(r"([01]?\.?\d*)(?::([01]?\.?\d*))?", text)
    try:
        right, wrong = float(found[1]) if found else -1.0, float((found and found[2]) or 0.05)
    except ValueError:
        right = wrong = -1.0
    if not (0 <= right <= 1 and 0 <= wrong <= 1):
        raise click.UsageError("--hints is RIGHT or RIGHT:WRONG, numbers from 0 to 1: 0.8:0.05")
    known: tuple[Knowledge, ...] = ("goes on", "soon", "over")
    return [HintModel(), *(HintModel(knowledge, right, wrong) for knowledge in known)]
