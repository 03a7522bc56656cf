"""Who may share blocks: those whose bytes mean the same. And telling a fleet that disagrees.

A block's hash names its tokens and nothing else: not the model, its weights, dtypes, layout or
parallelism. All that is described here, digested into the *fingerprint*, and is part of every
namespace; so engines that differ in any of it never see each other's blocks. That would be silent,
so each engine leaves its description in the store, and warns when it meets another one of the same
model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.client.sync import Client
from kvstore.connectors.vllm.messages import Hello
from kvstore.limits import FLEET_NAMESPACE, KEY_BYTES_MAX

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.kvstore")

FORMAT: Final = 1
"""Of keys, namespaces and the order of bytes in a block. One more with each change."""

SAMPLE_BYTES: Final = 64 << 10
"""Read at the beginning, the middle and the end of each file of weights."""

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.npz")


def describe(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, model_id: str
) -> dict[str, Any]:
    """Everything that bytes and hashes depend on, as plain JSON values.

    Args:
        model_id: what the weights are called; "": find out.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return {
        "format": FORMAT,
        "weights": model_id or weights_id(vllm_config),
        "config": _digest(_meaningful(model.hf_config.to_dict())),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": cache.cache_dtype,
        "device": vllm_config.device_config.device_type,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": [
            parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size,
        ],
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "block_tokens": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
                "layers": len(group.layer_names),
            }
            for group in kv_cache_config.kv_cache_groups
        ],
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "none_hash": none_hash(cache.prefix_caching_hash_algo),
        "speculative": _speculative(vllm_config),
    }  # fmt: skip


def none_hash(algorithm: str) -> str:
    """What stands for the hash before the first block, as hexadecimal digits.

    vLLM makes it after it has made us, the same way. Where it is random it is so in each engine,
    and so is this: none of them can share a block.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    if _is_random(algorithm):
        return os.urandom(16).hex()
    hash_fn = get_hash_fn_by_name(algorithm)
    return bytes(hash_fn(resolve_none_hash_seed(hash_fn))).hex()


def fingerprint(description: Mapping[str, Any], workers: Mapping[Any, Hello]) -> str:
    """32 hexadecimal digits.

    Args:
        workers: by rank, what each has.
    """
    layouts = sorted({(hello.part, hello.layout) for hello in workers.values()})
    return _digest({**description, "layouts": layouts})[:32]


def weights_id(vllm_config: VllmConfig) -> str:
    """Name and revision of the weights; of a local directory, what is in it, wherever it is."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy seed={model.seed} of {_name(model.model)}"
    path = Path(model.model)
    if path.is_dir():
        return f"files {directory_digest(path)[:32]}"
    return f"{model.model}@{model.revision or 'main'}"


def directory_digest(path: Path) -> str:
    """Of the weights in a directory: names, sizes and samples of the files; not where they are."""
    found = sorted({file for pattern in WEIGHTS for file in path.glob(pattern)})
    digest = hashlib.sha256()
    for file in found:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                opened.seek(start)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def hash_warnings(description: Mapping[str, Any]) -> list[str]:
    """What keeps engines of one fleet from computing the same hashes."""
    algorithm = str(description["hash_algorithm"])
    warnings = []
    if _is_random(algorithm):
        warnings.append(
            f"{algorithm} starts from a random seed in each engine, so no two engines ever share a "
            "block. Set PYTHONHASHSEED to the same number everywhere, or use "
            "--prefix-caching-hash-algo sha256_cbor."
        )
    return warnings


class Fleet:
    """The descriptions that engines leave in the store."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def announce(
        self, models: list[str], mark: str, description: Mapping[str, Any],
        namespaces: list[str], block_tokens: int, hash_block_tokens: int,
    ) -> list[str]:  # fmt: skip
        """Leave ours, and return what to warn of: other descriptions of the same model.

        Raises:
            KVStoreError: the store did not answer.
        """
        record = {
            "format": FORMAT, "models": models, "fingerprint": mark, "namespaces": namespaces,
            "block_size": block_tokens, "hash_block_size": hash_block_tokens,
            "hash_algorithm": description["hash_algorithm"], "none_hash": description["none_hash"],
            "description": description,
        }  # fmt: skip
        prefix = _name(models[0]).encode()[: KEY_BYTES_MAX // 2] + b"/"
        warnings = []
        for row in self._client.list_objects(namespace=FLEET_NAMESPACE, prefix=prefix):
            if row.key == prefix + mark.encode():
                continue
            other = self._client.get(row.key, namespace=FLEET_NAMESPACE, kind="bytes")
            if isinstance(other, bytes):
                warnings += _differences(models[0], description, other)
        data = json.dumps(record, default=str).encode()
        self._client.put(prefix + mark.encode(), data, namespace=FLEET_NAMESPACE)
        return warnings


def _differences(model: str, ours: Mapping[str, Any], raw: bytes) -> list[str]:
    try:
        theirs = json.loads(raw)["description"]
    except (ValueError, KeyError, TypeError):
        return []
    if not isinstance(theirs, dict):
        return []
    ours = json.loads(json.dumps(ours, default=str))
    keys = sorted({*ours, *theirs})
    differing = [
        f"{key}: {ours.get(key)!r} here, {theirs.get(key)!r} there"
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]
    told = "; ".join(differing) or "only the layout of the cache"
    return [f"another engine serves {model}, and shares no block with this one. {told}"]


def _meaningful(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without where it lies and what wrote it; also of the configurations within."""
    return {
        key: _meaningful(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in ("_name_or_path", "transformers_version", "_commit_hash")
    }


def _is_random(algorithm: str) -> bool:
    return algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None


def _speculative(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    return "" if speculative is None else f"{speculative.method} {speculative.model}"


def _name(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
