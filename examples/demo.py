"""The command ``python -m examples.demo`` (``make demo``): starts all processes, and prints the
results. The engine of the producer and the consumer is in ``engine``."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvstore.bench.processes import (
    Children,
    environment,
    failures_reported,
    require_modules,
    start_store,
)

BLOCK_TOKENS = 64
"""Tokens in one object of the store. Smaller blocks match more of a prompt, larger ones cost
fewer keys; engines use 16 to 256."""

PORTION_TOKENS = 256
"""Prefill ends a portion at each multiple of this, as engines do (chunked prefill). If a prefix
from the store ends at such a multiple, the remaining portions are the same as without the store:
the same sums in the same order, so the same bits. After any other prefix float32 may round
differently, by much less than the distance between the logits of the two best tokens."""

# The decoder: 58 million weights, of which prefill multiplies 50 million with every token. One
# query head in four has a key/value head, as in Llama 3, so a token's KV is small next to the work
# of computing it: 1 MiB per block against some 6 GFLOP.
LAYERS = 16
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 64
HIDDEN = HEADS * HEAD_DIM
INTERMEDIATE = 1536
VOCABULARY = 8192
POSITIONS_MAX = 32_768
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4  # keys and values, float32

TAIL_TOKENS = {"producer": 64, "consumer": 100}
"""Tokens of a prompt after the prefix: a block or more, so each prompt has a block of its own."""

PREFIX_TOKENS_MAX = 16_384
"""Two cores compute this many in a minute or two."""

NEW_TOKENS = 32
TIMED_RUNS = 3

MIB = 1 << 20
JOB_SECONDS = 150.0
"""Timeout of a worker, for a slow machine; two cores need a tenth of it for the default prefix."""

EXAMPLE = """\b
Example:
  python -m examples.demo --prefix-tokens 4096 --transport tcp
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
def main(stay: bool | None, as_json: bool, **scenario: Any) -> None:
    """Watch one process reuse the KV cache that another one computed.

    Starts a master and a node, then a producer, which computes a long prompt and puts its KV
    blocks. After the producer has ended, a consumer continues another prompt with the same prefix
    in two ways: it computes all of it, and it takes the prefix from the store. Both ways must give
    the same tokens. The model is a small Llama with random weights, created locally: no download.

    The last line begins with "demo:". The exit status is 0 only if the outputs were identical and
    every shared block came from the store. The master serves a dashboard, which shows these blocks.
    """
    console = Console(quiet=as_json, highlight=False, soft_wrap=True)
    if stay is None:
        stay = not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    report: dict[str, Any] = {"scenario": scenario, "ok": False}

    def tell(summary: str) -> None:
        if "summary" not in report:
            report["summary"] = summary
            click.echo(json.dumps(report) if as_json else summary)

    with (
        failures_reported("demo", tell),
        running(scenario, console) as (dashboard, report["produced"], report["consumed"]),
    ):
        show(report["consumed"], console)
        report["ok"], summary = judge(scenario, report["produced"], report["consumed"])
        tell(summary)
        if stay:
            click.echo(f"\nThe store still runs. Look at {dashboard}; Enter ends it.", err=True)
            with contextlib.suppress(KeyboardInterrupt):
                sys.stdin.readline()
    sys.exit(0 if report["ok"] else 1)


Report = dict[str, Any]
"""The output of a worker (``engine``)."""


