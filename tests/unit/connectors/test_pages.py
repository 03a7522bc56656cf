"""Where the bytes of each block are, in caches of several shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvstore.connectors.vllm.worker.pages import (
    CacheGeometry,
    CPUPages,
    Page,
    inspect_caches,
    pages_of,
)
from kvstore.device.device import Device
from kvstore.device.memory import DeviceMemory
from kvstore.errors import ConfigError
from tests.support.fake_device import FakeDriver

BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 4, 6
PAGE = HEADS * TOKENS * CONTENT * 2  # bytes, of float16


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any = None


@dataclass
class Config:
    """``KVCacheConfig``."""

    kv_cache_groups: list[Group]
    num_blocks: int = BLOCKS


def config(*groups: list[str], blocks: int = BLOCKS) -> Any:
    return Config([Group(names) for names in groups], blocks)


def layer_by_layer(layers: int, *, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """LBHNC: each layer has its own memory."""
    shape = (BLOCKS, HEADS, TOKENS, CONTENT)
    return {f"l{index}": torch.zeros(shape, dtype=dtype) for index in range(layers)}


def block_by_block(layers: int) -> dict[str, torch.Tensor]:
    """BLHNC: one memory, in which a block is one run over all layers."""
    whole = torch.zeros((BLOCKS, layers, HEADS, TOKENS, CONTENT), dtype=torch.float16)
    return {f"l{index}": whole[:, index] for index in range(layers)}


def permuted(layers: int) -> dict[str, torch.Tensor]:
    """Tokens before heads in memory."""
    shape = (BLOCKS, TOKENS, HEADS, CONTENT)
    return {
        f"l{index}": torch.zeros(shape, dtype=torch.float16).permute(0, 2, 1, 3)
        for index in range(layers)
    }


def fill(caches: Mapping[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for cache in caches.values():
        cache.copy_(torch.rand(cache.shape, generator=generator).to(cache.dtype))


def stored(pages: CPUPages, group: int, block_ids: list[int]) -> list[bytes]:
    """What is stored of each block."""
    blocks = pages.blocks(group, block_ids, None)
    return [b"".join(bytes(piece) for piece in pieces) for pieces in blocks]


def put_back(pages: CPUPages, group: int, block_ids: list[int], data: list[bytes]) -> None:
    for pieces, of_block in zip(pages.blocks(group, block_ids, None), data, strict=True):
        at = 0
        for piece in pieces:
            piece[:] = of_block[at : at + len(piece)]
            at += len(piece)
        assert at == len(of_block)


# --- shards ---------------------------------------------------------------------------------------


def test_a_shard_has_the_bytes_of_a_page_with_its_heads_alone() -> None:
    whole = layer_by_layer(2)
    fill(whole, 1)
    for shard in range(HEADS):
        alone = {name: cache[:, shard : shard + 1].contiguous() for name, cache in whole.items()}
        ours = inspect_caches(whole, config(["l0", "l1"]), shard, HEADS)
        theirs = inspect_caches(alone, config(["l0", "l1"]))
        assert ours.layout == theirs.layout
        assert ours.block_bytes == theirs.block_bytes
        for block in (0, 3):
            assert stored(CPUPages(ours), 0, [block]) == stored(CPUPages(theirs), 0, [block])


@pytest.mark.parametrize(
    ("cache", "shards"),
    [(permuted(1)["l0"], 2), (layer_by_layer(1)["l0"], 3)],
    ids=["tokens before heads", "three"],
)
def test_pages_that_have_no_such_shards_are_refused(cache: torch.Tensor, shards: int) -> None:
    with pytest.raises(ConfigError, match="tp_shards"):
        inspect_caches({"l0": cache}, config(["l0"]), 0, shards)


def test_layers_that_share_their_cache_are_stored_once() -> None:
    caches = layer_by_layer(2)
    caches["again"] = caches["l0"]
    geometry = inspect_caches(caches, config(["l0", "again", "l1"]))
    assert geometry.block_bytes == {0: 2 * PAGE}


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, BLOCKS, 8),  # keys and values apart
        torch.zeros(BLOCKS + 1, 8),
        torch.zeros(BLOCKS - 1, 8),
        torch.zeros(BLOCKS, 8, 8)[:, :, :4],
        torch.zeros(BLOCKS, 8, 8)[:, ::2],
        torch.zeros(BLOCKS * 2, 2, 8)[:, 0],  # parts of a block that do not lie together
        torch.zeros(1, 8).expand(BLOCKS, 8),  # all blocks are one
    ],
)
def test_what_is_no_dense_page_for_each_block_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="layer l0"):
        inspect_caches({"l0": cache}, config(["l0"]))


class Storage:
    """A tensor over memory of a device that this host does not have."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def data_ptr(self) -> int:
        return 1 << 40

    def __len__(self) -> int:
        return 100


