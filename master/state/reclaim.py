"""Wipes the headers of removed objects, and frees their extents one lease after the removal.

Evicted objects and abandoned puts are wiped too, before their extents are granted again. So a valid
header always belongs to an object, and implies its payload after a restart.

Readers of a removed object are not counted. Its extents are free when (a) the longest possible
lease has ended, and (b) the node has reported the wipe, so that no restart finds the object again.
A removal is acknowledged at (b), because readers reject a wiped header. A dead segment counts as
wiped at (a): tombstones forbid its objects when it joins again, but until then a client may read
there, if only the master cannot reach the node.

A node with capabilities zeroes extents before they are granted again (``segment.zeroes``), but not
while a client may use them. Extents that are free immediately are zeroed by their wipe request.
Others get a further request when the lease has ended, as do unclaimed bytes of returned memory. A
segment has one such request at a time, so that the following ones do not wait for gigabytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvstore import calls
from kvstore.calls import NO_VERSION, MasterWipe, Version
from kvstore.errors import KVStoreError
from kvstore.master.state.effects import Effect, SendReply, SendToNode
from kvstore.master.state.inventory import Tombstones
from kvstore.master.state.records import MountedSegment, Name, ObjectRecord, StaleExtents, Writer
from kvstore.memory.header import extent_bytes

WIPES_PER_ORDER = 1_024
"""Maximum number of extents per request: one step frees them in about 2 ms."""

ZERO_BYTES = 256 << 20
"""Bytes of one request that zeroes memory before it is free: 25 to 100 ms for a node."""


@dataclass(slots=True, eq=False)
class WipeRequest:
    """The extents of one wipe request, all on one segment: pending free."""

    wipe_seq: int
    segment: MountedSegment
    free_at_ms: int
    removals: list[PendingRemoval] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    counters: list[int] = field(default_factory=list)
    zeroed: list[int] = field(default_factory=list)
    """Bytes to zero at each offset; empty on a segment that does not zero."""
    forbidden: list[Version] = field(default_factory=list)
    """Versions that get a tombstone if the segment dies before the wipe."""
    wiped: bool = False
    ended: bool = False
    """Whether the last possible lease has ended."""
    removal_watermark: Version = NO_VERSION
    """Removal watermark to store after the wipe."""
    writers: dict[Writer, None] = field(default_factory=dict)
    """Connections that the node must close before the wipe."""
    ahead: bool = False
    """Whether the objects were evicted ahead of demand."""
    released: bool = False
    """Whether the allocator or the quarantine has the extents."""

    def count(self) -> None:
        """Add extents that are not released yet to ``reclaim_bytes``."""
        self.segment.reclaim_bytes += sum(self.lengths)

    def add(self, removals: Iterable[PendingRemoval]) -> None:
        """Make these removals wait for this request."""
        known = set(self.removals)
        new = [removal for removal in removals if removal not in known]
        self.removals += new
        for removal in new:
            removal.wipe_seqs += 1

    def free(self) -> None:
        self.segment.reclaim_bytes -= sum(self.lengths)
        if self.segment.alive:
            for offset, length in zip(self.offsets, self.lengths, strict=True):
                self.segment.allocator.free(offset, length)

    def to_message(self) -> MasterWipe:
        uuid = self.segment.offer.uuid
        return MasterWipe(
            self.wipe_seq,
            uuid,
            self.offsets,
            self.epochs,
            self.counters,
            self.removal_watermark,
            [client for client, _ in self.writers],
            [connection for _, connection in self.writers],
            self.zeroed if any(self.zeroed) else (),
        )


@dataclass(slots=True, eq=False)
class PendingRemoval:
    """A reply that waits until its last wipe request is done."""

    reply_id: int
    reply: calls.Reply
    wipe_seqs: int = 0


class SpaceReclaimer:
    """Keeps the extents of removed objects until they are free, and their wipe requests."""

    def __init__(self, tombstones: Tombstones) -> None:
        self._tombstones = tombstones
        self._by_end: deque[WipeRequest] = deque()
        self._unwiped: dict[int, WipeRequest] = {}
        self._unwiped_of: dict[Name, list[WipeRequest]] = {}
        self._unclean: dict[MountedSegment, dict[int, WipeRequest]] = {}
        """Pending requests with released extents, by segment and number."""
        self._still_read: deque[tuple[Version, WipeRequest]] = deque()
        """Segments that died within the last lease; see ``wait_for_readers``."""
        self._held: dict[MountedSegment, WipeRequest] = {}
        """Segments with an incomplete inventory, each with a placeholder request."""
        self._unzeroed: dict[MountedSegment, deque[tuple[int, int]]] = {}
        """Offset and length of memory that is free once it is zeroed."""
        self._zeroing: dict[MountedSegment, int] = {}
        """The pending request that zeroes such memory."""
        self.last_order = 0
        """Number of the last wipe request; 0: none."""
        self._ordered: deque[tuple[int, int]] = deque()
        """Times of calls of ``unanswered``, and the last request at each."""

    @property
    def with_wipe_seqs(self) -> bool:
        """Whether there are pending requests of objects."""
        return bool(self._unwiped_of)

    def for_objects(self, names: Iterable[Name]) -> list[WipeRequest]:
        """Return the pending requests of these objects."""
        wipings = {
            wiping.wipe_seq: wiping for name in names for wiping in self._unwiped_of.get(name, ())
        }
        return list(wipings.values())

    def for_namespace(self, namespace: str) -> list[WipeRequest]:
        """Return the pending requests of the namespace; "": of any."""
        return [
            wiping
            for wiping in self._unwiped.values()
            if not namespace or namespace in wiping.namespaces
        ]

    def wipe(
        self,
        gone: Iterable[StaleExtents],
        free_at_ms: int,
        ticket: int,
        reply: calls.Reply,
        earlier: Sequence[WipeRequest],
    ) -> tuple[list[Effect], bool]:
        """Request wipes of headers, and send ``reply`` when these and the ``earlier`` requests are
        done.

        ``free_at_ms``: when all leases of the usual length have ended. A request with a longer
        lease (on a committed allocation) delays the following ones, which is simpler than a heap.
        Return the effects, and whether there is anything to wait for.
        """
        removal = PendingRemoval(ticket, reply)
        wipings = self._new_wipings(gone, free_at_ms, kept=True)
        self._by_end.extend(wipings)
        for wiping in wipings:
            wiping.count()
        for wiping in dict.fromkeys((*wipings, *earlier)):
            wiping.removals.append(removal)
            removal.wipe_seqs += 1
        return [effect for wiping in wipings for effect in _send(wiping)], removal.wipe_seqs > 0

    def clean(self, gone: Iterable[StaleExtents]) -> list[Effect]:
        """Request wipes of extents that are free, or freed elsewhere."""
        effects: list[Effect] = []
        for wiping in self._new_wipings(gone, 0):
            wiping.ended = wiping.released = True
            self._unclean.setdefault(wiping.segment, {})[wiping.wipe_seq] = wiping
            effects += _send(wiping)
        return effects

    def wait_for_readers(self, segment: MountedSegment, newest: Version, until_ms: int) -> None:
        """Track a dead segment, on which clients may read leased objects until ``until_ms``.

        Args:
            newest: upper bound of the versions stored so far.
            until_ms: not earlier than in any previous call.
        """
        wiping = self._new(segment, until_ms)
        self._still_read.append((newest, wiping))

    def still_read(self, record: ObjectRecord | None) -> list[WipeRequest]:
        """Return placeholder requests of dead segments on which clients may still read an earlier
        version of the object, or one that this master does not know any more."""
        if not self._still_read:
            return []
        if record is None or not record.complete:
            return [wiping for _, wiping in self._still_read]
        version = record.epoch, record.counter
        on = {segment for segment, _ in record.extents()}
        return [g for newest, g in self._still_read if version > newest or g.segment in on]

    def add_reader(self, readers: Iterable[WipeRequest], name: Name) -> None:
        """Record that readers of these requests may read a removed version (``being_read``)."""
        for wiping in readers:
            wipings = self._unwiped_of.setdefault(name, [])
            if wiping not in wipings:
                wipings.append(wiping)
                wiping.names.append(name)

    def being_read(self, name: Name) -> list[WipeRequest]:
        """Return pending requests of ended versions that may still have leases."""
        wipings = self._unwiped_of.get(name)
        return [wiping for wiping in wipings if not wiping.ended] if wipings else []

    def keep_removal_watermark(self, segment: MountedSegment, mark: Version) -> list[Effect]:
        """Request the node to store the watermark, after all earlier requests."""
        wiping = self._new(segment)
        wiping.removal_watermark = mark
        wiping.ended = wiping.released = True
        self._unclean.setdefault(segment, {})[wiping.wipe_seq] = wiping
        return _send(wiping)

    def unmarked(self) -> list[WipeRequest]:
        """Return the pending requests to store a watermark."""
        return [
            wiping
            for wipings in self._unclean.values()
            for wiping in wipings.values()
            if wiping.removal_watermark != NO_VERSION
        ]

    def clean_ahead(self, gone: Iterable[StaleExtents]) -> list[Effect]:
        """Request wipes and free the extents afterwards."""
        wipings = self._new_wipings(gone, 0)
        for wiping in wipings:
            wiping.ended = wiping.ahead = True
            wiping.count()
        return [effect for wiping in wipings for effect in _send(wiping)]

    def pending_wipes(self, segments: Iterable[MountedSegment]) -> list[WipeRequest]:
        """Return the requests to complete before these segments' free extents are written."""
        if not self._unclean:
            return []
        return [
            wiping
            for segment in dict.fromkeys(segments)
            for wiping in self._unclean.get(segment, {}).values()
        ]

    def free_unclaimed(self, segment: MountedSegment, offset: int, length: int) -> None:
        """Free memory that no object claims, immediately or once zeroed."""
        if segment.zeroes:
            segment.reclaim_bytes += length
            self._unzeroed.setdefault(segment, deque()).append((offset, length))
            segment.unready = True
        else:
            segment.allocator.free(offset, length)

    def request_zeroing(self, now_ms: int) -> list[Effect]:
        """Request zeroing of more memory, on each segment without a pending request for it."""
        effects: list[Effect] = []
        for segment, waiting in list(self._unzeroed.items()):
            if segment in self._zeroing or segment.usable_at_ms > now_ms:
                continue
            wiping = self._new(segment)
            wiping.ended = True
            room = ZERO_BYTES
            while waiting and room and len(wiping.offsets) < WIPES_PER_ORDER:
                offset, length = waiting.popleft()
                if length > room:
                    waiting.appendleft((offset + room, length - room))
                    length = room
                room -= length
                wiping.offsets.append(offset)
                wiping.lengths.append(length)
                wiping.zeroed.append(length)
                wiping.epochs.append(0)  # no header has this version
                wiping.counters.append(0)
            if not waiting:
                del self._unzeroed[segment]
            self._zeroing[segment] = wiping.wipe_seq
            effects += _send(wiping)
        return effects

    def _return_extents(self, wiping: WipeRequest) -> None:
        """Free the extents of a done and ended request, or have them zeroed first."""
        segment = wiping.segment
        if not segment.zeroes or not segment.alive or any(wiping.zeroed):
            wiping.free()
        elif wiping.offsets:
            waiting = self._unzeroed.setdefault(segment, deque())
            waiting.extend(zip(wiping.offsets, wiping.lengths, strict=True))

    def _new(self, segment: MountedSegment, free_at_ms: int = 0) -> WipeRequest:
        self.last_order += 1
        wiping = self._unwiped[self.last_order] = WipeRequest(self.last_order, segment, free_at_ms)
        return wiping

    def _new_wipings(
        self, gone: Iterable[StaleExtents], free_at_ms: int, *, kept: bool = False
    ) -> list[WipeRequest]:
        """``kept``: see ``StaleExtents``, for all of them."""
        wipings: list[WipeRequest] = []
        open_wipings: dict[MountedSegment, WipeRequest] = {}
        for residue in gone:
            length = extent_bytes(residue.size)
            version = Version(residue.epoch, residue.counter)
            for segment, offset in residue.extents:
                if not segment.alive:
                    if residue.forbid:
                        self._tombstones.add_version(version)
                    continue
                wiping = open_wipings.get(segment)
                if wiping is None or len(wiping.offsets) == WIPES_PER_ORDER:
                    wiping = open_wipings[segment] = self._new(segment, free_at_ms)
                    wipings.append(wiping)
                if residue.name is not None:
                    wiping.names.append(residue.name)
                    wiping.namespaces.add(residue.name[0])
                    self._unwiped_of.setdefault(residue.name, []).append(wiping)
                wiping.free_at_ms = max(wiping.free_at_ms, residue.lease_until_ms)
                wiping.offsets.append(offset)
                wiping.lengths.append(length)
                wiping.epochs.append(residue.epoch)
                wiping.counters.append(residue.counter)
                if segment.zeroes:
                    wiping.zeroed.append(0 if kept or residue.kept else length)
                if residue.forbid:
                    wiping.forbidden.append(version)
                wiping.writers.update(dict.fromkeys(residue.writers))
        return wipings

    def hold_removals(self, segment: MountedSegment) -> None:
        """Make removals wait for this segment until ``release_held``."""
        self._held[segment] = WipeRequest(0, segment, 0)

    def held_removals(self) -> list[WipeRequest]:
        """Return a placeholder request for each segment that removals must wait for."""
        return list(self._held.values())

    def release_held(self, segment: MountedSegment) -> list[Effect]:
        """Make the removals that waited for this segment wait for its pending requests instead."""
        held = self._held.pop(segment)
        for wiping in self.pending_wipes((segment,)):
            wiping.add(held.removals)
        for removal in held.removals:
            removal.wipe_seqs -= 1
        return [
            SendReply(done.reply_id, done.reply) for done in held.removals if not done.wipe_seqs
        ]

    def wiped(self, order: int) -> list[Effect]:
        """Complete a request that the node has done, or whose segment is dead."""
        wiping = self._unwiped.pop(order, None)
        if wiping is None:
            return []
        wiping.wiped = True
        if wiping.released:
            unclean = self._unclean[wiping.segment]
            del unclean[order]
            if not unclean:
                del self._unclean[wiping.segment]
        elif wiping.ended:
            self._return_extents(wiping)
        if self._zeroing.get(wiping.segment) == order:
            del self._zeroing[wiping.segment]
            wiping.segment.unready = False
        if wiping.ahead:
            wiping.segment.wiping_bytes -= sum(wiping.lengths)
        for name in wiping.names:
            wipings = self._unwiped_of[name]
            wipings.remove(wiping)
            if not wipings:
                del self._unwiped_of[name]
        for removal in wiping.removals:
            removal.wipe_seqs -= 1
        return [
            SendReply(done.reply_id, done.reply) for done in wiping.removals if not done.wipe_seqs
        ]

    def waiting_for(self, segment: MountedSegment) -> list[PendingRemoval]:
        """Return the removals that wait for requests or the inventory of this segment."""
        wipings = self._on(segment)
        if segment in self._held:
            wipings.append(self._held[segment])
        return list(dict.fromkeys(removal for wiping in wipings for removal in wiping.removals))

    def wait_for_other_segments(
        self, removals: Sequence[PendingRemoval], lost: MountedSegment
    ) -> None:
        """Make removals wait for watermarks and inventories of segments except ``lost``."""
        for wiping in (*self.held_removals(), *self.unmarked()):
            if wiping.segment is not lost:
                wiping.add(removals)

    def fail(self, removals: Sequence[PendingRemoval], error: KVStoreError) -> list[Effect]:
        """Reply to these removals with an error."""
        failed = set(removals)
        for wiping in (*self._unwiped.values(), *self._held.values()):
            wiping.removals = [each for each in wiping.removals if each not in failed]
        return [SendReply(removal.reply_id, error) for removal in removals]

    def segment_of(self, order: int) -> MountedSegment | None:
        wiping = self._unwiped.get(order)
        return None if wiping is None else wiping.segment

    def unanswered(self, now_ms: int, patience_ms: int) -> list[MountedSegment]:
        """Return live segments with a request pending for ``patience_ms``, to one call interval."""
        ordered = self._ordered
        if not ordered or ordered[-1][1] != self.last_order:
            ordered.append((now_ms, self.last_order))
        while len(ordered) > 1 and ordered[1][0] + patience_ms <= now_ms:
            ordered.popleft()
        since_ms, last = ordered[0]
        if since_ms + patience_ms > now_ms:
            return []
        late = takewhile(lambda wiping: wiping.wipe_seq <= last, self._unwiped.values())
        return [wiping.segment for wiping in late if wiping.segment.alive]

    def send_again(self, segment: MountedSegment) -> list[Effect]:
        """Send again the requests that a node may have missed while its stream was broken."""
        return [effect for wiping in self._on(segment) for effect in _send(wiping)]

    def segment_died(self, segment: MountedSegment) -> list[Effect]:
        unwiped = self._on(segment)
        for wiping in unwiped:
            for version in wiping.forbidden:
                self._tombstones.add_version(version)
        ended = [wiping for wiping in unwiped if wiping.ended]
        self._unzeroed.pop(segment, None)
        return [effect for wiping in ended for effect in self.wiped(wiping.wipe_seq)]

    def end_next(self, now_ms: int) -> tuple[list[Effect], bool]:
        """Free one request's extents after its leases. Return whether there was one."""
        if not self._by_end or self._by_end[0].free_at_ms > now_ms:
            return [], False
        wiping = self._by_end.popleft()
        wiping.ended = True
        if wiping.wiped:
            self._return_extents(wiping)
        return ([] if wiping.segment.alive else self.wiped(wiping.wipe_seq)), True

    def end_reading(self, now_ms: int) -> list[Effect]:
        """Stop waiting for readers of segments that died long enough ago."""
        effects: list[Effect] = []
        while self._still_read and self._still_read[0][1].free_at_ms <= now_ms:
            effects += self.wiped(self._still_read.popleft()[1].wipe_seq)
        return effects

    def _on(self, segment: MountedSegment) -> list[WipeRequest]:
        return [wiping for wiping in self._unwiped.values() if wiping.segment is segment]


def _send(wiping: WipeRequest) -> list[Effect]:
    session = wiping.segment.node.session
    return [] if session is None else [SendToNode(session, wiping.to_message())]
