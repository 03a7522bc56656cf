"""The paged KV cache of one worker as plain memory.

In every layer a block is one *page*, a run of bytes. The stored bytes of a block are the pages of
its group's layers in the order of the layers; they are not transposed or converted. Engines whose
pages have the same content format (``layout``) can read each other's blocks, wherever the pages are
in memory.

Pages can be split by heads into *shards* of equal size. A shard has the bytes of the page of a
worker with only these heads, so engines of other tensor-parallel sizes can read it.

This module copies nothing: the client copies between the pages and the pool, on a GPU by its driver
(``kvstore.device``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from kvstore.client.values import Payload
from kvstore.connectors.vllm.groups import NULL_BLOCK
from kvstore.connectors.vllm.worker.recurrent_states import is_state, shard_runs
from kvstore.device.device import Device
from kvstore.device.driver import Event, Numbers
from kvstore.device.memory import DeviceMemory
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

Mark = Event | None
"""An event of the compute stream; None on a CPU, where work has ended when its call returns."""


class Pages(Protocol):
    """The paged cache of one worker. Threads: any."""

    layout: str
    block_bytes: dict[int, int]
    """Stored bytes of one block, by group."""

    def record_event(self) -> Mark:
        """Record an event after all work queued on the calling thread's stream, which is that of
        the thread that computes. Does not wait."""
        ...

    def blocks(
        self, group: int, block_ids: Sequence[int], after: Mark, each: int = 1
    ) -> Sequence[Payload]:
        """Return the memory of these blocks, to be read or filled after the event ``after``.

        Args:
            each: blocks of one object. Of ``NULL_BLOCK`` among them the memory is a scratch buffer.
        """
        ...

    def zero(self, group: int, block_ids: Sequence[int], after: Mark, deadline: float) -> None:
        """Fill the memory of these blocks with zeros after the event ``after``; return when that
        has ended. Args as for ``blocks``.

        Raises:
            KVStoreError: the event was not reached by ``deadline`` (monotonic seconds).
        """
        ...


class Page(NamedTuple):
    """Location of the pages of one layer, or of several layers that are adjacent in each block."""

    storage: int
    """Index of the allocation, in ``CacheGeometry.storages``."""
    offset: int
    """Offset of block 0, bytes."""
    stride: int
    """Distance from one block to the next, bytes."""
    length: int


class CacheGeometry(NamedTuple):
    """All pages of a worker."""

    storages: list[torch.Tensor]
    """One-dimensional uint8 tensors over each complete allocation."""
    pages: dict[int, list[Page]]
    """By group id, in the order of the layers; without groups of which the worker has none."""
    layout: str

    @property
    def block_bytes(self) -> dict[int, int]:
        return {group: sum(page.length for page in pages) for group, pages in self.pages.items()}


def inspect_caches(
    caches: Mapping[str, torch.Tensor], config: KVCacheConfig, shard: int = 0, shards: int = 1,
    layers: Mapping[str, Any] | None = None,
) -> CacheGeometry:  # fmt: skip
    """Locate all pages, or one shard of each.

    Args:
        caches: by layer name: a tensor whose first dimension counts blocks, or equal parts of
            blocks, as some attention kernels want them; its other dimensions are dense. With shards
            the second dimension counts heads.
        shards: number of shards of this worker's pages.
        layers: vLLM's by name (``static_forward_context``), if states are split, also into one
            shard; None: they are stored as they are.

    Raises:
        ConfigError: a layout that this connector does not understand, or cannot split.
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
            runs = [page]
            if layers is not None and is_state(spec.kv_cache_spec):
                found = shard_runs(name, layers.get(name), spec.kv_cache_spec, shard, shards)
                runs, shape = _state(page, shape, found, shards)
            elif shards > 1:
                runs, shape = _shard(name, cache, page, shape, shard, shards)
            address = cache.untyped_storage().data_ptr()
            if address not in storages:
                storages[address] = len(tensors)
                whole = torch.empty(0, dtype=torch.uint8, device=cache.device)
                tensors.append(whole.set_(cache.untyped_storage()))
            of_group += [run._replace(storage=storages[address]) for run in runs]
            inside.append((group, name, sum(run.length for run in runs), shape))
        if of_group:
            pages[group] = _merged(of_group)
    digest = hashlib.sha256(repr(inside).encode()).hexdigest()[:16]
    return CacheGeometry(tensors, pages, digest)


