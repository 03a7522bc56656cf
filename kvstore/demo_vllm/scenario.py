"""The models and prompts of the demonstration, and the outcome of each prompt."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from kvstore.demo_vllm.tiny import BLOCK_TOKENS, TEXT_TOKENS, kv_bytes_per_token

HIDDEN = 512
LAYERS = 8
"""Layers of the model: enough for computing a prompt to take longer than fetching it."""

NEW_TOKENS = 16
TIMED_RUNS = 3
PROMPT_TOKENS_MAX = 2_000
"""Prompt and answer together must have fewer tokens than ``--max-model-len``."""

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the demonstration."""

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
# A block is so long that a state fits into one. vLLM 0.32 lengthens it by itself, but then cuts
# prompts at multiples of --block-size, and keeps no state where that is within a block.
QWEN = Model(
    kind="recurrent",
    name="Qwen3-Next",
    layers=f"{LAYERS // 2} recurrent and {LAYERS // 2} attention layers of {HIDDEN}",
    block_tokens=2 * BLOCK_TOKENS,
    options=("--dtype", "bfloat16", "--block-size", str(2 * BLOCK_TOKENS)),
)
MODELS = {model.kind: model for model in (LLAMA, QWEN)}


def prompt(seed: int, name: object, tokens: int) -> list[int]:
    """Token ids of random bytes: the same for equal arguments; other seeds or names differ."""
    chance = random.Random(f"{seed} {name}")  # noqa: S311  reproducible, no secret
    return chance.choices(TEXT_TOKENS, k=tokens)


def full_blocks(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """How many blocks of a prompt can be found. The last token is always computed."""
    return (tokens - 1) // block_tokens


def memory_mib(prompts: int, tokens: int) -> int:
    """MiB of memory for all full blocks of ``prompts`` prompts of the Llama, with a quarter to
    spare. The hybrid needs less: half as many layers have blocks, of half as many bytes."""
    blocks = prompts * (tokens // BLOCK_TOKENS)
    return 8 + blocks * BLOCK_TOKENS * kv_bytes_per_token(HIDDEN, LAYERS) * 5 // 4 // MIB


@dataclass(frozen=True, kw_only=True)
class PromptOutcome:
    """The outcome of one prompt. Times are milliseconds from the request to the first token."""

    model: str
    number: int
    prompt_tokens: int
    block_tokens: int
    blocks_found: int
    """Blocks that the decoder found in the store: the fewest of all its lookups."""
    tokens_computed: list[list[int]]
    """Tokens that the decoder generated alone, for each run."""
    tokens_found: list[list[int]]
    """Tokens generated with the prompt from the store, for each run."""
    prefilled_ms: float
    """Time of the first run, in which the prefiller computes the prompt."""
    computed_ms: list[float]
    found_ms: list[float]

    @property
    def medians_ms(self) -> tuple[float, float]:
        """The median when the prompt is computed, and when it is found."""
        return statistics.median(self.computed_ms), statistics.median(self.found_ms)

    @property
    def identical(self) -> bool:
        return all(
            each == self.tokens_computed[0] for each in (*self.tokens_computed, *self.tokens_found)
        )

    @property
    def blocks(self) -> int:
        """The number of blocks that can be found."""
        return full_blocks(self.prompt_tokens, self.block_tokens)

    def problems(self) -> list[str]:
        """Texts that say what is wrong with the outcome."""
        found = []
        prompt = f"{self.model} prompt {self.number}"
        if not self.identical:
            found.append(f"{prompt}: tokens differ")
        if self.blocks_found < self.blocks:
            found.append(f"{prompt}: {self.blocks_found} of {self.blocks} blocks found")
        return found
