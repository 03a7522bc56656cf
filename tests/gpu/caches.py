"""Paged KV caches of real models, with a pattern by block and page in every word.

In every layer a block is one *page*, or several. The stored bytes of a block are its pages, one
after the other, as the vLLM connector stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvstore.device.device import Device
from kvstore.device.driver import Event
from kvstore.device.memory import DeviceMemory
from tests.gpu.machine import GIB, GPU, IS_REAL, SAVED_BYTES_MAX

TOKENS: Final = 16
"""Of a block."""
WORD: Final = 8
SPLIT, LAYER, BLOCK, QUARTER = "K-and-V-apart", "layer-first", "block-first", "kernel-blocks"

CACHE_BYTES_MAX: Final = 20 * GIB
BLOCKS: Final = 4_000 if IS_REAL else 24
SAVED: Final = 1_000 if IS_REAL else 8
LAYERS_MAX: Final = 1_000 if IS_REAL else 3


@dataclass(frozen=True)
class Case:
    """A model's cache in one layout."""

    model: str
    layers: int
    page: int
    """Bytes of a block in one layer: keys and values of its tokens."""
    layout: str
    groups: int = 1
    """KV cache groups, which use the same memory for different blocks."""

    def __str__(self) -> str:
        return f"{self.model}-{self.layout}"


def _page(heads: int, bytes_per_value: int) -> int:
    return 2 * TOKENS * heads * 128 * bytes_per_value


CASES: Final = [
    Case("llama-8b-tp1-bf16", 32, _page(8, 2), SPLIT),
    Case("llama-8b-tp1-bf16", 32, _page(8, 2), LAYER),
    Case("llama-8b-tp1-bf16", 32, _page(8, 2), BLOCK),
    Case("llama-8b-tp1-bf16", 32, _page(8, 2), QUARTER),
    Case("llama-8b-tp1-fp8", 32, _page(8, 1), LAYER),
    Case("llama-8b-tp8-bf16", 32, _page(1, 2), SPLIT),
    Case("llama-8b-tp8-fp8", 32, _page(1, 1), BLOCK),
    Case("llama-70b-tp1-bf16", 80, _page(8, 2), LAYER),
    Case("llama-70b-tp1-bf16", 80, _page(8, 2), BLOCK),
    Case("llama-70b-tp8-fp8", 80, _page(1, 1), SPLIT),
    Case("deepseek-v3-bf16", 61, TOKENS * 576 * 2, LAYER),
    Case("deepseek-v3-bf16", 61, TOKENS * 576 * 2, BLOCK),
    Case("deepseek-v3-656-bytes", 61, TOKENS * 656, LAYER),
    Case("hybrid-two-groups", 24, _page(8, 2), LAYER, groups=2),
]


class Cache:
    """The cache of one worker."""

    def __init__(self, gpu: GPU, case: Case) -> None:
        layers = min(case.layers, LAYERS_MAX)
        self.block_bytes = layers * case.page
        self.blocks = min(BLOCKS, CACHE_BYTES_MAX // self.block_bytes)
        self.saved = min(SAVED, SAVED_BYTES_MAX // self.block_bytes)
        words = case.page // WORD
        self._rows_in_use: list[torch.Tensor] = []
        self.pages: list[torch.Tensor] = []
        """By their order in a block: tensors of int64, (blocks, words of the page)."""

        def new(*shape: int) -> torch.Tensor:
            return gpu.empty(*shape, dtype=torch.int64)

        if case.layout == BLOCK:
            whole = new(self.blocks, layers, words)
            self.pages = [whole[:, layer] for layer in range(layers)]
        elif case.layout == LAYER:
            self.pages = [new(self.blocks, words) for _ in range(layers)]
        elif case.layout == SPLIT:
            self.pages = [part for _ in range(layers) for part in new(2, self.blocks, words // 2)]
        else:
            for _ in range(layers):
                layer = new(self.blocks * 4, words // 4).view(self.blocks, 4, words // 4)
                self.pages += [layer[:, part] for part in range(4)]
        self._bases = np.array([each.data_ptr() for each in self.pages], np.int64)
        self._strides = np.array([each.stride(0) * WORD for each in self.pages], np.int64)
        self._sizes = np.array([each.shape[1] * WORD for each in self.pages], np.int64)

    def memory(self, device: Device, block: int, after: Sequence[Event] = ()) -> DeviceMemory:
        """The pages of a block."""
        addresses = self._bases + block * self._strides
        return DeviceMemory(device, addresses, self._sizes, after, self.pages, self.block_bytes)

    def filling(self, blocks: Sequence[int], salt: int) -> Callable[[], None]:
        """A kernel that writes the pattern of these blocks. It waits for nothing."""
        rows = self._rows(blocks)
        self._rows_in_use.append(rows)  # torch must not give its memory to others too soon

        def kernel() -> None:
            for number, page in enumerate(self.pages):
                page[rows] = self._pattern(number, rows, salt)

        return kernel

    def fill(self, blocks: Sequence[int], salt: int) -> None:
        """Writes the pattern of these blocks at once."""
        self.filling(blocks, salt)()

    def holds(self, blocks: Sequence[int], of: Sequence[int], salt: int) -> bool:
        """Whether these blocks hold the pattern of others."""
        rows, expected = self._rows(blocks), self._rows(of)
        return all(
            torch.equal(page[rows], self._pattern(number, expected, salt))
            for number, page in enumerate(self.pages)
        )

    def _rows(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.pages[0].device)

    def _pattern(self, number: int, rows: torch.Tensor, salt: int) -> torch.Tensor:
        words = torch.arange(self.pages[number].shape[1], dtype=torch.int64, device=rows.device)
        return (rows[:, None] << 36) + (number << 24) + words + (salt << 56)
