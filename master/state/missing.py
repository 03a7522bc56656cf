"""Counts objects whose last replica went with its node, until they come back or count as lost.

node gone ──► its objects are missing ──► its memory is back, and has them: nothing is lost
                                      ├─► put again, removed, lifetime over: nothing is lost
                                      └─► LOST_AFTER_MS is over, no report under way: they are lost

Each missing object is known by name, so that what happens to its key meanwhile does not count as a
loss. Names that count no more are forgotten in slices (``forget_some``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from heapq import heappop, heappush
from typing import NamedTuple

from kvstore.calls import GoneNode, Version
from kvstore.limits import Key, Namespace
from kvstore.master.state.jobs import MISS, Jobs
from kvstore.master.state.records import TABLE_SHARDS, MountedSegment, Name, ObjectRecord

LOST_AFTER_MS = 300_000
"""How long memory may be away before its objects count as lost: a restart of a process, of a
container, or of a host with another node's memory takes less."""

TOLD_MS = 600_000
"""How long the status names a node that has gone and has not come back."""

NODES_MAX = 64
"""Gone nodes that are remembered; beyond these, the missing objects of the oldest are lost."""

NAMES_MAX = 1 << 20
"""Missing objects that are known by name, each in some 300 bytes. Of further ones only the number
is known: those are missing until their memory is back, whatever happens to their keys."""

ENDS_PER_TICK = 256
"""Lifetimes that one tick ends: less than 1 ms."""


class _Away:
    """The objects that went with a node, until they count as lost."""

    __slots__ = ("missing", "settled", "unnamed")

    def __init__(self) -> None:
        self.missing = 0
        self.unnamed = 0
        """How many of the missing objects are not known by name."""
        self.settled = False
        """Whether its missing objects count as lost."""


class _Entry(NamedTuple):
    """A missing object, by its version."""

    away: _Away
    epoch: int
    counter: int


class _Gone:
    """A node that has gone, with all its memory."""

    __slots__ = ("away", "back", "gone_ms", "lost", "memory", "place", "why")

    def __init__(self, place: str, why: str, gone_ms: int) -> None:
        self.place = place
        self.why = why
        self.gone_ms = gone_ms
        self.memory: set[bytes] = set()
        """The uuids of its segments."""
        self.back: dict[bytes, MountedSegment] = {}
        """Its segments that have come back."""
        self.away = _Away()
        self.lost = 0

    def reports(self) -> bool:
        """Whether some of its memory is back, and has not reported all of its objects yet."""
        return any(segment.alive and not segment.whole for segment in self.back.values())

    def is_back(self) -> bool:
        return len(self.back) == len(self.memory) and all(
            segment.alive and segment.whole for segment in self.back.values()
        )


