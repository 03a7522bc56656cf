"""An LLM engine that keeps KV blocks in kvstore: read it before you integrate your own engine.

It makes three choices:

* **Key**: the hash of a block covers its tokens *and* the hash of the block before it, so equal
  hashes mean equal prompts from the very beginning, and the blocks of a prompt are one chain.
* **Namespace**: a fingerprint of all that gives the bytes their meaning (``model.fingerprint``).
* **Value**: the KV of all layers for the tokens of one block, where the engine keeps it anyway.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from kvstore import Client
from kvstore.calls import PutOutcome
from kvstore.demo.model import KVMemory
from kvstore.demo.scenario import BLOCK_TOKENS, PORTION_TOKENS
from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    """One hash per whole block of a prompt; each covers everything up to the end of its block."""
    hashes = []
    parent = b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = array("q", tokens[start : start + BLOCK_TOKENS])
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The result of one prompt."""

    tokens: list[int]
    logits: torch.Tensor
    """The logits from which each token was chosen: (tokens, vocabulary)."""
    blocks_reused: int
    first_token_ms: float
    """From the prompt to its first token: look-up, transfer and prefill."""


class Engine:
    """Greedy decoding of one prompt at a time, with the KV of prefixes in a store."""

    def __init__(
        self, model: LlamaForCausalLM, memory: KVMemory, client: Client, namespace: str
    ) -> None:
        self.model = model
        self.memory = memory
        self.client = client
        self.namespace = namespace

    # --- the integration: these two methods --------------------------------------------------

    def load(self, prompt: Sequence[int]) -> int:
        """Fill the memory with as much of the prompt's KV as the store has; returns the blocks."""
        # The last token is computed in any case: its logits choose the next one.
        hashes = block_hashes(prompt[:-1])
        try:
            matched = self.client.match_prefix(hashes, namespace=self.namespace)
            loaded = self.client.get_into(
                hashes[:matched], self.memory.blocks(matched), namespace=self.namespace
            )
        except KVStoreError as error:  # a cache that fails is a cache that misses
            log.warning("cannot load the prefix, computing it: %s", error)
            return 0
        # A block can be lost between the two calls, with its node. Blocks before it are good.
        blocks = loaded.index(None) if None in loaded else matched
        self.memory.holds(blocks * BLOCK_TOKENS)
        return blocks

    def save(self, prompt: Sequence[int]) -> int:
        """Put the blocks of a prompt that was just computed; returns how many are new."""
        hashes = block_hashes(prompt)
        try:
            outcomes = self.client.put_chain(
                hashes, self.memory.blocks(len(hashes)), namespace=self.namespace
            )
        except KVStoreError as error:
            log.warning("cannot save the prefix: %s", error)
            return 0
        return outcomes.count(PutOutcome.STORED)

    # --- the engine ----------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], new_tokens: int, *, reuse: bool) -> Generation:
        """Continue a prompt, with its prefix from the store (``reuse``) or computing all of it."""
        self.memory.empty()
        start = time.perf_counter()
        blocks = self.load(prompt) if reuse else 0
        logits = [self._prefill(prompt, blocks * BLOCK_TOKENS)]
        tokens = [int(logits[0].argmax())]
        first_token_ms = (time.perf_counter() - start) * 1e3
        while len(tokens) < new_tokens:
            logits.append(self._forward(tokens[-1:]))
            tokens.append(int(logits[-1].argmax()))
        return Generation(
            tokens=tokens,
            logits=torch.stack(logits),
            blocks_reused=blocks,
            first_token_ms=first_token_ms,
        )

    def _prefill(self, prompt: Sequence[int], start: int) -> torch.Tensor:
        """Compute a prompt from ``start`` on; returns the logits of its last token."""
        while True:
            end = start - start % PORTION_TOKENS + PORTION_TOKENS
            logits = self._forward(prompt[start:end])
            if end >= len(prompt):
                return logits
            start = end

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute these tokens after those in memory; returns the logits of the last."""
        ids = torch.tensor([tokens], device=self.model.device)
        # The memory by its place: Transformers 5.24 calls it `cache`, before `past_key_values`.
        output = self.model(ids, None, None, self.memory, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits
