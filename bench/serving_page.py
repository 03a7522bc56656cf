"""The page about what ``bench.serving`` measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from bench import agentic
from bench import vllm_systems as systems
from bench.page import Found, ResultsPage, ResultsTable
from kvstore.bench.timing import Spread

NAME: Final = "serving"
PAIR: Final = "1P1D"
ROUND_ROBIN: Final = "round robin"
SHAPES: Final = (PAIR, ROUND_ROBIN)
COUNTS: Final = {
    "completed": "requests", "duration": "duration, s", "request_throughput": "req/s",
    "output_throughput": "out tok/s", "total_token_throughput": "tok/s",
}  # fmt: skip
TIMES: Final = ("ttft", "tpot", "itl")
OF_TIMES: Final = ("mean", "median", "p99")
FIGURES: Final = (*COUNTS, *(f"{of}_{time}_ms" for time in TIMES for of in OF_TIMES))
"""What ``vllm bench serve`` says of a run."""
EXACT: Final = ("duration", "request_throughput")
COMPARED: Final = {
    "median_ttft_ms": "median TTFT", "p99_ttft_ms": "P99 TTFT", "median_tpot_ms": "median TPOT",
    "request_throughput": "req/s",
}  # fmt: skip
METHOD: Final = (
    "What `vllm bench serve` says of two vLLM engines behind `kvstore-proxy`. Times are"
    " milliseconds. The guides print these tables of GPUs; here only ratios say something.\n\n"
    "* Each engine computes on one thread; engines, stores, proxies and the tool share {cores}"
    " cores. So prompts are short and rates low.\n"
    "* A run has {prompts} prompts of the given tokens, and {new_tokens} tokens are generated for"
    " each. Of so few, P99 is near the slowest.\n"
    "* The model is a Llama of {layers} layers of {hidden} in float32, with random weights and a"
    " tokenizer of bytes, both made on the spot. An engine's own cache has {cache_blocks} blocks"
    " of {block_tokens} tokens.\n"
    "* All systems run at the same time and take turns, run by run, with the same prompts; another"
    " one begins each time. The engines' own caches are emptied before each run. A first round"
    " warms up and is not counted.\n"
    "* A figure is the median of the rounds ({rounds}). A ratio is taken within a round: median"
    " (smallest to largest). The first of the two does better below 1 in times, above 1 in req/s."
)
OF_SHAPE: Final = {
    PAIR: "One engine computes the prompts, the other answers; all prompts are new. Without a"
    " store nothing would reach the other, so `none` is a round robin here, too.",
    ROUND_ROBIN: "Both engines answer, in turn. The first three quarters of a prompt are one of"
    " {prefixes} texts.",
}
OF_SESSIONS: Final = (
    "{sessions} sessions of {turns} turns behind the round robin, one request at a time, so that"
    " the engine that computes a turn did not compute the one before. Tokens: {0} that all"
    " begin with, {1} of the session, and from turn to turn {3} that the model said and"
    " {2} of a tool. That is the published workload (20,000, 10,000, 900, 2,048; 30 turns)"
    " divided by 59. At most {possible:.1%} of the prompts are in full blocks that were computed"
    " before, as prompts or as answers. A ratio is taken within a turn."
)
REASONS: Final = (
    "By more than 5 % in the median. Where the range has both sides of 1, the rounds do not agree:"
    " a load above the number of cores says that other programs computed, too.\n\n"
    "* 1P1D, to `none`: one engine, on one thread, computes all prompts and then the answer waits"
    " for the store; without a store both engines compute prompts. What 1P1D is for shows in the"
    " time per token of long prompts, which no other prompt interrupts."
)
BEHIND: Final = 1.05
"""Less is no difference: rounds of the same system differ by more."""


def page_of(found: Found) -> ResultsPage:
    plan = found["plan"] | found["model"] | {"cores": found["machine"]["cores"]}
    parts: list[str | ResultsTable] = [METHOD.format(**plan)]
    for shape in SHAPES:
        rows = [row for row in found["rows"] if row["shape"] == shape]
        parts += [f"## {shape}", OF_SHAPE[shape].format(**plan), _figures(rows), _ratios(rows)]
    sessions = found["sessions"]
    about = OF_SESSIONS.format(*agentic.TOKENS, **sessions)
    parts += ["## Sessions that grow", about, *_sessions(sessions["systems"])]
    parts += ["## Where kvstore is behind", REASONS, _behind(found["rows"])]
    title = "vLLM's serving benchmark, with and without a store"
    return ResultsPage(NAME, title, "make bench-serving", parts)


def find_problems(found: Found) -> list[str]:
    """Reasons why the numbers are invalid, as texts."""
    sessions = found["sessions"]
    problems = [
        f"{name} found nothing in the sessions"
        for name, turns in sessions["systems"].items()
        if name != systems.NONE and not agentic.hit_ratio(turns)
    ]
    if sessions["differing"]:
        problems.append(f"{sessions['differing']} turns differ between systems")
    return problems


def _figures(rows: Sequence[Found]) -> ResultsTable:
    lines = []
    for row in rows:
        figures = {name: statistics.median(run[name] for run in row["runs"]) for name in FIGURES}
        counts = [f"{figures[name]:,.{2 if name in EXACT else 0}f}" for name in COUNTS]
        times = [
            " / ".join(f"{figures[f'{of}_{time}_ms']:,.0f}" for of in OF_TIMES) for time in TIMES
        ]
        lines.append((f"{row['tokens']}", f"{row['rate']:g}/s", row["system"], *counts, *times))
    titles = [f"{time.upper()} {' / '.join(OF_TIMES)}" for time in TIMES]
    return ResultsTable(("tokens", "rate", "system", *COUNTS.values(), *titles), lines, (2,))


def _ratios(rows: Sequence[Found]) -> ResultsTable:
    lines = [
        (f"{row['tokens']}", f"{row['rate']:g}/s", f"{row['system']} / {below}",
         *map(_shown, ratios.values()))
        for row, below, ratios in _compared(rows)
    ]  # fmt: skip
    return ResultsTable(("tokens", "rate", "", *COMPARED.values()), lines, (2,))


def _compared(rows: Sequence[Found]) -> Iterator[tuple[Found, str, dict[str, Spread]]]:
    """For each kind of run and pair of systems: the row of the first, the name of the second, and
    the ratios of their figures within each round."""
    for _, some in itertools.groupby(rows, lambda row: (row["shape"], row["tokens"], row["rate"])):
        of = {row["system"]: row for row in some}
        for above, below in comparisons(list(of)):
            runs, others = of[above]["runs"], of[below]["runs"]
            yield (
                of[above],
                below,
                {
                    name: Spread.of_ratios(
                        [run[name] for run in runs], [run[name] for run in others]
                    )
                    for name in COMPARED
                },
            )


def _behind(rows: Sequence[Found]) -> ResultsTable:
    """The ratios in which kvstore is behind another system by more than ``BEHIND``."""
    lines = [
        (row["shape"], f"{row['tokens']}", f"{row['rate']:g}/s", below,
         COMPARED[name], _shown(each))
        for row, below, ratios in _compared(rows) if row["system"] == systems.KVSTORE
        for name, each in ratios.items()
        if (1 / each.median if name == "request_throughput" else each.median) > BEHIND
    ]  # fmt: skip
    return ResultsTable(("", "tokens", "rate", "behind", "in", "ratio"), lines, (0, 3, 4))


def comparisons(names: Sequence[str]) -> list[tuple[str, str]]:
    """The ratios to show, each as numerator and denominator: kvstore and the rest, then what each
    store gains."""
    stores = [name for name in names if name != systems.NONE]
    pairs = [(systems.KVSTORE, name) for name in stores if name != systems.KVSTORE]
    pairs += [(name, systems.NONE) for name in stores]
    return [pair for pair in pairs if set(pair) <= set(names)]


def _sessions(turns: dict[str, list[Found]]) -> list[ResultsTable]:
    lines = [
        (name, f"{agentic.hit_ratio(each):.1%}",
         *(f"{agentic.first_token_ms(each, part):,.0f}" for part in (0.5, 0.99)))
        for name, each in turns.items()
    ]  # fmt: skip
    ratios = [
        (f"{above} / {below}", _shown(agentic.ratio(turns[above], turns[below])))
        for above, below in comparisons(list(turns))
    ]
    return [
        ResultsTable(("system", "hit ratio", "TTFT p50", "TTFT p99"), lines),
        ResultsTable(("", "median TTFT of a turn"), ratios),
    ]


def _shown(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.range})"
