"""The command ``python -m kvstore.demo_vllm``: starts everything, prints what happened."""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.table import Table

from kvstore.demo.processes import ChildError, Children
from kvstore.demo_vllm import servers
from kvstore.demo_vllm.requests import RequestError, complete, counters, forget
from kvstore.demo_vllm.scenario import (
    HIDDEN,
    LAYERS,
    NEW_TOKENS,
    PROMPT_TOKENS_MAX,
    TIMED_RUNS,
    PromptOutcome,
    memory_mib,
    prompt,
)
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

STOP_SECONDS = 20.0
"""How long an engine may take for a clean end."""

EXAMPLE = """\b
Example:
  python -m kvstore.demo_vllm --prompts 6 --prompt-tokens 1000
"""


@dataclasses.dataclass(frozen=True)
class RunningFleet:
    """The addresses of the running servers that the demonstration talks to."""

    proxy: str
    decoder: str


@click.command(epilog=EXAMPLE)
@click.option(
    "--prompts", type=click.IntRange(1, 50), default=4, show_default=True, help="Number of prompts."
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(BLOCK_TOKENS + 1, PROMPT_TOKENS_MAX),
    default=1500,
    show_default=True,
    help="Tokens in each prompt.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of weights and prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text.")
def main(prompts: int, prompt_tokens: int, seed: int, as_json: bool) -> None:
    """Watch a vLLM decoder find blocks in the store that a vLLM prefiller computed.

    Starts a master, a node, two vLLM servers (a prefiller, kv_producer, and a decoder, kv_consumer)
    and kvstore-proxy in front of them. Sends each prompt three ways: the prefiller computes it for
    the decoder, the decoder computes it alone, the decoder finds it in the store. The decoder's own
    prefix cache is emptied in between. The model is a small Llama with random weights, created
    locally: no download. All servers listen on the loopback interface.

    The last line begins with "demo:". The exit status is 0 only if all tokens were identical and
    every full block came from the store.
    """
    console = Console(quiet=as_json, highlight=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # cleans up, as Ctrl-C does
    outcomes: list[PromptOutcome] = []
    try:
        with Children(servers.environment(), stop_seconds=STOP_SECONDS) as children:
            fleet = start(children, console, prompts, prompt_tokens, seed)
            run(fleet, console, [prompt(seed, i, prompt_tokens) for i in range(prompts + 1)],
                outcomes)  # fmt: skip
            show(outcomes, counters(fleet.decoder), console)
        problems = [problem for outcome in outcomes for problem in outcome.problems()]
        summary, status = summarize(outcomes, problems), 1 if problems else 0
    except (ChildError, RequestError) as error:
        what, _, output = str(error).partition("\n")
        if output:
            click.echo(output, err=True)
        summary, status = f"demo: FAILED: {what}", 1
    except KeyboardInterrupt:
        summary, status = "demo: interrupted", 128 + signal.SIGINT
    report = {
        "ok": status == 0,
        "summary": summary,
        "prompts": [
            {**dataclasses.asdict(each), "identical": each.identical, "blocks": each.blocks}
            for each in outcomes
        ],
    }
    click.echo(json.dumps(report) if as_json else summary)
    sys.exit(status)


def start(
    children: Children, console: Console, prompts: int, prompt_tokens: int, seed: int
) -> RunningFleet:
    """Start all processes, and print a line about each.

    Raises:
        ChildError: a package is not installed, or a process did not start.
    """
    servers.require("vllm", "aiohttp", "transformers")
    with _step(console, "making a model"):
        model = servers.make_model(children, seed=seed, hidden=HIDDEN, layers=LAYERS)
    console.print(f"model      Llama, random weights, {LAYERS} layers of {HIDDEN}")
    memory = memory_mib(prompts + 1, prompt_tokens)
    with _step(console, "starting master and node"):
        master = servers.start_store(children, memory)
    console.print(f"store      master {master}, a node with {memory} MiB of memory")
    with _step(console, "starting two vLLM servers (a minute on two cores)"):
        prefiller, decoder = (
            servers.start_engine(
                children, name, model, servers.transfer_config(master, role)
            )
            for name, role in (("prefiller", "kv_producer"), ("decoder", "kv_consumer"))
        )  # fmt: skip
        for engine in (prefiller, decoder):
            servers.engine_ready(children, engine)
    console.print(f"prefiller  vLLM {prefiller.address}, kv_producer")
    console.print(f"decoder    vLLM {decoder.address}, kv_consumer")
    with _step(console, "starting the proxy"):
        proxy = servers.start_proxy(children, master, [prefiller], [decoder])
    console.print(f"proxy      {proxy.address}\n")
    return RunningFleet(proxy=proxy.address, decoder=decoder.address)


def run(
    fleet: RunningFleet, console: Console, prompts: list[list[int]], outcomes: list[PromptOutcome]
) -> None:
    """Send each prompt three ways, and add its outcome to ``outcomes``.

    The first prompt warms up engines and connections, and is not counted.
    """
    for number, each in enumerate(prompts):
        with _step(console, f"prompt {number} of {len(prompts) - 1}" if number else "warming up"):
            outcome = ask_three_ways(fleet, number, each)
        if number:
            outcomes.append(outcome)


def ask_three_ways(fleet: RunningFleet, number: int, ids: list[int]) -> PromptOutcome:
    """Send a prompt three ways, all through the proxy, so that times differ only by engines' work.

    The two ways that are compared alternate, so that a busy machine slows both alike.
    """
    forget(fleet.decoder)
    first = complete(fleet.proxy, ids, NEW_TOKENS)
    computed, found = [], []
    for _ in range(TIMED_RUNS):
        forget(fleet.decoder)
        computed.append(complete(fleet.proxy, ids, NEW_TOKENS, params={"no_load": True}))
        forget(fleet.decoder)
        found.append(complete(fleet.proxy, ids, NEW_TOKENS))
    return PromptOutcome(
        number=number,
        prompt_tokens=len(ids),
        blocks_found=min(each.cached_tokens for each in (first, *found)) // BLOCK_TOKENS,
        tokens_computed=[each.tokens for each in computed],
        tokens_found=[each.tokens for each in (first, *found)],
        computed_ms=[each.first_token_ms for each in computed],
        prefilled_ms=first.first_token_ms,
        found_ms=[each.first_token_ms for each in found],
    )


def show(outcomes: list[PromptOutcome], counted: dict[str, float], console: Console) -> None:
    """Print a table with a row per prompt."""
    table = Table(title="Time to first token", title_justify="left")
    headings = ("", "tokens", "blocks", "identical", "prefilled", "computed", "found", "ratio")
    for column in headings:
        table.add_column(column, justify="right")
    for each in outcomes:
        computed_ms, found_ms = each.medians_ms
        table.add_row(
            f"{each.number}",
            f"{each.prompt_tokens}",
            f"{each.blocks_found} of {each.blocks}",
            "yes" if each.identical else "NO",
            f"{each.prefilled_ms:.0f} ms",
            f"{computed_ms:.0f} ms",
            f"{found_ms:.0f} ms",
            f"{computed_ms / found_ms:.1f}x",
        )
    console.print(table)
    console.print(
        f"blocks     full blocks of {BLOCK_TOKENS} tokens that the decoder found in the store\n"
        f"identical  the {NEW_TOKENS} tokens generated each time, with and without the store\n"
        "prefilled  the prefiller computes the prompt, the decoder finds it (once)\n"
        f"computed   the decoder computes the prompt (median of {TIMED_RUNS})\n"
        f"found      the prompt is in the store (median of {TIMED_RUNS})\n\n"
        f"The decoder's connector counts {counted.get('loaded_requests', 0):.0f} requests that"
        f" loaded {counted.get('hit_tokens', 0):.0f} tokens,\nwarm-up included.\n"
    )


def summarize(outcomes: list[PromptOutcome], problems: list[str]) -> str:
    if problems:
        return f"demo: FAILED: {', '.join(problems)}"
    computed_ms = statistics.median(ms for each in outcomes for ms in each.computed_ms)
    found_ms = statistics.median(ms for each in outcomes for ms in each.found_ms)
    return (
        f"demo: {len(outcomes)} prompts, tokens identical, all"
        f" {sum(each.blocks for each in outcomes)} full blocks found, time to first token"
        f" {computed_ms:.0f} ms -> {found_ms:.0f} ms ({computed_ms / found_ms:.1f}x)"
    )


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    """On a terminal, show a spinner while the block runs."""
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


if __name__ == "__main__":
    main()
