"""The figures of ``kvstore size``, by the costs of docs/sizing.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.config.clients import choose_blocks_per_object
from kvstore.errors import InvalidArgumentError

SHAPES: Final = {
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b": (80, 8, 128),
    "llama-3-405b": (126, 8, 128),
}
"""Layers, KV heads and head size of models that need no config.json."""

SPACE_FACTOR: Final = 9 / 8
"""For removed memory under leases, puts in progress and fragmentation."""

MASTER_OBJECT_BYTES: Final = 330
DISK_OBJECT_BYTES: Final = 280
"""Of the master, for an object on a disk."""
BATCH: Final = 64
PUT_BATCH_S, LOOKUP_BATCH_S, MATCH_S = 296e-6, 56e-6, 66e-6
TCP_S_PER_BYTE, PUT_S_PER_BYTE = 0.61e-9, 0.096e-9
CONNECTIONS_PER_RANK: Final = 4


class KVShape(NamedTuple):
    """The KV cache of a model."""

    layers: int
    heads: int
    head_size: int
    groups: int = 1
    """Cache groups: sets of layers with the same kind of attention."""
    latent: int = 0
    """Of latent attention (MLA): elements per token and layer, equal on all ranks."""

    def bytes_per_token(self, ranks: int, element_bytes: int) -> int:
        """Return the bytes of all ranks. Raises InvalidArgumentError."""
        if self.latent:
            return self.layers * self.latent * element_bytes
        if max(self.heads, ranks) % min(self.heads, ranks):
            raise InvalidArgumentError(
                f"{self.heads} KV heads cannot be divided among {ranks} ranks",
                advice="Give the --tensor-parallel of your engines.",
            )
        # More ranks than heads: each rank stores a copy of its head.
        return 2 * self.layers * max(self.heads, ranks) * self.head_size * element_bytes


@dataclass(frozen=True)
class Load:
    """A cluster and what its engines do."""

    ranks: int = 1
    element_bytes: int = 2
    block_tokens: int = 16
    engines: int = 1
    tokens_per_s: float = 5_000
    """Prompt tokens of one engine, found ones included."""
    hits: float = 0.8
    reuse_s: float = 1_800
    memory_bytes: int = 0
    """Of the pool; 0: what ``reuse_s`` takes."""
    disk_bytes: int = 0
    """Of all disks below it."""
    replicas: int = 1
    prompt_tokens: int = 16_000
    nodes: int | None = None
    """None: one per engine."""


def load_shape(model: str) -> KVShape:
    """Return the shape of a name in ``SHAPES`` or of a config.json. Raises InvalidArgumentError."""
    if model in SHAPES:
        return KVShape(*SHAPES[model])
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{model} is no readable config.json: {error}",
            advice=f"Give the path of a config.json of Hugging Face, or {', '.join(SHAPES)}.",
        ) from None
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{path} holds no JSON object")
    if isinstance(text := config.get("text_config"), dict):
        config = text
    kinds = _attention_kinds(config, _number(path, config, "num_hidden_layers"))
    # vLLM divides the layers into groups of equal length.
    counts = sorted(kinds.count(kind) for kind in set(kinds))
    if not counts:
        raise InvalidArgumentError(f"{path}: no layer in layer_types has a KV cache per token")
    length = counts[-1] if counts[-1] < 1.5 * counts[0] else counts[0]
    groups = sum(-(-count // length) for count in counts)
    if config.get("kv_lora_rank"):
        latent = sum(_number(path, config, name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        return KVShape(len(kinds), 1, 0, groups, latent)
    heads = config.get("num_attention_heads")
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None and config.get("hidden_size") is not None:
        config["head_dim"] = config["hidden_size"] // _number(path, config, "num_attention_heads")
    return KVShape(
        len(kinds), _number(path, config, "num_key_value_heads"),
        _number(path, config, "head_dim"), groups,
    )  # fmt: skip


def _attention_kinds(config: dict[str, Any], layers: int) -> list[str]:
    """Return the kind of attention per layer with a KV cache per token."""
    if kinds := config.get("layer_types"):
        return [kind for kind in kinds if "attention" in kind and "linear" not in kind]
    period = config.get("sliding_window_pattern")
    if config.get("sliding_window") and period and config.get("use_sliding_window", True):
        return ["full" if (layer + 1) % period == 0 else "window" for layer in range(layers)]
    return ["full"] * layers


def _number(path: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        found = "is missing" if value is None else f"is {value!r}, no positive number"
        raise InvalidArgumentError(f"{path}: {name} {found}")
    return value


def figures_of(shape: KVShape, load: Load) -> dict[str, float]:
    """Return what the load needs, by name: bytes, seconds, or numbers, per second where it says so.

    Raises:
        InvalidArgumentError: the model cannot be divided among the ranks.
    """
    from kvstore.memory.header import extent_bytes  # here, because it imports numpy

    token = shape.bytes_per_token(load.ranks, load.element_bytes)
    objects = shape.groups * (1 if shape.latent else load.ranks)
    block = token * load.block_tokens
    block_bytes = -(-block // objects)
    each = choose_blocks_per_object(load.block_tokens, block_bytes) if shape.groups == 1 else 1
    stored_block = objects * extent_bytes(block_bytes * each) / each
    tokens = load.engines * load.tokens_per_s
    new, found = tokens * (1 - load.hits), tokens * load.hits
    # Every rank reads the object of a latent cache.
    readers = load.ranks if shape.latent else 1
    stored_s, read_s = new * token, found * token * readers
    extents_s = new / load.block_tokens * stored_block * load.replicas
    memory = load.memory_bytes or extents_s * load.reuse_s * SPACE_FACTOR
    nodes = load.nodes or load.engines
    puts_s = new / load.block_tokens * objects / each
    reads_s = found / load.block_tokens * objects * readers / each
    stored_objects = memory / stored_block * objects / each
    read_host = read_s / nodes
    disk_objects = load.disk_bytes / stored_block * objects / each
    disks = {
        "disk_bytes_per_node": load.disk_bytes / nodes,
        "disk_objects": disk_objects,
        "disk_reuse_s": load.disk_bytes / extents_s,
        "disk_writes_per_day": 86_400 * extents_s / load.disk_bytes,
    } if load.disk_bytes else {}  # fmt: skip
    return {
        "bytes_per_token": token,
        "bytes_per_block": block,
        "bytes_per_object": block_bytes * each,
        "objects_per_block": objects,
        "blocks_per_object": each,
        "stored_bytes_per_s": stored_s,
        "stored_bytes_per_day": stored_s * 86_400,
        "read_bytes_per_s": read_s,
        "reuse_s": memory / (extents_s * SPACE_FACTOR),
        "memory_bytes": memory,
        "nodes": nodes,
        "memory_bytes_per_node": memory / nodes,
        "objects": stored_objects,
        **disks,
        "master_memory_bytes": stored_objects * MASTER_OBJECT_BYTES
        + disk_objects * DISK_OBJECT_BYTES,
        "puts_per_s": puts_s,
        "reads_per_s": reads_s,
        "master_core": puts_s / BATCH * PUT_BATCH_S + reads_s / BATCH * LOOKUP_BATCH_S
        + tokens / load.prompt_tokens * load.ranks * MATCH_S,
        "connections_per_node": load.engines * load.ranks * CONNECTIONS_PER_RANK,
        "network_bytes_per_s_per_node": read_host * (nodes - 1) / nodes,
        "node_host_cores": TCP_S_PER_BYTE * read_host + PUT_S_PER_BYTE * stored_s / nodes,
    }  # fmt: skip
