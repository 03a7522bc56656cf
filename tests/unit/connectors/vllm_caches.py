"""KV caches that vLLM's own code lays out, in memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

TOKENS = 16
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float16)
WINDOW = SlidingWindowSpec(
    block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float16, sliding_window=32
)
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
LATENT_FP8 = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=656, dtype=torch.uint8)
LARGE = FullAttentionSpec(block_size=4 * TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float16)


class Model(NamedTuple):
    """What decides where the pages are."""

    layers: Sequence[tuple[int, KVCacheSpec]]
    """Of each group: how many, and of which kind."""
    order: str
    kernel_tokens: int = TOKENS

    def caches(self, blocks: int) -> tuple[dict[str, torch.Tensor], Any]:
        """As a connector gets them: the cache of each layer, and ``KVCacheConfig``."""
        order = KVCacheLayout[self.order]
        engine: Any = SimpleNamespace(
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: order,
                prefix_cache_retention_interval=None,
                num_gpu_blocks_override=blocks,
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
        )
        groups = [
            KVCacheGroupSpec([f"g{group}l{layer}" for layer in range(count)], spec)
            for group, (count, spec) in enumerate(self.layers)
        ]
        config = get_kv_cache_config_from_groups(engine, groups, 1 << 40)
        kernels = [self.kernel_tokens] * len(groups)
        return allocate_kv_cache(config, torch.device("cpu"), order, kernels), config


MODELS = {
    "layer by layer": Model([(3, FULL)], "LBNHC"),
    "layer by layer, heads first": Model([(3, FULL)], "LBHNC"),
    "block by block": Model([(3, FULL)], "BLNHC"),
    "block by block, heads first": Model([(3, FULL)], "BLHNC"),
    "two groups": Model([(2, FULL), (2, WINDOW)], "LBNHC"),
    "two groups, block by block": Model([(3, FULL), (2, WINDOW)], "BLNHC"),
    "kernel blocks": Model([(2, LARGE)], "LBNHC"),
    "latent": Model([(61, LATENT)], "LBNHC"),
    "latent, block by block": Model([(61, LATENT)], "BLNHC"),
    "latent of 656 bytes": Model([(61, LATENT_FP8)], "LBNHC"),
}
