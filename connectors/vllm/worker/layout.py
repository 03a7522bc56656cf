"""The order of the KV cache in memory: the one that the connector requests from vLLM, and the
orders with the same stored bytes of a block.

vLLM names an order by its dimensions, the outermost first: layers, blocks, heads, tokens (N) and
content. Its usual order on a GPU is ``LBNHC``: a block of 64 layers is 64 pages, which a GPU copies
one by one. In ``BLNHC`` the pages of a block are one run of memory, and the bytes are the same.

vLLM 0.32 (``resolve_kv_cache_layout``) uses the requested order if all attention backends of the
model support it. Otherwise it logs a warning and uses its own. The operator's
``VLLM_KV_CACHE_LAYOUT`` takes precedence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.connectors.vllm.call_stack import is_part_of_several
from kvstore.connectors.vllm.worker.recurrent_states import check_split
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_UNSPLIT_BLOCK_TOKENS: Final = 16
"""vLLM's attention backends that support blocks of this size do not split them."""

_HEADS_FIRST_CAPABILITY: Final = 10
"""Major compute capability of GPUs on which FlashInfer's kernels need heads before tokens
(``supported_kv_cache_layouts`` of that backend)."""


class PageSplit(NamedTuple):
    """The split of an engine's pages by heads, for engines of other tensor-parallel sizes."""

    shards: int
    """Shards of a complete page; 0: engines of one tensor-parallel size share pages as they are."""
    each: int
    """Shards of one worker."""

    def parts(self, stage: int, place: int) -> list[str]:
        """Return the names of a worker's parts of each block: its shards, or its complete pages.

        Args:
            stage: of the pipeline.
            place: counts the workers of a stage that hold different bytes.
        """
        if not self.shards:
            return [f"p{stage}t{place}"]
        first = place * self.each
        return [f"p{stage}s{shard}" for shard in range(first, first + self.each)]


NOT_SPLIT: Final = PageSplit(0, 1)


def split_of(shards: int, kv_cache_config: KVCacheConfig, tensor_parallel: int) -> PageSplit:
    """Return the split of pages into ``shards`` (``tp_shards``; 0: none).

    Ranks that hold identical bytes count once: with latent attention all of them do, and nothing
    needs to be split.

    Raises:
        ConfigError: the ranks cannot hold equal numbers of shards, or a layer's cache has no heads.
    """
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

    if not shards:
        return NOT_SPLIT
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group)]
    for spec in specs:
        if isinstance(spec, MambaSpec):
            check_split(spec, shards)
    if all(isinstance(spec, MLAAttentionSpec) for spec in specs):
        return PageSplit(1, 1)
    places = tensor_parallel // max(1, kv_cache_config.kv_tp_replicas)
    if shards % places:
        raise ConfigError(
            f"tp_shards={shards}: {places} ranks with different heads cannot hold equal numbers of "
            "shards",
            advice="Choose a number that the tensor-parallel sizes of all engines divide.",
            key="tp_shards",
        )
    return PageSplit(shards, shards // places)


def specs_of(group: Any) -> list[Any]:
    """Return the specs of a cache group's layers: one for all, unless they are of several kinds."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    many = isinstance(spec, UniformTypeKVCacheSpecs)
    return list(spec.kv_cache_specs.values()) if many else [spec]


def bytes_of_block(group: Any) -> int:
    """Return the bytes of one block of a cache group: the pages of all its layers."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    is_sum = isinstance(spec, UniformTypeKVCacheSpecs)
    return int(spec.page_size_bytes) * (1 if is_sum else len(group.layer_names))


def window_of(group: Any) -> int:
    """Return the tokens of a cache group's window, which later tokens need; 0: it has none."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = specs_of(group)[0]
    is_window = isinstance(spec, SlidingWindowSpec)
    return spec.sliding_window + spec.extra_retained_tokens if is_window else 0


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """Return the order in which a block is one run of memory over all layers; None: vLLM's own
    order.

    The connector does not request it if there is no choice, or if vLLM might refuse to start:

    * on anything but NVIDIA's GPUs: the backend for CPUs supports only one order;
    * as a part of ``MultiConnector``, which rejects parts with different requests;
    * with latent attention, whose backends have other requirements, and with HiSparse;
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
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    is_split = any(extra.get(name) for name in ("tp_shards", "store_tp_size"))
    heads_first = is_split or (
        capability is not None and capability.major == _HEADS_FIRST_CAPABILITY
    )
    return "BLHNC" if heads_first else "BLNHC"


def stored_order(layout: str) -> str:
    """Return one order for all orders with the same stored bytes. The connector stores pages,
    wherever they are in memory, so only the order within a page counts."""
    return f"LB{layout[2:]}" if layout.startswith("BL") else layout
