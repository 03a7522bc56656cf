"""Inventory of a returning segment, and the tombstones by which claims are rejected.

    mounted, nothing free ──► claims, in slices between calls ──► the last ──► gaps are free
                                  │ objects are matched and read immediately
                                  └ rejected: headers are wiped before the space is used

A claim is rejected if it is malformed, overlaps another, is older than the known version of its
key, or was removed while the memory was absent (``Tombstones``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from kvstore.calls import NO_VERSION, NodeClaims, Version
from kvstore.errors import ProtocolError
from kvstore.limits import CLAIMS_UNANSWERED_MAX, Key
from kvstore.master.state.records import MountedSegment, Name

GAPS_PER_STEP = 500
"""Gaps between claims that one slice frees: 2 to 4 ms."""

RUN_MAX = 512
"""Maximum number of ranges moved when another one is inserted between them."""

TOLD_BYTES_PER_MS = 64 << 10
"""Minimum progress, 64 MiB/s: nodes read a hundred times as fast, the master 60,000 objects/s."""

TOMBSTONES_MAX = 65_536
"""Maximum number of tombstones, about 250 bytes each."""


class Claim(NamedTuple):
    name: Name
    parent: Key | None
    size: int
    version: Version
    offset: int


class InventoryLoad:
    """Inventory of one segment, from its mount until its last claim has been processed."""

    def __init__(self, segment: MountedSegment, joined_ms: int, absent_since: int) -> None:
        self.segment = segment
        self.absent_since = absent_since
        self.outdated = False
        """Whether to reject all claims: an earlier master removed objects meanwhile."""
        self.claimed = 0
        self.refused = 0
        self._use_ms = joined_ms
        self._joined_ms = self._last_message_ms = joined_ms
        self._waiting: deque[NodeClaims] = deque()
        self._at = 0
        """Processed rows of the first message."""
        self._taken = IntervalSet()
        self._freed_until = segment.allocator.start
        self._last_seen = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._last_seen

    @property
    def all_claimed(self) -> bool:
        return self._last_seen and not self._waiting

    def is_late(self, now_ms: int, silence_ms: int) -> bool:
        """Return whether no claims arrived for ``silence_ms``, or the total is too slow."""
        total_ms = 10 * silence_ms + self.segment.offer.size // TOLD_BYTES_PER_MS
        is_silent = not self.has_work and now_ms - self._last_message_ms > silence_ms
        return is_silent or now_ms - self._joined_ms > total_ms

    def add(self, now_ms: int, claims: NodeClaims) -> None:
        """Raise ProtocolError if the node sends more claims than the flow control allows."""
        self._last_message_ms = now_ms
        if claims.first:
            self._waiting.clear()
            self._at = 0
            self._last_seen = False
        if len(self._waiting) > CLAIMS_UNANSWERED_MAX or self._last_seen:
            raise ProtocolError("the node sent more claims than requested")
        self._waiting.append(claims)
        self._last_seen = claims.last

    def next(self, count: int) -> tuple[list[Claim], bool]:
        """Return up to ``count`` unprocessed claims, and whether they end a message."""
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
        """Return the last use to assume for a claim: nodes report the newest objects first."""
        self._use_ms -= 1
        return max(0, self._use_ms)

    def fits(self, offset: int, size: int) -> bool:
        """Return whether ``offset`` is aligned and the range is free."""
        allocator = self.segment.allocator
        stop = offset + self.segment.extent_bytes(size)
        if offset % self.segment.align or offset < allocator.start or stop > allocator.end:
            return False
        return self._taken.is_free(offset, stop)

    def claim_range(self, offset: int, size: int) -> None:
        self._taken.add(offset, offset + self.segment.extent_bytes(size))

    def free_gaps(self, free: Callable[[MountedSegment, int, int], None]) -> bool:
        """Free some gaps after the last claim. Return whether none is left."""
        for offset, length in islice(self.gaps(), GAPS_PER_STEP):
            free(self.segment, offset, length)
            self._freed_until = offset + length
        return next(self.gaps(), None) is None

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the bytes that are neither claimed nor free, as (offset, length)."""
        at = self._freed_until
        for start, stop in self._taken.behind(at):
            if start > at:
                yield at, start - at
            at = max(at, stop)
        if at < self.segment.allocator.end:
            yield at, self.segment.allocator.end - at


