"""The paged KV cache of one worker as plain memory: where the bytes of each block are.

In every layer a block is one *page*, a run of bytes. The stored bytes of a block are the pages of
its group's layers, one after the other in the order of the layers; they are not transposed or
converted. Engines whose pages have the same content format (``layout``) can read each other's
blocks, wherever the pages are in memory.

On a CPU the store copies directly between the pages and the mapped segment. On a GPU a separate
stream gathers the pages into page-locked memory; it waits for the compute stream by events, and the
compute stream never waits for it.
"""

# mypy: allow-untyped-calls
# torch annotates its CUDA classes only in part.

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

Buffers = list[list[memoryview]]
"""For each block: its pages, or runs of several adjacent pages."""

Lent = AbstractContextManager[Buffers]


class Pages(Protocol):
    """The paged cache of one worker. Threads: any."""

    layout: str
    block_bytes: dict[int, int]
    """Stored bytes of one block, by group."""

    def mark(self) -> Any:
        """Marks a moment of the compute stream, for which ``reading`` and ``writing`` wait. The
        thread that computes calls it, and does not wait."""
        ...

    def reading(self, group: int, block_ids: Sequence[int], after: Any) -> Lent:
        """The bytes of these blocks, valid while the context is open."""
        ...

    def writing(self, group: int, block_ids: Sequence[int], after: Any) -> Lent:
        """Buffers to fill; their bytes are in the blocks once the context has closed without an
        error."""
        ...


class Page(NamedTuple):
    """The pages of one layer, or of several that are adjacent in each block."""

    storage: int
    """Index of the allocation."""
    offset: int
    """Offset of block 0, bytes."""
    stride: int
    """From one block to the next, bytes."""
    length: int


class Geometry(NamedTuple):
    """All pages of a worker."""

    storages: list[torch.Tensor]
    """One-dimensional uint8 tensors over the whole of each allocation."""
    pages: dict[int, list[Page]]
    """By group id, in the order of the layers; groups without layers here are left out."""
    layout: str

    @property
    def block_bytes(self) -> dict[int, int]:
        return {group: sum(page.length for page in pages) for group, pages in self.pages.items()}


def survey(caches: Mapping[str, torch.Tensor], config: KVCacheConfig) -> Geometry:
    """Finds where all pages are.

    Args:
        caches: by layer name: a tensor whose first dimension counts blocks (or parts of blocks of
            equal size, as some attention kernels want them) and whose others are dense.

    Raises:
        ConfigError: a layout that this connector does not understand.
    """
    storages: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    pages: dict[int, list[Page]] = {}
    inside: list[object] = []
    for group, spec in enumerate(config.kv_cache_groups):
        of_group: list[Page] = []
        seen: set[int] = set()
        for name in spec.layer_names:
            cache = caches.get(name)
            if cache is None or cache.data_ptr() in seen:  # on another worker, or shared
                continue
            seen.add(cache.data_ptr())
            page, shape = _page(name, cache, config.num_blocks)
            address = cache.untyped_storage().data_ptr()
            if address not in storages:
                storages[address] = len(tensors)
                whole = torch.empty(0, dtype=torch.uint8, device=cache.device)
                tensors.append(whole.set_(cache.untyped_storage()))
            of_group.append(page._replace(storage=storages[address]))
            inside.append((group, name, page.length, shape))
        if of_group:
            pages[group] = _merged(of_group)
    digest = hashlib.sha256(repr(inside).encode()).hexdigest()[:16]
    return Geometry(tensors, pages, digest)


def _page(name: str, cache: torch.Tensor, blocks: int) -> tuple[Page, tuple[object, ...]]:
    parts, rest = divmod(cache.shape[0], blocks)
    item = cache.element_size()
    size = cache[0].numel() * item
    stride = cache.stride(0) * item
    dense = 1
    for length, step in sorted(
        zip(cache.shape[1:], cache.stride()[1:], strict=True), key=lambda each: each[1]
    ):
        if length > 1 and step != dense:
            dense = -1
            break
        dense *= length
    if rest or not parts or dense < 0 or stride < size or (parts > 1 and stride != size):
        raise ConfigError(
            f"the KV cache of layer {name} has shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}, which is not a dense page for each of {blocks} blocks",
            advice="Please report the attention backend that created it.",
        )
    offset = int(cache.storage_offset()) * item
    inner = zip(cache.shape[1:], cache.stride()[1:], strict=True)
    strides = tuple(step if length > 1 else 0 for length, step in inner)  # length 1: meaningless
    shape = (str(cache.dtype), tuple(cache.shape[1:]), strides, parts)
    return Page(0, offset, stride * parts, size * parts), shape


