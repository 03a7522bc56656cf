"""A prompt's keys, computed from the fleet records that connectors put into the store.

A connector puts one object per fingerprint (equal for engines that can share) into the namespace
``vllm-fleet``, or its tenant's: JSON of at most ``kvstore.calls.fleet_records.RECORD_BYTES_MAX``
bytes.

The keys are vLLM's hashes of full blocks. Each covers the hash of the block before it, its own
token ids and, as a third part, the request's salt in the first block. The third part also covers
LoRA and multimodal inputs, but the proxy does not look up requests with those. vLLM's
``--prefix-caching-hash-algo`` selects the serialization that is hashed.

Source: ``vllm/v1/core/kv_cache_utils.py`` (``hash_block_tokens``,
``generate_block_hash_extra_keys``), ``vllm/utils/hashing.py``, 0.32.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import cbor2

from kvstore.calls.fleet_records import FORMAT, FleetRecord
from kvstore.errors import KVStoreError
from kvstore.limits import BATCH_KEYS_MAX, NAMESPACES_MAX, check_namespace

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
    """Yield the hashes of the first ``blocks_max`` full blocks of ``block_size`` tokens. A long
    prompt has thousands of blocks, and a hash takes some 3 µs (sha256) or 8 µs (sha256_cbor).

    Args:
        none_hash: the hash before the first block.
        algorithm: a key of ``ALGORITHMS``.
        salt: the request's ``cache_salt``; empty: none.
    """
    function = ALGORITHMS[algorithm]
    last = none_hash
    more = (("cache_salt", salt),) if salt else None
    for block in range(min(len(token_ids) // block_size, blocks_max)):
        tokens = tuple(token_ids[block * block_size : (block + 1) * block_size])
        last = function((last, tokens, more))
        more = None
        yield last


def keys(record: FleetRecord, token_ids: Sequence[int], salt: str = "") -> Iterator[bytes]:
    """Yield the keys of a prompt's full blocks, at most as many as one call may have.

    Args:
        record: one that ``is_usable``.
        salt: the request's ``cache_salt``; empty: none.
    """
    assert record.hashes is not None
    every = record.block_size // record.hashes.block_size
    hashes = block_hashes(
        token_ids,
        block_size=record.hashes.block_size,
        none_hash=record.hashes.none_hash,
        algorithm=record.hashes.algorithm,
        blocks_max=BATCH_KEYS_MAX * every,
        salt=salt,
    )
    return islice(hashes, every - 1, None, every)


class StoredPrefix(NamedTuple):
    """The stored part of a prompt."""

    blocks: int
    block_size: int

    def missing_tokens(self, tokens: int) -> int:
        """Return the tokens that a prefiller could add for a prompt of ``tokens`` tokens: only full
        blocks, without the last token, which the decoder always computes."""
        wanted = min((tokens - 1) // self.block_size, BATCH_KEYS_MAX)
        return max(0, wanted - self.blocks) * self.block_size


def is_usable(record: FleetRecord) -> bool:
    """Return whether the hashes of its engines can be computed here, and its fields are
    consistent."""
    hashes = record.hashes
    if record.format != FORMAT or record.engine != "vllm" or hashes is None:
        return False
    try:
        for namespace in record.namespaces:
            check_namespace(namespace)
    except KVStoreError:
        return False
    return (
        hashes.algorithm in ALGORITHMS
        and 0 < len(record.namespaces) <= NAMESPACES_MAX
        and record.block_size > 0
        and record.block_size % hashes.block_size == 0
    )


def serving(records: Iterable[FleetRecord], model: str) -> FleetRecord | None:
    """Return the last announced record whose engines serve ``model``; None: none does, or it names
    an adapter."""
    serve = [each for each in records if model in each.models]
    return max(serve, key=lambda each: each.announced, default=None)
