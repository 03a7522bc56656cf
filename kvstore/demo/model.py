"""A small real decoder, and memory for its KV that the store can read and fill block by block."""

# mypy: allow-untyped-calls, allow-subclassing-any
# transformers annotates its cache classes only in part, and may not be installed.

from __future__ import annotations

import hashlib

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from kvstore.demo.scenario import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    POSITIONS_MAX,
    VOCABULARY,
)

KV_LAYOUT = "tokens,layers,key+value,heads,dim"


def build_decoder(seed: int) -> LlamaForCausalLM:
    """A Llama in float32 with random weights; equal seeds give equal weights in every process.

    The weights are drawn from a wider distribution than training starts from (0.05, not 0.02).
    With narrow ones attention averages over the whole prompt and every prompt continues with one
    token repeated, so wrong KV would go unnoticed. With these, one wrong block changes the tokens
    (``tests/e2e/test_demo.py`` holds the model to that); still wider ones magnify rounding.
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
    """Everything that decides whether KV of one process means the same to another process.

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
    tokens is one contiguous piece of memory, which the store reads and fills directly. Each layer
    of the model works on its own strided view of the same tensor.
    """

    def __init__(self, tokens: int, device: str = "cpu") -> None:
        self.tensor = torch.empty(tokens, LAYERS, 2, KV_HEADS, HEAD_DIM, device=device)
        self._layers = [_LayerMemory(self.tensor[:, layer]) for layer in range(LAYERS)]
        super().__init__(layers=list(self._layers))
        self.empty()

    def blocks(self, count: int) -> list[torch.Tensor]:
        """Views of the first ``count`` blocks."""
        starts = range(0, count * BLOCK_TOKENS, BLOCK_TOKENS)
        return [self.tensor[start : start + BLOCK_TOKENS] for start in starts]

    def holds(self, tokens: int) -> None:
        """Declares that the memory now holds the KV of the first ``tokens`` tokens."""
        for layer in self._layers:
            layer.length = tokens

    def empty(self) -> None:
        """Forgets everything. Memory that is read before it is written again makes results NaN."""
        self.tensor.fill_(torch.nan)
        self.holds(0)


class _LayerMemory(DynamicLayer):
    """One layer's view of a ``KVMemory``; transformers calls ``update`` once a forward pass."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.length = 0
        # From (tokens, 2, heads, dim) to what transformers expects: keys and values, each with a
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