@contextlib.contextmanager
def running(scenario: dict[str, Any], console: Console) -> Iterator[tuple[str, Report, Report]]:
    """Run the producer and the consumer; yield the address of the dashboard, and both reports.
    Master and node run inside the block; all processes have ended after it."""
    require_modules("pip install torch transformers", "torch", "transformers")
    # Waiting threads of torch sleep. Busy polling is slightly faster on an idle machine, but makes
    # a busy one ten times slower, which would make the comparison look better than it is.
    environ = environment(HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1", OMP_WAIT_POLICY="passive")
    with Children(environ) as children:
        # Memory for all objects of the producer, and a quarter more for headers and gaps: with the
        # default prefix below a container's default of 64 MiB for /dev/shm.
        tokens = scenario["prefix_tokens"] + TAIL_TOKENS["producer"]
        memory = 8 + tokens * KV_BYTES_PER_TOKEN * 5 // 4 // MIB
        store = start_store(children, memory * MIB, http=True)
        address, dashboard = store.address(), store.dashboard
        console.print(f"master     pid {store.pids['master']}, {address}, dashboard {dashboard}")
        console.print(f"node       pid {store.pids['storage']}, {memory} MiB of memory")

        def work(role: str) -> Report:
            job = ("examples.engine", address, json.dumps(scenario), role)
            worker = children.start(role, *job)
            done: Report = json.loads(children.result(worker, JOB_SECONDS))
            place = "GPU" if done["device"] == "cuda" else "CPU"
            console.print(f"{role}   pid {done['pid']}, on the {place},", end=" ")
            return done

        produced = work("producer")
        console.print(
            f"computed {produced['prompt_tokens']} tokens in {produced['prefill_ms']:.0f} ms,"
            f" put {produced['blocks_stored']} blocks ({produced['stored_bytes'] / MIB:.1f} MiB)"
            f" in {produced['put_ms']:.0f} ms, ended"
        )
        consumed = work("consumer")
        console.print(
            f"prompt of {consumed['prompt_tokens']} tokens: {consumed['blocks_reused']} of its"
            f" {consumed['blocks_asked']} blocks are in the store"
        )
        yield dashboard, produced, consumed


def judge(scenario: dict[str, Any], produced: Report, consumed: Report) -> tuple[bool, str]:
    """Return whether all outputs and blocks are right, and the last line."""
    blocks, shared = consumed["blocks_reused"], scenario["prefix_tokens"] // BLOCK_TOKENS
    problems = []
    if consumed["tokens_reused"] != consumed["tokens_computed"]:
        problems.append("outputs differ")
    if blocks != shared:
        problems.append(
            f"{blocks} of {shared} blocks reused ({produced['blocks_stored']} were stored)"
        )
    if problems:
        return False, f"demo: FAILED: {', '.join(problems)}"
    computed_ms, reused_ms = first_token_ms(consumed)
    return True, (
        f"demo: outputs identical, {blocks} of {shared} blocks reused,"
        f" {consumed['moved_bytes'] / MIB:.1f} MiB moved, time to first token"
        f" {computed_ms:.0f} ms -> {reused_ms:.0f} ms ({computed_ms / reused_ms:.1f}x)"
    )


def first_token_ms(consumed: Report) -> list[float]:
    return [statistics.median(consumed[f"first_token_{way}_ms"]) for way in ("computed", "reused")]


def show(consumed: Report, console: Console) -> None:
    blocks, tokens = consumed["blocks_reused"], consumed["prompt_tokens"]
    computed_ms, reused_ms = first_token_ms(consumed)
    table = Table("", "without the store", "with the store")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("blocks from the store", "0", f"{blocks}")
    table.add_row("moved", "0", f"{consumed['moved_bytes'] / MIB:.1f} MiB")
    table.add_row("prompt tokens computed", f"{tokens}", f"{tokens - blocks * BLOCK_TOKENS}")
    table.add_row("time to first token", f"{computed_ms:.1f} ms", f"{reused_ms:.1f} ms")
    console.print(table)
    console.print(
        f"Times: from the prompt to its first token, look-up and transfer included; the median of"
        f"\n{TIMED_RUNS} runs with a warm model and a warm connection; the first run of each way is"
        " not counted.\nThe model's weights are random, so its tokens mean nothing; what counts is"
        " that both ways\ngive the same ones."
    )


if __name__ == "__main__":
    main()
