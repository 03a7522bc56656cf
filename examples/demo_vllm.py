"""The command ``python -m examples.demo_vllm`` (``make demo-vllm``): starts all processes, and
prints the results."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.table import Table

from examples import fleet
from examples.fleet import (
    complete,
    counters,
    forget,
    full_blocks,
    make_model,
    prompt,
    start_engine,
)
from examples.tiny import BLOCK_TOKENS, HIDDEN, LAYERS, kv_bytes_per_token
from kvstore.bench.processes import Children, failures_reported, require_modules, start_store

NEW_TOKENS = 16
TIMED_RUNS = 3
PROMPT_TOKENS_MAX = 2_000
"""Prompt and answer together must have fewer tokens than ``--max-model-len``."""

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    kind: str
    """The value of ``--kind`` for ``tiny``."""
    name: str
    layers: str
    block_tokens: int
    """Tokens of a block of vLLM for CPUs."""
    options: tuple[str, ...] = ()
    """More options of ``vllm serve``."""


LLAMA = Model(
    kind="plain", name="Llama", layers=f"{LAYERS} layers of {HIDDEN}", block_tokens=BLOCK_TOKENS
)
# A block is so long that a state fits into one. vLLM 0.32 lengthens it by itself, but then splits
# prompts at multiples of --block-size, and keeps no state where that is within a block.
QWEN = Model(
    kind="recurrent",
    name="Qwen3-Next",
    layers=f"{LAYERS // 2} recurrent and {LAYERS // 2} attention layers of {HIDDEN}",
    block_tokens=2 * BLOCK_TOKENS,
    options=("--dtype", "bfloat16", "--block-size", str(2 * BLOCK_TOKENS)),
)
MODELS = {model.kind: model for model in (LLAMA, QWEN)}
PROMPT_TOKENS_MIN = max(model.block_tokens for model in MODELS.values()) + 1

EXAMPLE = """\b
Example:
  python -m examples.demo_vllm --kind recurrent --prompts 6 --prompt-tokens 1000
