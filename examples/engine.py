"""An LLM engine that keeps KV blocks in kvstore: read it before you integrate your own engine.

It makes three choices:

* **Key**: the hash of a block covers its tokens *and* the hash of the block before it, so equal
  hashes mean equal prompts from the very beginning, and the blocks of a prompt are one chain.
* **Namespace**: a fingerprint of all that gives the bytes their meaning (``fingerprint``).
* **Value**: the KV of all layers for the tokens of one block, where the engine keeps it anyway.

``python -m examples.engine MASTER SCENARIO ROLE`` is the producer or the consumer of ``demo``. Each
prints what it did as one line of JSON; times are wall-clock milliseconds. The producer has ended
when the consumer starts, so reused blocks can only come from the store.
"""

# mypy: allow-untyped-calls, allow-subclassing-any
# transformers annotates its cache classes only in part, and may not be installed.

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import click
import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from examples.demo import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_BYTES_PER_TOKEN,
    KV_HEADS,
    LAYERS,
    NEW_TOKENS,
    PORTION_TOKENS,
    POSITIONS_MAX,
    TAIL_TOKENS,
    TIMED_RUNS,
    VOCABULARY,
)
from kvstore import Client
from kvstore.calls import PutOutcome
from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)

KV_LAYOUT = "tokens,layers,key+value,heads,dim"


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Return one hash per full block of a prompt; each covers everything up to its end."""
    hashes = []
    parent = b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = array("q", tokens[start : start + BLOCK_TOKENS])
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, kw_only=True)
class Generation:
    tokens: list[int]
    logits: torch.Tensor
    """The logits from which each token was chosen: (tokens, vocabulary)."""
    blocks_reused: int
    first_token_ms: float
    """From the prompt to its first token: lookup, transfer and prefill."""


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
        """Fill the memory with the stored part of the prompt's KV; return the blocks."""
        # The last token is always computed: its logits choose the next one.
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
        """Put the blocks of a prompt that was just computed; return the number of new ones."""
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
        """Compute a prompt from ``start`` on; return the logits of its last token."""
        while True:
            end = start - start % PORTION_TOKENS + PORTION_TOKENS
            logits = self._forward(prompt[start:end])
            if end >= len(prompt):
                return logits
            start = end

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute these tokens after those in memory; return the logits of the last."""
        ids = torch.tensor([tokens], device=self.model.device)
        # A positional argument: Transformers 5.24 calls it `cache`, earlier `past_key_values`.
        output = self.model(ids, None, None, self.memory, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


# --- the model ---------------------------------------------------------------------------------


def build_decoder(seed: int) -> LlamaForCausalLM:
    """Build a Llama in float32 with random weights; equal seeds give equal weights.

    The weights are drawn from a wider distribution than training starts from (0.05, not 0.02). With
    narrow ones attention averages over the whole prompt and every prompt continues with one token
    repeated, so wrong KV would go unnoticed. With these, one wrong block changes the tokens
    (``tests/e2e/test_demo.py`` verifies it); still wider ones magnify rounding.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS_MAX,
        initializer_range=0.05,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def fingerprint(model: LlamaForCausalLM, seed: int) -> str:
    """Return everything that decides whether KV of one process means the same to another process.

    It becomes the namespace, so that engines that differ (in weights, dtype, block size, layout)
    never find each other's blocks: they miss instead of misreading bytes. A real engine names its
    model revision where this one names its seed.
    """
    config = model.config.to_json_string(use_diff=False)
    parts = (config, seed, model.dtype, BLOCK_TOKENS, KV_LAYOUT)
    return "demo-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class KVMemory(Cache):
    """The KV cache of one sequence, in one tensor that is allocated once.

    The token comes first: (tokens, layers, key and value, heads, dim). So the KV of a block of
    tokens is one contiguous range of memory, which the store reads and fills directly. Each layer
    of the model works on its own strided view of the same tensor.
    """

    def __init__(self, tokens: int, device: str = "cpu") -> None:
        self.tensor = torch.empty(tokens, LAYERS, 2, KV_HEADS, HEAD_DIM, device=device)
        self._layers = [_LayerMemory(self.tensor[:, layer]) for layer in range(LAYERS)]
        super().__init__(layers=list(self._layers))
        self.empty()

    def blocks(self, count: int) -> list[torch.Tensor]:
        starts = range(0, count * BLOCK_TOKENS, BLOCK_TOKENS)
        return [self.tensor[start : start + BLOCK_TOKENS] for start in starts]

    def holds(self, tokens: int) -> None:
        """Declare that the memory now holds the KV of the first ``tokens`` tokens."""
        for layer in self._layers:
            layer.length = tokens

    def empty(self) -> None:
        """Clear the memory. Memory that is read before it is written again makes results NaN."""
        self.tensor.fill_(torch.nan)
        self.holds(0)


