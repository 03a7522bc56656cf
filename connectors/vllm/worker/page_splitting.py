"""Splits the pages of a worker along their tokens, into objects of engines with smaller blocks.

Only the attention kernel knows the location of a token's bytes in a page: vLLM's kernels for CPUs
pack keys and values over all tokens of a block, which the shape of the cache does not show. So the
layer's own function writes a small cache of numbered elements, once with this engine's blocks and
once with the smaller ones; a chunk is the bytes that have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from kvstore.client.values import Payload
from kvstore.connectors.vllm.worker.pages import Mark, Page, Pages, Shape
from kvstore.device.driver import Numbers
from kvstore.errors import ConfigError

ADVICE: Final = "Leave block_tokens out, and give all engines of this model one --block-size."

Part = list[tuple[int, int]]
"""Runs of bytes within a kernel's block: offset and length."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values, ``[tokens, heads, content]``, into a cache of one block."""


class PageSplitter:
    """Splits the pages of one worker into chunks of ``tokens`` tokens."""

    def __init__(self, tokens: int, layers: Mapping[str, Any], dtype: torch.dtype) -> None:
        """
        Args:
            layers: vLLM's attention layers by name (``static_forward_context``).
            dtype: of the keys and values that the model computes.
        """
        self._tokens = tokens
        self._layers = layers
        self._dtype = dtype
        self._known: dict[object, Numbers] = {}

    def chunk(
        self, index: int, name: str, cache: torch.Tensor, runs: Sequence[Page], shape: Shape
    ) -> tuple[list[Page], Shape]:
        """Return the runs of a layer's chunk ``index``, and the shape of a page with only its
        tokens. No runs: a block of the layer has fewer chunks.

        Args:
            runs: of the complete page, or of a shard of it.

        Raises:
            ConfigError: the page cannot be split there.
        """
        dtype, dims, strides, count = shape
        if len(dims) != 3:
            raise _cannot_split_error(name, f"its cache has shape {tuple(cache.shape)}")
        parts = _parts(runs, count)
        inside, tokens = dims[1], self._tokens
        if tokens % inside == 0:
            each = tokens // inside
            return parts[index * each : (index + 1) * each], (dtype, dims, strides, each)
        if inside % tokens:
            raise _cannot_split_error(name, f"its kernel uses blocks of {inside} tokens")
        left = (dims[0], tokens, dims[2])
        of_part, cut = divmod(index, inside // tokens)
        cut_shape = (dtype, left, _dense(left, strides), 1)
        if of_part >= count:
            return [], cut_shape
        page = parts[of_part]
        found = self._byte_ranges(name, cache, (dims, strides), (left, cut_shape[2]), cut)
        return [page._replace(offset=page.offset + at, length=n) for at, n in found], cut_shape

    def _byte_ranges(
        self, name: str, cache: torch.Tensor, full: _Dims, small: _Dims, cut: int
    ) -> Part:
        """Return the bytes of one chunk, in the order of the smaller page."""
        offsets = self._element_offsets(name, cache, full)[
            cut * self._tokens : (cut + 1) * self._tokens
        ]
        order = np.argsort(self._element_offsets(name, cache, small), axis=None)
        at = offsets.ravel()[order]
        ends = np.flatnonzero(np.diff(at) != 1) + 1
        size = cache.element_size()
        return [(int(run[0]) * size, len(run) * size) for run in np.split(at, ends)]

    def _element_offsets(self, name: str, cache: torch.Tensor, page: _Dims) -> Numbers:
        """Return ``element_offsets``, computed once for each kind of layer."""
        layer: Any = self._layers.get(name)
        write = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
        if write is None:
            raise _cannot_split_error(name, "vLLM has no function that writes one token of it")
        kind = (type(layer.impl), getattr(layer, "isa", ""), layer.head_size, cache.dtype, page)
        if kind not in self._known:
            slots = torch.arange(page[0][1], dtype=torch.int64, device=cache.device)

            def into(keys: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
                write(layer, keys, values, scratch, slots)

            try:
                self._known[kind] = element_offsets(into, layer.head_size, self._dtype, cache, page)
            except Exception as error:
                raise _cannot_split_error(
                    name, f"writing a token of it failed: {error!r}"
                ) from error
        return self._known[kind]


_Dims = tuple[tuple[int, ...], tuple[int, ...]]
"""Heads, tokens and content of a page, and their strides (0 for a dimension of length 1)."""


def element_offsets(
    write: Write, key_size: int, dtype: torch.dtype, like: torch.Tensor, page: _Dims
) -> Numbers:
    """Return the location of each element, ``[tokens, heads, content]``, in elements of the page.

    Each element has a number, of which one bit is written at a time: any dtype, quantised or not,
    distinguishes 0 from another value.

    Args:
        key_size: elements of a key; the rest of the content is the value.
        like: a tensor of the cache's dtype and device.

    Raises:
        ValueError: the kernel does not write each element once.
    """
    (heads, tokens, content), strides = page
    numbers = torch.arange(1, tokens * heads * content + 1, device=like.device)
    numbers = numbers.view(tokens, heads, content)
    found = np.zeros(numbers.numel(), np.int64)
    for bit in range(int(numbers.numel()).bit_length()):
        bits = (numbers >> bit & 1).to(dtype)
        flat = torch.zeros(numbers.numel(), dtype=like.dtype, device=like.device)
        scratch = flat.as_strided((1, *page[0]), (flat.numel(), *_dense(page[0], strides, one=1)))
        write(bits[..., :key_size].contiguous(), bits[..., key_size:].contiguous(), scratch)
        found |= (flat.view(torch.uint8).view(len(flat), -1) != 0).any(1).cpu().numpy().astype(
            np.int64
        ) << bit  # fmt: skip
    at = np.argsort(found)
    if not np.array_equal(found[at], np.arange(1, len(found) + 1)):
        raise ValueError("it does not write each element once")
    return at.reshape(tokens, heads, content)


def _dense(dims: Sequence[int], strides: Sequence[int], *, one: int = 0) -> tuple[int, ...]:
    """Return the strides of a dense page of these dimensions, in the order of ``strides``. ``one``:
    the stride of a dimension of length 1; 0: as in a ``Shape``."""
    dense = [one] * len(dims)
    size = 1
    for axis in sorted(range(len(dims)), key=lambda axis: (strides[axis], -axis)):
        if dims[axis] > 1:
            dense[axis] = size
            size *= dims[axis]
    return tuple(dense)


def _parts(runs: Sequence[Page], count: int) -> list[Page]:
    """Return the kernel's blocks of a page, one run each."""
    if len(runs) == count:
        return list(runs)
    (page,) = runs
    size = page.length // count
    return [page._replace(offset=page.offset + n * size, length=size) for n in range(count)]


def _cannot_split_error(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"block_tokens: the blocks of layer {name} cannot be cut: {why}",
        advice=ADVICE,
        key="block_tokens",
    )


class SplitPages:
    """Implements ``Pages`` for split blocks. Objects are numbered as by ``Groups.places``."""

    def __init__(self, pieces: Sequence[Pages]) -> None:
        """``pieces``: each has one chunk of every block; a group may have fewer than another."""
        self.layout = pieces[0].layout
        self.block_bytes = pieces[0].block_bytes
        self._mark = pieces[0].record_event
        self._pieces = {
            group: [piece for piece in pieces if group in piece.block_bytes]
            for group in self.block_bytes
        }

    def record_event(self) -> Mark:
        return self._mark()

    def blocks(
        self, group: int, block_ids: Sequence[int], after: Mark, each: int = 1
    ) -> Sequence[Payload]:
        assert each == 1, "blocks are split"
        found: dict[int, Payload] = {}
        for pages, mine, blocks in self._per_part(group, block_ids):
            found.update(zip(mine, pages.blocks(group, blocks, after), strict=True))
        return [found[place] for place in block_ids]

    def zero(self, group: int, block_ids: Sequence[int], after: Mark, deadline: float) -> None:
        for pages, _, blocks in self._per_part(group, block_ids):
            pages.zero(group, blocks, after, deadline)

    def _per_part(
        self, group: int, places: Sequence[int]
    ) -> Iterator[tuple[Pages, list[int], list[int]]]:
        """Yield the pages of one chunk, the numbers of its objects, and the numbers of their
        blocks."""
        pieces = self._pieces[group]
        count = len(pieces)
        for cut, pages in enumerate(pieces):
            if mine := [place for place in places if place % count == cut]:
                yield pages, mine, [place // count for place in mine]
