"""Traces: the chains of blocks that requests asked for, with their times.

Formats, one JSON object per line, plain or compressed by gzip:

* Mooncake's: ``{"timestamp": ms, "input_length": tokens, "hash_ids": [...]}``;
* that of ``kvstore-master --record``: ``{"t": ms, "n": [namespaces], "k": [keys], "z": bytes}``;
  ``FILE.1`` is read before ``FILE``. Engines ask again while a request waits: the same chain within
  ``REPEAT_MS`` is one request.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from kvstore.errors import InvalidArgumentError

MOONCAKE_BLOCK_TOKENS = 512

REPEAT_MS = 1_000

SAMPLE_BITS = 24


@dataclass
class Trace:
    """Requests in columns. Blocks are numbered; each has one parent."""

    times_ms: list[int] = field(default_factory=list)
    chains: list[list[int]] = field(default_factory=list)
    """Per request: its blocks, from the root."""
    tips: list[int] = field(default_factory=list)
    """Per request: the last block that another request can share, as an index into the chain: a
    block that is not full is in no other chain."""
    namespaces: list[str] = field(default_factory=list)
    blocks: int = 0
    block_bytes: int = 0
    """Of the trace; 0: it does not say."""
    block_tokens: int = 0
    """0: it does not say."""

    @property
    def accesses(self) -> int:
        return sum(map(len, self.chains))

    def sample(self, rate: float) -> Trace:
        """Return a trace with this part of the blocks, chosen by hash (SHARDS, Waldspurger et al.,
        FAST 2015), so that all uses of a block are in it or none."""
        bound = int(rate * (1 << SAMPLE_BITS))
        chosen = [
            zlib.crc32(block.to_bytes(8, "little")) & (1 << SAMPLE_BITS) - 1 < bound
            for block in range(self.blocks)
        ]
        sampled = Trace(blocks=self.blocks, block_tokens=self.block_tokens)
        columns = zip(self.times_ms, self.chains, self.tips, self.namespaces, strict=True)
        for time_ms, chain, tip, namespace in columns:
            kept = [block for block in chain if chosen[block]]
            if kept:
                shared = sum(chosen[block] for block in chain[: tip + 1])
                sampled.times_ms.append(time_ms)
                sampled.chains.append(kept)
                sampled.tips.append(max(0, shared - 1))
                sampled.namespaces.append(namespace)
        return sampled


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises InvalidArgumentError."""
    if not path.is_file():
        raise InvalidArgumentError(f"there is no trace {path}")
    trace = Trace()
    numbers: dict[tuple[str, int, object], int] = {}
    last_ms: dict[str, int] = {}
    older = path.with_name(f"{path.name}.1")
    for file in (older, path) if older.exists() else (path,):
        for number, line in _lines(file):
            try:
                _add(trace, numbers, last_ms, json.loads(line))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise InvalidArgumentError(
                    f"{file}, line {number}: no request of a known trace: {error!r}",
                    advice="kvstore plan --help names the formats.",
                ) from None
    if not trace.chains:
        raise InvalidArgumentError(f"{path} has no requests with blocks")
    trace.blocks = len(numbers)
    return trace


def _add(
    trace: Trace,
    numbers: dict[tuple[str, int, object], int],
    last_ms: dict[str, int],
    row: dict[str, Any],
) -> None:
    """``last_ms``: when each recorded chain, named by its last key, was asked for last."""
    if "hash_ids" in row:
        keys, time_ms, namespace = row["hash_ids"], row["timestamp"], ""
        trace.block_tokens = MOONCAKE_BLOCK_TOKENS
        full = row.get("input_length", 0) // MOONCAKE_BLOCK_TOKENS or len(keys)
    else:
        keys, time_ms, namespace = row["k"], row["t"], row["n"][0]
        full = len(keys)
        if not keys or time_ms - last_ms.get(keys[-1], -REPEAT_MS) < REPEAT_MS:
            return
        last_ms[keys[-1]] = time_ms
        trace.block_bytes = max(trace.block_bytes, int(row.get("z", 0)) * len(row["n"]))
    parent, chain = -1, []
    for key in keys:
        parent = numbers.setdefault((namespace, parent, key), len(numbers))
        chain.append(parent)
    if chain:
        trace.times_ms.append(int(time_ms))
        trace.chains.append(chain)
        trace.tips.append(max(0, min(full, len(chain)) - 1))
        trace.namespaces.append(namespace)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with cast("IO[str]", opened(path, "rt", encoding="utf-8")) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line
