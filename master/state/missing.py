"""Counts objects whose last replica went with its node, until they come back or count as lost.

node gone ──► its objects are missing ──► its memory is back, and has them: nothing is lost
                                      └─► LOST_AFTER_MS is over, no report under way: they are lost
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from kvstore.calls import GoneNode
from kvstore.master.state.records import MountedSegment

LOST_AFTER_MS = 300_000
"""How long memory may be away before its objects count as lost: a restart of a process, of a
container, or of a host with another node's memory takes less."""

TOLD_MS = 600_000
"""How long the status names a node that has gone and has not come back."""

NODES_MAX = 64
"""Gone nodes that are remembered; beyond these, the missing objects of the oldest are lost."""


class _Gone:
    """A node that has gone, with all its memory."""

    __slots__ = ("back", "gone_ms", "lost", "memory", "missing", "place", "settled", "why")

    def __init__(self, place: str, why: str, gone_ms: int) -> None:
        self.place = place
        self.why = why
        self.gone_ms = gone_ms
        self.memory: set[bytes] = set()
        """The uuids of its segments."""
        self.back: dict[bytes, MountedSegment] = {}
        """Its segments that have come back."""
        self.missing = 0
        self.lost = 0
        self.settled = False
        """Whether its missing objects count as lost."""

    def reports(self) -> bool:
        """Whether some of its memory is back, and has not reported all of its objects yet."""
        return any(segment.alive and not segment.whole for segment in self.back.values())

    def is_back(self) -> bool:
        return len(self.back) == len(self.memory) and all(
            segment.alive and segment.whole for segment in self.back.values()
        )


class Missing:
    """See the module. ``counters``: ``lost_objects`` is counted there."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._gone: dict[str, _Gone] = {}
        """Gone nodes by name, in the order in which they went."""
        self._by_memory: dict[bytes, _Gone] = {}

    @property
    def objects(self) -> int:
        return sum(each.missing for each in self._gone.values())

    def segment_died(self, now_ms: int, segment: MountedSegment) -> None:
        node, uuid = segment.node, segment.offer.uuid
        if node.gone == "drained":
            self._forget(node.name)  # the objects that are left on it are lost on purpose
            return
        gone = self._gone.get(node.name)
        if gone is None or (uuid not in gone.memory and gone.gone_ms != now_ms):
            self._forget(node.name)  # an earlier node of that name had other memory
            gone = self._gone[node.name] = _Gone(node.place, node.gone, now_ms)
        gone.why, gone.gone_ms, gone.settled = node.gone, now_ms, False
        gone.memory.add(uuid)
        gone.back.pop(uuid, None)
        self._by_memory[uuid] = gone
        if len(self._gone) > NODES_MAX:
            self._forget(next(iter(self._gone)))

    def segment_mounted(self, segment: MountedSegment) -> None:
        gone = self._by_memory.get(segment.offer.uuid)
        if gone is not None:
            gone.back[segment.offer.uuid] = segment

    def object_gone(self, segment: MountedSegment) -> None:
        """Called for an object that had its last replica on this dead segment."""
        gone = self._by_memory.get(segment.offer.uuid)
        if gone is not None and not gone.settled:
            gone.missing += 1
            return
        self._counters["lost_objects"] += 1
        if gone is not None:
            gone.lost += 1

    def object_back(self, segment: MountedSegment) -> None:
        """Called for an object that this segment has brought back. The object may have gone missing
        with another node, which had another replica."""
        own = self._by_memory.get(segment.offer.uuid)
        if own is None:
            return  # this master did not know the memory before
        for gone in (own, *self._gone.values()):
            if gone.missing:
                gone.missing -= 1
                return

    def tick(self, now_ms: int, nodes: Container[str]) -> None:
        """``nodes``: the names of the joined nodes."""
        for name, gone in list(self._gone.items()):
            age_ms = now_ms - gone.gone_ms
            if age_ms >= LOST_AFTER_MS and not gone.reports():
                self._settle(gone)
            is_well = not gone.missing and not gone.lost and (gone.is_back() or name in nodes)
            if (is_well and not gone.reports()) or (gone.settled and age_ms >= TOLD_MS):
                self._forget(name)

    def next_ms(self) -> int | None:
        """When ``tick`` has something to settle or to forget."""
        return min(
            (
                gone.gone_ms + (TOLD_MS if gone.settled else LOST_AFTER_MS)
                for gone in self._gone.values()
                if not gone.reports()
            ),
            default=None,
        )

    def told(self, now_ms: int) -> list[GoneNode]:
        return [
            GoneNode(
                name=name,
                host=gone.place,
                why=gone.why,
                gone_ms=now_ms - gone.gone_ms,
                missing=gone.missing,
                lost=gone.lost,
                reports=gone.reports(),
            )
            for name, gone in self._gone.items()
        ]

    def check_invariants(self) -> None:
        assert all(gone.missing >= 0 for gone in self._gone.values())
        assert all(gone in self._gone.values() for gone in self._by_memory.values())
        assert len(self._gone) <= NODES_MAX

    def _settle(self, gone: _Gone) -> None:
        gone.settled = True
        gone.lost += gone.missing
        self._counters["lost_objects"] += gone.missing
        gone.missing = 0

    def _forget(self, name: str) -> None:
        gone = self._gone.pop(name, None)
        if gone is not None:
            self._settle(gone)
            for uuid in gone.memory:
                if self._by_memory.get(uuid) is gone:
                    del self._by_memory[uuid]
