"""The messages between the scheduler side and the worker sides.

    scheduler ── TransferCommands(fingerprint, loads, saves) ──► each worker, every step
              ◄── TransferReport(saves that ended, loads that failed, adapters) ──
              ── identify yourself (at the start, and when weights may have changed) ──►
              ◄── WorkerIdentity(layout, parts, weights) ──

Every worker holds its own part of each block, so a namespace is named by fingerprint, cache group
and part (``namespace``). All messages are plain values that can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.limits import Namespace, of_tenant


class Run(NamedTuple):
    """Consecutive objects of one cache group in a request: blocks, several blocks each, or parts of
    split blocks."""

    group: int
    keys: list[bytes]
    """Hash at the end of each object."""
    block_ids: list[int]
    """The number of each object's block in the paged cache; with several blocks an object, those of
    the first object, then those of the second. ``NULL_BLOCK``: a block that is not loaded."""
    first: int
    """Index of the first object in its request."""
    parent: bytes | None
    """Hash at the end of the object before the first; None: the run starts the prompt."""
    each: int = 1
    """Blocks of each object."""


class LoadCommand(NamedTuple):
    """Command to fill these blocks, then to report that the request's blocks are loaded."""

    request_id: str
    runs: list[Run]


class SaveCommand(NamedTuple):
    """Command to store these blocks, which are kept until every worker has reported the number."""

    number: int
    runs: list[Run]
    ttl_ms: int = 0
    """TTL of blocks that were not stored before; 0: none."""


@dataclass
class TransferCommands(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    fingerprint: str = ""
    loads: list[LoadCommand] = field(default_factory=list)
    saves: list[SaveCommand] = field(default_factory=list)
    draft: str = ""
    """Digest of the engine's draft model (``fingerprint.draft_of``)."""


class SaveResult(NamedTuple):
    """The result of one save, summed over the workers that have reported it."""

    workers: int
    """Number of workers that have ended the save."""
    stored: int
    """Number of those that have found or stored all of its blocks."""


@dataclass
class TransferReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The transfers that ended since the previous step."""

    saves: dict[int, SaveResult] = field(default_factory=dict)
    failed_loads: dict[str, int] = field(default_factory=dict)
    """By request: number of leading tokens that were loaded; later ones were not."""
    adapters: dict[int, dict[int, str]] = field(default_factory=dict)
    """By rank, for changed ranks only: the digest of each loaded adapter, by its id."""
    verdicts: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """By rank: number of a check of its weights, and whether they are those identified."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, TransferReport)
        for number, end in other.saves.items():
            mine = self.saves.get(number, SaveResult(0, 0))
            self.saves[number] = SaveResult(mine.workers + end.workers, mine.stored + end.stored)
        for request_id, tokens in other.failed_loads.items():
            self.failed_loads[request_id] = min(tokens, self.failed_loads.get(request_id, tokens))
        self.adapters.update(other.adapters)
        self.verdicts.update(other.verdicts)
        return self


@dataclass
class UnfinishedTransfers:
    """The transfers still in progress after a worker has waited for them."""

    report: TransferReport | None
    saves: set[int]
    """Numbers of saves."""
    loads: set[str]


@dataclass
class WorkerIdentity:
    layout: str
    """Digest of the layout of a block's bytes; see ``pages``."""
    groups: list[int]
    """Cache groups of which the worker holds layers (in a pipeline, not every worker holds all)."""
    parts: list[str]
    """The worker's parts of each block: one, or one for each shard; equal for ranks that hold
    identical bytes."""
    rank: int = 0
    weights: str = ""
    """Digest of the worker's live weights; see ``weights``."""
    files: str = ""
    """The origin of weights that cannot be read; "": all could be read."""
    attention: list[list[str]] = field(default_factory=list)
    """The KV formats of its attention layers; see ``weights``."""
    adapters: dict[int, str] = field(default_factory=dict)
    """Digest of each loaded adapter, by its id."""
    prefix_caching: bool = True
    """Whether vLLM had prefix caching on when it created the layers."""
    host: str = ""
    """The worker's host (``kvstore.runtime.host``), for the tier."""
    error: str = ""
    """Error of the identification."""
    draft: DraftIdentity | None = None
    """The draft model whose pages are stored separately; None: there is none, or its weights and
    layers are among those above."""


@dataclass
class DraftIdentity:
    """A worker's draft model for speculative decoding. Nothing that the model computes depends on
    it, so its pages have separate namespaces."""

    layers: list[str]
    """Names of its attention layers; empty if it has none of its own."""
    layouts: list[str]
    """Of the worker's parts; see ``pages``."""
    method: str
    """The method of speculative decoding."""
    weights: str = ""
    files: str = ""
    attention: list[list[str]] = field(default_factory=list)


def draft_part(part: str, draft: str) -> str:
    """Return the name of this draft model's pages of a part."""
    return f"{part}.draft-{draft}"


def namespace(fingerprint: str, group: int, part: str, *, tenant: str = "") -> Namespace:
    """Return the namespace of one worker's part of one cache group."""
    return Namespace(f"{namespace_prefix(fingerprint, tenant=tenant)}g{group}/{part}")


def namespace_prefix(fingerprint: str, *, tenant: str = "") -> str:
    """Return the prefix of all namespaces of a fingerprint."""
    return of_tenant(tenant, f"vllm/{fingerprint}/")
