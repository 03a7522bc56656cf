"""Marks: how memory that was away during a removal is told from memory that was there.

Before a removal is acknowledged, every mounted segment keeps a mark that is newer than any mark on
memory that may be away. A later master trusts the newest mark that it finds: memory with an older
one was away during a removal, and its claims are refused.
"""

from __future__ import annotations

from kvstore import calls
from kvstore.calls import Version
from kvstore.errors import UnavailableError
from kvstore.master.state.effects import LogClusterEvent
from kvstore.master.state.records import MountedSegment
from kvstore.master.state.state_context import StateContext


def unrecorded_removal_error() -> UnavailableError:
    """The error of a removal that no memory could record: it would be lost if the master died, and
    memory that is away, or has not joined yet, may hold the object."""
    return UnavailableError(
        "no node is connected that could record the removal, and a node that joins may hold the "
        "object",
        advice="Try again when a node has joined.",
    )


class RemovalWatermarks:
    """See the module."""

    def __init__(self, common: StateContext) -> None:
        self._common = common
        self._newest = calls.NO_VERSION
        """The newest mark that any segment keeps."""
        self._found = calls.NO_VERSION
        """The newest mark of an earlier master that a node has reported."""
        self._outdated: set[bytes] = set()
        """Memory (uuid) whose claims were accepted until it was found to be outdated."""
        self._in_doubt = True
        """Whether some memory may have gone away, or stayed away, since the last mark was made."""

    def segment_died(self, segment: MountedSegment) -> None:
        """Called when the segment is unmounted. Removals that wait for it will be acknowledged
        without its answer, so from now on they also wait for a mark on the memory that is left. If
        no memory is left, they fail."""
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
        """Called for each removal. Orders a new mark if memory that has the last one may be
        away."""
        if not self._in_doubt:
            return
        common = self._common
        self._in_doubt = False
        number = self._newest.counter + 1 if self._newest.epoch == common.epoch else 1
        self._newest = Version(common.epoch, number)
        for segment in common.pool.segments.values():
            if segment.whole:
                common.effects += common.reclaim.keep_removal_watermark(segment, self._newest)

    def propagate_to(self, segment: MountedSegment) -> None:
        """Called when the segment holds no removed object: has its node keep the newest mark."""
        self._outdated.discard(segment.offer.uuid)
        if segment.offer.removal_watermark < self._newest:
            self._common.effects += self._common.reclaim.keep_removal_watermark(
                segment, self._newest
            )

    def is_outdated(self, segment: MountedSegment) -> bool:
        """Whether the segment was away during a removal that this master does not know of."""
        return segment.offer.uuid in self._outdated or segment.offer.removal_watermark < self._found

    def node_joined(self, session: int, name: str, mark: Version) -> None:
        """Notes the mark of an earlier master that a joining node has kept. Nodes that joined
        before with an older mark must join again, and their claims are refused then.

        The node is believed: if all others were away during a removal, it alone has the mark.
        """
        common = self._common
        if mark.epoch >= common.epoch or mark <= self._found:
            return
        self._found = mark
        self._newest = max(self._newest, mark)
        fields = {"epoch": mark.epoch, "number": mark.counter}
        common.effect(LogClusterEvent("removal_watermark_found", {"node": name, **fields}))
        for node in list(common.membership.nodes.values()):
            segments = common.membership.segments[node.name]
            older = [s for s in segments if s.offer.removal_watermark < mark and not s.offer.fresh]
            if older and node.session != session:
                self._outdated.update(segment.offer.uuid for segment in older)
                common.membership.declare_dead(node, "outdated")
