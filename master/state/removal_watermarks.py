"""Removal watermarks: they distinguish memory that was absent during a removal.

Before a removal is acknowledged, every mounted segment stores a watermark newer than that of any
memory that may be absent. A later master trusts the newest watermark that it finds and rejects the
claims of memory with an older one.
"""

from __future__ import annotations

from kvstore import calls
from kvstore.calls import Version
from kvstore.errors import UnavailableError
from kvstore.master.state.effects import LogClusterEvent
from kvstore.master.state.records import MountedSegment
from kvstore.master.state.state_context import StateContext


def unrecorded_removal_error() -> UnavailableError:
    """Return the error of a removal that would be lost if the master died."""
    return UnavailableError(
        "no joined node can record the removal, and an absent node may hold the object",
        advice="Try again when a node has joined.",
    )


class RemovalWatermarks:
    def __init__(self, common: StateContext) -> None:
        self._common = common
        self._newest = calls.NO_VERSION
        """The newest watermark that any segment stores."""
        self._found = calls.NO_VERSION
        """The newest reported watermark of an earlier master."""
        self._outdated: set[bytes] = set()
        """Memory (uuid) whose claims were accepted before it was found to be outdated."""
        self._in_doubt = True
        """Whether memory may have departed or stayed absent since the last watermark was made."""

    def segment_died(self, segment: MountedSegment) -> None:
        """Let removals that waited for the unmounted segment wait for a watermark on the remaining
        memory; without any, they fail."""
        self._in_doubt = True
        common = self._common
        waiting = common.reclaim.waiting_for(segment)
        if not waiting:
            return
        if not common.pool.segments:
            common.effects += common.reclaim.fail(waiting, unrecorded_removal_error())
            return
        self.advance()
        common.reclaim.wait_for_other_segments(waiting, segment)

    def advance(self) -> None:
        """Request a new watermark for a removal, if memory that has the last one may be absent."""
        if not self._in_doubt:
            return
        common = self._common
        self._in_doubt = False
        number = self._newest.counter + 1 if self._newest.epoch == common.epoch else 1
        self._newest = Version(common.epoch, number)
        disks = [disk.segment for disk in common.disks.disks.values()]
        for segment in (*common.pool.segments.values(), *disks):
            if segment.inventory_complete:
                common.effects += common.reclaim.keep_removal_watermark(segment, self._newest)

    def propagate_to(self, segment: MountedSegment) -> None:
        """Store the newest watermark on a segment that holds no removed object."""
        self._outdated.discard(segment.offer.uuid)
        if segment.offer.removal_watermark < self._newest:
            self._common.effects += self._common.reclaim.keep_removal_watermark(
                segment, self._newest
            )

    def is_outdated(self, segment: MountedSegment) -> bool:
        """Return whether the segment missed a removal by an earlier master."""
        return segment.offer.uuid in self._outdated or segment.offer.removal_watermark < self._found

    def node_joined(self, session: int, name: str, watermark: Version) -> None:
        """Process the watermark of a joining node, which is trusted: no other may have been present
        at a removal. Nodes with an older one must join again, and their claims are rejected."""
        common = self._common
        if watermark.epoch >= common.epoch or watermark <= self._found:
            return
        self._found = watermark
        self._newest = max(self._newest, watermark)
        fields = {"epoch": watermark.epoch, "number": watermark.counter}
        common.effect(LogClusterEvent("removal_watermark_found", {"node": name, **fields}))
        for node in list(common.membership.nodes.values()):
            segments = common.membership.segments[node.name]
            older = [
                s for s in segments if s.offer.removal_watermark < watermark and not s.offer.fresh
            ]
            if older and node.session != session:
                self._outdated.update(segment.offer.uuid for segment in older)
                common.membership.declare_dead(node, "outdated")
