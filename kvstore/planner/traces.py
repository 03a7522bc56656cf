"""Traces: the chains of blocks that requests asked for, with their times.

Formats, one JSON value per line, plain or compressed by gzip:

* Mooncake's: ``{"timestamp": ms, "input_length": tokens, "hash_ids": [...]}``;
* that of ``kvstore-master --record``: ``{"t": ms, "n": [namespaces], "k": [keys], "z": bytes}``,
  and of puts (``"p": parent``) and hints (``"h": [[key, action, retain_ms], ...]``);
  ``FILE.1`` is read before ``FILE``. Engines ask again while a request waits: the same chain within
  ``REPEAT_MS`` is one request.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from kvstore.errors import InvalidArgumentError

MOONCAKE_BLOCK_TOKENS = 512

REPEAT_MS = 1_000

SAMPLE_BITS = 24


class RecordedHint(NamedTuple):
    time_ms: int
    namespace: str
    block: int
    action: int
    retain_ms: int


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
    hints: dict[int, list[RecordedHint]] = field(default_factory=dict)
    """By the request before them."""
    blocks: int = 0
    block_bytes: int = 0
    """Of the trace; 0: it does not say."""
    block_tokens: int = 0
    """0: it does not say."""
    repetitions: int = 0
    """Recorded requests that were left out: the same chain within ``REPEAT_MS``."""

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
        nearest: dict[int, int] = {}
        """Per block the last chosen one of its chain up to there."""
        columns = zip(self.times_ms, self.chains, self.tips, self.namespaces, strict=True)
        for index, (time_ms, chain, tip, namespace) in enumerate(columns):
            kept = [block for block in chain if chosen[block]]
            last = None
            for block in chain if self.hints else ():
                last = block if chosen[block] else last
                if last is not None:
                    nearest[block] = last
            if kept:
                shared = sum(chosen[block] for block in chain[: tip + 1])
                sampled.times_ms.append(time_ms)
                sampled.chains.append(kept)
                sampled.tips.append(max(0, shared - 1))
                sampled.namespaces.append(namespace)
            if sampled.chains and index in self.hints:
                sampled.hints.setdefault(len(sampled.chains) - 1, []).extend(
                    hint._replace(block=nearest[hint.block])
                    for hint in self.hints[index]
                    if hint.block in nearest
                )
        return sampled


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises InvalidArgumentError."""
    if not path.is_file():
        raise InvalidArgumentError(f"there is no trace {path}")
    reader = _TraceReader()
    older = path.with_name(f"{path.name}.1")
    for file in (older, path) if older.exists() else (path,):
        number = 0
        try:
            for row in _rows(file):
                reader.add(row)
                number += 1
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgumentError(
                f"{file}, row {number + 1}: no request of a known trace: {error!r}",
                advice="kvstore plan --help names the formats.",
            ) from None
    if not reader.trace.chains:
        raise InvalidArgumentError(f"{path} has no requests with blocks")
    return reader.trace


class _TraceReader:
    def __init__(self) -> None:
        self.trace = Trace()
        self._numbers: dict[tuple[str, int, object], int] = {}
        self._last_ms: dict[object, int] = {}
        """When each recorded chain, named by its last key, was asked for last."""
        self._named: dict[tuple[str, object], int] = {}
        """Recorded blocks that were asked for, by key."""
        self._parents: dict[tuple[str, object], object] = {}
        """Of recorded puts."""

    def add(self, row: Any) -> None:
        if "hash_ids" in row:
            keys = row["hash_ids"]
            self.trace.block_tokens = MOONCAKE_BLOCK_TOKENS
            full = row.get("input_length", 0) // MOONCAKE_BLOCK_TOKENS or len(keys)
            self._add_chain(int(row["timestamp"]), "", keys, full)
        elif "h" in row:
            self._add_hints(row)
        elif "p" in row:
            for parent, key in pairwise([row["p"], *row["k"]]):
                self._parents[row["n"][0], key] = parent
        else:
            keys, time_ms, namespace = row["k"], int(row["t"]), row["n"][0]
            if not keys or time_ms - self._last_ms.get(keys[-1], -REPEAT_MS) < REPEAT_MS:
                self.trace.repetitions += 1
                return
            self._last_ms[keys[-1]] = time_ms
            size = int(row.get("z", 0)) * len(row["n"])
            self.trace.block_bytes = max(self.trace.block_bytes, size)
            chain = self._add_chain(time_ms, namespace, keys, len(keys))
            self._named.update(zip([(namespace, key) for key in keys], chain, strict=True))

    def _add_chain(
        self, time_ms: int, namespace: str, keys: Sequence[object], full: int
    ) -> list[int]:
        """``full``: the number of blocks that another request can share."""
        chain: list[int] = []
        for key in keys:
            parent = chain[-1] if chain else -1
            chain.append(self._numbers.setdefault((namespace, parent, key), len(self._numbers)))
        self.trace.blocks = len(self._numbers)
        if chain:
            self.trace.times_ms.append(time_ms)
            self.trace.chains.append(chain)
            self.trace.tips.append(max(0, min(full, len(chain)) - 1))
            self.trace.namespaces.append(namespace)
        return chain

    def _add_hints(self, row: dict[str, Any]) -> None:
        """A block that was put, but not asked for, is not replayed: use its nearest ancestor."""
        namespace = row["n"][0]
        for key, action, retain_ms in row["h"]:
            while key and (namespace, key) not in self._named:
                key = self._parents.get((namespace, key))
            if key:
                hint = RecordedHint(
                    int(row["t"]), namespace, self._named[namespace, key], int(action),
                    int(retain_ms),
                )  # fmt: skip
                self.trace.hints.setdefault(len(self.trace.chains) - 1, []).append(hint)


def _rows(path: Path) -> Iterator[Any]:
    opened = gzip.open if path.suffix == ".gz" else open
    with cast("IO[bytes]", opened(path, "rb")) as file:
        for line in file:
            if line.strip():
                yield json.loads(line)
