"""The command ``python -m bench.vllm``: vLLM without a store, with this one, and with
its built-in one, on the same machine with the same prompts."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from typing import IO

import click
from rich.console import Console

from bench.vllm import report, systems
from bench.vllm.measure import HIT, Measured, Plan, measure
from kvstore.demo.processes import ChildError, Children
from kvstore.demo_vllm import servers
from kvstore.demo_vllm.requests import RequestError
from kvstore.demo_vllm.scenario import HIDDEN, LAYERS, PROMPT_TOKENS_MAX, memory_mib
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

STOP_SECONDS = 20.0
WIDTH = 120
"""Width of the tables if they go to a file."""
MEMORY_MORE = 1.2
"""Memory of each store, relative to the blocks of all prompts, so that no store evicts: Mooncake
begins to evict when it is nearly full."""

EXAMPLE = """\b
Examples:
  python -m bench.vllm --json results.json
  python -m bench.vllm --systems none,kvstore --prompts 4 --rounds 3
"""


def _systems(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in systems.SYSTEMS:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(systems.SYSTEMS)}")
    return names


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
    callback=_systems, help=f"Some of {', '.join(systems.SYSTEMS)}.",
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
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    plan = Plan(**sizes)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    try:
        summary, status = run(names, plan, json_file, console)
    except (ChildError, RequestError) as error:
        what, _, output = str(error).partition("\n")
        if output:
            click.echo(output, err=True)
        summary, status = f"bench: FAILED: {what}", 1
    except KeyboardInterrupt:
        summary, status = "bench: interrupted", 128 + signal.SIGINT
    click.echo(summary)
    sys.exit(status)


def run(
    names: list[str], plan: Plan, json_file: IO[str] | None, console: Console
) -> tuple[str, int]:
    """Start, measure, show. Returns the last line and the exit status.

    Raises:
        ChildError: a process did not start.
        RequestError: an engine did not answer.
    """
    servers.require("vllm", "transformers")
    for name in list(names):
        if reason := systems.missing(name):
            console.print(f"{name} is left out: {reason}")
            names.remove(name)
    memory = int(memory_mib(plan.prompts_in_all, plan.prompt_tokens) * MEMORY_MORE)
    load = os.getloadavg()[0]
    with Children(servers.environment(), stop_seconds=STOP_SECONDS) as children:
        status = console.status("making a model") if console.is_terminal else None
        with status or nullcontext():
            model = servers.make_model(children, seed=plan.seed, hidden=HIDDEN, layers=LAYERS)
            console.print(
                f"starting {len(names)} engines, stores of {memory} MiB (a minute or two)"
            )
            if status:
                status.update("starting engines and stores")
            started = systems.start(children, names, model, memory)
            measured = measure(started, plan, status.update if status else lambda what: None)
    report.show(measured, console)
    if json_file:
        found = report.as_json(measured, (load, os.getloadavg()[0]))
        json_file.write(json.dumps(found, indent=1) + "\n")
    problems = find_problems(measured)
    if problems:
        return f"bench: FAILED: {', '.join(problems)}", 1
    return f"bench: {len(measured.systems)} systems, tokens identical, every full block found", 0


def find_problems(measured: Measured) -> list[str]:
    """Reasons why the numbers are invalid, as texts."""
    found = []
    if measured.differing:
        found.append(f"{measured.differing} answers differ between systems")
    for name in measured.systems:
        part = measured.found(name, HIT)
        if name != systems.NONE and part < 1:
            found.append(f"{name} found {part:.1%} on a hit")
    return found


if __name__ == "__main__":
    main()
