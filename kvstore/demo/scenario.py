"""What the producer and the consumer agree on: a model, and the prefix of a prompt.

Neither process knows of the other.
"""

from __future__ import annotations

import random

BLOCK_TOKENS = 64
"""Tokens in one object of the store. Smaller blocks match more of a prompt, larger ones cost
fewer keys; engines use 16 to 256."""

PORTION_TOKENS = 256
"""Prefill ends a portion at each multiple of this, as engines do (chunked prefill). It costs
nothing here. If a prefix from the store ends at such a multiple, the remaining portions are the
same as without the store: the same sums in the same order, so the same bits. After any other prefix
the portions are different and float32 may round differently, by much less than the distance between
the logits of the two best tokens."""

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

TAIL_TOKENS = {"producer": 64, "consumer": 100}
"""Tokens of a prompt after the prefix: a block or more, so each prompt has a block of its own."""

PREFIX_TOKENS_MAX = 16_384
"""Two cores compute this many in a minute or two."""

NEW_TOKENS = 32
TIMED_RUNS = 3


def prompt(role: str, prefix_tokens: int, seed: int) -> list[int]:
    """The prompt of the ``producer`` or the ``consumer``: the shared prefix, and a tail."""
    lengths = {"prefix": prefix_tokens, role: TAIL_TOKENS[role]}
    tokens: list[int] = []
    for part, length in lengths.items():
        chance = random.Random(f"{seed} {part}")  # noqa: S311  equal in every process
        tokens += chance.choices(range(VOCABULARY), k=length)
    return tokens