Shape = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""The dtype of a page, its dimensions and their strides, and the number of its equal parts."""


def _shard(
    name: str, cache: torch.Tensor, page: Page, shape: Shape, shard: int, shards: int
) -> tuple[list[Page], Shape]:
    """Return the runs of bytes of one shard of a page, and the shape of that shard."""
    dtype, (heads, *inner), (step, *strides), parts = shape
    part = page.length // parts
    if heads % shards or (heads > 1 and step * heads * cache.element_size() != part):
        raise ConfigError(
            f"the {heads} heads of layer {name} cannot be split into {shards} shards: its cache "
            f"has shape {tuple(cache.shape)} and strides {cache.stride()}",
            advice="Choose a tp_shards that divides the model's KV heads, and a layout with heads "
            "before tokens (VLLM_KV_CACHE_LAYOUT=LBHNC).",
            key="tp_shards",
        )
    size = part // shards
    firsts = range(page.offset + shard * size, page.offset + page.length, part)
    runs = [page._replace(offset=first, length=size) for first in firsts]
    left = heads // shards
    return runs, (dtype, (left, *inner), (step if left > 1 else 0, *strides), parts)


def _state(
    page: Page, shape: Shape, found: Sequence[tuple[int, int]], shards: int
) -> tuple[list[Page], Shape]:
    """As ``_shard``, of a state: one row of content with known runs."""
    runs = [page._replace(offset=page.offset + at, length=length) for at, length in found]
    dtype, (*ones, content), strides, parts = shape
    return runs, (dtype, (*ones, content // shards), strides, parts)


def _page(name: str, cache: torch.Tensor, blocks: int) -> tuple[Page, Shape]:
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
    """Merge layers that are adjacent in every block into one run."""
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
    """Implements ``Pages`` for a cache in main memory."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self.layout = geometry.layout
        self.block_bytes = geometry.block_bytes
        self._memory = [memoryview(storage.numpy()) for storage in geometry.storages]  # type: ignore[arg-type]
        self._pages = geometry.pages

    def record_event(self) -> Mark:
        return None

    def blocks(
        self, group: int, block_ids: Sequence[int], after: Mark, each: int = 1
    ) -> list[list[memoryview]]:
        memory, pages = self._memory, self._pages[group]
        last = max(block_ids, default=0)
        for storage, offset, stride, length in pages:
            assert offset + last * stride + length <= len(memory[storage]), f"block {last}"

        def of_block(block: int) -> list[memoryview]:
            if each > 1 and block == NULL_BLOCK:
                return [memoryview(bytearray(page.length)) for page in pages]
            return [
                memory[storage][offset + block * stride : offset + block * stride + length]
                for storage, offset, stride, length in pages
            ]

        found = [of_block(block) for block in block_ids]
        if each == 1:
            return found
        starts = range(0, len(found), each)
        return [list(chain.from_iterable(found[start : start + each])) for start in starts]

    def zero(self, group: int, block_ids: Sequence[int], after: Mark, deadline: float) -> None:
        for pages in self.blocks(group, block_ids, after):
            for page in pages:
                np.frombuffer(page, np.uint8)[:] = 0


class _Table(NamedTuple):
    """The pages of one group, in the order of the layers."""

    firsts: Numbers
    """Addresses of the pages of block 0."""
    strides: Numbers
    lengths: Numbers
    ends: Numbers
    """Addresses at which the pages' allocations end."""


