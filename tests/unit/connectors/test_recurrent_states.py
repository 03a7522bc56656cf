"""Shards of the states of recurrent layers: the state of a rank that has only their heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvstore.connectors.vllm.worker.pages import CPUPages, inspect_caches
from kvstore.connectors.vllm.worker.recurrent_states import check_split, shard_runs, shard_shapes
from kvstore.errors import ConfigError
from tests.unit.connectors.test_pages import Config, Group

K_HEADS, V_HEADS, K_DIM, V_DIM, KEPT = 4, 8, 2, 3, 3
BLOCKS = 3
GDN: Any = SimpleNamespace(name="GDN_ATTN")


def spec(ranks: int, *, channels_first: bool = False) -> MambaSpec:
    """Of one rank of so many."""
    channels = (2 * K_HEADS * K_DIM + V_HEADS * V_DIM) // ranks
    return MambaSpec(
        block_size=16,
        shapes=(
            (channels, KEPT) if channels_first else (KEPT, channels),
            (V_HEADS // ranks, V_DIM, K_DIM),
        ),
        dtypes=(torch.bfloat16, torch.float32), mamba_type=GDN, mamba_cache_mode="align",
    )  # fmt: skip


def layer(ranks: int) -> Any:
    return SimpleNamespace(
        key_dim=K_HEADS * K_DIM, value_dim=V_HEADS * V_DIM, num_k_heads=K_HEADS,
        num_v_heads=V_HEADS, tp_size=ranks,
    )  # fmt: skip


def state(rank: int, ranks: int, *, channels_first: bool) -> bytes:
    """A rank's state, in which each element tells its head."""
    convolved = []
    for first, heads, size in ((0, K_HEADS, K_DIM), (50, K_HEADS, K_DIM), (100, V_HEADS, V_DIM)):
        mine = torch.arange(heads).view(ranks, -1)[rank]
        convolved.append((first + mine).repeat_interleave(size))
    conv = torch.cat(convolved).repeat(KEPT, 1) + 200 * torch.arange(KEPT).view(-1, 1)
    if channels_first:
        conv = conv.T.contiguous()
    of_rank = torch.arange(V_HEADS).view(ranks, -1)[rank]
    matrix = of_rank.view(-1, 1, 1) + torch.zeros(V_DIM, K_DIM)
    parts = (conv.to(torch.bfloat16).view(torch.int16), matrix.to(torch.float32))
    return b"".join(each.contiguous().numpy().tobytes() for each in parts)


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize(("ranks", "shards"), [(1, 2), (1, 4), (2, 2)])
def test_a_shard_has_the_bytes_of_a_rank_with_its_heads_alone(
    ranks: int, shards: int, channels_first: bool
) -> None:
    of = spec(ranks, channels_first=channels_first)
    size = len(state(0, ranks, channels_first=channels_first))
    cache = torch.zeros((BLOCKS, 1, 1, size + 64), dtype=torch.int8)[..., :size]
    for rank in range(ranks):
        whole = state(rank, ranks, channels_first=channels_first)
        cache[2, 0, 0] = torch.frombuffer(bytearray(whole), dtype=torch.int8)
        config: Any = Config([Group(["a"], of)], BLOCKS)
        for shard in range(shards):
            layers = {"a": layer(ranks)}
            geometry = inspect_caches({"a": cache}, config, shard, shards, layers=layers)
            [pieces] = CPUPages(geometry).blocks(0, [2], None)
            found = b"".join(map(bytes, pieces))
            number = rank * shards + shard
            small = ranks * shards
            assert found == state(number, small, channels_first=channels_first)
            alone = torch.zeros((BLOCKS, 1, 1, len(found)), dtype=torch.int8)
            its: Any = Config([Group(["a"], spec(small, channels_first=channels_first))], BLOCKS)
            assert inspect_caches({"a": alone}, its).layout == geometry.layout
    small_spec = spec(ranks * shards, channels_first=channels_first)
    assert shard_shapes(of, shards) == list(small_spec.shapes)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 and 8 heads of layer a cannot be split into 3"):
        shard_runs("a", layer(1), spec(1), 0, 3)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_layer_that_lays_its_state_out_otherwise_is_refused(shards: int) -> None:
    """Also where a rank holds one shard."""
    with pytest.raises(ConfigError, match=r"states of layer a \(SimpleNamespace\)"):
        shard_runs("a", SimpleNamespace(), spec(1), 0, shards)
    odd = layer(1)
    odd.key_dim += 1
    with pytest.raises(ConfigError, match="states of layer a"):
        shard_runs("a", odd, spec(1), 0, shards)


def test_other_kinds_of_states_are_refused_by_name() -> None:
    check_split(spec(1), 2)
    mamba = MambaSpec(block_size=16, shapes=((2, 2), (2, 2)), dtypes=(torch.float32,) * 2)
    with pytest.raises(ConfigError, match="recurrent layers of the kind MAMBA2 cannot be split"):
        check_split(mamba, 2)
