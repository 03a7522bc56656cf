"""SGLang's host pools without a GPU, and back-ends on them as its controller makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvstore.connectors.sglang.pools import bytes_of

PAGE_TOKENS = 16
TOKENS = 512
LAYERS = 3
BUDGET_BYTES = 1 << 30
"""That pools may take. SGLang would leave 10 GiB of the host free, which a busy one has not."""


def device_pool(
    kind: str = "mha", *, tokens: int = TOKENS, dtype: Any = torch.bfloat16, heads: int = 2
) -> Any:
    if kind == "mha":
        return MHATokenToKVPool(tokens, PAGE_TOKENS, dtype, heads, 8, LAYERS, "cpu", False)
    return MLATokenToKVPool(
        size=tokens, page_size=PAGE_TOKENS, dtype=dtype, kv_lora_rank=32, qk_rope_head_dim=8,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def host_pool(
    kind: str = "mha", layout: str = "page_first", *, of: Any = None, filled: int | None = None
) -> Any:
    """
    Args:
        of: the device pool; None: a new one.
        filled: seed of its bytes; None: zero.
    """
    device = device_pool(kind) if of is None else of
    with host_memory_budget_scope(BUDGET_BYTES):
        pool = _host_pool(kind, layout, device)
    fill([pool.kv_buffer], filled)
    return pool


def _host_pool(kind: str, layout: str, device: Any) -> Any:
    common = {
        "pin_memory": False, "device": "cpu", "device_capacity_tokens": TOKENS, "start_layer": 0,
        "end_layer": LAYERS,
    }  # fmt: skip
    if kind == "mha":
        info = device._mha_buffer_info()
        return MHATokenToKVPoolHost(info, 2.0, 0, PAGE_TOKENS, layout, **common)
    info = device._mla_buffer_info()
    return MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE_TOKENS, layout, target_layer_num=LAYERS, **common
    )


def mamba_pool(*, side_states: bool = False, filled: int | None = None) -> MambaPoolHost:
    """States of two layers; with ``side_states`` it refuses zero-copy."""
    extra = (torch.zeros(8, 5),) if side_states else ()
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, 8, 4, 4, 8),
        conv=(torch.zeros(2, 8, 16, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=extra,
    )
    with host_memory_budget_scope(BUDGET_BYTES):
        pool = MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")
    fill(pool.get_hybrid_pool_buffer(), filled)
    return pool


def fill(tensors: Sequence[torch.Tensor], seed: int | None) -> None:
    for tensor in tensors:
        flat = tensor.view(-1).view(torch.uint8)
        if seed is None:
            flat.zero_()
        else:
            flat.random_(0, 255, generator=torch.Generator().manual_seed(seed))


def config(
    address: str,
    *,
    model: Path | str,
    rank: int = 0,
    ranks: int = 1,
    is_mla: bool = False,
    zero_copy: bool = True,
    metrics: bool = False,
    **extra: Any,
) -> HiCacheStorageConfig:
    """What the controller generates of the line that a user types."""
    lcm = extra.pop("tp_lcm_size", None)  # the controller takes it, too
    typed = {
        "backend_name": "kvstore", "module_path": "kvstore.connectors.sglang",
        "class_name": "KVStoreHiCache", "master": address,
    }  # fmt: skip
    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=is_mla, enable_storage_metrics=metrics, is_page_first_layout=True,
        model_name=str(model), extra_config=typed | {"interface_v1": int(zero_copy)} | extra,
        tp_lcm_size=lcm,
    )  # fmt: skip


def attach(pool: Any, address: str, *, sides: dict[Any, Any] | None = None, **given: Any) -> Any:
    """As ``HiCacheController.attach_storage_backend``, and the hybrid controller after it."""
    backend = StorageBackendFactory.create_backend("dynamic", config(address, **given), pool)
    try:
        backend.register_mem_pool_host(pool)
        for name, side in (sides or {}).items():
            backend.register_mem_host_pool_v2(side, name)
        backend.on_host_pools_registered()
    except Exception:
        backend.close()
        raise
    return backend


def indices(*pages: int) -> torch.Tensor:
    """Of whole pages of tokens."""
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def bytes_at(pool: Any, page: int, *, tokens: int = PAGE_TOKENS) -> bytes:
    """A page as the pool itself hands it over."""
    return bytes(bytes_of(pool.get_data_page(page * tokens, flat=True).contiguous()))


def after(*prefix: str) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=list(prefix))