class IntervalSet:
    """Disjoint ranges, joined if adjacent: time and memory depend on their number only."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._starts: list[list[int]] = []
        """Ascending runs of up to ``RUN_MAX`` starts, which bounds the cost of an insertion."""
        self._stops: list[list[int]] = []

    def is_free(self, start: int, stop: int) -> bool:
        """Return whether no range overlaps this one. O(log n)."""
        run = bisect_right(self._firsts, start) - 1
        if run >= 0:
            index = bisect_right(self._starts[run], start) - 1
            if self._stops[run][index] > start:
                return False
            if index + 1 < len(self._starts[run]):
                return self._starts[run][index + 1] >= stop
        return run + 1 == len(self._firsts) or self._firsts[run + 1] >= stop

    def add(self, start: int, stop: int) -> None:
        """Add a range for which ``is_free`` is true. O(log n)."""
        if not self._firsts:
            self._insert_run(0, [start], [stop])
            return
        run = max(0, bisect_right(self._firsts, start) - 1)
        starts, stops = self._starts[run], self._stops[run]
        index = bisect_right(starts, start)
        joins_before = index > 0 and stops[index - 1] == start
        if index < len(starts) and starts[index] == stop:
            if joins_before:
                stops[index - 1] = stops[index]
                del starts[index], stops[index]
            else:
                starts[index] = start
        elif joins_before:  # not joined at the border of two runs, which is harmless
            stops[index - 1] = stop
        else:
            starts.insert(index, start)
            stops.insert(index, stop)
            if len(starts) > RUN_MAX:
                half = RUN_MAX // 2
                self._insert_run(run + 1, starts[half:], stops[half:])
                del starts[half:], stops[half:]
        self._firsts[run] = starts[0]

    def behind(self, at: int) -> Iterator[tuple[int, int]]:
        first = max(0, bisect_right(self._firsts, at) - 1)
        for run in range(first, len(self._firsts)):
            starts, stops = self._starts[run], self._stops[run]
            for index in range(bisect_right(stops, at), len(starts)):
                yield starts[index], stops[index]

    def _insert_run(self, run: int, starts: list[int], stops: list[int]) -> None:
        self._firsts.insert(run, starts[0])
        self._starts.insert(run, starts)
        self._stops.insert(run, stops)


class Tombstones:
    """Removed and replaced versions that absent memory may still hold.

    A tombstone forbids all versions of a key or namespace up to one, or one version of an unknown
    key. Their number is bounded: memory absent since before a dropped tombstone is no longer
    trusted.
    """

    def __init__(self) -> None:
        self.made = 0
        self._of: OrderedDict[
            tuple[str, Key | None] | Version, tuple[int, Version, Version | None]
        ] = OrderedDict()
        """By (namespace, key or None for all) or version, oldest first: tombstone number, highest
        forbidden and an allowed version. An ``OrderedDict`` has no deleted entries to pass."""
        self.newest = NO_VERSION
        """Upper bound of all forbidden versions."""
        self._dropped = 0
        self._dropped_version = NO_VERSION

    def add(
        self, namespace: str, key: Key | None, version: Version, but: Version | None = None
    ) -> None:
        """Forbid versions up to this one except ``but``, in ``namespace`` or all ("")."""
        self.newest = max(self.newest, version)
        self._add((namespace, key), version, but)

    def add_version(self, version: Version) -> None:
        self._add(version, version, None)

    def _add(
        self, of: tuple[str, Key | None] | Version, version: Version, but: Version | None
    ) -> None:
        self.made += 1
        self._of.pop(of, None)
        self._of[of] = self.made, version, but
        if len(self._of) > TOMBSTONES_MAX:
            _, (number, version, _) = self._of.popitem(last=False)
            self._dropped = number
            self._dropped_version = max(self._dropped_version, version)

    def forbids(self, name: Name, version: Version, absent_since: int) -> bool:
        """Return whether that version was, or may have been, removed while its memory was absent
        since ``absent_since`` (``made`` when this master lost it; 0: it never had it)."""
        if absent_since < self._dropped and version <= self._dropped_version:
            return True
        if version in self._of:
            return True
        namespace, key = name
        allowed_since = 0
        found = self._of.get((namespace, key))
        if found is not None and version <= found[1]:
            if version != found[2]:
                return True
            allowed_since = found[0]
        for of in ((namespace, None), ("", None)):
            found = self._of.get(of)
            if found is not None and version <= found[1] and found[0] > allowed_since:
                return True
        return False

    def __len__(self) -> int:
        return len(self._of)
