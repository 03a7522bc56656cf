"""The rounds, samples and ratios of ``bench.vllm``.

A round sends fresh prompts (a *miss*), then the same ones again (a *hit*), each in three manners
with prompts of their own: one request at a time, several at once, and one at a time beside a
request that generates tokens. In each of these six phases the systems take turns with the same
prompts, and the system that begins changes from phase to phase.

Before each phase every engine's own prefix cache is emptied, which waits until its saves are done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event

from bench.page import Advance
from bench.vllm_systems import System
from kvstore.bench.timing import Spread
from kvstore.demo_vllm.requests import Completion, RequestError, complete, forget, token_times
from kvstore.demo_vllm.scenario import full_blocks, prompt
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

MISS = "miss"
HIT = "hit"
KINDS = (MISS, HIT)
ONE, SEVERAL, BESIDE = MANNERS = ("one at a time", "several at once", "beside a running request")
RUNNING_PROMPT_TOKENS = 32
"""Less than a block: no store holds any of it."""
RUNNING_TOKENS = 1_500
"""Tokens that the running request asks for: more than it gets, as it ends with the others."""
SETTLE_SECONDS = 0.3
"""Pause between two systems: threads that wait for work spin for 0.2 s."""


@dataclass(frozen=True, kw_only=True)
class RoundsPlan:
    """How much is measured."""

    prompts: int
    """Prompts in each phase."""
    prompt_tokens: int
    rounds: int
    at_once: int
    new_tokens: int
    seed: int

    @property
    def prompts_in_all(self) -> int:
        """Number of different prompts, those of the warm-up round included."""
        return len(MANNERS) * self.prompts * (self.rounds + 1)

    def ids(self, round_number: int, manner: str) -> list[list[int]]:
        """The prompts of a round's two phases of this manner."""
        first = (len(MANNERS) * round_number + MANNERS.index(manner)) * self.prompts
        return [
            prompt(self.seed, number, self.prompt_tokens)
            for number in range(first, first + self.prompts)
        ]

    def running_ids(self, round_number: int, kind: str) -> list[int]:
        """The prompt of the request that runs beside the others."""
        number = -1 - len(KINDS) * round_number - KINDS.index(kind)
        return prompt(self.seed, number, RUNNING_PROMPT_TOKENS)


@dataclass(kw_only=True)
class Samples:
    """The samples of one system and one kind; one list for each round."""

    first_token_ms: list[list[float]] = field(default_factory=list)
    """Times to the first token, one request at a time."""
    seconds: list[float] = field(default_factory=list)
    """Time for all prompts of a phase, several at once."""
    token_ms: list[list[float]] = field(default_factory=list)
    """Times between two tokens of the running request, while it runs beside others."""
    cached_tokens: list[int] = field(default_factory=list)
    """Tokens found in any cache, added up over the three manners."""


@dataclass(kw_only=True)
class Measured:
    """All results of the benchmark."""

    plan: RoundsPlan
    systems: list[str]
    samples: dict[str, dict[str, Samples]]
    """By system and kind."""
    differing: int = 0
    """Prompts for which two systems generated different tokens."""

    def first_token_ms(self, system: str, kind: str) -> list[float]:
        return [ms for each in self.samples[system][kind].first_token_ms for ms in each]

    def requests_per_second(self, system: str, kind: str) -> list[float]:
        """Throughput, one number for each round."""
        return [self.plan.prompts / seconds for seconds in self.samples[system][kind].seconds]

    def per_token_ms(self, system: str, kind: str) -> list[float]:
        """Time per token of the running request: its mean in each round."""
        return [statistics.fmean(each) for each in self.samples[system][kind].token_ms]

    def longest_pause_ms(self, system: str, kind: str) -> list[float]:
        """Longest time between two tokens of the running request, for each round."""
        return [max(each) for each in self.samples[system][kind].token_ms]

    def found(self, system: str, kind: str) -> float:
        """The part of the stored tokens that was found."""
        cached = self.samples[system][kind].cached_tokens
        possible = (
            len(MANNERS) * self.plan.prompts * full_blocks(self.plan.prompt_tokens) * BLOCK_TOKENS
        )
        return sum(cached) / (possible * len(cached))

    def ratios(self, above: str, below: str, kind: str) -> dict[str, Spread]:
        """``above / below`` within each round; of medians for the first token."""

        def of(values: Callable[[str], Iterable[float]]) -> Spread:
            return Spread.of_ratios(list(values(above)), list(values(below)))

        return {
            "first_token": of(
                lambda name: map(statistics.median, self.samples[name][kind].first_token_ms)
            ),
            "requests_per_second": of(lambda name: self.requests_per_second(name, kind)),
            "per_token": of(lambda name: self.per_token_ms(name, kind)),
        }


