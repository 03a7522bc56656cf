"""Operators' calls about use: which clients put and ask, and which chains are matched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from kvstore.calls.field_constraints import IntRange, NamespaceOrEmpty, Numbers, RowCount
from kvstore.limits import BLOCKS_MAX, CHAINS_MAX, Key, Namespace
from kvstore.runtime.formatting import key_text


class Traffic(NamedTuple):
    """Who puts, who asks and what is not found, a page of namespaces at a time."""

    namespace: NamespaceOrEmpty = ""
    """Empty: all namespaces that the master remembers."""
    cursor: int = 0
    """0 first, then ``next_cursor`` of the answer before."""


class ClientTraffic(NamedTuple):
    """One client in one namespace, as one who puts or as one who asks."""

    client: str
    """The name with which it joined; empty: not known."""
    address: str
    """Where it calls from; ``local``: from the host of the master."""
    first_ms: int
    """Time since the client was first seen. The master remembers the last clients only."""
    idle_ms: int
    """Time since its last call."""
    keys: int
    """Keys that it wanted to put, or asked for."""
    found: int
    """Of those: keys that were stored already."""
    stored: int
    """Keys that it has put."""
    key: bytes
    """One key of its last put; empty: it has only asked."""
    stored_bytes: int = 0
    """Payload bytes of what it has put, replicas not counted."""


class MissedKey(NamedTuple):
    """A key that was asked for and not found: the first missing one of its question."""

    key: Key
    client: str
    address: str
    idle_ms: int
    """Time since that question."""
    found: int
    """Keys before it in that question; they were stored."""
    requested: int
    """Keys of that question."""
    present: bool
    """Whether the key is stored now."""
    evicted: bool = False
    """Whether the key had been evicted before that question. False also if the master does not
    remember: it remembers the first keys of the chains that were evicted last."""

    @property
    def text(self) -> str:
        """The key as kvstore ls shows it."""
        return key_text(self.key)


class NamespaceTraffic(NamedTuple):
    name: str
    objects: int
    size: int
    """Payload bytes, replicas not counted."""
    writers: Sequence[ClientTraffic]
    readers: Sequence[ClientTraffic]
    misses: Sequence[MissedKey]
    """The last missed key of each client that asked, the most recent one first."""
    queries: int
    queries_without_hit: int
    """Questions whose first key was not stored."""
    queries_with_partial_hit: int
    """Questions of which a later key was not stored."""
    evicted: int
    """Objects that were evicted."""
    evicted_ms: int
    """Time since the last eviction."""
    evicted_idle_ms: int
    """How long the object that was evicted last had not been used then."""


class TrafficReport(NamedTuple):
    epoch: int
    uptime_ms: int
    """Time since the start of the master, which remembers nothing from before."""
    namespaces: Sequence[NamespaceTraffic]
    next_cursor: int
    """0: that was the last page."""

    def with_page(self, page: TrafficReport) -> TrafficReport:
        """This report with the rows of the next page added."""
        namespaces = [*self.namespaces, *page.namespaces]
        return self._replace(namespaces=namespaces, next_cursor=page.next_cursor)


class Chains(NamedTuple):
    """The chains that were matched most and used last, from their tips to their roots."""

    namespace: NamespaceOrEmpty = ""
    """Empty: the last namespaces in which clients put or asked."""
    keys: Annotated[Sequence[Key], RowCount(CHAINS_MAX)] = ()
    """The chains that end at these blocks of ``namespace`` instead."""
    limit: Annotated[int, IntRange(0, CHAINS_MAX)] = 0
    """The most chains; 0: as many as are allowed."""


class Branch(NamedTuple):
    """A run of blocks, each of which is the parent of the next one.

    It ends where the chain forks, where the chain ends, and where counted matches ended.
    """

    namespace: str
    above: int
    """The number of the branch that this one continues, counted from 1; 0: there is none."""
    first: Key
    last: Key
    blocks: int
    missing: int
    """Of those: blocks without bytes, which were evicted, removed or lost. No match finds blocks
    below them."""
    being_written: int
    """Of those: blocks that are being written."""
    size: int
    """Payload bytes, replicas not counted."""
    depth: int
    """Ancestors of the last block, as far as known."""
    children: int
    """Blocks directly below the last one, also in branches that the answer does not have."""
    matched: int
    """Matches that ended in this branch or below it, at the tips that the master remembers."""
    matches_ended: int
    """Of those: matches that ended at its last block."""
    counted_ms: int
    """How long the oldest of these counts has been kept; 0: there is none."""
    idle_ms: int
    """Time since the last use of a block of this branch, or of one below it in this answer."""
    leased_ms: int
    """How long a lease still protects a block of it, or one below it in this answer."""
    pinned: int
    """Of its blocks: those that pins hold."""
    truncated: bool
    """Whether the chain goes on above this branch, but the bounds of one answer ended the walk."""
    segments: Numbers
    """The segments that hold most of the replicas of its blocks."""
    replicas: Numbers
    """How many of these replicas are on each of ``segments``."""

    def replicas_by_node(self, nodes: Mapping[int, str]) -> dict[str, int]:
        """Replicas by node. ``nodes``: the node of each segment; ``""`` has all other replicas."""
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
    """Each branch comes after the one that it continues; the most matched chain is first."""
    complete: bool
    """Whether every wanted chain was walked."""


class Blocks(NamedTuple):
    """What does the master know of these blocks, and of those above the last one? The question
    does not count as a use of them."""

    namespace: Namespace
    keys: Annotated[Sequence[Key], RowCount(BLOCKS_MAX)]
    above: Annotated[int, IntRange(0, BLOCKS_MAX)] = 0
    """How many blocks above the last key, towards the root, are in the answer, too."""


class BlockStatus(NamedTuple):
    key: Key
    state: str
    """complete, being_written, missing (its place is kept for blocks below it) or absent."""
    parent: bytes
    """Empty: a root, or not known."""
    children: int
    depth: int
    size: int
    idle_ms: int
    leased_ms: int
    pinned_ms: int
    """How long the pin of this block itself lasts; pins of blocks below it do not count."""
    segments: Numbers
    """The segment of each replica that is mounted."""


class BlocksReply(NamedTuple):
    blocks: Sequence[BlockStatus]
    """One per key, then those above the last one."""


UsageRequest = Traffic | Chains | Blocks
