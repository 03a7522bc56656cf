"""Decides which engines may share blocks: those whose bytes mean the same. Warns of differences.

A block's hash covers its tokens and nothing else: not the model, its weights, dtypes, layout or
parallelism. This module describes all of these, from the configuration and from the workers' view
of the live model (``identity``). The digest of the description, the *fingerprint*, is part of every
namespace, so engines that differ in any of it never see each other's blocks. To make such a
difference visible, each engine puts its description into the store, and warns if it finds a
different one of the same model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from kvstore.client.sync import Client
from kvstore.connectors.vllm.messages import Hello
from kvstore.limits import FLEET_NAMESPACE, KEY_BYTES_MAX

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.kvstore")

FORMAT: Final = 2
"""Version of keys, namespaces and the order of bytes in a block. Each change increments it."""

SAMPLE_BYTES: Final = 4 << 10
"""Bytes read at each sampled place of a tensor in a file of weights."""

RECORD_FORMAT: Final = 1
"""Version of the records that engines put into the store; the proxy reads only this one."""

CHUNK_BYTES: Final = 16 << 20

PACKING: Final = ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_KV_CACHE_LAYOUT")
"""Variables that change the order of bytes within a page, but not its shape."""

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.npz")


def describe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """All settings on which bytes and hashes depend, as plain JSON values."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return {
        "format": FORMAT,
        "config": _digest(_meaningful(model.hf_config.to_dict())),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": cache.cache_dtype,
        "device": vllm_config.device_config.device_type,
        "machine": platform.machine(),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": [
            parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size,
        ],
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "packing": {name: os.environ[name] for name in PACKING if name in os.environ},
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


def identified(
    description: Mapping[str, Any], workers: Sequence[Hello], *, name: str = ""
) -> dict[str, Any]:
    """The description, completed with the workers' identity.

    Args:
        workers: in the order of ranks.
        name: the operator's name for the weights; "": use their digest.
    """
    weights = _digest([(hello.weights, hello.files) for hello in workers])[:32]
    attention = sorted({tuple(manner) for hello in workers for manner in hello.attention})
    return {
        **description,
        "weights": name or weights,
        "files": [] if name else sorted({hello.files for hello in workers if hello.files}),
        "attention": [list(manner) for manner in attention],
    }


def none_hash(algorithm: str) -> str:
    """The hash that precedes the first block, as hexadecimal digits.

    vLLM computes it in the same way, after it has created the connector. If it is random, it is
    different in each engine, and so is this one: no two engines can share a block.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    if _is_random(algorithm):
        return os.urandom(16).hex()
    hash_fn = get_hash_fn_by_name(algorithm)
    return bytes(hash_fn(resolve_none_hash_seed(hash_fn))).hex()


def fingerprint(description: Mapping[str, Any], workers: Sequence[Hello]) -> str:
    """32 hexadecimal digits."""
    layouts = sorted({(hello.part, hello.layout) for hello in workers})
    return _digest({**description, "layouts": layouts})[:32]


def weights_id(vllm_config: VllmConfig) -> str:
    """The origin of weights: for files a digest of their content, wherever they are; otherwise name
    and commit.

    Used for weights that cannot be read in memory; see ``identity``.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy seed={model.seed} of {_name(model.model)}"
    path = Path(model.model)
    if path.exists():
        return f"files {files_digest(path)[:32]}"
    # A branch moves, so the commit identifies the loaded weights.
    commit = getattr(model.hf_config, "_commit_hash", None)
    return f"{model.model}@{commit or model.revision or 'main'}"


def files_digest(path: Path) -> str:
    """The digest of a file of weights, or of the files in a directory: their names and a sample of
    each tensor; the whole file for formats that do not say where their tensors are."""
    found = [path]
    if path.is_dir():
        found = sorted({file for pattern in WEIGHTS for file in path.glob(pattern)})
    digest = hashlib.sha256()
    for file in found:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        with file.open("rb") as opened:
            if file.suffix == ".safetensors":
                _sample_tensors(opened, size, digest)
            else:
                while data := opened.read(CHUNK_BYTES):
                    digest.update(data)
    return digest.hexdigest()


def _sample_tensors(file: BinaryIO, size: int, digest: hashlib._Hash) -> None:
    """Adds the header, and each tensor's beginning, middle and end, to the digest."""
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, size))
    digest.update(header)
    for name, tensor in sorted(json.loads(header).items()):
        if name == "__metadata__":
            continue
        start, stop = tensor["data_offsets"]
        part = SAMPLE_BYTES // 4
        for at in (start, (start + stop) // 2, max(start, stop - part)):
            file.seek(8 + length + at)
            digest.update(file.read(min(part, stop - at)))


def hash_warnings(description: Mapping[str, Any]) -> list[str]:
    """Warnings of settings that keep engines of one fleet from computing the same hashes."""
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
    """The descriptions that engines put into the store."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def announce(
        self, models: list[str], mark: str, description: Mapping[str, Any],
        namespaces: list[str], block_tokens: int, hash_block_tokens: int,
    ) -> list[str]:  # fmt: skip
        """Puts this engine's description, and returns warnings of different ones of the same model.

        Raises:
            KVStoreError: the store did not answer.
        """
        record = {
            "format": RECORD_FORMAT, "models": models,
            "fingerprint": mark, "namespaces": namespaces,
            "block_size": block_tokens, "hash_block_size": hash_block_tokens,
            "hash_algorithm": description["hash_algorithm"], "none_hash": description["none_hash"],
            "description": description,
        }  # fmt: skip
        prefix = _prefix(models)
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

    def leave(self, models: list[str], mark: str) -> None:
        """Removes this engine's description under another fingerprint; an engine that still has
        that fingerprint puts it again.

        Raises:
            KVStoreError: the store did not answer.
        """
        self._client.remove(_prefix(models) + mark.encode(), namespace=FLEET_NAMESPACE)


def _prefix(models: list[str]) -> bytes:
    return _name(models[0]).encode()[: KEY_BYTES_MAX // 2] + b"/"


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
    """``config`` without its path and the version that wrote it; nested configurations as well."""
    return {
        key: _meaningful(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in ("_name_or_path", "transformers_version", "_commit_hash")
    }


def _is_random(algorithm: str) -> bool:
    return algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None


def _speculative(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    return "" if speculative is None else str(speculative.method)


def _name(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
