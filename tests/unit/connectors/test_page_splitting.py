"""Pieces of pages, by kernels of vLLM and by others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import Run
from kvstore.connectors.vllm.worker.page_splitting import PageSplitter, SplitPages
from kvstore.connectors.vllm.worker.pages import CPUPages, inspect_caches
from kvstore.errors import ConfigError
from tests.unit.connectors.test_pages import config, stored

BLOCKS, HEADS, SIZE = 3, 2, 32
Kernel = Callable[..., None]


def in_rows(_: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    """Of each token and head the key and the value side by side, as kernels of GPUs do."""
    size = keys.shape[2]
    for token, slot in enumerate(slots.tolist()):
        block, inside = divmod(slot, cache.shape[2])
        cache[block, :, inside, :size] = keys[token].to(cache.dtype)
        cache[block, :, inside, size:] = values[token].to(cache.dtype)


def in_columns(_: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    """The keys of a head before its values, and one above the other."""
    heads, tokens, size = cache.shape[1], cache.shape[2], keys.shape[2]
    for token, slot in enumerate(slots.tolist()):
        block, inside = divmod(slot, tokens)
        flat = cache.view(len(cache), heads, -1)
        flat[block, :, inside : tokens * size : tokens] = keys[token].to(cache.dtype)
        start = tokens * size + inside * size
        flat[block, :, start : start + size] = values[token].to(cache.dtype)


def of_a_cpu(layer: Any, *tensors: Any) -> None:
    """vLLM's own, which packs keys (and, for AMX, values) by its instruction set."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    whose = SimpleNamespace(attn_type="decoder", kv_cache_dtype="auto")
    CPUAttentionBackendImpl.do_kv_cache_update(whose, layer, *tensors)


