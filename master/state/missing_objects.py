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
"""Time for which the status lists a departed node that stopped, or has rejoined without all of its
objects."""

DEAD_MS = 21_600_000
"""Time for which the status lists a node that died and has not rejoined."""

NODES_MAX = 64
"""Departed nodes to track; beyond, the missing objects of the oldest count as lost."""

NAMES_MAX = 1 << 17
"""Missing objects tracked by name, about 300 bytes each. Further ones are only counted, and stay
missing until their memory returns. Checking all names for a lost node takes 10 ms."""


class _DepartedNode:
    def __init__(self, location: str, reason: str, departed_ms: int) -> None:
        self.location = location
        self.why = reason
        self.departed_ms = departed_ms
        self.memory: set[bytes] = set()
        self.back: dict[bytes, MountedSegment] = {}
        self.missing = 0
        self.unnamed = 0
        """Number of missing objects that are not tracked by name."""
        self.is_quiesced = False
        """Whether its missing objects were counted as lost."""
        self.lost = 0

    def reports(self) -> bool:
        """Return whether some of its memory has returned and its inventory is incomplete."""
        return any(
            segment.alive and not segment.inventory_complete for segment in self.back.values()
        )

    def is_back(self) -> bool:
        return len(self.back) == len(self.memory) and all(
            segment.alive and segment.inventory_complete for segment in self.back.values()
        )


class _MissingEntry(NamedTuple):
    departed: _DepartedNode
    end_ms: int
    """Time of expiry; 0: never."""


class MissingObjects:
    """Tracks missing objects; ``lost_objects`` is counted in ``counters``."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._departed: dict[str, _DepartedNode] = {}
        self._by_memory: dict[bytes, _DepartedNode] = {}
        self._named: dict[Namespace, dict[Key, _MissingEntry]] = {}
        """Missing objects by namespace and key; no empty namespaces."""
        self._names = 0

    @property
    def objects(self) -> int:
        return sum(node.missing for node in self._departed.values())

    def segment_died(self, now_ms: int, segment: MountedSegment) -> None:
        node, uuid = segment.node, segment.offer.uuid
        if node.departed == "drained":
            self._forget(now_ms, node.name)  # the objects left on it are lost on purpose
            return
        departed = self._departed.get(node.name)
        if departed is None or (uuid not in departed.memory and departed.departed_ms != now_ms):
            self._forget(now_ms, node.name)  # an earlier node of that name had other memory
            departed = self._departed[node.name] = _DepartedNode(
                node.location_text, node.departed, now_ms
            )
        departed.is_quiesced = False
        departed.why, departed.departed_ms = node.departed, now_ms
        departed.memory.add(uuid)
        departed.back.pop(uuid, None)
        self._by_memory[uuid] = departed
        if len(self._departed) > NODES_MAX:
            self._forget(now_ms, next(iter(self._departed)))

    def segment_mounted(self, segment: MountedSegment) -> None:
        departed = self._by_memory.get(segment.offer.uuid)
        if departed is not None:
            departed.back[segment.offer.uuid] = segment

    def on_object_departed(self, record: ObjectRecord, end_ms: int) -> None:
        """Track an object without live replicas. ``end_ms``: its expiry, or 0."""
        assert record.segment is not None
        departed = self._by_memory.get(record.segment.offer.uuid)
        if departed is None or departed.is_quiesced:
            self._counters["lost_objects"] += 1
            if departed is not None:
                departed.lost += 1
            return
        self.forget(record.namespace, record.key)  # an earlier object of that name
        departed.missing += 1
        if self._names >= NAMES_MAX:
            departed.unnamed += 1
            return
        self._named.setdefault(record.namespace, {})[record.key] = _MissingEntry(departed, end_ms)
        self._names += 1

    def object_claimed(self, segment: MountedSegment, name: Name) -> None:
        """Uncount an unnamed missing object that a returned segment stores again."""
        departed = self._by_memory.get(segment.offer.uuid)
        if (
            departed is not None
            and departed.unnamed
            and name[1] not in self._named.get(name[0], ())
        ):
            departed.unnamed -= 1
            departed.missing -= 1

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
        for name, departed in list(self._departed.items()):
            age_ms = now_ms - departed.departed_ms
            if age_ms >= LOST_AFTER_MS and not departed.reports():
                self._count_as_lost(now_ms, departed)
            is_complete = (
                not departed.missing and not departed.lost and (departed.is_back() or name in nodes)
            )
            listed_ms = TOLD_MS if name in nodes or departed.why == "left" else DEAD_MS
            if (is_complete and not departed.reports()) or (
                departed.is_quiesced and age_ms >= listed_ms
            ):
                self._forget(now_ms, name)

    def list_departed(self, now_ms: int) -> list[DepartedNode]:
        return [
            DepartedNode(
                name=name,
                host=departed.location,
                reason=departed.why,
                departed_ms=now_ms - departed.departed_ms,
                missing=departed.missing,
                lost=departed.lost,
                reports=departed.reports(),
            )
            for name, departed in self._departed.items()
        ]

    def _count_as_lost(self, now_ms: int, departed: _DepartedNode) -> None:
        departed.is_quiesced = True
        if not departed.missing:
            return
        lost = departed.missing
        for namespace, named in list(self._named.items()):
            keys = [key for key, entry in named.items() if entry.departed is departed]
            for key in keys:
                lost -= 0 < named.pop(key).end_ms <= now_ms
            self._names -= len(keys)
            if not named:
                del self._named[namespace]
        departed.lost += lost
        self._counters["lost_objects"] += lost
        departed.missing = departed.unnamed = 0

    def _forget(self, now_ms: int, name: str) -> None:
        departed = self._departed.pop(name, None)
        if departed is not None:
            self._count_as_lost(now_ms, departed)
            for uuid in departed.memory:
                if self._by_memory.get(uuid) is departed:
                    del self._by_memory[uuid]
