"""Computes vLLM's hashes of a prompt's blocks, under which connectors put them.

Each full block's hash covers the hash of the block before it, its own token ids and, as a third
part, the request's salt in the first block. The third part also covers LoRA and multimodal inputs,
but the proxy does not look up requests with those. vLLM's ``--prefix-caching-hash-algo`` selects
the serialization that is hashed.

Source: ``vllm/v1/core/kv_cache_utils.py`` (``hash_block_tokens``,
``generate_block_hash_extra_keys``), ``vllm/utils/hashing.py``, 0.32.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import cbor2

Part = tuple[bytes, tuple[int, ...], tuple[tuple[str, str]] | None]


def _sha256(part: Part) -> bytes:
    data = pickle.dumps(part, protocol=pickle.HIGHEST_PROTOCOL)
    return hashlib.sha256(data).digest()


def _sha256_cbor(part: Part) -> bytes:
    return hashlib.sha256(cbor2.dumps(part, canonical=True)).digest()


ALGORITHMS: Final[dict[str, Callable[[Part], bytes]]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256_cbor,
}
"""The algorithms whose results are the same in every process."""


def block_hashes(
    token_ids: Sequence[int],
    *,
    block_size: int,
    none_hash: bytes,
    algorithm: str,
    blocks_max: int,
    salt: str = "",
) -> Iterator[bytes]:
    """Yields the hashes of the first ``blocks_max`` full blocks of ``block_size`` tokens. A long
    prompt has thousands of blocks, and a hash takes some 3 µs (sha256) or 8 µs (sha256_cbor).

    Args:
        none_hash: the hash before the first block.
        algorithm: a key of ``ALGORITHMS``.
        salt: the request's ``cache_salt``; empty: it has none.
    """
    function = ALGORITHMS[algorithm]
    last = none_hash
    more = (("cache_salt", salt),) if salt else None
    for block in range(min(len(token_ids) // block_size, blocks_max)):
        tokens = tuple(token_ids[block * block_size : (block + 1) * block_size])
        last = function((last, tokens, more))
        more = None
        yield last