class Worker:
    """A layer of some prompt, in blocks of ``block`` tokens, which ``kernel`` has written."""

    def __init__(
        self, block: int, kernel: Kernel, *, inside: int = 0, heads: int = HEADS, size: int = SIZE,
        tokens_first: bool = False, isa: str = "vec", dtype: torch.dtype = torch.float32,
        total: int = 0,
    ) -> None:  # fmt: skip
        """``inside``: tokens of a kernel's block, if it divides blocks."""
        total = total or 2 * block
        inside = inside or block
        self.blocks = 1 + total // block
        dims = (self.blocks * block // inside, heads, inside, 2 * size)
        cache = torch.zeros(dims, dtype=dtype)
        if tokens_first:
            cache = torch.zeros((dims[0], inside, heads, 2 * size), dtype=dtype).transpose(1, 2)
        impl = SimpleNamespace(do_kv_cache_update=kernel)
        self.layers = {
            "l0": SimpleNamespace(
                impl=impl, isa=isa, head_size=size, _k_scale_float=1.0, _v_scale_float=1.0
            )
        }
        generator = torch.Generator().manual_seed(1)
        keys, values = (
            torch.rand((total, heads, size), generator=generator).to(dtype) for _ in "kv"
        )
        slots = torch.arange(block, block + total)
        kernel(self.layers["l0"], keys, values, cache, slots)
        self.cache, self.dtype, self.block = cache, dtype, block

    def objects(self, tokens: int = 0, shard: int = 0, shards: int = 1) -> tuple[str, list[bytes]]:
        """The layout and the objects of the prompt, of so many tokens; 0: whole blocks."""
        tokens = tokens or self.block
        cuts = self.block // tokens
        caches, where = {"l0": self.cache}, config(["l0"], blocks=self.blocks)
        if cuts == 1:
            pieces = [inspect_caches(caches, where, shard, shards)]
        else:
            cutter = PageSplitter(tokens, self.layers, self.dtype)
            pieces = [
                inspect_caches(caches, where, shard, shards, partial(cutter.chunk, index))
                for index in range(cuts)
            ]
        pages: Any = SplitPages([CPUPages(each) for each in pieces])
        groups = Groups(
            hash_block_tokens=tokens, scheduler_block_tokens=self.block,
            block_tokens={0: self.block}, object_tokens=tokens,
        )  # fmt: skip
        blocks = [block for block in range(1, self.blocks) for _ in range(cuts)]
        run = Run(0, [b""] * len(blocks), blocks, 0, None)
        return pages.layout, stored(pages, 0, groups.places(run))


@given(
    st.sampled_from([in_rows, in_columns]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_piece_has_the_bytes_of_a_block_with_its_tokens_alone(
    kernel: Kernel, heads: int, tokens: int, cuts: int, size: int, tokens_first: bool
) -> None:
    tokens_first &= kernel is in_rows
    make = partial(Worker, kernel=kernel, heads=heads, size=size, tokens_first=tokens_first)
    large = make(tokens * cuts)
    assert large.objects(tokens) == make(tokens, total=2 * tokens * cuts).objects()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("isa", "dtype"),
    [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16)],
    ids=["float32", "bfloat16", "amx"],
)
def test_pieces_of_a_block_that_a_cpu_packs(isa: str, dtype: torch.dtype, shards: int) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    large = Worker(128, of_a_cpu, isa=isa, dtype=dtype)
    small = Worker(32, of_a_cpu, isa=isa, dtype=dtype, total=256)
    for shard in range(shards):
        assert large.objects(32, shard, shards) == small.objects(32, shard, shards)


def test_pieces_of_a_block_that_kernels_divide() -> None:
    make = partial(Worker, kernel=in_rows, inside=4)
    assert make(16).objects(8) == make(8, total=32).objects()
    assert make(16).objects(4) == Worker(4, in_rows, total=32).objects()
    assert make(16).objects(2) == Worker(2, in_rows, total=32).objects()


def test_a_piece_that_kernels_cannot_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer l0 .* blocks of 8 tokens"):
        Worker(24, in_rows, inside=8).objects(12)


def in_bytes(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    """Two elements share a place, as with four bits each."""
    in_rows(layer, keys, values, cache, slots)
    cache[..., ::2] += cache[..., 1::2]
    cache[..., 1::2] = 0


@pytest.mark.parametrize("kernel", [in_bytes, lambda *_: None], ids=["two in one", "none"])
def test_a_kernel_that_does_not_write_each_element_once_is_refused(kernel: Kernel) -> None:
    with pytest.raises(ConfigError, match=r"layer l0 .* each element once") as refused:
        Worker(8, kernel).objects(4)
    assert "--block-size" in refused.value.advice


def test_layers_that_do_not_write_tokens_one_by_one_are_refused() -> None:
    worker = Worker(8, in_rows)
    worker.layers.clear()
    with pytest.raises(ConfigError, match="no function that writes"):
        worker.objects(4)


def test_groups_with_smaller_blocks_have_fewer_pieces() -> None:
    large, small = Worker(8, in_rows), Worker(4, in_rows, total=16)
    caches = {"l0": large.cache, "l1": small.cache[:3]}
    cutter = PageSplitter(4, {**large.layers, "l1": small.layers["l0"]}, torch.float32)
    where = config(["l0"], ["l1"], blocks=3)
    pieces = [
        inspect_caches(caches, where, piece=partial(cutter.chunk, index)) for index in range(2)
    ]
    pages: Any = SplitPages([CPUPages(each) for each in pieces])
    assert stored(pages, 0, [2, 3]) == large.objects(4)[1][:2]
    assert stored(pages, 1, [1, 2]) == small.objects()[1][:2]


def test_zeros_are_written_to_pieces_that_have_such_objects() -> None:
    """The others are not asked: of no blocks, nothing says on which device they are."""
    told: list[tuple[str, list[int]]] = []

    def piece(name: str) -> Any:
        return SimpleNamespace(
            layout="", block_bytes={0: 8}, record_event=None,
            zero=lambda group, blocks, after, deadline: told.append((name, list(blocks))),
        )  # fmt: skip

    SplitPages([piece("a"), piece("b")]).zero(0, [3, 5], None, 0.0)
    assert told == [("b", [1, 2])]
