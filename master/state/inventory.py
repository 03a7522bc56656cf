"""What a node that comes back says its memory holds, and what of it may be believed.

    mounted, nothing free ──► claims, in slices between calls ──► the last ──► the gaps are free
                                   │ objects are matched and read at once
                                   └ refused: their headers are wiped before their bytes are used

A claim is refused when it is nonsense, lies over another, is older than what is known of its key,
or was removed while the memory was away (``Tombstones``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from kvstore.calls import NodeClaims, Version
from kvstore.errors import ProtocolError
from kvstore.limits import CLAIMS_UNANSWERED_MAX, Key
from kvstore.master.state.records import Name, Segment
from kvstore.memory.header import EXTENT_ALIGN, extent_bytes

GAPS_PER_STEP = 500
"""Gaps between claims that one slice frees: 2 to 4 ms."""

TOMBSTONES_MAX = 65_536
"""Removals that are remembered, each for some 250 bytes."""


class Claim(NamedTuple):
    """An object, as a node found it."""

    name: Name
    parent: Key | None
    size: int
    version: Version
    offset: int


class Inventory:
    """Of one segment, from its mounting until its last claim is dealt with."""

    def __init__(self, segment: Segment, joined_ms: int, absent_since: int) -> None:
        """``absent_since``: as ``Tombstones.forbids``."""
        self.segment = segment
        self.absent_since = absent_since
        self.outdated = False
        """Whether nothing of it is to be believed: a master before us removed something while it
        was away, and nobody knows what."""
        self.claimed = 0
        self.refused = 0
        self._use_ms = joined_ms
        self._waiting: deque[NodeClaims] = deque()
        self._at = 0
        """Rows of the first of those that were dealt with."""
        self._taken = bytearray(segment.allocator.end // EXTENT_ALIGN)
        """One byte for each place where an extent may start: 1 where one lies."""
        self._freed_until = segment.allocator.start
        self._last_seen = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._last_seen

    @property
    def all_claimed(self) -> bool:
        """Whether the last claim was dealt with."""
        return self._last_seen and not self._waiting

    def add(self, claims: NodeClaims) -> None:
        """Raises ProtocolError: more than the node may send before it is answered."""
        if claims.first:
            self._waiting.clear()
            self._at = 0
            self._last_seen = False
        if len(self._waiting) > CLAIMS_UNANSWERED_MAX or self._last_seen:
            raise ProtocolError("a node sends more of its inventory than was asked for")
        self._waiting.append(claims)
        self._last_seen = claims.last

    def next(self, count: int) -> tuple[list[Claim], bool]:
        """Up to ``count`` claims that were not dealt with yet; whether a message ends with them."""
        message, start = self._waiting[0], self._at
        stop = min(start + count, len(message.keys))
        namespaces = message.namespaces
        claims = [
            Claim(
                (namespaces[message.namespace_of[row]], message.keys[row]),
                message.parents[row],
                message.sizes[row],
                Version(message.epochs[row], message.counters[row]),
                message.offsets[row],
            )
            for row in range(start, stop)
        ]
        self._at = stop
        ends = stop == len(message.keys)
        if ends:
            self._waiting.popleft()
            self._at = 0
        return claims, ends

    def next_use_ms(self) -> int:
        """When a claimed object counts as last used: nodes tell the newest first."""
        self._use_ms -= 1
        return max(0, self._use_ms)

    def take(self, offset: int, size: int) -> bool:
        """Whether an object of ``size`` bytes can be at ``offset``; then no other can."""
        allocator, taken = self.segment.allocator, self._taken
        stop = offset + extent_bytes(size)
        if offset % EXTENT_ALIGN or offset < allocator.start or stop > allocator.end:
            return False
        first, behind = offset // EXTENT_ALIGN, stop // EXTENT_ALIGN
        if taken.find(1, first, behind) >= 0:
            return False
        taken[first:behind] = b"\1" * (behind - first)
        return True

    def give_back(self, offset: int, size: int) -> None:
        """What ``take`` has just taken."""
        first, count = offset // EXTENT_ALIGN, extent_bytes(size) // EXTENT_ALIGN
        self._taken[first : first + count] = bytes(count)

    def free_gaps(self) -> bool:
        """Free some of what nobody claimed, once all is claimed; whether that was the rest."""
        allocator = self.segment.allocator
        for offset, length in islice(self.gaps(), GAPS_PER_STEP):
            allocator.free(offset, length)
            self._freed_until = offset + length
        return next(self.gaps(), None) is None

    def gaps(self) -> Iterator[tuple[int, int]]:
        """What is neither claimed nor free, as (offset, length)."""
        taken = self._taken
        end = self.segment.allocator.end // EXTENT_ALIGN
        at = taken.find(0, self._freed_until // EXTENT_ALIGN)
        while at >= 0:
            behind = taken.find(1, at)
            behind = end if behind < 0 else behind
            yield at * EXTENT_ALIGN, (behind - at) * EXTENT_ALIGN
            at = taken.find(0, behind)


class Tombstones:
    """Removed and replaced versions that memory which is away may still hold.

    A tombstone forbids all versions of a key, or of a namespace, up to one; or one version of which
    nobody knows the key. Their number is bounded: when the oldest is dropped, memory that was away
    since before it was made is not believed any more.
    """

    def __init__(self) -> None:
        self.made = 0
        """Counts tombstones: ``absent_since`` is this count, when the memory went away."""
        self._of: dict[tuple[str, Key | None] | Version, tuple[int, Version]] = {}
        """By namespace and key (None: all of them), or version, oldest first: its number, and the
        version."""
        self._dropped = 0
        self._dropped_version = Version(0, 0)

    def add(self, namespace: str, key: Key | None, version: Version) -> None:
        """Forbid versions up to this one. ``namespace`` "" means all of them."""
        self._add((namespace, key), version)

    def add_version(self, version: Version) -> None:
        """Forbid this version."""
        self._add(version, version)

    def _add(self, of: tuple[str, Key | None] | Version, version: Version) -> None:
        self.made += 1
        self._of.pop(of, None)
        self._of[of] = self.made, version
        if len(self._of) > TOMBSTONES_MAX:
            oldest = next(iter(self._of))
            number, version = self._of.pop(oldest)
            self._dropped = number
            self._dropped_version = max(self._dropped_version, version)

    def forbids(self, name: Name, version: Version, absent_since: int) -> bool:
        """Whether that version was removed or replaced, or may have been, while the memory that
        holds it was away.

        ``absent_since``: what ``made`` was when this master lost it; 0: it never had it.
        """
        if absent_since < self._dropped and version <= self._dropped_version:
            return True
        if version in self._of:
            return True
        namespace, key = name
        for of in ((namespace, key), (namespace, None), ("", None)):
            found = self._of.get(of)
            if found is not None and version <= found[1]:
                return True
        return False

    def __len__(self) -> int:
        return len(self._of)
