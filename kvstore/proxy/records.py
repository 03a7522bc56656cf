"""Records that connectors put into the store, from which the proxy computes the keys of a prompt.

A connector puts one object per fingerprint (equal for engines that can share) into the namespace
``vllm-fleet``: JSON of at most ``kvstore.fleet.RECORD_BYTES_MAX``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.errors import KVStoreError, ProtocolError
from kvstore.fleet import FORMAT
from kvstore.limits import BATCH_KEYS_MAX, NAMESPACES_MAX, check_namespace
from kvstore.proxy.hashes import ALGORITHMS, block_hashes


class FleetRecord(NamedTuple):
    """Engines that share KV blocks with each other."""

    models: frozenset[str]
    """Names under which the bare model is served: no adapters."""
    fingerprint: str
    namespaces: tuple[str, ...]
    """Namespaces in the store; a block counts as stored if each of them holds it."""
    block_size: int
    """Tokens per key, a multiple of ``hash_block_size``."""
    hash_block_size: int
    hash_algorithm: str
    none_hash: bytes

    def keys(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Yields the keys of a prompt's full blocks, at most as many as one call may have."""
        every = self.block_size // self.hash_block_size
        hashes = block_hashes(
            token_ids,
            block_size=self.hash_block_size,
            none_hash=self.none_hash,
            algorithm=self.hash_algorithm,
            blocks_max=BATCH_KEYS_MAX * every,
        )
        return islice(hashes, every - 1, None, every)


class Held(NamedTuple):
    """How much of a prompt the store holds."""

    blocks: int
    block_size: int

    def missing_tokens(self, tokens: int) -> int:
        """How many tokens a prefiller could add for a prompt of ``tokens`` tokens: full blocks
        only, and without the last token, which the decoder always computes."""
        wanted = min((tokens - 1) // self.block_size, BATCH_KEYS_MAX)
        return max(0, wanted - self.blocks) * self.block_size


def parse(data: bytes) -> FleetRecord | None:
    """The record; None if the hashes of its engines cannot be computed here.

    Raises:
        ProtocolError: ``data`` is not a record of a known format.
    """
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}")
        if value.get("engine", "vllm") != "vllm" or value["hash_algorithm"] not in ALGORITHMS:
            return None
        record = FleetRecord(
            models=frozenset(_text(each) for each in value["models"]),
            fingerprint=_text(value["fingerprint"]),
            namespaces=tuple(check_namespace(_text(each)) for each in value["namespaces"]),
            block_size=_positive(value["block_size"]),
            hash_block_size=_positive(value["hash_block_size"]),
            hash_algorithm=value["hash_algorithm"],
            none_hash=bytes.fromhex(_text(value["none_hash"])),
        )
        if not 0 < len(record.namespaces) <= NAMESPACES_MAX:
            raise ValueError(f"{len(record.namespaces)} namespaces")
        if record.block_size % record.hash_block_size:
            raise ValueError("block_size is no multiple of hash_block_size")
    except (ValueError, TypeError, KeyError, RecursionError, KVStoreError) as error:
        raise ProtocolError(f"not a fleet record: {type(error).__name__} {error}") from None
    return record


def serving(records: Iterable[FleetRecord], model: str) -> FleetRecord | None:
    """The first record whose engines serve ``model``."""
    return next((each for each in records if model in each.models), None)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _positive(value: object) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{value!r} is not a positive integer")
    return value
