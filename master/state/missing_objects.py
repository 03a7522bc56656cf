"""Counts objects whose last replica departed with its node, until they return or count as lost.

    node departed ──► objects are missing ──► memory returns and reports them: not lost
                                          └─► LOST_AFTER_MS over, inventories complete: lost

They are only counted, so objects that are put again, removed or expired before their memory returns
remain in the number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from kvstore.calls import DepartedNode
from kvstore.master.state.records import MountedSegment, ObjectRecord

LOST_AFTER_MS = 300_000
"""Grace period for departed memory; a process, container or host restart takes less."""

TOLD_MS = 600_000
"""Time for which the status lists a departed node that stopped, or has rejoined without all of its
objects."""

DEAD_MS = 21_600_000
"""Time for which the status lists a node that died and has not rejoined."""

NODES_MAX = 64
"""Departed nodes to track; beyond, the missing objects of the oldest count as lost."""


class _DepartedNode:
    def __init__(self, location: str, reason: str, departed_ms: int) -> None:
        self.location = location
        self.why = reason
        self.departed_ms = departed_ms
        self.memory: set[bytes] = set()
        self.back: dict[bytes, MountedSegment] = {}
        self.missing = 0
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


class MissingObjects:
    """Counts missing objects; ``lost_objects`` is counted in ``counters``."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._departed: dict[str, _DepartedNode] = {}
        self._by_memory: dict[bytes, _DepartedNode] = {}

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

    def on_object_departed(self, record: ObjectRecord) -> None:
        """Count an object without live replicas."""
        assert record.segment is not None
        departed = self._by_memory.get(record.segment.offer.uuid)
        if departed is None or departed.is_quiesced:
            self._counters["lost_objects"] += 1
            if departed is not None:
                departed.lost += 1
            return
        departed.missing += 1

    def object_claimed(self, segment: MountedSegment) -> None:
        """Uncount a missing object that a returned segment reports."""
        departed = self._by_memory.get(segment.offer.uuid)
        if departed is not None and departed.missing:
            departed.missing -= 1

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
        departed.lost += departed.missing
        self._counters["lost_objects"] += departed.missing
        departed.missing = 0

    def _forget(self, now_ms: int, name: str) -> None:
        departed = self._departed.pop(name, None)
        if departed is not None:
            self._count_as_lost(now_ms, departed)
            for uuid in departed.memory:
                if self._by_memory.get(uuid) is departed:
                    del self._by_memory[uuid]