def measure(systems: Sequence[System], plan: RoundsPlan, progress: Advance) -> Measured:
    """Measures all rounds. The first one warms up and is not counted.

    Raises:
        RequestError: an engine did not answer.
    """
    names = [system.name for system in systems]
    measured = Measured(plan=plan, systems=names, samples=_empty(names))
    said: dict[tuple[int, ...], list[int]] = {}
    for number in range(plan.rounds + 1):
        counted = measured.samples if number else _empty(names)
        for kind, manner, system in _turns(systems, number):
            what = f"round {number} of {plan.rounds}" if number else "warming up"
            progress(f"{what}: {kind}, {manner}, {system.name}", 1)
            prompts = plan.ids(number, manner)
            samples = counted[system.name][kind]
            if manner == ONE:
                answers = _ask(system, prompts, plan)
                samples.first_token_ms.append([each.first_token_ms for each in answers])
                samples.cached_tokens.append(0)
            elif manner == SEVERAL:
                answers, seconds = _ask_several(system, prompts, plan)
                samples.seconds.append(seconds)
            else:
                running = plan.running_ids(number, kind)
                answers, token_ms = _ask_beside(system, prompts, plan, running)
                samples.token_ms.append(token_ms)
            samples.cached_tokens[-1] += sum(each.cached_tokens for each in answers)
            for ids, each in zip(prompts, answers, strict=True):
                if said.setdefault(tuple(ids), each.tokens) != each.tokens:
                    measured.differing += 1
    return measured


def p90(values: Sequence[float]) -> float:
    """The smallest value that at least 90 % of the values do not exceed."""
    return sorted(values)[-(-len(values) * 9 // 10) - 1]


def _turns(systems: Sequence[System], number: int) -> Iterator[tuple[str, str, System]]:
    """The kind, manner and system of each turn in a round. Before each phase it empties the prefix
    caches of all engines."""
    phases = [(kind, manner) for kind in KINDS for manner in MANNERS]
    for turn, (kind, manner) in enumerate(phases):
        for system in systems:
            forget(system.address)
        first = (number + turn) % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            yield kind, manner, system
            forget(system.address)  # waits for its saves before another system is measured
            time.sleep(SETTLE_SECONDS)


def _ask(system: System, prompts: list[list[int]], plan: RoundsPlan) -> list[Completion]:
    """The answers to the prompts, sent one after the other."""
    return [complete(system.address, ids, plan.new_tokens) for ids in prompts]


def _ask_several(
    system: System, prompts: list[list[int]], plan: RoundsPlan
) -> tuple[list[Completion], float]:
    """The answers to prompts sent in parallel, and the seconds for all of them."""
    start = time.perf_counter()
    with ThreadPoolExecutor(plan.at_once) as pool:
        answers = list(
            pool.map(lambda ids: complete(system.address, ids, plan.new_tokens), prompts)
        )
    return answers, time.perf_counter() - start


def _ask_beside(
    system: System, prompts: list[list[int]], plan: RoundsPlan, running: list[int]
) -> tuple[list[Completion], list[float]]:
    """The answers to the prompts, sent one after the other, and the milliseconds between two tokens
    of a request that generates meanwhile."""
    stop, started = Event(), Event()
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(token_times, system.address, running, RUNNING_TOKENS, stop, started)
        try:
            started.wait()
            start = time.perf_counter()
            answers = _ask(system, prompts, plan)
            end = time.perf_counter()
        finally:
            stop.set()
        times = [when for when in tokens.result() if start <= when <= end]
    if len(times) < 2:
        raise RequestError(f"{system.address} generated no tokens beside other requests")
    return answers, [(late - early) * 1e3 for early, late in pairwise(times)]


def _empty(names: Sequence[str]) -> dict[str, dict[str, Samples]]:
    return {name: {kind: Samples() for kind in KINDS} for name in names}
