"""Counts objects whose last replica departed with its node, until they return or count as lost.

    node departed ──► objects are missing ──► memory returns and has them: not lost
                                          ├─► put again, removed: not lost
                                          └─► LOST_AFTER_MS over, inventories complete: lost,
                                              except expired ones

Missing objects are tracked by name, so that later changes of their keys do not count as losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import NamedTuple

from kvstore.calls import DepartedNode
from kvstore.limits import Key, Namespace
from kvstore.master.state.records import MountedSegment, Name, ObjectRecord

LOST_AFTER_MS = 300_000
"""Grace period for departed memory; a process, container or host restart takes less."""

TOLD_MS = 600_000
"""Time for which the status lists a departed node."""

NODES_MAX = 64
"""Departed nodes to track; beyond, the missing objects of the oldest count as lost."""

NAMES_MAX = 1 << 17
"""Missing objects tracked by name, about 300 bytes each. Further ones are only counted, and stay
missing until their memory returns. Checking all names for a lost node takes 10 ms."""


class _DepartedNode:
    def __init__(self, place: str, why: str, gone_ms: int) -> None:
        self.place = place
        self.why = why
        self.gone_ms = gone_ms
        self.memory: set[bytes] = set()
        self.back: dict[bytes, MountedSegment] = {}
        self.missing = 0
        self.unnamed = 0
        """Number of missing objects that are not tracked by name."""
        self.is_settled = False
        """Whether its missing objects were counted as lost."""
        self.lost = 0

    def reports(self) -> bool:
        """Return whether some of its memory has returned and its inventory is incomplete."""
        return any(segment.alive and not segment.whole for segment in self.back.values())

    def is_back(self) -> bool:
        return len(self.back) == len(self.memory) and all(
            segment.alive and segment.whole for segment in self.back.values()
        )


class _MissingEntry(NamedTuple):
    departed: _DepartedNode
    end_ms: int
    """When the object expires; 0: never."""


class MissingObjects:
    """Tracks missing objects; ``lost_objects`` is counted in ``counters``."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._gone: dict[str, _DepartedNode] = {}
        """Departed nodes by name, oldest first."""
        self._by_memory: dict[bytes, _DepartedNode] = {}
        self._named: dict[Namespace, dict[Key, _MissingEntry]] = {}
        """Missing objects by namespace and key; no empty namespaces."""
        self._names = 0

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
        """Track an object whose last replica was on a dead segment, before it loses its bytes.
        ``end_ms``: when it expires; 0: never."""
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
        """Uncount an unnamed missing object that a returned segment stores again."""
        gone = self._by_memory.get(segment.offer.uuid)
        if gone is not None and gone.unnamed and name[1] not in self._named.get(name[0], ()):
            gone.unnamed -= 1
            gone.missing -= 1

    def forget(self, namespace: str, key: Key) -> None:
        """Stop tracking a key when an object is stored under it, or none is expected."""
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
        """Stop tracking a namespace whose objects were removed; "": all namespaces."""
        names = [Namespace(namespace)] if namespace else list(self._named)
        for name in names:
            named = self._named.pop(name, {})
            self._names -= len(named)
            for entry in named.values():
                entry.departed.missing -= 1

    def tick(self, now_ms: int, nodes: Container[str]) -> None:
        """Count overdue objects as lost. ``nodes``: the names of the joined nodes."""
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
        """Count the missing objects of a node as lost, except expired ones."""
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
