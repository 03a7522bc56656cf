"""Chooses which objects with too few replicas to copy next, and limits the copies.

After a node died or joined, a pass over all objects queues short ones by node, in slices; a put
that found too few nodes queues its object at once. The reply to the node's heartbeat says
``repair``; the node requests the copies (``StartMoves``), makes and ends them (``PutEnd``).

An object should have as many replicas as its record has extents. An extent on a dead segment, or on
``placeholder_segment``, stands for a missing replica, except the one at ``COPIED``: it notes that a
copy was begun, so memory that returns may hold one too many.

Copies use free memory only, and leave a part of each segment (``SPARE_SHIFT``) to puts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvstore.calls import SegmentOffer
from kvstore.master.state.forest import Forest
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.records import Extent, MountedSegment, ObjectRecord, shards_from

COPIED: Final = 1
"""The offset that notes a begun copy; no real extent has it."""

QUEUE_MAX: Final = 65_536
"""Objects in the queue. A later pass finds the others."""

SPARE_SHIFT: Final = 4
"""A copy leaves a 16th of its segment free, so that puts need not wait for an eviction."""

OBJECT_COUNTS_FOR: Final = 64 << 10
"""Bytes of ``bytes_per_s`` that a smaller object takes, too: it costs the master's time."""

SCAN_STEPS: Final = 20_000
"""Records that one slice of a pass checks: 2 to 4 ms."""

SHORT_COUNTS_FOR: Final = 16
"""Steps that a record with missing replicas counts for: queueing it takes time."""

RECORDS_PER_PAUSE_MS: Final = 100
"""After a pass, there is a pause of at least 1 ms for this number of records: passes take a
fiftieth of the master's time."""

PAUSE_MIN_MS: Final = 1_000
"""The pause between two passes; doubled each time that no copy was finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRules:
    """The bounds of repair."""

    after_ms: int = 30_000
    """The time after its node's death when a replica is replaced; at least one lease."""
    copies_max: int = 512
    """Objects copied at the same time: enough for ``bytes_max`` of 512 KiB each."""
    bytes_max: int = 256 << 20
    """Payload bytes copied at the same time; a larger object is copied alone."""
    bytes_per_s: int = 256 << 20
    """Bytes that are copied per second, in the whole cluster: a quarter of a 10 Gbit/s network."""
    pause_max_ms: int = 60_000
    """The longest pause between two passes while no copy is finished."""


def placeholder_segment() -> MountedSegment:
    """The segment of replicas that were never made. It is dead, and no other segment has its id."""
    offer = SegmentOffer(1 << 20, bytes(16), "", "", b"", 0, 0, True)
    segment = MountedSegment(0, JoinedNode("", "", None, 0), offer, 0)
    segment.alive = False
    return segment


def desired_replicas(record: ObjectRecord) -> int:
    """Replicas that the object should have, if it has ever been complete."""
    return len(record.more) + 1 - was_copied(record)


def was_copied(record: ObjectRecord) -> bool:
    """Whether a copy of the object was begun, whatever its outcome."""
    return any(offset == COPIED for _, offset in record.more)


def missing(record: ObjectRecord) -> int:
    """The number of replicas that the object lacks; 0 if it is not complete."""
    first, more = record.segment, record.more
    if not more or first is None:
        return 0
    dead, alive = 0, 0
    for segment, offset in record.extents():
        if segment.alive:
            alive += 1
        elif offset != COPIED:
            dead += 1
    return dead if alive else 0


def find_repairable_placeholder(record: ObjectRecord, departed_before_ms: int) -> Extent | None:
    """A missing replica whose segment died before that time, so that no lease on it is left."""
    for segment, offset in record.extents():
        if not segment.alive and offset != COPIED and segment.died_ms <= departed_before_ms:
            return segment, offset
    return None