"""


def memory_mib(prompts: int, tokens: int) -> int:
    """Return MiB for all full blocks of ``prompts`` prompts of the Llama, with a quarter to spare.
    The hybrid needs less: half as many layers have blocks, of half as many bytes."""
    blocks = prompts * (tokens // BLOCK_TOKENS)
    return 8 + blocks * BLOCK_TOKENS * kv_bytes_per_token(HIDDEN, LAYERS) * 5 // 4 // MIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOutcome:
    """The outcome of one prompt. Times are milliseconds from the request to the first token."""

    model: str
    number: int
    prompt_tokens: int
    block_tokens: int
    blocks: int
    """Blocks that can be found."""
    blocks_found: int
    """Blocks that the decoder found in the store: the fewest of all its lookups."""
    identical: bool
    """Whether all runs gave the same tokens, computed and found."""
    tokens_found: list[list[int]]
    """Tokens generated with the prompt from the store, for each run."""
    prefilled_ms: float
    """Time of the first run, in which the prefiller computes the prompt."""
    computed_ms: list[float]
    found_ms: list[float]

    def problems(self) -> list[str]:
        prompt = f"{self.model} prompt {self.number}"
        found = [] if self.identical else [f"{prompt}: tokens differ"]
        if self.blocks_found < self.blocks:
            found.append(f"{prompt}: {self.blocks_found} of {self.blocks} blocks found")
        return found


@dataclasses.dataclass(frozen=True)
class RunningFleet:
    """The model, and the addresses of the running servers."""

    model: Model
    proxy: str
    decoder: str


@click.command(epilog=EXAMPLE)
@click.option(
    "--kind",
    type=click.Choice([*MODELS, "both"]),
    default="both",
    show_default=True,
    help="A Llama (plain), a Qwen3-Next, whose layers are recurrent in part, or both in turn.",
)
@click.option(
    "--prompts",
    type=click.IntRange(1, 50),
    default=4,
    show_default=True,
    help="Prompts of each model.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX),
    default=1500,
    show_default=True,
    help="Tokens in each prompt.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of weights and prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text.")
def main(kind: str, prompts: int, prompt_tokens: int, seed: int, as_json: bool) -> None:
    """Watch a vLLM decoder find blocks in the store that a vLLM prefiller computed.

    Starts a master, a node, two vLLM servers (a prefiller, kv_producer, and a decoder, kv_consumer)
    and kvstore-proxy in front of them. Sends each prompt three ways: the prefiller computes it for
    the decoder, the decoder computes it alone, the decoder finds it in the store. The decoder's own
    prefix cache is emptied in between. All of this with a small Llama, then with a small
    Qwen3-Next, whose recurrent layers go on from a state that the store keeps. Both have random
    weights and are created locally: no download. All servers listen on the loopback interface.

    The last line begins with "demo:". The exit status is 0 only if all tokens were identical and
    every full block came from the store.
    """
    console = Console(quiet=as_json, highlight=False)
    outcomes: list[PromptOutcome] = []
    asked = [prompt(seed, number, prompt_tokens) for number in range(prompts + 1)]

    def tell(summary: str, *, ok: bool = False) -> None:
        prompts = list(map(dataclasses.asdict, outcomes))
        report = {"ok": ok, "summary": summary, "prompts": prompts}
        click.echo(json.dumps(report) if as_json else summary)

    with failures_reported("demo", tell):
        for model in MODELS.values() if kind == "both" else [MODELS[kind]]:
            act(model, console, asked, seed, outcomes)
    problems = [problem for outcome in outcomes for problem in outcome.problems()]
    tell(summarize(outcomes, problems), ok=not problems)
    sys.exit(1 if problems else 0)


def act(
    model: Model, console: Console, prompts: list[list[int]], seed: int,
    outcomes: list[PromptOutcome],
) -> None:  # fmt: skip
    """Start a store and engines with this model, send the prompts, and end all of them.

    Args:
        outcomes: the outcomes of the prompts are added to it.
    """
    with Children(fleet.environment()) as children:
        running = start(children, console, model, len(prompts), len(prompts[0]), seed)
        first = len(outcomes)
        for number, prompt in enumerate(prompts):
            what = f"prompt {number} of {len(prompts) - 1}" if number else "warming up"
            with step(console, what):
                outcome = ask_three_ways(running, number, prompt)
            if number:  # the first prompt warms up engines and connections, and is not counted
                outcomes.append(outcome)
        show(outcomes[first:], counters(running.decoder), console)


def start(
    children: Children, console: Console, model: Model, prompts: int, prompt_tokens: int, seed: int
) -> RunningFleet:
    """Start all processes, and print a line about each.

    Raises:
        ChildError: a package is not installed, or a process did not start.
    """
    require_modules("`make demo-vllm` installs it", "vllm", "aiohttp", "transformers")
    with step(console, "making a model"):
        directory = make_model(children, seed=seed, hidden=HIDDEN, layers=LAYERS, kind=model.kind)
    console.print(f"model      {model.name}, random weights, {model.layers}")
    memory = memory_mib(prompts, prompt_tokens)
    with step(console, "starting master and node"):
        master = start_store(children, memory * MIB).address()
    console.print(f"store      master {master}, a node with {memory} MiB of memory")
    with step(console, "starting two vLLM servers (a minute on two cores)"):
        prefiller, decoder = (
            start_engine(
                children, name, directory, fleet.transfer_config(master, role),
                options=model.options,
            )
            for name, role in (("prefiller", "kv_producer"), ("decoder", "kv_consumer"))
        )  # fmt: skip
        for engine in (prefiller, decoder):
            fleet.engine_ready(children, engine)
    console.print(f"prefiller  vLLM {prefiller.address}, kv_producer")
    console.print(f"decoder    vLLM {decoder.address}, kv_consumer")
    with step(console, "starting the proxy"):
        proxy = fleet.start_proxy(children, master, [prefiller.address], [decoder.address])
    console.print(f"proxy      {proxy.address}\n")
    return RunningFleet(model, proxy=proxy.address, decoder=decoder.address)


def ask_three_ways(fleet: RunningFleet, number: int, ids: list[int]) -> PromptOutcome:
    """Send a prompt three ways, all through the proxy, so that times differ only by engines' work.

    The two ways that are compared alternate, so that a busy machine slows both alike.
    """
    forget(fleet.decoder)
    first = complete(fleet.proxy, ids, NEW_TOKENS)
    computed, found = [], [first]
    for _ in range(TIMED_RUNS):
        forget(fleet.decoder)
        computed.append(complete(fleet.proxy, ids, NEW_TOKENS, params={"no_load": True}))
        forget(fleet.decoder)
        found.append(complete(fleet.proxy, ids, NEW_TOKENS))
    block_tokens = fleet.model.block_tokens
    return PromptOutcome(
        model=fleet.model.name, number=number, prompt_tokens=len(ids), block_tokens=block_tokens,
        blocks=full_blocks(len(ids), block_tokens),
        blocks_found=min(answer.cached_tokens for answer in found) // block_tokens,
        identical=all(answer.tokens == first.tokens for answer in (*computed, *found)),
        tokens_found=[answer.tokens for answer in found],
        computed_ms=[answer.first_token_ms for answer in computed],
        prefilled_ms=first.first_token_ms,
        found_ms=[answer.first_token_ms for answer in found[1:]],
    )  # fmt: skip


def show(outcomes: list[PromptOutcome], counted: dict[str, float], console: Console) -> None:
    title = f"{outcomes[0].model}: time to first token"
    table = Table(title=title, title_justify="left")
    for column in ("", "tokens", "blocks", "identical", "prefilled", "computed", "found", "ratio"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        computed_ms, found_ms = map(statistics.median, (outcome.computed_ms, outcome.found_ms))
        table.add_row(
            str(outcome.number), str(outcome.prompt_tokens),
            f"{outcome.blocks_found} of {outcome.blocks}",
            "yes" if outcome.identical else "NO", f"{outcome.prefilled_ms:.0f} ms",
            f"{computed_ms:.0f} ms", f"{found_ms:.0f} ms", f"{computed_ms / found_ms:.1f}x",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"blocks     full blocks of {outcomes[0].block_tokens} tokens that the decoder found\n"
        f"identical  the {NEW_TOKENS} tokens generated each time, with and without the store\n"
        "prefilled  the prefiller computes the prompt, the decoder finds it (once)\n"
        f"computed   the decoder computes the prompt (median of {TIMED_RUNS})\n"
        f"found      the prompt is in the store (median of {TIMED_RUNS})\n\n"
        f"The decoder's connector counts {counted.get('loaded_requests', 0):.0f} requests that"
        f" loaded {counted.get('hit_tokens', 0):.0f} tokens\nand"
        f" {counted.get('hit_states', 0):.0f} states of recurrent layers, warm-up included.\n"
    )


def summarize(outcomes: list[PromptOutcome], problems: list[str]) -> str:
    if problems:
        return f"demo: FAILED: {', '.join(problems)}"
    acts = itertools.groupby(outcomes, lambda each: each.model)
    return f"demo: {'; '.join(_summary_of(model, list(found)) for model, found in acts)}"


def _summary_of(model: str, outcomes: Sequence[PromptOutcome]) -> str:
    computed_ms = statistics.median(ms for outcome in outcomes for ms in outcome.computed_ms)
    found_ms = statistics.median(ms for outcome in outcomes for ms in outcome.found_ms)
    found = sum(outcome.blocks_found * outcome.block_tokens for outcome in outcomes)
    tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    return (
        f"{model}: answers identical, {found} of {tokens} prompt tokens found, time to first token"
        f" {computed_ms:.0f} ms -> {found_ms:.0f} ms ({computed_ms / found_ms:.1f}x)"
    )


@contextmanager
def step(console: Console, what: str) -> Iterator[None]:
    """On a terminal, show a spinner while the block runs."""
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


if __name__ == "__main__":
    main()