def _merged(pages: list[Page]) -> list[Page]:
    """Merges layers that are adjacent in every block into one run."""
    merged = [pages[0]]
    for page in pages[1:]:
        last = merged[-1]
        if (page.storage, page.stride) == (last.storage, last.stride) and (
            page.offset == last.offset + last.length and last.length + page.length <= page.stride
        ):
            merged[-1] = last._replace(length=last.length + page.length)
        else:
            merged.append(page)
    return merged


class CPUPages:
    """Implements ``Pages`` for a cache in main memory, without a copy of its own."""

    def __init__(self, geometry: Geometry) -> None:
        self.layout = geometry.layout
        self.block_bytes = geometry.block_bytes
        self._memory = [memoryview(each.numpy()) for each in geometry.storages]  # type: ignore[arg-type]
        self._pages = geometry.pages

    def mark(self) -> Any:
        return None

    def _buffers(self, group: int, block_ids: Sequence[int]) -> Buffers:
        memory = self._memory
        last = max(block_ids, default=0)
        for storage, offset, stride, length in self._pages[group]:
            assert offset + last * stride + length <= len(memory[storage]), f"block {last}"
        return [
            [
                memory[storage][offset + block * stride : offset + block * stride + length]
                for storage, offset, stride, length in self._pages[group]
            ]
            for block in block_ids
        ]

    @contextmanager
    def reading(self, group: int, block_ids: Sequence[int], after: Any) -> Iterator[Buffers]:
        del after
        yield self._buffers(group, block_ids)

    @contextmanager
    def writing(self, group: int, block_ids: Sequence[int], after: Any) -> Iterator[Buffers]:
        del after
        yield self._buffers(group, block_ids)


class CUDAPages:
    """Implements ``Pages`` for a cache in a GPU's memory.

    Each call uses page-locked memory for its blocks, which the calling thread keeps and reuses.
    Not run on this project's machines, which have no GPU: see docs/vllm.md.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.layout = geometry.layout
        self.block_bytes = geometry.block_bytes
        self._storages = geometry.storages
        self._pages = geometry.pages
        self._stream = torch.cuda.Stream(device=geometry.storages[0].device)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def reading(self, group: int, block_ids: Sequence[int], after: Any) -> Iterator[Buffers]:
        staged = self._staging(group, len(block_ids))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for here, there in self._pieces(group, block_ids, staged):
                there.copy_(here, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()  # this thread waits, the compute stream does not
        yield self._views(staged)

    @contextmanager
    def writing(self, group: int, block_ids: Sequence[int], after: Any) -> Iterator[Buffers]:
        staged = self._staging(group, len(block_ids))
        yield self._views(staged)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for here, there in self._pieces(group, block_ids, staged):
                here.copy_(there, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()

    def _staging(self, group: int, blocks: int) -> torch.Tensor:
        shape = (blocks, self.block_bytes[group])
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)  # torch caches it

    def _pieces(
        self, group: int, block_ids: Sequence[int], staged: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of device memory and page-locked memory, one per page."""
        for row, block in enumerate(block_ids):
            at = 0
            for storage, offset, stride, length in self._pages[group]:
                start = offset + block * stride
                yield self._storages[storage][start : start + length], staged[row, at : at + length]
                at += length

    @staticmethod
    def _views(staged: torch.Tensor) -> Buffers:
        return [[memoryview(row.numpy())] for row in staged]


def pages_of(geometry: Geometry) -> Pages:
    """The pages of a cache, for the device that it is on. Raises ConfigError."""
    devices = {storage.device.type for storage in geometry.storages}
    if devices == {"cpu"}:
        return CPUPages(geometry)
    if devices == {"cuda"}:
        return CUDAPages(geometry)
    raise ConfigError(
        f"KV caches on {sorted(devices)} are not supported", advice="Use a CPU or CUDA engine."
    )
