"""Descriptions of engines: two engines share blocks only if equal keys mean equal bytes.

A block's hash covers only its tokens: not the model, its weights, dtypes, layout or parallelism.
The description covers these, from the configuration and from the workers' live model (``weights``).
Its fingerprint is part of every namespace, so engines with different descriptions never share
blocks; ``kvstore.connectors.common.fleet`` makes such a difference visible.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import vllm

from kvstore.calls.fleet_records import short_name
from kvstore.connectors.common.fingerprint import (
    LOADED,
    LoadedFiles,
    digest,
    meaningful,
    unidentified,
)
from kvstore.connectors.vllm.messages import WorkerIdentity
from kvstore.connectors.vllm.worker.layout import NOT_SPLIT, PageSplit, stored_order, window_of
from kvstore.connectors.vllm.worker.recurrent_states import is_state, shard_shapes
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.kvstore")

IdentityT = TypeVar("IdentityT")

RELEASE: Final = ".".join(vllm.__version__.split(".")[:2])
"""vLLM's version without the patch level: vLLM does not number its layouts."""

FORMAT: Final = 3
"""Version of keys, namespaces and the order of bytes in a block. Each change increments it."""

PACKING: Final = ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_KV_CACHE_LAYOUT")
"""Variables that change the order of bytes within a page, but not its shape."""

WITHOUT_DRAFT: Final = ("ngram", "ngram_gpu", "suffix")
"""Speculative decoding from the tokens themselves: no weights, and no layer of its own."""

GUESSES: Final = (
    "eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model", "medusa", "mlp_speculator",
)  # fmt: skip
"""Speculative decoding whose layers compute drafts only. Not ``extract_hidden_states``: its layer
keeps hidden states of the model, which its user reads."""

OF_MEDIA: Final = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_hasher_algorithm", "mm_device_do_normalize",
    "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "video_pruning_rate",
    "video_pruning_method",
)  # fmt: skip
"""Fields of vLLM's ``MultiModalConfig`` on which the model's view of an item depends."""

PROCESSOR_FILES: Final = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def describe(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, split: PageSplit = NOT_SPLIT,
    hash_tokens: int = 0, blocks_per_object: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Return all settings on which the bytes and hashes of blocks depend, as plain JSON values.

    Args:
        split: split of pages for engines of other tensor-parallel sizes: engines with the same
            objects have the same description.
        hash_tokens: tokens per hash if configured (``prefix_match_unit``); 0: they follow from the
            groups.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return {
        "format": FORMAT,
        "vllm": RELEASE,
        "config": digest(meaningful(model.hf_config.to_dict())),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(model.dtype).removeprefix("torch.")
        if cache.cache_dtype == "auto" else cache.cache_dtype,
        "device": vllm_config.device_config.device_type,
        "machine": platform.machine(),
        **({"shards": split.shards} if split.shards
           else {"tensor_parallel": parallel.tensor_parallel_size}),
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": [
            parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size,
        ],
        "layout": stored_order(str(getattr(kv_cache_config, "kv_cache_layout", None))),
        "packing": {name: os.environ[name] for name in PACKING if name in os.environ},
        "groups": [_group(group, split) for group in kv_cache_config.kv_cache_groups],
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "none_hash": none_hash(cache.prefix_caching_hash_algo),
        **({"hash_tokens": hash_tokens} if hash_tokens else {}),
        **({"blocks_per_object": blocks_per_object} if blocks_per_object > 1 else {}),
        "speculative": speculation(vllm_config),
        **_media(model),
    }  # fmt: skip


