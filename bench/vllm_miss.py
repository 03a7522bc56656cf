"""The command ``python -m bench.vllm_miss``: what looking up and saving cost a prompt that no
engine has computed before.

Two processes of one engine differ by some percent without any store, so that a cost of one percent
cannot be seen between them. So one engine answers all prompts, and some of these tell it to use no
store (``no_load``, ``no_store``). Each round has three turns, in changing order, each of fresh
prompts one after the other: with the store, without, and without again. The ratio of the last two
says how much two equal turns differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import permutations
from math import ceil, floor
from typing import Final

import click

from bench import page
from bench import vllm_systems as systems
from bench.page import Advance, Found, ResultsTable
from bench.vllm import MEMORY_MORE, PACKAGES, STOP_SECONDS
from bench.vllm_rounds import SETTLE_SECONDS
from kvstore.bench.timing import Spread
from kvstore.demo.processes import ChildError, Children
from kvstore.demo_vllm import servers
from kvstore.demo_vllm.requests import RequestError, complete, forget
from kvstore.demo_vllm.scenario import HIDDEN, LAYERS, PROMPT_TOKENS_MAX, memory_mib, prompt
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

WITH, WITHOUT, AGAIN = TURNS = ("with the store", "without", "without again")
KEPT_ROUNDS: Final = 20
"""Then the pool is full, as most are, and saves evict."""
NO_STORE: Final[Mapping[str, object]] = {"no_load": True, "no_store": True}
EXAMPLE = """\b
Examples:
  python -m bench.vllm_miss
  python -m bench.vllm_miss --rounds 5 --prompts 2
"""


@click.command(epilog=EXAMPLE)
@click.option(
    "--rounds", type=click.IntRange(1, 200), default=80, show_default=True,
    help="Rounds that count; one more comes before them.",
)  # fmt: skip
@click.option(
    "--prompts", type=click.IntRange(1, 50), default=4, show_default=True,
    help="Prompts in each turn, one after the other.",
)  # fmt: skip
@click.option(
    "--prompt-tokens", type=click.IntRange(BLOCK_TOKENS + 1, PROMPT_TOKENS_MAX), default=1500,
    show_default=True, help="Tokens in each prompt.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of weights and prompts.")
def main(rounds: int, prompts: int, prompt_tokens: int, seed: int) -> None:
    """Measure what looking up and saving cost a prompt that no engine has computed before.

    One engine answers all prompts, with and without the store in turns; one token is generated for
    each. The last line begins with "bench:".
    """
    found = page.measured(
        lambda progress: run(rounds, prompts, prompt_tokens, seed, progress),
        (rounds + 1) * len(TURNS), PACKAGES,
    )  # fmt: skip
    page.show(parts_of(found))
    click.echo(f"bench: {rounds} rounds")


def run(rounds: int, prompts: int, prompt_tokens: int, seed: int, progress: Advance) -> Found:
    """Starts a store and an engine, and measures. The first round warms up and is not counted.

    Raises:
        ChildError: a process did not start, or the engine did not answer.
    """
    servers.require("vllm", "transformers")
    kept = min(rounds, KEPT_ROUNDS) + 1
    memory = int(memory_mib(len(TURNS) * prompts * kept, prompt_tokens) * MEMORY_MORE)
    with Children(servers.environment(), stop_seconds=STOP_SECONDS) as children:
        progress("starting a store and an engine", 0)
        model = servers.make_model(children, seed=seed, hidden=HIDDEN, layers=LAYERS)
        (system,) = systems.start(children, [systems.KVSTORE], model, memory)
        seconds: dict[str, list[float]] = {turn: [] for turn in TURNS}
        orders = list(permutations(TURNS))
        try:
            for number in range(rounds + 1):
                for at, turn in enumerate(orders[number % len(orders)]):
                    progress(f"round {number} of {rounds}: {turn}", 1)
                    first = (number * len(TURNS) + at) * prompts
                    asked = [prompt(seed, first + each, prompt_tokens) for each in range(prompts)]
                    took = _turn(system.address, asked, None if turn == WITH else NO_STORE)
                    seconds[turn] += [took] if number else []
        except RequestError as error:
            raise ChildError(str(error)) from None
    return {
        "plan": {"rounds": rounds, "prompts": prompts, "prompt_tokens": prompt_tokens},
        "seconds": seconds,
    }


def _turn(address: str, asked: list[list[int]], params: Mapping[str, object] | None) -> float:
    """Seconds for each of these prompts."""
    forget(address)  # waits for the saves of the turn before
    time.sleep(SETTLE_SECONDS)
    start = time.perf_counter()
    for ids in asked:
        complete(address, ids, 1, params=params)
    return (time.perf_counter() - start) / len(asked)


def parts_of(found: Found) -> list[str | ResultsTable]:
    """A table of the turns, and of the ratios within rounds."""
    plan, seconds = found["plan"], found["seconds"]
    rows = []
    for turn in TURNS:
        ms = Spread.of([each * 1e3 for each in seconds[turn]])
        ratios = [mine / its for mine, its in zip(seconds[turn], seconds[WITHOUT], strict=True)]
        ratio, (low, high) = Spread.of(ratios), within(ratios)
        rows.append((
            turn, f"{ms.median:.1f} ms ({ms.smallest:.1f} to {ms.largest:.1f})",
            f"{ratio.median:.4f} ({ratio.smallest:.3f} to {ratio.largest:.3f})",
            f"{low:.4f} to {high:.4f}",
        ))  # fmt: skip
    return [
        f"{plan['rounds']} rounds of {plan['prompts']} prompts of {plan['prompt_tokens']} tokens, "
        "all to one engine",
        ResultsTable(("", "a prompt", "of the turn without", "its median, 95 %"), rows, (0,)),
    ]


def within(values: Sequence[float]) -> tuple[float, float]:
    """The interval in which the median of all such values lies with a probability of 95 %, whatever
    their distribution: between two of the ordered values (Conover, Practical Nonparametric
    Statistics, section 3.2).
    """
    ordered, half = sorted(values), 1.96 * len(values) ** 0.5 / 2
    first = max(0, floor(len(ordered) / 2 - half))
    last = min(len(ordered) - 1, ceil(len(ordered) / 2 + half))
    return ordered[first], ordered[last]


if __name__ == "__main__":
    main()
