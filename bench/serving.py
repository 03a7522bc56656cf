"""The command ``python -m bench.serving``: what vLLM's own ``vllm bench serve`` says of two engines
that share a store, of this project or Mooncake's, and of two that share none.

The two engines of a system stand behind ``kvstore-proxy``, in two ways:

* *1P1D*: one computes prompts, the other answers. Every prompt is new. Without a store nothing
  that the one computes reaches the other, so this system is a round robin here, too.
* *round robin*: both answer, in turn. Some prompts begin alike.

After that come the sessions of ``agentic``, behind the round robin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from bench import agentic, page, serving_page
from bench import vllm_systems as systems
from bench.page import Advance, Found
from bench.serving_page import FIGURES, PAIR, ROUND_ROBIN, SHAPES
from bench.vllm import PACKAGES, STOP_SECONDS
from bench.vllm_rounds import SETTLE_SECONDS
from bench.vllm_systems import System
from kvstore.config import ConnectorConfig
from kvstore.demo.processes import ChildError, Children
from kvstore.demo_vllm import servers
from kvstore.demo_vllm.requests import MODEL, RequestError, forget
from kvstore.demo_vllm.scenario import HIDDEN, LAYERS, memory_mib
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

NEW_TOKENS: Final = 16
PREFIXES: Final = 2
"""Different beginnings of the prompts of one run, behind the round robin."""
PREFIX_QUARTERS: Final = 3
"""Quarters of a prompt that are its beginning."""
CACHE_BLOCKS: Final = 40
"""Blocks of an engine's own cache: it holds two prompts of the greatest length, and a part of the
sessions, as the memory of a GPU holds a part of the conversations of a day."""
ENGINE_OPTIONS: Final = ("--enable-scale-out", "--num-gpu-blocks-override", str(CACHE_BLOCKS))
"""The first: engines answer ``/render``, by which the proxy learns a prompt's token ids."""
AS_SHIPPED: Final = {
    "lookup_deadline_ms": ConnectorConfig.model_fields["lookup_deadline_ms"].default
}
"""Instead of the demonstration's patience: a user would have these."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
"""Of engines: two that compute at once on two cores would wait for each other's threads."""
SYSTEMS: Final = (systems.NONE, systems.KVSTORE, systems.MOONCAKE)


class ServingKind(NamedTuple):
    """What one run of the tool is like."""

    shape: str
    tokens: int
    """Of each prompt."""
    rate: float
    """Requests per second."""


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """How much is measured."""

    rounds: int = 3
    prompts: int = 6
    """Prompts of each run of the tool."""
    tokens: tuple[int, ...] = (512, 1536)
    """Lengths of prompts."""
    rates: tuple[float, ...] = (1.0, 2.0)
    """Requests per second."""
    sessions: int = 5
    """An odd number, so that each turn of a session is on the other engine."""
    turns: int = 30
    seed: int = 0

    @property
    def kinds(self) -> list[ServingKind]:
        """The runs of a round."""
        return list(
            itertools.starmap(ServingKind, itertools.product(SHAPES, self.tokens, self.rates))
        )

    @property
    def every(self) -> list[tuple[int, ServingKind]]:
        """Number of the round (0 warms up) and kind of each run."""
        first = [(0, ServingKind(shape, max(self.tokens), max(self.rates))) for shape in SHAPES]
        return first + list(itertools.product(range(1, self.rounds + 1), self.kinds))

    @property
    def memory_mib(self) -> int:
        """Of a store that evicts nothing."""
        tokens = self.prompts * sum(kind.tokens for _, kind in self.every)
        return memory_mib(1, tokens + self.sessions * servers.POSITIONS)


QUICK: Final = ServingPlan(rounds=1, prompts=4, tokens=(512,), rates=(2.0,), sessions=3, turns=3)


@click.command()
@click.option(
    "--systems", "names", default=",".join(SYSTEMS), show_default=True,
    callback=systems.named, help=f"Some of {', '.join(systems.SYSTEMS)}.",
)  # fmt: skip
@page.quick_option
@page.out_option
@page.redraw_option
def main(names: list[str], quick: bool, out: Path | None, redraw: Path | None) -> None:
    """Measure two vLLM engines that share a store, by `vllm bench serve` and by growing sessions.

    Each system is two engines and its store. All systems run at the same time and get requests in
    turns. The model is a small Llama with random weights, created locally.

    The last line begins with "bench:". The exit status is 0 only if all systems said the same in
    the sessions, and every system with a store found a part of what it had computed.
    """
    if redraw:
        found = json.loads(redraw.read_text())
    else:
        plan = QUICK if quick else ServingPlan()
        names = systems.present(names)
        steps = len(names) * (len(plan.every) + plan.turns)
        found = page.measured(lambda progress: run(names, plan, progress), steps, PACKAGES)
    page.publish(serving_page.page_of(found), found, out)
    if problems := serving_page.find_problems(found):
        click.echo(f"bench: FAILED: {', '.join(problems)}")
        sys.exit(1)
    click.echo(f"bench: {len(found['sessions']['systems'])} systems, sessions identical")


def run(names: Sequence[str], plan: ServingPlan, progress: Advance) -> Found:
    """Starts all systems, and measures them.

    Raises:
        ChildError: a process did not start, or an engine did not answer.
    """
    servers.require("vllm", "aiohttp", "transformers")
    with Children(servers.environment() | ONE_THREAD, stop_seconds=STOP_SECONDS) as children:
        progress("making a model", 0)
        model = servers.make_model(children, seed=plan.seed, hidden=HIDDEN, layers=LAYERS)
        progress(f"starting {2 * len(names)} engines, stores of {plan.memory_mib} MiB (minutes)", 0)
        started = systems.start(
            children, names, model, plan.memory_mib, engines=2, options=ENGINE_OPTIONS,
            settings=AS_SHIPPED,
        )  # fmt: skip
        try:
            return measure(children, started, model, plan, progress)
        except RequestError as error:
            raise ChildError(str(error)) from None


