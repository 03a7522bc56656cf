"""What the producer and the consumer agree on beforehand, and what they report afterwards.

They share a model and the prefix of a prompt. They do not know each other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

BLOCK_TOKENS = 64
"""Tokens in one object of the store. Smaller blocks match more of a prompt, larger ones cost
fewer keys; engines use 16 to 256."""

PORTION_TOKENS = 256
"""Prefill ends a portion at each multiple of this, as engines do (chunked prefill). It costs
nothing here. If a prefix from the store ends at such a multiple, the remaining portions are the
same as without the store: the same sums in the same order, so the same bits. After any other prefix
the portions are different and float32 may round differently, by much less than the distance between
the two best tokens."""

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

PRODUCER_TAIL_TOKENS = 64
CONSUMER_TAIL_TOKENS = 100
"""More than a block, as is the producer's tail: each prompt has a block of its own at its end."""

PREFIX_TOKENS_MAX = 16_384
"""Two cores compute this many in a minute or two."""

NEW_TOKENS = 32
TIMED_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One demonstration; equal values give equal weights and prompts."""

    prefix_tokens: int
    """Shared by both prompts; up to ``PREFIX_TOKENS_MAX``."""
    seed: int
    transport: str
    """``shm`` or ``tcp``."""

    @property
    def shared_blocks(self) -> int:
        """Whole blocks of the shared prefix: all that the consumer can reuse."""
        return self.prefix_tokens // BLOCK_TOKENS

    @property
    def producer_prompt(self) -> list[int]:
        return self._shared_prefix() + self._tokens("producer", PRODUCER_TAIL_TOKENS)

    @property
    def consumer_prompt(self) -> list[int]:
        return self._shared_prefix() + self._tokens("consumer", CONSUMER_TAIL_TOKENS)

    def _shared_prefix(self) -> list[int]:
        return self._tokens("prefix", self.prefix_tokens)

    def _tokens(self, part: str, count: int) -> list[int]:
        chance = random.Random(f"{self.seed} {part}")  # noqa: S311  equal in every process
        return chance.choices(range(VOCABULARY), k=count)


@dataclass(frozen=True, kw_only=True)
class Produced:
    """What the producer reports. Times are wall-clock milliseconds."""

    pid: int
    device: str
    """Where it computed: ``cuda`` or ``cpu``."""
    namespace: str
    prompt_tokens: int
    blocks_stored: int
    stored_bytes: int
    prefill_ms: float
    put_ms: float


@dataclass(frozen=True, kw_only=True)
class Consumed:
    """What the consumer reports. Times are wall-clock milliseconds from prompt to first token."""

    pid: int
    device: str
    prompt_tokens: int
    blocks_asked: int
    blocks_reused: int
    """The fewest of all runs."""
    moved_bytes: int
    """Per run."""
    tokens_computed: list[int]
    """Generated without the store."""
    tokens_reused: list[int]
    """Generated with the prefix from the store."""
    first_token_computed_ms: list[float]
    first_token_reused_ms: list[float]
    logit_difference_max: float
    """Between the two ways, over all generated tokens."""
    logit_lead_min: float
    """The least distance of a chosen token's logit from the second best. If it is larger than twice
    the difference, rounding cannot change a token."""