class CUDAPages:
    """Implements ``Pages`` for a cache in a GPU's memory.

    It has been run only with the fake GPU of the tests, not on a real one: see docs/vllm.md.
    """

    def __init__(self, geometry: CacheGeometry, device: Device) -> None:
        self.layout = geometry.layout
        self.block_bytes = geometry.block_bytes
        self._device = device
        self._storages = geometry.storages
        self._pages = geometry.pages
        starts = [storage.data_ptr() for storage in geometry.storages]
        ends = [start + len(each) for start, each in zip(starts, geometry.storages, strict=True)]
        self._tables = {
            group: _Table(
                np.array([starts[page.storage] + page.offset for page in pages], np.int64),
                np.array([page.stride for page in pages], np.int64),
                np.array([page.length for page in pages], np.int64),
                np.array([ends[page.storage] for page in pages], np.int64),
            )
            for group, pages in geometry.pages.items()
        }

    def record_event(self) -> Mark:
        return self._device.driver.record_event()

    def blocks(
        self, group: int, block_ids: Sequence[int], after: Mark, each: int = 1
    ) -> list[DeviceMemory]:
        assert after is not None, "the stream of this thread says nothing about the cache"
        firsts, strides, lengths, ends = self._tables[group]
        last = max(block_ids, default=0)
        assert (firsts + last * strides + lengths <= ends).all(), f"block {last}"
        numbers = np.array(block_ids, np.int64).reshape(-1, 1)
        size, events, storages = self.block_bytes[group], (after,), self._storages
        places = firsts + numbers * strides
        if each > 1:
            unwanted = np.flatnonzero(numbers == NULL_BLOCK)
            if len(unwanted):
                device = storages[0].device
                scratch = torch.empty(len(unwanted) * size, dtype=torch.uint8, device=device)
                inside = np.concatenate(([0], np.cumsum(lengths)[:-1]))
                starts = scratch.data_ptr() + np.arange(len(unwanted)).reshape(-1, 1) * size
                places[unwanted] = starts + inside
                storages = [*storages, scratch]
            places, lengths = places.reshape(-1, each * len(firsts)), np.tile(lengths, each)
        return [
            DeviceMemory(self._device, addresses, lengths, events, storages, size * each)
            for addresses in places
        ]

    def zero(self, group: int, block_ids: Sequence[int], after: Mark, deadline: float) -> None:
        assert after is not None, "the stream of this thread says nothing about the cache"
        self._device.wait((after,), deadline)
        device = self._storages[0].device
        with stream_apart(device):
            numbers = torch.tensor(block_ids, dtype=torch.int64, device=device)
            for storage, offset, stride, length in self._pages[group]:
                whole = self._storages[storage]
                blocks = (len(whole) - offset - length) // stride + 1
                pages = whole.as_strided((blocks, length), (stride, 1), offset)
                pages.index_fill_(0, numbers, 0)


@contextmanager
def stream_apart(device: torch.device) -> Iterator[None]:
    """Run the calling thread's computations on another stream, which does not wait for the engine's
    work; they have ended afterwards."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def pages_of(geometry: CacheGeometry, device_of: Callable[[str], Device]) -> Pages:
    """Return the implementation of ``Pages`` for the device of the cache.

    Args:
        device_of: ``Client.device`` of the client that will copy.

    Raises:
        ConfigError: the cache is on several devices, or on one whose memory cannot be copied.
        DeviceError: the device's driver cannot be used.
    """
    devices = {storage.device for storage in geometry.storages}
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return CPUPages(geometry)
    if kinds == {"cuda"} and len(devices) == 1:
        return CUDAPages(geometry, device_of(str(devices.pop())))
    raise ConfigError(
        f"a KV cache on {', '.join(sorted(map(str, devices)))} is not supported",
        advice="Use an engine whose workers compute on CPUs, or on one CUDA GPU each.",
    )