class _LayerMemory(DynamicLayer):
    """One layer's view of a ``KVMemory``; transformers calls ``update`` once a forward pass."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.length = 0
        # From (tokens, 2, heads, dim) to the form of transformers: keys and values, each with a
        # batch of one, then (heads, tokens, dim).
        self._keys, self._values = memory.permute(1, 2, 0, 3).unsqueeze(1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, self.length = self.length, self.length + key_states.shape[-2]
        self._keys[..., start : self.length, :] = key_states
        self._values[..., start : self.length, :] = value_states
        return self._keys[..., : self.length, :], self._values[..., : self.length, :]

    def get_seq_length(self) -> int:
        return self.length


# --- the demonstration's producer and consumer -------------------------------------------------


def prompt(role: str, prefix_tokens: int, seed: int) -> list[int]:
    """Return the prompt of the ``producer`` or the ``consumer``: the shared prefix, and a tail."""
    lengths = {"prefix": prefix_tokens, role: TAIL_TOKENS[role]}
    tokens: list[int] = []
    for part, length in lengths.items():
        chance = random.Random(f"{seed} {part}")  # noqa: S311  equal in every process
        tokens += chance.choices(range(VOCABULARY), k=length)
    return tokens


def produce(engine: Engine, tokens: list[int]) -> dict[str, object]:
    """Compute a prompt and put its blocks."""
    generation = engine.generate(tokens, 1, reuse=False)
    start = time.perf_counter()
    blocks = engine.save(tokens)
    return {
        "namespace": engine.namespace,
        "blocks_stored": blocks,
        "stored_bytes": blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
        "prefill_ms": generation.first_token_ms,
        "put_ms": (time.perf_counter() - start) * 1e3,
    }


def consume(engine: Engine, tokens: list[int]) -> dict[str, object]:
    """Continue a prompt, both from its stored prefix and computing it all. Never puts a block."""
    # The first run of each way gives the tokens, and warms caches and allocators. The times come
    # from the later runs, which alternate, so that a busy machine slows both ways alike.
    reused, computed = (engine.generate(tokens, NEW_TOKENS, reuse=reuse) for reuse in (True, False))
    times_ms: dict[bool, list[float]] = {True: [], False: []}
    blocks = reused.blocks_reused
    for _ in range(TIMED_RUNS):
        for reuse, times in times_ms.items():
            run = engine.generate(tokens, 1, reuse=reuse)
            times.append(run.first_token_ms)
            if reuse:
                blocks = min(blocks, run.blocks_reused)
    return {
        "blocks_asked": len(block_hashes(tokens[:-1])),
        "blocks_reused": blocks,
        "moved_bytes": blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
        "tokens_computed": computed.tokens,
        "tokens_reused": reused.tokens,
        "first_token_computed_ms": times_ms[False],
        "first_token_reused_ms": times_ms[True],
    }


def main(master: str, scenario_json: str, role: str) -> None:
    scenario = json.loads(scenario_json)
    tokens = prompt(role, scenario["prefix_tokens"], scenario["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_decoder(scenario["seed"])  # drawn on the CPU: equal weights everywhere
    torch.nn.Module.to(model, device)
    memory = KVMemory(len(tokens) + NEW_TOKENS, device)
    with Client(master, transports=(scenario["transport"],)) as client:
        engine = Engine(model, memory, client, fingerprint(model, scenario["seed"]))
        report = produce(engine, tokens) if role == "producer" else consume(engine, tokens)
    who = {"pid": os.getpid(), "device": device, "prompt_tokens": len(tokens)}
    click.echo(json.dumps(who | report))


if __name__ == "__main__":
    main(*sys.argv[1:])