class Missing:
    """See the module. ``counters``: ``lost_objects`` is counted there."""

    def __init__(self, counters: Counter[str], jobs: Jobs) -> None:
        self._counters = counters
        self._jobs = jobs
        self._gone: dict[str, _Gone] = {}
        """Gone nodes by name, in the order in which they went."""
        self._by_memory: dict[bytes, _Gone] = {}
        self._shards: list[dict[Name, _Entry]] = [{} for _ in range(TABLE_SHARDS)]
        """Missing objects by name, and those that ``forget_some`` has yet to drop."""
        self._named = 0
        """Entries in all shards."""
        self._ends: list[tuple[int, int, int, Name]] = []
        """A heap of the lifetimes that may end before their objects count as lost: the end, epoch,
        counter and name."""
        self._slices = 0
        """How often ``forget_some`` has looked at a shard: at each in turn."""
        self._slices_wanted = 0
        """When every shard has been looked at since there was last something to forget."""
        self._cleared: dict[str, tuple[Version, int]] = {}
        """Cleared namespaces ("": all): the highest version that was removed, and when every shard
        has been looked at since, in slices."""

    @property
    def objects(self) -> int:
        return sum(each.away.missing for each in self._gone.values())

    def segment_died(self, now_ms: int, segment: MountedSegment) -> None:
        node, uuid = segment.node, segment.offer.uuid
        if node.gone == "drained":
            self._forget(node.name)  # the objects that are left on it are lost on purpose
            return
        gone = self._gone.get(node.name)
        if gone is None or (uuid not in gone.memory and gone.gone_ms != now_ms):
            self._forget(node.name)  # an earlier node of that name had other memory
            gone = self._gone[node.name] = _Gone(node.place, node.gone, now_ms)
        if gone.away.settled:
            gone.away = _Away()
        gone.why, gone.gone_ms = node.gone, now_ms
        gone.memory.add(uuid)
        gone.back.pop(uuid, None)
        self._by_memory[uuid] = gone
        if len(self._gone) > NODES_MAX:
            self._forget(next(iter(self._gone)))

    def segment_mounted(self, segment: MountedSegment) -> None:
        gone = self._by_memory.get(segment.offer.uuid)
        if gone is not None:
            gone.back[segment.offer.uuid] = segment

    def object_gone(self, record: ObjectRecord, end_ms: int) -> None:
        """Called for an object that had its last replica on a dead segment, before it loses its
        bytes. ``end_ms``: the end of its lifetime; 0: it has none."""
        assert record.segment is not None
        gone = self._by_memory.get(record.segment.offer.uuid)
        if gone is None or gone.away.settled:
            self._counters["lost_objects"] += 1
            if gone is not None:
                gone.lost += 1
            return
        name = record.namespace, record.key
        self._drop(name)  # an earlier object of that name, which counts as lost
        gone.away.missing += 1
        if self._named >= NAMES_MAX:
            gone.away.unnamed += 1
            return
        self._shard(name)[name] = _Entry(gone.away, record.epoch, record.counter)
        self._named += 1
        if 0 < end_ms < gone.gone_ms + LOST_AFTER_MS:
            heappush(self._ends, (end_ms, record.epoch, record.counter, name))

    def object_claimed(self, segment: MountedSegment, name: Name) -> None:
        """Called before an object that was not there is stored, because this segment has brought it
        back. ``settle`` follows, for one that is known by name."""
        gone = self._by_memory.get(segment.offer.uuid)
        if gone is not None and gone.away.unnamed and name not in self._shard(name):
            gone.away.unnamed -= 1
            gone.away.missing -= 1

    def settle(self, namespace: str, key: Key) -> None:
        """Called when an object of that key is stored, in whichever version, or when none is to
        come back."""
        if self._named:
            self._drop((Namespace(namespace), key))

    def clear(self, namespace: str, version: Version) -> None:
        """Called when all versions up to this one were removed; ``namespace`` "": of all
        namespaces."""
        if self._named:
            self._cleared[namespace] = version, self._slices + TABLE_SHARDS
            self._have_forgotten()
            self.forget_some()  # so there are fewer cleared namespaces than shards

    def forget_some(self) -> None:
        """Does one slice: drops entries of one shard that count no more. Of 4,096 entries, 4 ms."""
        shard = self._shards[self._slices % TABLE_SHARDS]
        for name, entry in list(shard.items()):
            if entry.away.settled or self._is_cleared(name, entry):
                self._drop(name)
        self._slices += 1
        for namespace, (_, until) in list(self._cleared.items()):
            if until <= self._slices:
                del self._cleared[namespace]
        self._jobs.note(MISS, self._slices < self._slices_wanted)

    def tick(self, now_ms: int, nodes: Container[str]) -> None:
        """``nodes``: the names of the joined nodes."""
        self._end_lifetimes(now_ms)
        for name, gone in list(self._gone.items()):
            age_ms = now_ms - gone.gone_ms
            if age_ms >= LOST_AFTER_MS and not gone.reports():
                self._lose(gone)
            is_well = not gone.away.missing and not gone.lost and (gone.is_back() or name in nodes)
            if (is_well and not gone.reports()) or (gone.away.settled and age_ms >= TOLD_MS):
                self._forget(name)

    def told(self, now_ms: int) -> list[GoneNode]:
        return [
            GoneNode(
                name=name,
                host=gone.place,
                why=gone.why,
                gone_ms=now_ms - gone.gone_ms,
                missing=gone.away.missing,
                lost=gone.lost,
                reports=gone.reports(),
            )
            for name, gone in self._gone.items()
        ]

    def _shard(self, name: Name) -> dict[Name, _Entry]:
        return self._shards[hash(name) % TABLE_SHARDS]

    def _drop(self, name: Name) -> None:
        entry = self._shard(name).pop(name, None)
        if entry is not None:
            self._named -= 1
            if not entry.away.settled:
                entry.away.missing -= 1

    def _is_cleared(self, name: Name, entry: _Entry) -> bool:
        if not self._cleared:
            return False
        version = Version(entry.epoch, entry.counter)
        cleared = [self._cleared.get(name[0]), self._cleared.get("")]
        return any(found is not None and version <= found[0] for found in cleared)

    def _have_forgotten(self) -> None:
        """Has every shard looked at, from now on."""
        if self._named:
            self._slices_wanted = self._slices + TABLE_SHARDS
            self._jobs.due |= MISS

    def _end_lifetimes(self, now_ms: int) -> None:
        for _ in range(ENDS_PER_TICK):
            if not self._ends or self._ends[0][0] > now_ms:
                break
            _, epoch, counter, name = heappop(self._ends)
            entry = self._shard(name).get(name)
            if entry is not None and (entry.epoch, entry.counter) == (epoch, counter):
                self._drop(name)

    def _lose(self, gone: _Gone) -> None:
        """Counts the missing objects of a node as lost."""
        away = gone.away
        away.settled = True
        gone.lost += away.missing
        self._counters["lost_objects"] += away.missing
        away.missing = away.unnamed = 0
        self._have_forgotten()

    def _forget(self, name: str) -> None:
        gone = self._gone.pop(name, None)
        if gone is not None:
            self._lose(gone)
            for uuid in gone.memory:
                if self._by_memory.get(uuid) is gone:
                    del self._by_memory[uuid]
