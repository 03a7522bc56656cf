"""The rounds of the benchmark, what they find, and the ratios of it.

A round has four phases; in each, the systems take turns with the same prompts, and who begins moves
on from round to round:

* ``miss``: fresh prompts, one after the other; ``miss at once``: others, several at a time
* ``hit``: those of ``miss`` again; ``hit at once``: those of ``miss at once`` again

Before each, every engine's own prefix cache is emptied, which waits until all its saves are done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.demo_vllm.requests import Completion, complete, forget
from kvstore.demo_vllm.scenario import full_blocks, prompt
from kvstore.demo_vllm.systems import System
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

MISS = "miss"
HIT = "hit"
KINDS = (MISS, HIT)
SETTLE_SECONDS = 0.3
"""Between two systems: threads that wait for work spin for 0.2 s."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    prompts: int
    """In each phase."""
    prompt_tokens: int
    rounds: int
    at_once: int
    new_tokens: int
    seed: int

    @property
    def prompts_in_all(self) -> int:
        """Different ones, the round for warming up included."""
        return 2 * self.prompts * (self.rounds + 1)

    def ids(self, round_number: int, several: bool) -> list[list[int]]:
        """The prompts of a round's phases with one, or several, at a time."""
        first = (2 * round_number + several) * self.prompts
        return [
            prompt(self.seed, number, self.prompt_tokens)
            for number in range(first, first + self.prompts)
        ]


@dataclass(kw_only=True)
class Samples:
    """Of one system and one kind; a list for each round."""

    first_token_ms: list[list[float]] = field(default_factory=list)
    """One request at a time."""
    seconds: list[float] = field(default_factory=list)
    """For all prompts of a phase, several at a time."""
    cached_tokens: list[int] = field(default_factory=list)
    """Found anywhere, added up over both phases."""


@dataclass(kw_only=True)
class Measured:
    """Everything."""

    plan: Plan
    systems: list[str]
    samples: dict[str, dict[str, Samples]]
    """By system and kind."""
    differing: int = 0
    """Prompts for which two systems generated different tokens."""

    def first_token_ms(self, system: str, kind: str) -> list[float]:
        return [ms for each in self.samples[system][kind].first_token_ms for ms in each]

    def requests_per_second(self, system: str, kind: str) -> list[float]:
        """One for each round."""
        return [self.plan.prompts / seconds for seconds in self.samples[system][kind].seconds]

    def found(self, system: str, kind: str) -> float:
        """The part of what could be found that was found."""
        cached = self.samples[system][kind].cached_tokens
        possible = 2 * self.plan.prompts * full_blocks(self.plan.prompt_tokens) * BLOCK_TOKENS
        return sum(cached) / (possible * len(cached))

    def ratios(self, above: str, below: str, kind: str) -> tuple[list[float], list[float]]:
        """``above / below``, one for each round: times to the first token (medians), requests/s."""
        times, rates = [], []
        for one, other in zip(
            self.samples[above][kind].first_token_ms, self.samples[below][kind].first_token_ms,
            strict=True,
        ):  # fmt: skip
            times.append(statistics.median(one) / statistics.median(other))
        for first, second in zip(
            self.requests_per_second(above, kind), self.requests_per_second(below, kind),
            strict=True,
        ):  # fmt: skip
            rates.append(first / second)
        return times, rates


def measure(systems: Sequence[System], plan: Plan, progress: Callable[[str], None]) -> Measured:
    """All rounds. The first one warms up and is not counted.

    Raises:
        RequestError: an engine did not answer.
    """
    names = [system.name for system in systems]
    measured = Measured(plan=plan, systems=names, samples=_empty(names))
    said: dict[tuple[int, ...], list[int]] = {}
    for number in range(plan.rounds + 1):
        counted = measured.samples if number else _empty(names)
        for kind, several, system in _turns(systems, number):
            what = f"round {number} of {plan.rounds}" if number else "warming up"
            progress(f"{what}: {kind}{', several at once' if several else ''}, {system.name}")
            prompts = plan.ids(number, several)
            samples = counted[system.name][kind]
            answers, seconds = _ask(system, prompts, plan.at_once if several else 1, plan)
            cached = sum(each.cached_tokens for each in answers)
            if several:
                samples.seconds.append(seconds)
                samples.cached_tokens[-1] += cached
            else:
                samples.first_token_ms.append([each.first_token_ms for each in answers])
                samples.cached_tokens.append(cached)
            for ids, each in zip(prompts, answers, strict=True):
                if said.setdefault(tuple(ids), each.tokens) != each.tokens:
                    measured.differing += 1
    return measured


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def p90(values: Sequence[float]) -> float:
    """The smallest value that at least 90 % do not exceed."""
    return sorted(values)[-(-len(values) * 9 // 10) - 1]


def _turns(systems: Sequence[System], number: int) -> Iterator[tuple[str, bool, System]]:
    """Who does what, in a round. Before each phase all engines are emptied."""
    for turn, (kind, several) in enumerate(
        [(MISS, False), (MISS, True), (HIT, False), (HIT, True)]
    ):
        for system in systems:
            forget(system.address)
        first = (number + turn) % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            yield kind, several, system
            forget(system.address)  # its saves are done before another one is measured
            time.sleep(SETTLE_SECONDS)


def _ask(
    system: System, prompts: list[list[int]], at_once: int, plan: Plan
) -> tuple[list[Completion], float]:
    """The answers, and how long all of them took, in seconds."""
    start = time.perf_counter()
    if at_once == 1:
        answers = [complete(system.address, ids, plan.new_tokens) for ids in prompts]
    else:
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(
                pool.map(lambda ids: complete(system.address, ids, plan.new_tokens), prompts)
            )
    return answers, time.perf_counter() - start


def _empty(names: Sequence[str]) -> dict[str, dict[str, Samples]]:
    return {name: {kind: Samples() for kind in KINDS} for name in names}