def elsewhere(*devices: str) -> CacheGeometry:
    storages: Any = [Storage(each) for each in devices]
    return CacheGeometry(storages, {0: [Page(0, 0, 10, 10)]}, "layout")


def test_the_copying_device_is_the_one_that_has_the_cache() -> None:
    asked: list[str] = []

    def device_of(name: str) -> Any:
        asked.append(name)
        return Device(FakeDriver(name), ring_bytes=1 << 20)

    geometry = inspect_caches(layer_by_layer(1), config(["l0"]))
    assert isinstance(pages_of(geometry, device_of), CPUPages)
    assert not asked
    [memory] = pages_of(elsewhere("cuda:3"), device_of).blocks(0, [2], object())
    assert isinstance(memory, DeviceMemory)
    assert asked == [memory.device.name] == ["cuda:3"]
    for geometry in (elsewhere("meta"), elsewhere("cuda:0", "cuda:1"), elsewhere("cuda:0", "cpu")):
        with pytest.raises(ConfigError, match=str(geometry.storages[-1].device)):
            pages_of(geometry, device_of)


# --- bytes ----------------------------------------------------------------------------------------


def test_engines_that_place_their_layers_differently_understand_each_other() -> None:
    ours, theirs = layer_by_layer(3), block_by_block(3)
    fill(ours, 1)
    fill(theirs, 2)
    names = ["l0", "l1", "l2"]
    from_ours, to_theirs = (
        CPUPages(inspect_caches(each, config(names))) for each in (ours, theirs)
    )
    assert from_ours.layout == to_theirs.layout
    assert from_ours.block_bytes == to_theirs.block_bytes
    before = {name: cache.clone() for name, cache in theirs.items()}
    put_back(to_theirs, 0, [4, 0], stored(from_ours, 0, [1, 3]))
    for name in names:
        assert torch.equal(theirs[name][4], ours[name][1])
        assert torch.equal(theirs[name][0], ours[name][3])
        assert torch.equal(theirs[name][1:4], before[name][1:4])
    put_back(from_ours, 0, [2], stored(to_theirs, 0, [2]))
    assert all(torch.equal(ours[name][2], before[name][2]) for name in names)


def test_what_lies_differently_in_a_page_has_another_layout() -> None:
    plain = inspect_caches(layer_by_layer(2), config(["l0", "l1"])).layout
    names = ["l0", "l1"]
    others = {
        "permuted": inspect_caches(permuted(2), config(names)).layout,
        "dtype": inspect_caches(layer_by_layer(2, dtype=torch.bfloat16), config(names)).layout,
        "order": inspect_caches(layer_by_layer(2), config(["l1", "l0"])).layout,
        "groups": inspect_caches(layer_by_layer(2), config(["l0"], ["l1"])).layout,
        "layers": inspect_caches(layer_by_layer(1), config(["l0"])).layout,
        "parts": inspect_caches(layer_by_layer(2), config(names, blocks=1)).layout,
    }
    assert len({plain, *others.values()}) == 1 + len(others)
