"""A small decoder, of torch alone, whose KV cache is in paged memory of the GPU.

    python -m tests.gpu.decoder MASTER NAMESPACE TRANSPORT put|get

``put`` computes a prompt, stores its blocks and prints the tokens that follow. ``get`` takes the
blocks from the store, as far as they are there, computes the rest and prints the same, with the
number of blocks that it found. With ``TEST_GPU=1`` the GPU is a real one.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from kvstore import Client
from kvstore.device.device import Device
from kvstore.device.memory import DeviceMemory
from tests.gpu.machine import GPU, IS_REAL, NAME, machine

LAYERS, HEADS, HEAD_DIM, VOCABULARY = (12, 16, 64, 32_000) if IS_REAL else (3, 4, 16, 500)
HIDDEN = HEADS * HEAD_DIM
BLOCK_TOKENS = 16
PROMPT_TOKENS = 1_029 if IS_REAL else 69
NEW_TOKENS = 24
BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS


class Decoder:
    """Random weights, the same in every process. Keys and values of a block lie in one page per
    layer: (layers, blocks, key and value, tokens, heads, dim)."""

    def __init__(self, gpu: GPU) -> None:
        chance = torch.Generator().manual_seed(11)

        def weights(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=chance) * (1.7 / shape[-1] ** 0.5)
            memory = gpu.empty(*shape, dtype=torch.float32)
            memory.copy_(drawn)
            return memory

        self.embedding = weights(VOCABULARY, HIDDEN)
        self.attention = [weights(3 * HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self.output = [weights(HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self.up = [weights(4 * HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self.down = [weights(HIDDEN, 4 * HIDDEN) for _ in range(LAYERS)]
        blocks = BLOCKS + NEW_TOKENS // BLOCK_TOKENS + 2
        self.table = torch.randperm(blocks, generator=chance).tolist()
        """Where in the cache each block of the sequence is."""
        shape = (LAYERS, blocks, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)
        self.cache = gpu.empty(*shape, dtype=torch.float32)
        self.cache.fill_(torch.nan)  # what is read before it is written shows

    def block(self, device: Device, number: int) -> DeviceMemory:
        pages = [self.cache[layer, self.table[number]] for layer in range(LAYERS)]
        addresses = np.array([page.data_ptr() for page in pages], np.int64)
        sizes = np.full(LAYERS, pages[0].nbytes, np.int64)
        return DeviceMemory(device, addresses, sizes, keep=self.cache)

    @torch.inference_mode()
    def step(self, tokens: list[int], start: int) -> int:
        """Computes tokens from position ``start`` on; the token that follows."""
        place = self.cache.device
        state = self.embedding[torch.tensor(tokens, device=place)]
        end = start + len(tokens)
        positions = torch.arange(start, end, device=place)
        table = torch.tensor(self.table, device=place)
        mask = torch.arange(end, device=place)[None, :] <= positions[:, None]
        for layer in range(LAYERS):
            projected = rms_norm(state, (HIDDEN,)) @ self.attention[layer].T
            query, key, value = projected.view(len(tokens), 3, HEADS, HEAD_DIM).unbind(1)
            blocks, inside = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
            self.cache[layer, blocks, 0, inside] = _rotated(key, positions)
            self.cache[layer, blocks, 1, inside] = value
            held = self.cache[layer, table[: -(-end // BLOCK_TOKENS)]].transpose(0, 1)
            keys, values = held.reshape(2, -1, HEADS, HEAD_DIM)[:, :end].transpose(1, 2)
            seen = scaled_dot_product_attention(
                _rotated(query, positions).transpose(0, 1), keys, values, attn_mask=mask
            )
            state = state + seen.transpose(0, 1).reshape(-1, HIDDEN) @ self.output[layer].T
            inner = (rms_norm(state, (HIDDEN,)) @ self.up[layer].T).relu()
            state = state + inner @ self.down[layer].T
        return int((rms_norm(state[-1], (HIDDEN,)) @ self.embedding.T).argmax())


def _rotated(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """With rotary position embedding: (tokens, heads, dim)."""
    half = HEAD_DIM // 2
    rates = 10_000.0 ** (-torch.arange(half, device=states.device) / half)
    angles = (positions[:, None] * rates)[:, None]
    first, second = states[..., :half], states[..., half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ],
        -1,
    )


def main(master: str, namespace: str, transport: str, role: str) -> None:
    prompt = torch.randint(
        VOCABULARY, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    keys = [
        hashlib.sha256(repr(prompt[: (number + 1) * BLOCK_TOKENS]).encode()).digest()
        for number in range(BLOCKS)
    ]
    with (
        machine() as gpu,
        Client(master, namespace=namespace, transports=(transport,), timeout_ms=60_000) as client,
    ):
        decoder = Decoder(gpu)
        device = client.device(NAME)
        blocks = [decoder.block(device, number) for number in range(BLOCKS)]
        found = client.match_prefix(keys) if role == "get" else 0
        if found:
            client.get_into(keys[:found], blocks[:found])
        start = found * BLOCK_TOKENS
        tokens = [decoder.step(prompt[start:], start)]
        if role == "put":
            client.put_chain(keys, blocks)
        while len(tokens) < NEW_TOKENS:
            tokens.append(decoder.step(tokens[-1:], PROMPT_TOKENS + len(tokens) - 1))
    print(json.dumps({"found": found, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