class RepairQueue:
    """The objects to copy, and the amount of copies in progress."""

    def __init__(self, rules: RepairRules, lease_ms: int, started_ms: int) -> None:
        self.rules = rules
        self.after_ms = max(rules.after_ms, lease_ms)
        self.due_ms: int | None = None
        """When the next pass is due; None: not before something changes."""
        self.scanning = False
        self.copies = 0
        """Copies in progress; ``copied_bytes`` are their payload bytes."""
        self.copied_bytes = 0
        self._queues: dict[str, deque[ObjectRecord]] = {}
        """Objects by the name of a node that has them."""
        self._queued = 0
        self._place = 0, 0
        """Shard and position of the next record that the pass looks at."""
        self._looked = 0
        self.found = 0
        """Objects that the pass has found to have too few replicas."""
        self._not_before_ms = started_ms
        """The earliest time of the next pass."""
        self._ripe_ms: int | None = None
        """When the first missing replica that the pass has found may be replaced."""
        self.note_deferred = False
        """Whether short objects are in no queue."""
        self.done = 0
        """Copies that were finished since the last pass began."""
        self._pause_ms = PAUSE_MIN_MS
        self._allowance = rules.bytes_max
        self._refilled_ms = started_ms

    # --- queue --------------------------------------------------------------------------------

    def changed(self, at_ms: int) -> None:
        """Plans a pass at that time, after a node joined or departed."""
        self._pause_ms = PAUSE_MIN_MS
        if self.due_ms is None or at_ms < self.due_ms:
            self.due_ms = at_ms

    def note(self, record: ObjectRecord) -> None:
        """Queues a short object that was used just now."""
        if not self.scanning and self._queued < QUEUE_MAX:
            self.enqueue(record)
        else:
            self.note_deferred = True

    def begin_pass(self) -> None:
        self.due_ms = None
        self.scanning = True
        self._queues.clear()
        self._queued = 0
        self._place = 0, 0
        self._looked = self.found = 0
        self._ripe_ms = None
        self.note_deferred = False

    def scan(self, forest: Forest, now_ms: int, nodes: int) -> bool:
        """Runs one slice of the pass. Returns whether that was the last one.

        ``nodes``: their number. An object with as many replicas is only counted, until another
        node joins."""
        first, position = self._place
        steps = 0
        departed_before_ms = now_ms - self.after_ms
        for index, shard in enumerate(shards_from(forest.namespaces.values(), first), first):
            for record in islice(shard.values(), position, None):
                if steps >= SCAN_STEPS:
                    self._place = index, position
                    self._looked += steps
                    return False
                steps += 1
                position += 1
                if not record.more:
                    continue
                lacks = missing(record)
                if lacks:
                    steps += SHORT_COUNTS_FOR
                    self.found += 1
                    self._take(record, desired_replicas(record) - lacks, departed_before_ms, nodes)
            position = 0
        self._looked += steps
        self.scanning = False
        self._not_before_ms = now_ms + max(PAUSE_MIN_MS, self._looked // RECORDS_PER_PAUSE_MS)
        if self._ripe_ms is not None and (self.due_ms is None or self._ripe_ms < self.due_ms):
            self.due_ms = self._ripe_ms
        return True

    def _take(self, record: ObjectRecord, has: int, departed_before_ms: int, nodes: int) -> None:
        if find_repairable_placeholder(record, departed_before_ms) is None:
            died_ms = min(s.died_ms for s, _ in record.extents() if not s.alive and s.segment_id)
            ripe_ms = died_ms + self.after_ms
            self._ripe_ms = ripe_ms if self._ripe_ms is None else min(self._ripe_ms, ripe_ms)
        elif has < nodes:
            if self._queued < QUEUE_MAX:
                self.enqueue(record)
            else:
                self.note_deferred = True

    def is_due(self, now_ms: int) -> bool:
        """Whether a pass is to begin. Postpones it until the pause after the last one is over."""
        if self.due_ms is None or self.due_ms > now_ms:
            return False
        if self.scanning or now_ms < self._not_before_ms:
            self.due_ms = max(now_ms + PAUSE_MIN_MS, self._not_before_ms)
            return False
        return True

    def plan_next(self, now_ms: int) -> None:
        """Plans another pass if objects remain, or copies were finished since the last one; not
        while objects wait or copies are in progress."""
        if not (self.note_deferred or self.done) or self.scanning or self._queued or self.copies:
            return
        if self.due_ms is None:
            if self.done:
                self._pause_ms = PAUSE_MIN_MS
            self.due_ms = now_ms + self._pause_ms
            self._pause_ms = min(2 * self._pause_ms, self.rules.pause_max_ms)
        self.note_deferred = False
        self.done = 0

    def enqueue(self, record: ObjectRecord) -> None:
        for segment, _ in record.extents():
            if segment.alive:
                queue = self._queues.get(segment.node.name)
                if queue is None:
                    queue = self._queues[segment.node.name] = deque()
                queue.append(record)
                self._queued += 1
                return

    def has_work_for(self, node: str) -> bool:
        """Whether there is anything to copy from that node."""
        return node in self._queues

    def next(self, node: str) -> ObjectRecord | None:
        """Removes the first object of this node. It may have changed since it was found."""
        queue = self._queues.get(node)
        if queue is None:
            return None
        record = queue.popleft()
        self._queued -= 1
        if not queue:
            del self._queues[node]
        return record

    # --- limits -------------------------------------------------------------------------------

    def may_begin(self, now_ms: int, size: int = 0) -> bool:
        """Whether one more copy, of ``size`` bytes, keeps the bounds."""
        rules = self.rules
        passed_ms = now_ms - self._refilled_ms
        if passed_ms > 0:
            self._refilled_ms = now_ms
            self._allowance += passed_ms * rules.bytes_per_s // 1000
            self._allowance = min(self._allowance, rules.bytes_max)
        return (
            self._allowance > 0
            and self.copies < rules.copies_max
            and (not self.copies or self.copied_bytes + size <= rules.bytes_max)
        )

    def begun(self, size: int) -> None:
        self.copies += 1
        self.copied_bytes += size
        self._allowance -= max(size, OBJECT_COUNTS_FOR)

    def ended(self, size: int) -> None:
        """Ends a copy, whatever its outcome: the next pass checks the object."""
        self.copies -= 1
        self.copied_bytes -= size
        self.note_deferred = True
