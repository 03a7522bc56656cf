"""The order of a request's chunks, which vLLM passes in no order, but with the token at which each
ends. A chunk's key is the hash of the prompt up to its end, and the number of its cache group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import ReqContext, get_offload_group_idx


class ChunkRun(NamedTuple):
    """Consecutive chunks of one cache group (a chain), or chunks whose order does not matter."""

    keys: list[Any]
    """Keys of vLLM's type ``OffloadKey``, which is bytes."""
    chunks: list[int]
    """Rows of vLLM's pool."""
    parent: bytes | None
    """Key of the chunk before the first; None: there is none, or it is not known."""
    is_chain: bool

    def pieces(self, chunks_max: int) -> Iterator[ChunkRun]:
        """Split the run into runs of at most ``chunks_max`` chunks."""
        for start in range(0, len(self.keys), chunks_max):
            stop = start + chunks_max
            parent = self.keys[start - 1] if start and self.is_chain else self.parent
            yield ChunkRun(self.keys[start:stop], self.chunks[start:stop], parent, self.is_chain)


class ChunkEnds:
    """The keys of a request's chunks by the token at which they end; kept in its ``ReqContext``."""

    def __init__(self) -> None:
        self._seen = 0
        self._keys: dict[tuple[int, int], bytes] = {}

    @classmethod
    def for_request(cls, request: ReqContext) -> ChunkEnds:
        """Return the ends of the request's present chunks."""
        ends: ChunkEnds | None = request.get_state(cls)
        if ends is None:
            ends = cls()
            request.set_state(ends)
        # vLLM's method returns the end for one key, not the key for a given end.
        positions: Mapping[bytes, int] = getattr(request, "_offload_key_positions", {})
        for key, end in islice(positions.items(), ends._seen, None):
            ends._keys[get_offload_group_idx(key), end] = key
        ends._seen = len(positions)
        return ends

    def before(self, group: int, end: int, chunk_tokens: int) -> bytes | None:
        """Return the key of the last full chunk before the one that ends at ``end``; None: not
        known."""
        return self._keys.get((group, (end - 1) // chunk_tokens * chunk_tokens))


def runs_of(
    keys: Collection[Any],
    chunks: Iterable[int],
    request: ReqContext,
    chunk_tokens: Mapping[int, int],
) -> list[ChunkRun]:
    """
    Args:
        keys: in the order of ``chunks``.
        chunk_tokens: tokens per chunk of the cache groups whose chunks are useful only with all
            chunks before them. Chunks of other groups have no parents.
    """
    loose = ChunkRun([], [], None, is_chain=False)
    chains: dict[int, list[tuple[int, Any, int]]] = {}
    for key, chunk in zip(keys, chunks, strict=True):
        group, end = get_offload_group_idx(key), request.get_offload_key_position(key)
        if end is None or group not in chunk_tokens:
            loose.keys.append(key)
            loose.chunks.append(int(chunk))
        else:
            chains.setdefault(group, []).append((end, key, int(chunk)))
    runs = [loose] if loose.keys else []
    ends = ChunkEnds.for_request(request)
    for group, chain in chains.items():
        last: bytes | None = None
        for end, key, chunk in sorted(chain):
            parent = ends.before(group, end, chunk_tokens[group])
            if last is None or parent != last:
                runs.append(ChunkRun([], [], parent, is_chain=True))
            runs[-1].keys.append(key)
            runs[-1].chunks.append(chunk)
            last = key
    return runs
