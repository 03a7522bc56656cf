"""Descriptions of engines: two engines share pages only if equal keys mean equal bytes.

A page's key is a hash of its tokens, all tokens before it, the LoRA adapter and the cache salt. The
description covers everything else on which the bytes depend; each namespace contains its
fingerprint.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sglang
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_context, get_parallel

from kvstore.connectors.common.fingerprint import config_of, unidentified, weights_of
from kvstore.connectors.sglang.pools import PoolPages

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

FORMAT: Final = 2
"""Version of keys, namespaces and the order of buffers in a page. Each change increments it."""

_CONFIGURED: Final = {
    "model": (
        "load_format", "dtype", "quantization", "quantization_param_path", "kv_cache_dtype",
        "context_length", "json_model_override_args", "model_impl",
    ),
    "device": ("device",),
    "spec": ("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype"),
}  # fmt: skip
"""Settings that change bytes, by namespace of SGLang's configuration."""

_PACKING: Final = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT")
"""Variables that change the order of bytes within a page."""


_NOT_OF_FILES: Final = ("remote_instance", "ipc_cache", "private")
"""Load formats that take weights from elsewhere, whatever is in the model's folder."""


class ServedWeights(NamedTuple):
    """The weights that SGLang serves now, as named by its configuration."""

    path: str
    revision: str | None
    version: str
    """The ``weight_version`` of the last call that updated weights."""
    draft: str | None
    draft_revision: str | None
    are_pushed: bool
    """Whether the last call took them from the memory of another program, such as a trainer."""


def live(model: str | None) -> ServedWeights:
    """Return the weights that this process serves.

    Args:
        model: path or name; used outside a server, where SGLang has published no configuration.
    """
    path, revision = _setting("model", "model_path"), _setting("model", "revision")
    return ServedWeights(
        path or model or "",
        revision,
        _setting("serving", "weight_version") or "",
        _setting("spec", "speculative_draft_model_path"),
        _setting("spec", "speculative_draft_model_revision"),
        _are_pushed(),
    )


def _are_pushed() -> bool:
    """Return whether the present version belongs to weights that did not come from files. SGLang
    logs its changes in order; an update from disk sets the path, and then its version if it has
    one."""
    has_version = False
    for _, fields in reversed(get_context()._overrides_log):
        if "model_path" in fields:
            return False
        if "weight_version" in fields:
            if has_version:
                return True
            has_version = True
    return has_version


def job_name() -> str:
    """Return a random name for this engine's start, the same on all tensor-parallel ranks. Each of
    them must call this: the others wait for the first."""
    name = secrets.token_hex(8)
    try:
        group = get_parallel().tp_group
    except RuntimeError:  # outside a server
        return name
    return str(group.broadcast_object(name))


def describe(
    config: HiCacheStorageConfig,
    pages: PoolPages,
    weights: ServedWeights,
    *,
    model_id: str,
    job: str,
    zero_copy: bool,
) -> dict[str, Any]:
    """Return everything on which the bytes of pages depend, except the rank, as JSON values. Reads
    the weight files at 7 GB/s from the page cache (``kvstore.connectors.common.weight_digests``),
    unless this host has their digests.

    Args:
        pages: the pages of the pool of the full attention, which every engine has.
        model_id: the operator's name for the weights; "": use the digest of their files.
        job: the job whose versions of pushed weights these are; "": all jobs.
        zero_copy: whether SGLang passes buffers (``interface_v1``) or copies of complete pages.

    Raises:
        ConfigError: the weights cannot be identified on this host.
        OSError: a weight file cannot be read.
    """
    load_format = _setting("model", "load_format")
    if not model_id and load_format in _NOT_OF_FILES:
        raise unidentified(f"--load-format {load_format} does not take weights from {weights.path}")
    return {
        "format": FORMAT,
        "engine": sglang.__version__,
        "machine": platform.machine(),
        "weights": model_id or _files(weights.path, weights.revision),
        "weight_version": weights.version,
        **({"job": job} if weights.are_pushed and job else {}),
        "draft": weights.draft and _files(weights.draft, weights.draft_revision),
        "config": {
            name: _plain(_setting(namespace, name))
            for namespace, names in _CONFIGURED.items()
            for name in names
        },
        "packing": {name: os.environ[name] for name in _PACKING if name in os.environ},
        "tensor_parallel": {"lcm": config.tp_lcm_size} if config.tp_lcm_size else config.tp_size,
        "pipeline_parallel": config.pp_size,
        "context_parallel": [config.attn_cp_size, config.dcp_size],
        "replicated": config.is_mla_model,
        "zero_copy": zero_copy,
        "page_tokens": pages.tokens,
        # The layers differ between pipeline stages, so they are in ``parts`` of the namespace.
        "pool": {name: value for name, value in pages.layout.items() if "layer" not in name},
    }


def pieces(config: HiCacheStorageConfig, pool: Any) -> int:
    """Return the number of chunks by heads into which pages are split, so that engines with other
    numbers of ranks find them (SGLang's ``tp_lcm_size``); 0: they are not split.

    SGLang's ``should_split_heads`` is not enough: it is false for an engine with one chunk per
    rank.
    """
    by_heads = isinstance(pool, MHATokenToKVPoolHost) and pool.layout == "page_head"
    return int(config.tp_lcm_size // config.tp_size) if config.tp_lcm_size and by_heads else 0


def parts(
    config: HiCacheStorageConfig, pages: PoolPages, *, replicated: bool, pieces: int = 0
) -> tuple[str, ...]:
    """Return the ends of a rank's namespaces, one for each chunk of a page.

    Args:
        replicated: all tensor-parallel ranks hold the same bytes.
        pieces: number of chunks by heads per page; 0: not split. Then a rank has one namespace.
    """
    place = [f"p{config.pp_rank}"]
    if config.attn_cp_size > 1:
        place.append(f"c{config.attn_cp_rank}")
    if config.dcp_size > 1:
        place.append(f"d{config.dcp_rank}")
    end = "".join(place) + "-" + pages.geometry
    if replicated:
        return (f"tall{end}",)
    if pieces:  # named as the ranks of an engine with a rank per chunk
        first = config.tp_rank * pieces
        return tuple(f"t{piece}{end}" for piece in range(first, first + pieces))
    # With tp_lcm_size the fingerprint does not cover the number of ranks.
    of = f"of{config.tp_size}" if config.tp_lcm_size else ""
    return (f"t{config.tp_rank}{of}{end}",)


def _files(path: str, revision: str | None) -> Mapping[str, str]:
    return {
        "files": weights_of(path, revision=revision),
        "config": config_of(path, revision=revision),
    }


def _setting(namespace: str, name: str) -> Any:
    """Return the value in effect of one of SGLang's settings; None: not set or not published."""
    context = get_context()
    if not context.is_config_namespace_published(namespace):
        return None
    return getattr(context.config_bag(namespace), name, None)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
