"""The command ``python -m kvstore.demo``: starts everything, prints what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator

import click
from rich.console import Console
from rich.table import Table

from kvstore.demo.processes import ChildError, Children, free_port
from kvstore.demo.scenario import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    PORTION_TOKENS,
    PREFIX_TOKENS_MAX,
    PRODUCER_TAIL_TOKENS,
    TIMED_RUNS,
    Consumed,
    Produced,
    Scenario,
)

MIB = 1 << 20
READY_SECONDS = 30.0
JOB_SECONDS = 150.0
"""Time-out, for a slow machine; two cores need a tenth of it for the default prefix."""

EXAMPLE = """\b
Example:
  python -m kvstore.demo --prefix-tokens 4096 --transport tcp
"""


@click.command(epilog=EXAMPLE)
@click.option(
    "--prefix-tokens",
    type=click.IntRange(BLOCK_TOKENS, PREFIX_TOKENS_MAX),
    default=2048,
    show_default=True,
    help="Tokens that the two prompts have in common.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of weights and prompts.")
@click.option(
    "--transport",
    type=click.Choice(["shm", "tcp"]),
    default="shm",
    show_default=True,
    help="Transport of the bytes: shared memory or a socket.",
)
@click.option(
    "--stay/--no-stay",
    default=None,
    help="At the end, keep the store and its dashboard until Enter or Ctrl-C."
    "  [default: in a terminal]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text.")
def main(prefix_tokens: int, seed: int, transport: str, stay: bool | None, as_json: bool) -> None:
    """Watch one process reuse the KV cache that another one computed.

    Starts a master and a node, then a producer, which computes a long prompt and puts its KV
    blocks. After the producer has ended, a consumer continues another prompt with the same prefix
    in two ways: it computes all of it, and it takes the prefix from the store. Both ways must give
    the same tokens. The model is a small Llama with random weights, created locally: no download.

    The last line begins with "demo:". The exit status is 0 only if the outputs were identical and
    every shared block came from the store. The master serves a dashboard, which shows these blocks.
    """
    scenario = Scenario(prefix_tokens=prefix_tokens, seed=seed, transport=transport)
    console = Console(quiet=as_json, highlight=False, soft_wrap=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # to end like Ctrl-C: cleaning up
    report: dict[str, object] = {"scenario": dataclasses.asdict(scenario)}
    if stay is None:
        stay = not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    has_ended = False
    try:
        with running(scenario, console) as (dashboard, produced, consumed):
            problems = find_problems(scenario, produced, consumed)
            show(consumed, console)
            summary, status = summarize(scenario, consumed, problems), 1 if problems else 0
            report["produced"] = dataclasses.asdict(produced)
            report["consumed"] = dataclasses.asdict(consumed)
            report |= {"ok": status == 0, "summary": summary}
            click.echo(json.dumps(report) if as_json else summary)
            has_ended = True
            if stay:
                wait_for_user(dashboard)
    except ChildError as error:
        what, _, output = str(error).partition("\n")
        if output:
            click.echo(output, err=True)
        summary, status = f"demo: FAILED: {what}", 1
    except KeyboardInterrupt:
        summary, status = "demo: interrupted", 128 + signal.SIGINT
    if not has_ended:
        report |= {"ok": False, "summary": summary}
        click.echo(json.dumps(report) if as_json else summary)
    sys.exit(status)


def wait_for_user(dashboard: str) -> None:
    """Returns after a line, or the end, of standard input, or after Ctrl-C."""
    click.echo(f"\nThe store still runs. Look at {dashboard}; Enter ends it.", err=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.readline()


@contextlib.contextmanager
def running(scenario: Scenario, console: Console) -> Iterator[tuple[str, Produced, Consumed]]:
    """Run the producer and the consumer; the address of the dashboard, and what they did. Master
    and node run inside the block; all processes have ended after it."""
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise ChildError(f"{module} is not installed; pip install torch transformers")
    with Children(_environment()) as children:
        master = children.start(
            "master", "kvstore.cli.master", "--port", "0", "--http-port", str(free_port())
        )
        said = children.ready(
            master, r"listening on (\S+:\d+)[^\0]*dashboard on (http://\S+)", READY_SECONDS
        )
        address, dashboard = said.groups()
        console.print(f"master     pid {master.process.pid}, {address}, dashboard {dashboard}")

        memory = ["--memory", f"{_pool_mib(scenario)}MiB"]
        node = children.start("node", "kvstore.cli.node", "--master", address, *memory)
        children.ready(node, r"^kvstore-node .+", READY_SECONDS)
        console.print(f"node       pid {node.process.pid}, {_pool_mib(scenario)} MiB of memory")

        job = ("kvstore.demo.worker", address, json.dumps(dataclasses.asdict(scenario)))
        producer = children.start("producer", *job, "producer")
        produced = Produced(**json.loads(children.result(producer, JOB_SECONDS)))
        console.print(
            f"producer   pid {produced.pid}, {_place(produced.device)}, computed"
            f" {produced.prompt_tokens} tokens in"
            f" {produced.prefill_ms:.0f} ms, put {produced.blocks_stored} blocks"
            f" ({produced.stored_bytes / MIB:.1f} MiB) in {produced.put_ms:.0f} ms, ended"
        )
        consumer = children.start("consumer", *job, "consumer")
        consumed = Consumed(**json.loads(children.result(consumer, JOB_SECONDS)))
        console.print(
            f"consumer   pid {consumed.pid}, {_place(consumed.device)}, prompt of"
            f" {consumed.prompt_tokens} tokens:"
            f" {consumed.blocks_reused} of its {consumed.blocks_asked} blocks are in the store"
        )
        yield dashboard, produced, consumed


def find_problems(scenario: Scenario, produced: Produced, consumed: Consumed) -> list[str]:
    """Everything that went wrong, as texts."""
    problems = []
    if consumed.tokens_reused != consumed.tokens_computed:
        problems.append("outputs differ")
    if consumed.blocks_reused != scenario.shared_blocks:
        problems.append(
            f"{consumed.blocks_reused} of {scenario.shared_blocks} blocks reused"
            f" ({produced.blocks_stored} were stored)"
        )
    return problems


def summarize(scenario: Scenario, consumed: Consumed, problems: list[str]) -> str:
    if problems:
        return f"demo: FAILED: {', '.join(problems)}"
    computed_ms = statistics.median(consumed.first_token_computed_ms)
    reused_ms = statistics.median(consumed.first_token_reused_ms)
    return (
        f"demo: outputs identical, {consumed.blocks_reused} of {scenario.shared_blocks} blocks"
        f" reused, {consumed.moved_bytes / MIB:.1f} MiB moved, time to first token"
        f" {computed_ms:.0f} ms -> {reused_ms:.0f} ms ({computed_ms / reused_ms:.1f}x)"
    )


def show(consumed: Consumed, console: Console) -> None:
    """Both ways side by side."""
    reused_tokens = consumed.blocks_reused * BLOCK_TOKENS
    table = Table("", "without the store", "with the store")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("blocks from the store", "0", f"{consumed.blocks_reused}")
    table.add_row("moved", "0", f"{consumed.moved_bytes / MIB:.1f} MiB")
    table.add_row(
        "prompt tokens computed",
        f"{consumed.prompt_tokens}",
        f"{consumed.prompt_tokens - reused_tokens}",
    )
    table.add_row(
        "time to first token",
        f"{statistics.median(consumed.first_token_computed_ms):.1f} ms",
        f"{statistics.median(consumed.first_token_reused_ms):.1f} ms",
    )
    console.print(table)
    console.print(
        f"Times: from the prompt to its first token, look-up and transfer included; the median of"
        f"\n{TIMED_RUNS} runs with a warm model and a warm connection; the first run of each way is"
        " not counted."
    )
    for way, tokens in (
        ("without", consumed.tokens_computed),
        ("with", consumed.tokens_reused),
    ):
        console.print(f"\nTokens generated {way} the store:")
        for start in range(0, len(tokens), 16):
            console.print("".join(f"{token:5}" for token in tokens[start : start + 16]))
    console.print(
        f"\nLogits of the two ways differ by at most {consumed.logit_difference_max:.1g}; the token"
        f" chosen led the second\nbest by at least {consumed.logit_lead_min:.1g}. Prefill works in"
        f" portions that end at multiples of {PORTION_TOKENS} tokens;\nwhere the reused prefix ends"
        " at one, both ways do the same sums for the rest.\n"
    )


def _place(device: str) -> str:
    return "on the GPU" if device == "cuda" else "on the CPU"


def _pool_mib(scenario: Scenario) -> int:
    """Memory for all objects of the producer, and a quarter more for headers and gaps.

    With the default prefix it stays below a container's default of 64 MiB for /dev/shm.
    """
    tokens = scenario.prefix_tokens + PRODUCER_TAIL_TOKENS
    return 8 + tokens * KV_BYTES_PER_TOKEN * 5 // 4 // MIB


def _environment() -> dict[str, str]:
    """This process's environment without kvstore's settings, so that every run is the same."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
    return inherited | {
        "KVSTORE_CONFIG": "",  # no kvstore.toml either
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Waiting threads of torch sleep. Spinning is slightly faster on an idle machine, but makes
        # a busy one ten times slower, which would make the comparison look better than it is.
        "OMP_WAIT_POLICY": "passive",
    }


if __name__ == "__main__":
    main()
