"""Splits recurrent states into shards, each of which is the state of a rank with only its heads.

A gated delta net keeps two arrays for each sequence: the last inputs of its convolution, whose
channels are those of queries, keys and values, in this order; and a matrix for each head. Ranks
divide each of these four by heads (vLLM 0.32, ``gated_delta_net_state_shape``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec

SPLIT: Final = "GDN_ATTN"
"""The kind of layers (``MambaSpec.mamba_type``) whose states can be split."""

ADVICE: Final = "Leave tp_shards out: engines of one tensor-parallel size share this model."


def is_state(spec: Any) -> bool:
    """Return whether it is the specification of recurrent layers."""
    return hasattr(spec, "mamba_cache_mode")


def check_split(spec: MambaSpec, shards: int) -> None:
    """
    Args:
        shards: ``tp_shards``.

    Raises:
        ConfigError: states of this kind cannot be split.
    """
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    if kind != SPLIT or spec.tp_replicated or len(spec.shapes) != 2:
        raise _unsplit(f"states of recurrent layers of the kind {kind}", shards)


def shard_shapes(spec: MambaSpec, shards: int) -> list[tuple[int, ...]]:
    """Return the shapes of one of so many shards of a worker's state."""
    shapes = [list(shape) for shape in spec.shapes]
    if shards > 1:
        for shape, axis in zip(shapes, _axes(spec)):
            shape[axis] //= shards
    return [tuple(shape) for shape in shapes]


def shard_runs(
    name: str, layer: Any, spec: MambaSpec, shard: int, shards: int
) -> list[tuple[int, int]]:
    """Return the byte runs of one shard in a worker's page: offset and length, in the shard's
    order.

    Args:
        layer: vLLM's.

    Raises:
        ConfigError: the layer's heads cannot be divided so.
    """
    axes = _axes(spec)
    whole = [shape[axis] for shape, axis in zip(spec.shapes, axes)]
    try:
        ranks = layer.tp_size
        of_rank = [layer.key_dim // ranks, layer.key_dim // ranks, layer.value_dim // ranks]
        heads = (layer.num_k_heads // ranks, layer.num_v_heads // ranks)
    except AttributeError:
        of_rank, heads = [], (0, 0)
    if [sum(of_rank), heads[1]] != whole:
        raise _unsplit(f"states of layer {name} ({type(layer).__name__})", shards)
    if any(head % shards for head in heads):
        raise _unsplit(f"a rank's {heads[0]} and {heads[1]} heads of layer {name}", shards)
    sections = [of_rank, [whole[1]]]
    runs: list[tuple[int, int]] = []
    start = 0
    for shape, dtype, axis, sizes in zip(spec.shapes, spec.dtypes, axes, sections):
        rows = np.concatenate(list(_rows(sizes, shard, shards)))
        at = np.arange(prod(shape)).reshape(shape).take(rows, axis).ravel()
        ends = np.flatnonzero(np.diff(at) != 1) + 1
        item = dtype.itemsize
        runs += [(start + int(run[0]) * item, len(run) * item) for run in np.split(at, ends)]
        start += prod(shape) * item
    return runs


def _axes(spec: MambaSpec) -> tuple[int, int]:
    """Return the axes along which the two arrays are split: the channels, which are more than the
    inputs that a convolution keeps, and the heads."""
    channels = max(range(len(spec.shapes[0])), key=spec.shapes[0].__getitem__)
    return channels, 0


def _rows(sizes: Sequence[int], shard: int, shards: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the rows of a shard in each of these sections."""
    first = 0
    for size in sizes:
        each = size // shards
        yield np.arange(first + shard * each, first + (shard + 1) * each)
        first += size


def _unsplit(what: str, shards: int) -> ConfigError:
    return ConfigError(
        f"tp_shards: {what} cannot be split into {shards} shards", advice=ADVICE, key="tp_shards"
    )
