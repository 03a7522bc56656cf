"""Operators' calls about usage: writers and readers, and matched chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from kvstore.calls.field_constraints import IntRange, NamespaceOrEmpty, Numbers, RowCount
from kvstore.limits import BLOCKS_MAX, CHAINS_MAX, Key, Namespace
from kvstore.runtime.formatting import key_text


class Traffic(NamedTuple):
    """List writers, readers and missed keys, in batches of namespaces."""

    namespace: NamespaceOrEmpty = ""
    """Empty: all namespaces that the master remembers."""
    cursor: int = 0
    """0 first, then ``next_cursor`` of the previous reply."""


class ClientTraffic(NamedTuple):
    """One client in one namespace, as a writer or as a reader."""

    client: str
    """Name at the join; empty: unknown."""
    address: str
    """Source address; ``local``: the host of the master."""
    first_ms: int
    """Time since the client was first seen; the master remembers the most recent clients only."""
    idle_ms: int
    """Time since its last call."""
    keys: int
    """Keys that it requested, to put or to read."""
    found: int
    """Of those: keys that were already stored."""
    stored: int
    """Keys that it has stored."""
    key: bytes
    """A key of its last put; empty: it has only read."""
    stored_bytes: int = 0
    """Payload bytes that it has stored, without replicas."""


class MissedKey(NamedTuple):
    """The first key of a query that was not found."""

    key: Key
    client: str
    address: str
    idle_ms: int
    """Time since that query."""
    found: int
    """Keys before it in that query; they were stored."""
    requested: int
    """Keys of that query."""
    present: bool
    """Whether the key is stored now."""
    evicted: bool = False
    """Whether the key had been evicted before that query. False also if the master does not
    remember it: it remembers the first keys of recently evicted chains."""

    @property
    def text(self) -> str:
        """Return the key in the format of kvstore ls."""
        return key_text(self.key)


class NamespaceTraffic(NamedTuple):
    name: str
    objects: int
    size: int
    """Payload bytes without replicas."""
    writers: Sequence[ClientTraffic]
    readers: Sequence[ClientTraffic]
    misses: Sequence[MissedKey]
    """The last missed key of each reader, most recent first."""
    queries: int
    queries_without_hit: int
    """Queries whose first key was not stored."""
    queries_with_partial_hit: int
    """Queries of which a later key was not stored."""
    evicted: int
    """Number of evicted objects."""
    evicted_ms: int
    """Time since the last eviction."""
    evicted_idle_ms: int
    """Idle time of the last evicted object at its eviction."""


class TrafficReport(NamedTuple):
    epoch: int
    uptime_ms: int
    """Time since the start of the master, which remembers nothing from before."""
    namespaces: Sequence[NamespaceTraffic]
    next_cursor: int
    """0: no more batches."""

    def with_page(self, page: TrafficReport) -> TrafficReport:
        """Return this report with the rows of the next batch."""
        namespaces = [*self.namespaces, *page.namespaces]
        return self._replace(namespaces=namespaces, next_cursor=page.next_cursor)


class Chains(NamedTuple):
    """Get the most matched and most recently used chains, from their tips to their roots."""

    namespace: NamespaceOrEmpty = ""
    """Empty: the most recently used namespaces."""
    keys: Annotated[Sequence[Key], RowCount(CHAINS_MAX)] = ()
    """Get the chains that end at these blocks of ``namespace`` instead."""
    limit: Annotated[int, IntRange(0, CHAINS_MAX)] = 0
    """Maximum number of chains; 0: the highest allowed."""


class Branch(NamedTuple):
    """A run of blocks, each of which is the parent of the next one.

    It ends where the chain forks or ends, and where counted matches ended.
    """

    namespace: str
    above: int
    """Number of the branch that this one continues, from 1; 0: none."""
    first: Key
    last: Key
    blocks: int
    missing: int
    """Blocks without bytes: evicted, removed or lost. No match finds their descendants."""
    being_written: int
    """Blocks that are being written."""
    size: int
    """Payload bytes without replicas."""
    depth: int
    """Known ancestors of the last block."""
    children: int
    """Children of the last block, including branches that the reply omits."""
    matched: int
    """Matches that ended in this branch or its descendants, at the tips that the master
    remembers."""
    matches_ended: int
    """Of those: matches that ended at its last block."""
    counted_ms: int
    """Age of the oldest of these counts; 0: none."""
    idle_ms: int
    """Time since the last use of a block of this branch or of its descendants in this reply."""
    leased_ms: int
    """Remaining lease of a block of it or of its descendants in this reply."""
    pinned: int
    """Blocks that are pinned."""
    truncated: bool
    """Whether the chain has ancestors of this branch that exceed the limits of one reply."""
    segments: Numbers
    """The segments with most of the replicas of its blocks."""
    replicas: Numbers
    """Number of these replicas on each of ``segments``."""

    def replicas_by_node(self, nodes: Mapping[int, str]) -> dict[str, int]:
        """Return the number of replicas by node. ``nodes``: the node of each segment; ``""`` has
        all other replicas."""
        found: dict[str, int] = {}
        for segment, count in zip(self.segments, self.replicas, strict=True):
            name = nodes.get(segment, "")
            found[name] = found.get(name, 0) + count
        return found


class ChainsReply(NamedTuple):
    epoch: int
    uptime_ms: int
    """Time since the start of the master, which remembers no match from before."""
    branches: Sequence[Branch]
    """Each branch follows the one that it continues; the most matched chain is first."""
    complete: bool
    """Whether every requested chain was walked."""


class Blocks(NamedTuple):
    """Get the status of these blocks, and of the ancestors of the last one. This does not count as
    a use."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], RowCount(BLOCKS_MAX)]
    above: Annotated[int, IntRange(0, BLOCKS_MAX)] = 0
    """Number of ancestors of the last key to include."""


class BlockStatus(NamedTuple):
    key: Key
    state: str
    """complete, on_disk (only there), being_written, missing (its node in the prefix tree is kept
    for descendants) or absent."""
    parent: bytes
    """Empty: a root, or unknown."""
    children: int
    depth: int
    size: int
    idle_ms: int
    leased_ms: int
    pinned_ms: int
    """Remaining time of the pin of this block itself; pins of descendants do not count."""
    segments: Numbers
    """The segment of each mounted replica."""


class BlocksReply(NamedTuple):
    blocks: Sequence[BlockStatus]
    """One per key, then the ancestors of the last one."""


UsageRequest = Traffic | Chains | Blocks
