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

WIPES_PER_REQUEST = 1_024
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
    removal_watermark: Version = NO_VERSION
    """Removal watermark to store after the wipe."""
    writers: dict[Writer, None] = field(default_factory=dict)
    ahead: bool = False
    """Whether the objects were evicted ahead of demand."""
    released: bool = False
    """Whether the allocator or the quarantine has the extents."""

    def count(self) -> None:
        """Add extents that are not released yet to ``reclaim_bytes``."""
        self.segment.reclaim_bytes += sum(self.lengths)

    def add(self, removals: Iterable[PendingRemoval]) -> None:
        known = set(self.removals)
        new = [removal for removal in removals if removal not in known]
        self.removals += new
        for removal in new:
            removal.unfinished_wipes += 1

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
    unfinished_wipes: int = 0


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
        self._placeholders: dict[MountedSegment, WipeRequest] = {}
        """Segments with an incomplete inventory, each with a placeholder request."""
        self._unzeroed: dict[MountedSegment, deque[tuple[int, int]]] = {}
        """Offset and length of memory that is free once it is zeroed."""
        self._zeroing: dict[MountedSegment, int] = {}
        """The pending request that zeroes such memory."""
        self.last_order = 0
        """Number of the last wipe request; 0: none."""
        self._checkpoints: deque[tuple[int, int]] = deque()
        """Times of calls of ``unanswered``, and the last request at each."""

    @property
    def has_object_wipes(self) -> bool:
        """Whether there are pending requests of objects."""
        return bool(self._unwiped_of)

    def for_objects(self, names: Iterable[Name]) -> list[WipeRequest]:
        requests = {
            request.wipe_seq: request
            for name in names
            for request in self._unwiped_of.get(name, ())
        }
        return list(requests.values())

    def for_namespace(self, namespace: str) -> list[WipeRequest]:
        """Return the pending requests of the namespace; "": of any."""
        return [
            request
            for request in self._unwiped.values()
            if not namespace or namespace in request.namespaces
        ]

    def wipe(
        self,
        stale_extents: Iterable[StaleExtents],
        free_at_ms: int,
        reply_id: int,
        reply: calls.Reply,
        earlier: Sequence[WipeRequest],
    ) -> tuple[list[Effect], bool]:
        """Request wipes of headers, and send ``reply`` when these and the ``earlier`` requests are
        done.

        ``free_at_ms``: when all leases of the usual length have ended. A request with a longer
        lease (on a committed allocation) delays the following ones, which is simpler than a heap.
        Return the effects, and whether there is anything to wait for.
        """
        removal = PendingRemoval(reply_id, reply)
        requests = self._new_requests(stale_extents, free_at_ms, kept=True)
        self._by_end.extend(requests)
        for request in requests:
            request.count()
        for request in dict.fromkeys((*requests, *earlier)):
            request.removals.append(removal)
            removal.unfinished_wipes += 1
        return [
            effect for request in requests for effect in _send(request)
        ], removal.unfinished_wipes > 0

    def clean(self, stale_extents: Iterable[StaleExtents]) -> list[Effect]:
        """Request wipes of extents that are free, or freed elsewhere."""
        effects: list[Effect] = []
        for request in self._new_requests(stale_extents, 0):
            request.ended = request.released = True
            self._unclean.setdefault(request.segment, {})[request.wipe_seq] = request
            effects += _send(request)
        return effects

    def wait_for_readers(self, segment: MountedSegment, newest: Version, until_ms: int) -> None:
        """Track a dead segment, on which clients may read leased objects until ``until_ms``.

        Args:
            newest: upper bound of the versions stored so far.
            until_ms: not earlier than in any previous call.
        """
        request = self._new(segment, until_ms)
        self._still_read.append((newest, request))

    def still_read(self, record: ObjectRecord | None) -> list[WipeRequest]:
        """Return placeholder requests of dead segments on which clients may still read an earlier
        version of the object, or one that this master does not know any more."""
        if not self._still_read:
            return []
        if record is None or not record.complete:
            return [request for _, request in self._still_read]
        version = record.epoch, record.counter
        on = {segment for segment, _ in record.extents()}
        return [g for newest, g in self._still_read if version > newest or g.segment in on]

    def add_reader(self, readers: Iterable[WipeRequest], name: Name) -> None:
        """Record that readers of these requests may read a removed version (``being_read``)."""
        for request in readers:
            requests = self._unwiped_of.setdefault(name, [])
            if request not in requests:
                requests.append(request)
                request.names.append(name)

    def being_read(self, name: Name) -> list[WipeRequest]:
        """Return pending requests of ended versions that may still have leases."""
        requests = self._unwiped_of.get(name)
        return [request for request in requests if not request.ended] if requests else []

    def keep_removal_watermark(self, segment: MountedSegment, watermark: Version) -> list[Effect]:
        """Request the node to store the watermark, after all earlier requests."""
        request = self._new(segment)
        request.removal_watermark = watermark
        request.ended = request.released = True
        self._unclean.setdefault(segment, {})[request.wipe_seq] = request
        return _send(request)

    def unmarked(self) -> list[WipeRequest]:
        """Return the pending requests to store a watermark."""
        return [
            request
            for requests in self._unclean.values()
            for request in requests.values()
            if request.removal_watermark != NO_VERSION
        ]

    def clean_ahead(self, stale_extents: Iterable[StaleExtents]) -> list[Effect]:
        """Request wipes and free the extents afterwards."""
        requests = self._new_requests(stale_extents, 0)
        for request in requests:
            request.ended = request.ahead = True
            request.count()
        return [effect for request in requests for effect in _send(request)]

    def pending_wipes(self, segments: Iterable[MountedSegment]) -> list[WipeRequest]:
        """Return the requests to complete before these segments' free extents are written."""
        if not self._unclean:
            return []
        return [
            request
            for segment in dict.fromkeys(segments)
            for request in self._unclean.get(segment, {}).values()
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
            request = self._new(segment)
            request.ended = True
            budget = ZERO_BYTES
            while waiting and budget and len(request.offsets) < WIPES_PER_REQUEST:
                offset, length = waiting.popleft()
                if length > budget:
                    waiting.appendleft((offset + budget, length - budget))
                    length = budget
                budget -= length
                request.offsets.append(offset)
                request.lengths.append(length)
                request.zeroed.append(length)
                request.epochs.append(0)  # no header has this version
                request.counters.append(0)
            if not waiting:
                del self._unzeroed[segment]
            self._zeroing[segment] = request.wipe_seq
            effects += _send(request)
        return effects

    def _return_extents(self, request: WipeRequest) -> None:
        """Free the extents of a done and ended request, or have them zeroed first."""
        segment = request.segment
        if not segment.zeroes or not segment.alive or any(request.zeroed):
            request.free()
        elif request.offsets:
            waiting = self._unzeroed.setdefault(segment, deque())
            waiting.extend(zip(request.offsets, request.lengths, strict=True))

    def _new(self, segment: MountedSegment, free_at_ms: int = 0) -> WipeRequest:
        self.last_order += 1
        request = self._unwiped[self.last_order] = WipeRequest(self.last_order, segment, free_at_ms)
        return request

    def _new_requests(
        self, stale_extents: Iterable[StaleExtents], free_at_ms: int, *, kept: bool = False
    ) -> list[WipeRequest]:
        """``kept``: see ``StaleExtents``, for all of them."""
        requests: list[WipeRequest] = []
        open_requests: dict[MountedSegment, WipeRequest] = {}
        for stale in stale_extents:
            version = Version(stale.epoch, stale.counter)
            for segment, offset in stale.extents:
                length = segment.extent_bytes(stale.size)
                if not segment.alive:
                    if stale.forbid:
                        self._tombstones.add_version(version)
                    continue
                request = open_requests.get(segment)
                if request is None or len(request.offsets) == WIPES_PER_REQUEST:
                    request = open_requests[segment] = self._new(segment, free_at_ms)
                    requests.append(request)
                if stale.name is not None:
                    request.names.append(stale.name)
                    request.namespaces.add(stale.name[0])
                    self._unwiped_of.setdefault(stale.name, []).append(request)
                request.free_at_ms = max(request.free_at_ms, stale.lease_until_ms)
                request.offsets.append(offset)
                request.lengths.append(length)
                request.epochs.append(stale.epoch)
                request.counters.append(stale.counter)
                if segment.zeroes:
                    request.zeroed.append(0 if kept or stale.kept else length)
                if stale.forbid:
                    request.forbidden.append(version)
                request.writers.update(dict.fromkeys(stale.writers))
        return requests

    def hold_removals(self, segment: MountedSegment) -> None:
        """Make removals wait for this segment until ``release_held``."""
        self._placeholders[segment] = WipeRequest(0, segment, 0)

    def held_removals(self) -> list[WipeRequest]:
        """Return a placeholder request for each segment that removals must wait for."""
        return list(self._placeholders.values())

    def release_held(self, segment: MountedSegment) -> list[Effect]:
        """Make the removals that waited for this segment wait for its pending requests instead."""
        placeholder = self._placeholders.pop(segment)
        for request in self.pending_wipes((segment,)):
            request.add(placeholder.removals)
        for removal in placeholder.removals:
            removal.unfinished_wipes -= 1
        return [
            SendReply(done.reply_id, done.reply)
            for done in placeholder.removals
            if not done.unfinished_wipes
        ]

    def wiped(self, wipe_seq: int) -> list[Effect]:
        """Complete a request that the node has done, or whose segment is dead."""
        request = self._unwiped.pop(wipe_seq, None)
        if request is None:
            return []
        request.wiped = True
        if request.released:
            pending = self._unclean[request.segment]
            del pending[wipe_seq]
            if not pending:
                del self._unclean[request.segment]
        elif request.ended:
            self._return_extents(request)
        if self._zeroing.get(request.segment) == wipe_seq:
            del self._zeroing[request.segment]
            request.segment.unready = False
        if request.ahead:
            request.segment.wiping_bytes -= sum(request.lengths)
        for name in request.names:
            requests = self._unwiped_of[name]
            requests.remove(request)
            if not requests:
                del self._unwiped_of[name]
        for removal in request.removals:
            removal.unfinished_wipes -= 1
        return [
            SendReply(done.reply_id, done.reply)
            for done in request.removals
            if not done.unfinished_wipes
        ]

    def waiting_for(self, segment: MountedSegment) -> list[PendingRemoval]:
        """Return the removals that wait for requests or the inventory of this segment."""
        requests = self._pending_on(segment)
        if segment in self._placeholders:
            requests.append(self._placeholders[segment])
        return list(dict.fromkeys(removal for request in requests for removal in request.removals))

    def wait_for_other_segments(
        self, removals: Sequence[PendingRemoval], lost: MountedSegment
    ) -> None:
        """Make removals wait for watermarks and inventories of segments except ``lost``."""
        for request in (*self.held_removals(), *self.unmarked()):
            if request.segment is not lost:
                request.add(removals)

    def fail(self, removals: Sequence[PendingRemoval], error: KVStoreError) -> list[Effect]:
        failed = set(removals)
        for request in (*self._unwiped.values(), *self._placeholders.values()):
            request.removals = [removal for removal in request.removals if removal not in failed]
        return [SendReply(removal.reply_id, error) for removal in removals]

    def segment_of(self, wipe_seq: int) -> MountedSegment | None:
        request = self._unwiped.get(wipe_seq)
        return None if request is None else request.segment

    def unanswered(self, now_ms: int, patience_ms: int) -> list[MountedSegment]:
        """Return live segments with a request pending for ``patience_ms``, to one call interval."""
        checkpoints = self._checkpoints
        if not checkpoints or checkpoints[-1][1] != self.last_order:
            checkpoints.append((now_ms, self.last_order))
        while len(checkpoints) > 1 and checkpoints[1][0] + patience_ms <= now_ms:
            checkpoints.popleft()
        since_ms, last = checkpoints[0]
        if since_ms + patience_ms > now_ms:
            return []
        overdue = takewhile(lambda request: request.wipe_seq <= last, self._unwiped.values())
        return [request.segment for request in overdue if request.segment.alive]

    def send_again(self, segment: MountedSegment) -> list[Effect]:
        return [effect for request in self._pending_on(segment) for effect in _send(request)]

    def segment_died(self, segment: MountedSegment) -> list[Effect]:
        unwiped = self._pending_on(segment)
        for request in unwiped:
            for version in request.forbidden:
                self._tombstones.add_version(version)
        ended = [request for request in unwiped if request.ended]
        self._unzeroed.pop(segment, None)
        return [effect for request in ended for effect in self.wiped(request.wipe_seq)]

    def end_next(self, now_ms: int) -> tuple[list[Effect], bool]:
        """Free one request's extents after its leases. Return whether there was one."""
        if not self._by_end or self._by_end[0].free_at_ms > now_ms:
            return [], False
        request = self._by_end.popleft()
        request.ended = True
        if request.wiped:
            self._return_extents(request)
        return ([] if request.segment.alive else self.wiped(request.wipe_seq)), True

    def end_reading(self, now_ms: int) -> list[Effect]:
        """Stop waiting for readers of segments that died long enough ago."""
        effects: list[Effect] = []
        while self._still_read and self._still_read[0][1].free_at_ms <= now_ms:
            effects += self.wiped(self._still_read.popleft()[1].wipe_seq)
        return effects

    def _pending_on(self, segment: MountedSegment) -> list[WipeRequest]:
        return [request for request in self._unwiped.values() if request.segment is segment]


def _send(request: WipeRequest) -> list[Effect]:
    session = request.segment.node.session
    return [] if session is None else [SendToNode(session, request.to_message())]