def without_draft(
    description: Mapping[str, Any], kv_cache_config: KVCacheConfig, split: PageSplit,
    layers: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the description without these layers of a draft model, whose pages are stored
    separately."""
    groups = [_group(group, split, layers) for group in kv_cache_config.kv_cache_groups]
    return {**description, "groups": groups, "speculative": ""}


def _group(group: Any, split: PageSplit, drafts: Collection[str] = ()) -> dict[str, Any]:
    """Return a cache group without these layers."""
    spec = group.kv_cache_spec  # of the first layer, where layers have pages of several sizes
    return {
        "kind": type(spec).__name__,
        "block_tokens": spec.block_size,
        "page_bytes": spec.page_size_bytes // split.each,
        "layers": len([name for name in group.layer_names if name not in drafts]),
        **_state(spec, split.each),
        **({"window": window} if (window := window_of(group)) else {}),
    }


def identified(
    description: Mapping[str, Any], workers: Sequence[WorkerIdentity], *, name: str = ""
) -> dict[str, Any]:
    """Return the description with the workers' identity.

    Args:
        workers: in the order of ranks.
        name: the operator's name for the weights; "": use their digest.
    """
    weights = digest(_once([(hello.weights, hello.files) for hello in workers]))[:32]
    attention = sorted({tuple(manner) for hello in workers for manner in hello.attention})
    return {
        **description,
        "weights": name or weights,
        "files": [] if name else sorted({hello.files for hello in workers if hello.files}),
        "attention": [list(manner) for manner in attention],
    }


def draft_of(workers: Sequence[WorkerIdentity]) -> str:
    """Return a digest of the draft models of all workers (in the order of ranks), which hold
    different shards of one; "": no draft pages are separate.

    It is the same for all workers, because those that hold identical pages store them once.
    """
    identities = [
        (draft.method, draft.layouts, draft.weights, draft.files, draft.attention)
        for draft in (hello.draft for hello in workers) if draft is not None
    ]  # fmt: skip
    return digest(_once(identities))[:16] if identities else ""


def _once(identities: list[IdentityT]) -> list[IdentityT]:
    """Return one for all workers, if they are equal: those of an engine with shards, which loaded
    the same files."""
    return (
        identities[:1] if all(identity == identities[0] for identity in identities) else identities
    )


def none_hash(algorithm: str) -> str:
    """Return the hash that precedes the first block, as hexadecimal digits.

    vLLM computes its own in the same way, but only after it has created the connector. If vLLM's is
    random, it differs between engines, and so does this one: no two engines can share a block.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    if is_random(algorithm):
        return os.urandom(16).hex()
    hash_fn = get_hash_fn_by_name(algorithm)
    return bytes(hash_fn(resolve_none_hash_seed(hash_fn))).hex()


def fingerprint(description: Mapping[str, Any], workers: Sequence[WorkerIdentity]) -> str:
    """Return the fingerprint of an engine: 32 hexadecimal digits."""
    sharded = "shards" in description
    layouts = sorted({("" if sharded else hello.parts[0], hello.layout) for hello in workers})
    return digest({**description, "layouts": layouts})[:32]


def weights_id(vllm_config: VllmConfig, models: Mapping[str, object], *, name: str = "") -> str:
    """Return the origin of the weights: for files a digest of their content, whatever their path;
    otherwise the model's name and commit.

    For weights that cannot be read in memory; see ``weights``. Files are read once
    (``kvstore.connectors.common.weight_digests``): the result covers those that this worker has
    loaded, even if they change.

    Args:
        models: in this worker: the "model" itself, its "draft" model, or both.
        name: the operator's name for the weights, if the loaded files are not known; "": none.

    Raises:
        ConfigError: the loaded files are not known.
        OSError: a file cannot be read.
    """
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    configs = {"model": vllm_config.model_config, "draft": draft}
    load_format = vllm_config.load_config.load_format
    try:
        origins = [
            _origin(configs[kind], load_format, getattr(model, LOADED, ()))
            for kind, model in models.items()
            if configs[kind] is not None
        ]
    except (ConfigError, OSError):
        if not name:
            raise
        return f"named {name}"
    return "; ".join(dict.fromkeys(origins))


def _origin(model: Any, load_format: str, loaded: Sequence[LoadedFiles]) -> str:
    if load_format == "dummy":
        return f"dummy seed={model.seed} of {short_name(model.model)}"
    if not loaded:
        raise unidentified(
            f"it is not known which files were loaded of {model.model}: load_format is "
            f"{load_format}, or VLLM_PLUGINS leaves out kvstore"
        )
    if Path(model.model).exists():
        return f"files {digest([files.digest() for files in loaded])[:32]}"
    # A branch moves, so the commit identifies the loaded weights.
    commit = getattr(model.hf_config, "_commit_hash", None)
    return f"{model.model}@{commit or model.revision or 'main'}"


def models_of(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Return the names under which the engine serves its model; by default the model's own name."""
    model = vllm_config.model_config
    served = model.served_model_name
    return tuple(served) if isinstance(served, list | tuple) else (served or model.model,)


def is_random(algorithm: str) -> bool:
    """Return whether engines with this hash algorithm compute different hashes of the same
    tokens."""
    return algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None


def _state(spec: Any, shards: int) -> dict[str, Any]:
    """Return the parts of one of so many shards of a recurrent layer's state; empty for
    attention."""
    if not is_state(spec):
        return {}
    shapes = shard_shapes(spec, shards)
    return {
        "state": [[str(dtype), *shape] for shape, dtype in zip(shapes, spec.dtypes)],
        "state_kind": str(spec.mamba_type),
    }


def speculation(vllm_config: VllmConfig) -> str:
    """Return the method of speculative decoding with a draft model; "": there is none."""
    speculative = vllm_config.speculative_config
    method = "" if speculative is None else str(speculative.method)
    return "" if method in WITHOUT_DRAFT else method


def _media(model: Any) -> dict[str, Any]:
    """Return the settings that transform images, sounds and videos for the model: a block's hash
    covers the item as it was sent. Empty for text-only models."""
    config = getattr(model, "multimodal_config", None)
    if config is None:
        return {}
    settings = {name: _plain(getattr(config, name, None)) for name in OF_MEDIA}
    return {"media": settings, "processor": _processor(model)}


def _processor(model: Any) -> str:
    """Return the digest of the model's loaded processor, or of its configuration files if this host
    cannot load it."""
    from vllm.transformers_utils.processor import cached_processor_from_config

    try:
        processor = cached_processor_from_config(model)
        parts = {name: type(part).__name__ for name, part in vars(processor).items()}
        return digest([parts, meaningful(processor.to_dict())])[:32]
    except Exception as error:  # noqa: BLE001  # whatever the model's own code raises
        log.info("processor_not_loaded reason=%r", error)
    folder = Path(model.model)
    files = {name: folder / name for name in PROCESSOR_FILES}
    return digest({name: file.read_text() for name, file in files.items() if file.is_file()})[:32]


def _plain(value: object) -> object:
    return value if isinstance(value, dict | list | bool | int | float | None) else str(value)
