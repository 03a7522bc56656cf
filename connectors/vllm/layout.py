"""The order of the KV cache in memory: which order the connector asks vLLM for, and in which orders
the stored bytes of a block are the same.

vLLM names an order by its dimensions, the outermost first: layers, blocks, heads, tokens (N) and
content. Its usual order on a GPU is ``LBNHC``: a block of 64 layers is 64 pages, which a GPU copies
one by one. In ``BLNHC`` the pages of a block are one run of memory, and the bytes are the same.

vLLM 0.32 (``resolve_kv_cache_layout``) follows the connector's wish if all attention backends of
the model support that order. Otherwise it logs a warning and takes its own. The operator's
``VLLM_KV_CACHE_LAYOUT`` comes before the wish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.connectors.vllm.core import is_part_of_several

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UNSPLIT_BLOCK_TOKENS: Final = 16
"""vLLM's attention backends that support blocks of this size do not split them."""

_HEADS_FIRST_CAPABILITY: Final = 10
"""Major compute capability of GPUs on which FlashInfer's kernels need heads before tokens
(``supported_kv_cache_layouts`` of that backend)."""


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """The order in which a block is one run of memory over all layers; None: vLLM's own order.

    The connector does not ask for it if there is no choice, or if vLLM might refuse to start:

    * on anything but NVIDIA's GPUs: the backend for CPUs supports only one order;
    * as a part of ``MultiConnector``, which refuses parts with different wishes;
    * with latent attention, whose backends have needs of their own, and with HiSparse;
    * with recurrent layers, caches of several dtypes, or a block size that the operator has set:
      kernels may then use a part of a block, which vLLM does not support in this order.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or is_part_of_several():
        return None
    model, cache = vllm_config.model_config, vllm_config.cache_config
    is_given = cache.user_specified_block_size and cache.block_size != _UNSPLIT_BLOCK_TOKENS
    if (
        model is None
        or model.use_mla
        or model.is_hybrid
        or is_given
        or cache.kv_cache_dtype_skip_layers
        or vllm_config.attention_config.hisparse_config is not None
    ):
        return None
    capability = current_platform.get_device_capability()
    heads_first = capability is not None and capability.major == _HEADS_FIRST_CAPABILITY
    return "BLHNC" if heads_first else "BLNHC"


def stored_order(layout: str) -> str:
    """One order that stands for all orders with the same stored bytes. The connector stores pages,
    wherever they are in memory, so only the order within a page counts."""
    return f"LB{layout[2:]}" if layout.startswith("BL") else layout