def measure(
    children: Children, started: Sequence[System], model: Path, plan: ServingPlan, progress: Advance
) -> Found:
    """Measures running systems of two engines each, behind proxies that it starts.

    Raises:
        ChildError: a proxy did not start.
        RequestError: an engine did not answer.
    """
    fronts = {system.name: _fronts(children, system) for system in started}
    robins = {name: each[ROUND_ROBIN] for name, each in fronts.items()}
    about = {
        "hidden": HIDDEN, "layers": LAYERS, "cache_blocks": CACHE_BLOCKS,
        "block_tokens": BLOCK_TOKENS, "new_tokens": NEW_TOKENS, "prefixes": PREFIXES,
    }  # fmt: skip
    return {
        "model": about,
        "plan": dataclasses.asdict(plan),
        "rows": _rows(started, fronts, model, plan, progress),
        "sessions": agentic.measure(robins, plan.sessions, plan.turns, plan.seed, progress),
    }


def _fronts(children: Children, system: System) -> dict[str, str]:
    """Starts the proxies of a system; their addresses by shape."""

    def front(shape: str, master: str, prefill: list[str], decode: list[str]) -> str:
        name = f"{system.name}-{shape.replace(' ', '-')}"
        return servers.start_proxy(children, master, prefill, decode, name=name).address

    robin = front(ROUND_ROBIN, "", [], system.addresses)
    if system.name == systems.NONE:
        return dict.fromkeys(SHAPES, robin)
    first, second = system.addresses
    return {ROUND_ROBIN: robin, PAIR: front(PAIR, system.master, [first], [second])}


def _rows(
    started: Sequence[System],
    fronts: dict[str, dict[str, str]],
    model: Path,
    plan: ServingPlan,
    progress: Advance,
) -> list[Found]:
    """Runs the tool in all rounds. Returns a row for each kind and system, with its runs."""
    rows: dict[tuple[ServingKind, str], list[Found]] = {}
    for number, turn, kind, system in _turns(started, plan):
        what = f"round {number} of {plan.rounds}" if number else "warming up"
        progress(f"{what}: {kind.shape}, {kind.tokens} tokens, {kind.rate:g}/s, {system.name}", 1)
        address = fronts[system.name][kind.shape]
        found = vllm_bench_serve(_arguments(address, model, plan.prompts, kind, plan.seed + turn))
        if found["completed"] < plan.prompts:
            raise RequestError(f"{system.name} completed {found['completed']:.0f} requests")
        if number:
            rows.setdefault((kind, system.name), []).append(found)
    return [
        {**kind._asdict(), "system": system.name, "runs": rows[kind, system.name]}
        for kind in plan.kinds
        for system in started
    ]


def _turns(
    started: Sequence[System], plan: ServingPlan
) -> Iterator[tuple[int, int, ServingKind, System]]:
    """Number of the round (0 warms up), number of the prompts, kind of the run, and system. After
    each it empties the engines' own caches, which waits until their saves are done."""
    for turn, (number, kind) in enumerate(plan.every):
        first = turn % len(started)
        for system in [*started[first:], *started[:first]]:
            yield number, turn, kind, system
            for address in system.addresses:
                forget(address)
            time.sleep(SETTLE_SECONDS)


# --- the tool ----------------------------------------------------------------------------------


def _arguments(address: str, model: Path, prompts: int, kind: ServingKind, seed: int) -> list[str]:
    """Arguments of ``vllm bench serve``.

    The dataset is not ``random``, whose prompts are pieces of one sequence of the vocabulary: this
    model has so few tokens that prompts would repeat.
    """
    prefix = kind.tokens * PREFIX_QUARTERS // 4
    options = {
        "backend": "openai", "base-url": f"http://{address}", "model": model,
        "served-model-name": MODEL, "num-prompts": prompts, "request-rate": kind.rate, "seed": seed,
        "dataset-name": "prefix_repetition", "prefix-repetition-prefix-len": prefix,
        "prefix-repetition-suffix-len": kind.tokens - prefix,
        "prefix-repetition-num-prefixes": prompts if kind.shape == PAIR else PREFIXES,
        "prefix-repetition-output-len": NEW_TOKENS, "temperature": 0,
    }  # fmt: skip
    flags = ["--ignore-eos", "--disable-tqdm"]
    return [f"--{name}={value}" for name, value in options.items()] + flags


def vllm_bench_serve(arguments: Sequence[str]) -> Found:
    """The figures that ``vllm bench serve`` prints, and how many requests were completed.

    It runs in this process: a process of its own would import vLLM for seconds, each time, on the
    cores of the engines. Its command does not find vLLM's build for CPUs.
    """
    serve: Any = importlib.import_module("vllm.benchmarks.serve")  # exists only with vLLM
    for name in ("vllm", "transformers"):  # warn of every prompt that they cut to its length
        logging.getLogger(name).setLevel(logging.ERROR)
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    serve.add_cli_args(parser)
    with contextlib.redirect_stdout(io.StringIO()):
        said = serve.main(parser.parse_args(arguments))
    return {name: float(said[name]) for name in FIGURES}


if __name__ == "__main__":
    main()
