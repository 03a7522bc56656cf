"""Sessions of an agent, whose prompt grows with each turn: the published workload of Mooncake's and
vLLM's teams, in its proportions and small.

There a session has 30 turns. All begin with 20,000 common tokens, 10,000 of their own follow, and
each turn adds 900 that the model said and 2,048 of a tool. Here all this is divided by 59, so that
a session fits into the longest prompt of the engines.

The sessions take turns, one request at a time. With two engines behind a round robin and an odd
number of sessions, each turn is computed by the engine that did not compute the one before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

from bench.page import Advance, Found
from bench.vllm_rounds import SETTLE_SECONDS
from kvstore.bench.timing import Spread, percentile
from kvstore.demo_vllm.requests import complete
from kvstore.demo_vllm.scenario import full_blocks, prompt
from kvstore.demo_vllm.tiny import BLOCK_TOKENS

COMMON, FIRST, TOOL, SAID = TOKENS = (340, 170, 35, 15)
"""Tokens that all sessions begin with, that follow of each, and that a turn adds."""


def measure(
    addresses: Mapping[str, str], sessions: int, turns: int, seed: int, progress: Advance
) -> Found:
    """Holds the sessions with each system in turn: one turn of all sessions, then the next system.

    Args:
        addresses: of each system's round robin.

    Raises:
        RequestError: an engine did not answer.
    """
    common = _ids(seed, "common", COMMON)
    talks = {
        name: [common + _ids(seed, f"first {each}", FIRST) for each in range(sessions)]
        for name in addresses
    }
    found: dict[str, list[Found]] = {name: [] for name in addresses}
    names, differing = list(addresses), 0
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            progress(f"sessions: turn {turn + 1} of {turns}, {name}", 1)
            found[name].append(_turn(addresses[name], talks[name], turn, seed))
            time.sleep(SETTLE_SECONDS)
        differing += sum(
            len({tuple(each) for each in same}) > 1 for same in zip(*talks.values(), strict=True)
        )
    possible = _possible(sessions, turns)
    return {"turns": turns, "sessions": sessions, "possible": possible, "differing": differing,
            "systems": found}  # fmt: skip


def _turn(address: str, talks: list[list[int]], turn: int, seed: int) -> Found:
    """One turn of all sessions with one system, which makes their texts longer."""
    first_ms, asked, cached = [], 0, 0
    for number, talk in enumerate(talks):
        answer = complete(address, talk, SAID)
        first_ms.append(answer.first_token_ms)
        asked += len(talk)
        cached += answer.cached_tokens
        talk += answer.tokens + _ids(seed, f"turn {turn} {number}", TOOL)
    return {"first_token_ms": first_ms, "prompt_tokens": asked, "cached_tokens": cached}


def _ids(seed: int, what: str, tokens: int) -> list[int]:
    return prompt(seed, f"agent {what}", tokens)


def _possible(sessions: int, turns: int) -> float:
    """The part of all prompts that is in full blocks of prompts and answers that came before."""
    lengths = [COMMON + FIRST + turn * (SAID + TOOL) for turn in range(turns)]
    known = sum(full_blocks(length + SAID) for length in lengths[:-1])
    common = (sessions - 1) * full_blocks(COMMON + 1)
    return (common + sessions * known) * BLOCK_TOKENS / (sessions * sum(lengths))


# --- the arithmetic ----------------------------------------------------------------------------


def hit_ratio(turns: list[Found]) -> float:
    """The part of the prompts that the answering engine did not compute."""
    asked = sum(each["prompt_tokens"] for each in turns)
    return float(sum(each["cached_tokens"] for each in turns) / asked)


def first_token_ms(turns: list[Found], part: float) -> float:
    """A percentile of the times to the first token, over all turns of all sessions."""
    return percentile([ms for each in turns for ms in each["first_token_ms"]], part)


def ratio(above: list[Found], below: list[Found]) -> Spread:
    """``above / below`` of the median time to the first token, within each turn."""
    medians = [
        [statistics.median(each["first_token_ms"]) for each in some] for some in (above, below)
    ]
    return Spread.of_ratios(*medians)
