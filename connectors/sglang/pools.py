"""The pages of one of SGLang's host pools, as memory for puts and gets.

A page is one object: the concatenation of the buffers that the pool names for it
(``get_page_buffer_meta``): K and V, or one buffer per layer, or recurrent states. They are not
rearranged, so only pools of the same geometry share pages. A pool without zero-copy passes copies
of complete pages.

In the layout ``page_head`` the bytes of a head are contiguous. Such a page can be split by heads
into chunks of equal size, each of which is one object: K of its heads, then V. A chunk has the
bytes of the complete page of a pool with only these heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from kvstore.client.client import Client
from kvstore.connectors.common.fingerprint import digest
from kvstore.errors import ConfigError, InvalidArgumentError

Buffers = list[list[memoryview]]
"""The buffers of each page, in the host pool or in copies."""

_POOL_FIELDS: Final = (
    "layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim",
    "v_head_dim", "kv_cache_dim", "storage_format_tag",
)  # fmt: skip
"""Attributes that describe a pool; each kind of pool has some of them."""

_REFUSALS: Final = (NotImplementedError, ValueError, AttributeError, InvalidArgumentError)


class PageBuffers(NamedTuple):
    """Memory to read pages into."""

    buffers: Buffers
    arrived: Callable[[int], None]
    """Must be called with the index of each page that was read completely."""


class PoolPages:
    """The pages of one pool, whose memory it registers with the client. Threads: any."""

    def __init__(self, pool: Any, client: Client, *, pieces: int = 1) -> None:
        """
        Args:
            pieces: number of chunks per page.

        Raises:
            ConfigError: the pool passes neither buffers nor copies, or cannot split its pages.
            InvalidArgumentError, TransferEngineError: the pool's memory cannot be registered.
        """
        self._pool = pool
        self._client = client
        self.tokens = int(getattr(pool, "logical_page_size", 0) or pool.page_size or 1)
        """Tokens per page; SGLang names a page by as many indices."""
        self._is_flat = False
        self._pieces = pieces
        if pieces > 1:
            _check_split(pool, pieces)
        sizes = self._find_layout()
        self.size = sum(sizes)
        """Bytes of a page; 0: the pool only counts pages, and side pools hold the bytes."""
        self.layout = {
            name: str(value)
            for name in _POOL_FIELDS
            if (value := getattr(pool, name, None)) is not None
        }  # fmt: skip
        if pieces > 1:
            self.layout["head_num"] = str(pool.head_num // pieces)
            sizes = sizes[: len(sizes) // pieces]
        self.geometry = digest([type(pool).__name__, self.layout, sizes, self._is_flat])[:12]
        """Equal for pools whose pages, or chunks, have equal parts in the same order."""

    def _find_layout(self) -> list[int]:
        """Return the sizes of a page's buffers, in bytes."""
        first = torch.arange(self.tokens, dtype=torch.int64)
        self._register()
        try:
            meta = self._meta(first)
            if meta is None:
                return []
            self._named(first, 1)
            return [int(size) for size in _flattened(meta[1])]
        except _REFUSALS as refusal:
            self._is_flat = True
            try:
                if self._pieces == 1:
                    return [bytes_of(self._pool.get_data_page(0, flat=True).contiguous()).nbytes]
            except _REFUSALS:
                pass
            raise ConfigError(
                f"pages of {type(self._pool).__name__} with the layout "
                f"{getattr(self._pool, 'layout', None)} cannot be stored: {refusal}",
                advice="Choose --hicache-mem-layout page_first or page_first_direct.",
            ) from None

    def sources(self, indices: torch.Tensor | None, count: int) -> Buffers:
        """Return the bytes of ``count`` pages, in the pool's own memory or copied. The buffers of a
        page's chunks are adjacent.

        Raises:
            InvalidArgumentError: ``indices`` does not have ``count`` times ``tokens`` elements.
        """
        indices = self._checked(indices, count)
        if not self._is_flat:
            return self._named(indices, count)
        get = self._pool.get_data_page
        return [
            [bytes_of(get(at, flat=True).contiguous())] for at in indices[:: self.tokens].tolist()
        ]

    def targets(self, indices: torch.Tensor | None, count: int) -> PageBuffers:
        """Return memory for ``count`` pages. Raises the same as ``sources``."""
        indices = self._checked(indices, count)
        if not self._is_flat:
            return PageBuffers(self._named(indices, count), lambda _: None)
        copies = [self._pool.get_dummy_flat_data_page() for _ in range(count)]
        starts = indices[:: self.tokens].tolist()
        return PageBuffers(
            [[bytes_of(copy)] for copy in copies],
            lambda page: self._pool.set_from_flat_data_page(starts[page], copies[page]),
        )

    def _checked(self, indices: torch.Tensor | None, count: int) -> torch.Tensor:
        if indices is None or indices.numel() != count * self.tokens:
            given = None if indices is None else indices.numel()
            raise InvalidArgumentError(
                f"{given} indices for {count} pages of {self.tokens}", count=count
            )
        return indices

    def _named(self, indices: torch.Tensor, count: int) -> Buffers:
        addresses, sizes = map(_flattened, self._meta(indices))
        at = self._client.memory_at
        buffers = [at(start, size) for start, size in zip(addresses, sizes, strict=True)]
        each = len(buffers) // count
        return [buffers[page * each : (page + 1) * each] for page in range(count)]

    def _meta(self, indices: torch.Tensor) -> Any:
        """Return addresses and sizes of the buffers of these pages; None: the pool has no bytes."""
        if self._pieces > 1:
            return self._pool.get_split_heads_page_buffer_meta(indices, self._pieces)
        return self._pool.get_page_buffer_meta(indices)

    def _register(self) -> None:
        for start, size in _memory_of(self._pool):
            try:
                self._client.memory_at(start, size)
            except InvalidArgumentError:  # not registered yet: pools may share memory
                self._client.register(start, size)


def _check_split(pool: Any, pieces: int) -> None:
    """Raises ConfigError: the pool does not have as many equal groups of heads."""
    heads = getattr(pool, "head_num", 0)
    if heads == 0 or heads % pieces:
        raise ConfigError(
            f"pages of {type(pool).__name__} cannot be split into {pieces} pieces: a rank has "
            f"{heads} KV heads",
            advice="Choose a tp_lcm_size that divides the model's number of KV heads.",
        )


def _memory_of(pool: Any) -> list[tuple[int, int]]:
    """Return address and size of each of the pool's tensors."""
    get = getattr(pool, "get_hybrid_pool_buffer", None)
    tensors = [getattr(pool, "kv_buffer", None)] if get is None else get()
    return [
        (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        for tensor in tensors
        if tensor is not None and tensor.numel() and tensor.is_contiguous()
    ]


def _flattened(values: Sequence[Any]) -> list[int]:
    """Return all values in one list; some pools return a list per page."""
    if values and isinstance(values[0], Sequence):
        return [each for some in values for each in some]
    return list(values)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which the view keeps alive. Other tensors raise
    RuntimeError or TypeError."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
