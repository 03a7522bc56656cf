"""What the scheduler's half tells the workers' halves, and what they answer.

    scheduler ── Orders(fingerprint, loads, saves) ──► each worker, every step
              ◄── Report(saves that ended, loads that failed) ──

Every worker holds its own part of each block: the namespace it uses is the fingerprint's, with its
rank. All are plain values that can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.limits import Namespace


class Run(NamedTuple):
    """Blocks of one cache group that follow each other in a request."""

    group: int
    keys: list[bytes]
    """Hash of each block."""
    block_ids: list[int]
    """Where each is in the paged cache."""
    first: int
    """Index of the first block in its request."""
    parent: bytes | None
    """Hash of the block before the first; None: it is the first of its prompt."""


class Load(NamedTuple):
    """Fill these blocks, then say that the request has arrived."""

    request_id: str
    runs: list[Run]


class Save(NamedTuple):
    """Store these blocks. They are pinned until every worker has reported the number."""

    number: int
    runs: list[Run]


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Of one scheduler step."""

    fingerprint: str = ""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class SaveEnd(NamedTuple):
    """Of one save, summed over workers."""

    workers: int
    """How many have done with it."""
    stored: int
    """How many of those have found or stored every block."""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended since the step before."""

    saves: dict[int, SaveEnd] = field(default_factory=dict)
    failed_loads: dict[str, int] = field(default_factory=dict)
    """Request and how many of its leading tokens are there; what comes after is not."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of two workers."""
        assert isinstance(other, Report)
        for number, end in other.saves.items():
            mine = self.saves.get(number, SaveEnd(0, 0))
            self.saves[number] = SaveEnd(mine.workers + end.workers, mine.stored + end.stored)
        for request_id, tokens in other.failed_loads.items():
            self.failed_loads[request_id] = min(tokens, self.failed_loads.get(request_id, tokens))
        return self


@dataclass
class Hello(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker has, told once its cache is allocated."""

    layout: str
    """Digest of how bytes of a block are laid out; see ``pages``."""
    groups: list[int]
    """Cache groups of which it holds layers (of a pipeline, not every worker holds all)."""
    part: str
    """Which part of each block is its own; equal for ranks that hold identical bytes."""


def namespace(fingerprint: str, group: int, part: str) -> Namespace:
    """Where one worker's part of one cache group is kept."""
    return Namespace(f"vllm/{fingerprint}/g{group}/{part}")
