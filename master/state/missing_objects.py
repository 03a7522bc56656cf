"""Counts objects whose last replica went with its node, until they come back or count as lost.

node gone ──► its objects are missing ──► its memory is back, and has them: nothing is lost
                                      ├─► put again, removed: nothing is lost
                                      └─► LOST_AFTER_MS is over, no report under way: they are lost,
                                          except those whose lifetime is over

Each missing object is known by name, so that what happens to its key meanwhile does not count as a
loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import NamedTuple

from kvstore.calls import DepartedNode
from kvstore.limits import Key, Namespace
from kvstore.master.state.records import MountedSegment, Name, ObjectRecord

LOST_AFTER_MS = 300_000
"""How long memory may be away before its objects count as lost: a restart of a process, of a
container, or of a host with another node's memory takes less."""

TOLD_MS = 600_000
"""How long the status names a node that has gone and has not come back."""

NODES_MAX = 64
"""Gone nodes that are remembered; beyond these, the missing objects of the oldest are lost."""

NAMES_MAX = 1 << 17
"""Missing objects that are known by name, each in some 300 bytes. Of further ones only the number
is known: those are missing until their memory is back, whatever happens to their keys. To look at
all names, when those of a node count as lost, takes 10 ms."""


class _DepartedNode:
    """A node that has gone, with all its memory."""

    def __init__(self, place: str, why: str, gone_ms: int) -> None:
        self.place = place
        self.why = why
        self.gone_ms = gone_ms
        self.memory: set[bytes] = set()
        """The uuids of its segments."""
        self.back: dict[bytes, MountedSegment] = {}
        """Its segments that have come back."""
        self.missing = 0
        self.unnamed = 0
        """How many of the missing objects are not known by name."""
        self.is_settled = False
        """Whether what was missing counts as lost."""
        self.lost = 0

    def reports(self) -> bool:
        """Whether some of its memory is back, and has not reported all of its objects yet."""
        return any(segment.alive and not segment.whole for segment in self.back.values())

    def is_back(self) -> bool:
        return len(self.back) == len(self.memory) and all(
            segment.alive and segment.whole for segment in self.back.values()
        )


class _MissingEntry(NamedTuple):
    """A missing object."""

    departed: _DepartedNode
    end_ms: int
    """The end of its lifetime; 0: it has none."""


class MissingObjects:
    """See the module. ``counters``: ``lost_objects`` is counted there."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._gone: dict[str, _DepartedNode] = {}
        """Gone nodes by name, in the order in which they went."""
        self._by_memory: dict[bytes, _DepartedNode] = {}
        self._named: dict[Namespace, dict[Key, _MissingEntry]] = {}
        """Missing objects by namespace and key; no empty namespaces."""
        self._names = 0
        """Entries of all namespaces."""

    @property
    def objects(self) -> int:
        return sum(each.missing for each in self._gone.values())

    def segment_died(self, now_ms: int, segment: MountedSegment) -> None:
        node, uuid = segment.node, segment.offer.uuid
        if node.departed == "drained":
            self._forget(now_ms, node.name)  # the objects left on it are lost on purpose
            return
        gone = self._gone.get(node.name)
        if gone is None or (uuid not in gone.memory and gone.gone_ms != now_ms):
            self._forget(now_ms, node.name)  # an earlier node of that name had other memory
            gone = self._gone[node.name] = _DepartedNode(node.location_text, node.departed, now_ms)
        gone.is_settled = False
        gone.why, gone.gone_ms = node.departed, now_ms
        gone.memory.add(uuid)
        gone.back.pop(uuid, None)
        self._by_memory[uuid] = gone
        if len(self._gone) > NODES_MAX:
            self._forget(now_ms, next(iter(self._gone)))

    def segment_mounted(self, segment: MountedSegment) -> None:
        gone = self._by_memory.get(segment.offer.uuid)
        if gone is not None:
            gone.back[segment.offer.uuid] = segment

    def on_object_departed(self, record: ObjectRecord, end_ms: int) -> None:
        """Called for an object that had its last replica on a dead segment, before it loses its
        bytes. ``end_ms``: the end of its lifetime; 0: it has none."""
        assert record.segment is not None
        gone = self._by_memory.get(record.segment.offer.uuid)
        if gone is None or gone.is_settled:
            self._counters["lost_objects"] += 1
            if gone is not None:
                gone.lost += 1
            return
        self.forget(record.namespace, record.key)  # an earlier object of that name
        gone.missing += 1
        if self._names >= NAMES_MAX:
            gone.unnamed += 1
            return
        self._named.setdefault(record.namespace, {})[record.key] = _MissingEntry(gone, end_ms)
        self._names += 1

    def object_claimed(self, segment: MountedSegment, name: Name) -> None:
        """Called before an object that was not there is stored, because this segment has brought it
        back. ``forget`` follows, for one that is known by name."""
        gone = self._by_memory.get(segment.offer.uuid)
        if gone is not None and gone.unnamed and name[1] not in self._named.get(name[0], ()):
            gone.unnamed -= 1
            gone.missing -= 1

    def forget(self, namespace: str, key: Key) -> None:
        """Called when an object of that key is stored, in whichever version, or when none is to
        come back."""
        if not self._names:
            return
        named = self._named.get(Namespace(namespace))
        entry = None if named is None else named.pop(key, None)
        if named is None or entry is None:
            return
        if not named:
            del self._named[Namespace(namespace)]
        self._names -= 1
        entry.departed.missing -= 1

    def clear(self, namespace: str) -> None:
        """Called when all objects of a namespace were removed; "": of all namespaces."""
        names = [Namespace(namespace)] if namespace else list(self._named)
        for name in names:
            named = self._named.pop(name, {})
            self._names -= len(named)
            for entry in named.values():
                entry.departed.missing -= 1

    def tick(self, now_ms: int, nodes: Container[str]) -> None:
        """``nodes``: the names of the joined nodes."""
        for name, gone in list(self._gone.items()):
            age_ms = now_ms - gone.gone_ms
            if age_ms >= LOST_AFTER_MS and not gone.reports():
                self._count_as_lost(now_ms, gone)
            is_well = not gone.missing and not gone.lost and (gone.is_back() or name in nodes)
            if (is_well and not gone.reports()) or (gone.is_settled and age_ms >= TOLD_MS):
                self._forget(now_ms, name)

    def list_departed(self, now_ms: int) -> list[DepartedNode]:
        return [
            DepartedNode(
                name=name,
                host=gone.place,
                reason=gone.why,
                departed_ms=now_ms - gone.gone_ms,
                missing=gone.missing,
                lost=gone.lost,
                reports=gone.reports(),
            )
            for name, gone in self._gone.items()
        ]

    def _count_as_lost(self, now_ms: int, gone: _DepartedNode) -> None:
        """Counts the missing objects of a node as lost, but for those whose lifetime is over."""
        gone.is_settled = True
        if not gone.missing:
            return
        lost = gone.missing
        for namespace, named in list(self._named.items()):
            keys = [key for key, entry in named.items() if entry.departed is gone]
            for key in keys:
                lost -= 0 < named.pop(key).end_ms <= now_ms
            self._names -= len(keys)
            if not named:
                del self._named[namespace]
        gone.lost += lost
        self._counters["lost_objects"] += lost
        gone.missing = gone.unnamed = 0

    def _forget(self, now_ms: int, name: str) -> None:
        gone = self._gone.pop(name, None)
        if gone is not None:
            self._count_as_lost(now_ms, gone)
            for uuid in gone.memory:
                if self._by_memory.get(uuid) is gone:
                    del self._by_memory[uuid]
