"""The state that several parts of the master change: memory and forest, nodes, puts in progress,
wipe requests, and the effects for the shell. Each part owns the fields of its own subject."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvstore import calls
from kvstore.calls import Placements, Version
from kvstore.calls.tenants import TenantRule
from kvstore.limits import Key, Namespace
from kvstore.master.state import liveness
from kvstore.master.state.background_jobs import SERVE, BackgroundJobs
from kvstore.master.state.effects import DeferredReply, Effect
from kvstore.master.state.eviction import NewPolicy
from kvstore.master.state.grants import PendingGrants, WaitingPut
from kvstore.master.state.inventory import Tombstones
from kvstore.master.state.membership import Membership
from kvstore.master.state.memory_pool import MemoryPool
from kvstore.master.state.reclaim import SpaceReclaimer, WipeRequest
from kvstore.master.state.records import Extent, ObjectRecord, StaleExtents
from kvstore.master.state.rules import MasterRules

AnyReply = TypeVar("AnyReply", bound=calls.Reply)

_MISS = ObjectRecord(Namespace(""), Key(b""))
"""Stands for an object that is not stored; never changed."""


class StateContext:
    """See the module."""

    def __init__(
        self,
        *,
        epoch: int,
        epoch_max: int,
        version: str,
        cluster: str,
        rules: MasterRules,
        policy: NewPolicy,
        started_ms: int,
        tenants: Sequence[TenantRule] | None = None,
    ) -> None:
        self.epoch = epoch
        self._epoch_max = epoch_max
        self.version = version
        self.cluster = cluster
        self.rules = rules
        self.started_ms = started_ms
        self.effects: list[Effect] = []
        self.changing = False
        """Set by a step before its first change, cleared by the caller before each step. While it
        is set, an exception other than ``KVStoreError`` leaves the state half changed."""
        self.jobs = BackgroundJobs()
        self.pool = MemoryPool(self.jobs, policy, tenants)
        self.forest = self.pool.forest
        self.disks = self.forest.disks
        self.counters = self.pool.counters
        self.traffic = self.pool.traffic
        self.membership = Membership(
            epoch=epoch,
            rules=rules,
            cluster=cluster,
        )
        self.pending = PendingGrants()
        self.pending.tenants = self.pool.tenants
        self.waiting: deque[WaitingPut] = deque()
        """Puts that wait for space, in their order."""
        self.rooms = 0
        """Counts the times that space was freed while puts waited."""
        self.tombstones = Tombstones()
        self.reclaim = SpaceReclaimer(self.tombstones)
        self._last_reply_id = 0

    # --- epochs -------------------------------------------------------------------------------

    def is_later(self, epoch: int) -> bool:
        """Whether a node that reports this epoch has joined a later master. An epoch above
        ``epoch_max`` is not plausible, and ends no term."""
        return self.epoch < epoch <= self._epoch_max

    # --- effects ------------------------------------------------------------------------------

    def effect(self, effect: Effect) -> None:
        self.effects.append(effect)

    def space_freed(self) -> None:
        """Has waiting puts tried again, in a step of their own, after memory was freed, mounted or
        made eligible."""
        if self.waiting:
            self.jobs.due |= SERVE
            self.rooms += 1

    def new_reply_id(self) -> int:
        self._last_reply_id += 1
        return self._last_reply_id

    # --- wiping -------------------------------------------------------------------------------

    def reply_when_wiped(
        self,
        now_ms: int,
        stale: list[StaleExtents],
        reply: AnyReply,
        earlier: Sequence[WipeRequest] = (),
    ) -> AnyReply | DeferredReply:
        """Replies once the headers of ``stale`` are wiped and the ``earlier`` requests are done.
        The extents of ``stale`` are free one lease later."""
        reply_id = self.new_reply_id()
        free_at_ms = now_ms + self.rules.lease_ms
        effects, waits = self.reclaim.wipe(stale, free_at_ms, reply_id, reply, earlier)
        self.effects += effects
        return DeferredReply(reply_id) if waits else reply

    def wipe(self, given_up: Sequence[StaleExtents]) -> None:
        """Wipes what the writers of versions that are never stored may have written."""
        self.effects += self.reclaim.clean(given_up)

    def wipe_ahead(self, stale: StaleExtents) -> None:
        """Wipes extents that are free once that is done."""
        for segment, _ in stale.extents:
            if segment.alive:
                segment.wiping_bytes += segment.extent_bytes(stale.size)
        self.effects += self.reclaim.clean_ahead([stale])

    def pending_wipes(self, segment_ids: Iterable[int]) -> list[WipeRequest]:
        """The wipe requests that must be done before grants on these segments are sent."""
        segments = self.pool.segments
        unclean = self.reclaim.pending_wipes([segments[i] for i in dict.fromkeys(segment_ids)])
        return [wiping for wiping in unclean if wiping.offsets]  # watermarks concern no writer

    def wipes_before_grant(
        self, request: calls.PutStart | calls.Allocate, grants: calls.Grants
    ) -> list[WipeRequest]:
        """The wipe requests that must be done before these grants are sent: ``pending_wipes``, and,
        for each stored object, those of a removed version that clients may still read."""
        requests = self.pending_wipes(grants.segments)
        if isinstance(request, calls.PutStart) and self.reclaim.has_object_wipes:
            for key, outcome in zip(request.keys, grants.outcomes, strict=True):
                if outcome == calls.PutOutcome.FOUND:
                    requests += self.reclaim.being_read((request.namespace, key))
        return requests

    # --- versions -----------------------------------------------------------------------------

    @property
    def newest_granted(self) -> Version:
        """The newest version that was granted: none is newer until the next put begins."""
        return Version(self.epoch, self.pending.last_token)

    @property
    def newest_stored(self) -> Version:
        """No version up to this one will be stored any more. (A put in progress may have been
        granted before puts that have ended, and may still replace their objects.)"""
        first = self.pending.first_token()
        return self.newest_granted if first is None else Version(self.epoch, first - 1)

    # --- objects ------------------------------------------------------------------------------

    def adopt(self, now_ms: int, record: ObjectRecord, above: ObjectRecord | None) -> None:
        """Gives a record that is not complete its place in the forest.

        Raises:
            InvalidArgumentError: the objects would form a ring.
        """
        try:
            if record.lost:
                self.pool.take_extents(record)
            if record.segment is None:
                self.pool.link(record, above, now_ms + self.rules.lease_ms)
        finally:
            if above is not None and not above.children:
                self.pool.delete_if_unused(above)  # created for this record, and not needed

    def lease(self, namespace: Namespace, key: Key, until_ms: int) -> None:
        """Keeps the bytes of an object, if it is stored, for a client that got its location."""
        record = self.forest.get(namespace, key)
        if record is not None and record.complete:
            record.keep_until(until_ms)

    def add_tombstone(self, namespace: str, key: Key | None, but: Version | None = None) -> None:
        """Forbids that a version up to now, except ``but``, returns with the memory of a departed
        node. ``key`` None: of the whole namespace; ``namespace`` "": of all namespaces."""
        self.tombstones.add(namespace, key, self.newest_granted, but=but)

    def clear_tombstone(self, record: ObjectRecord, version: Version) -> None:
        """Lets the version that a put has stored return with its node, although the key was removed
        during the put."""
        name = record.namespace, record.key
        if self.tombstones.forbids(name, version, self.tombstones.made):
            self.add_tombstone(*name, but=version)

    def placements(self, records: Sequence[ObjectRecord | None], now_ms: int) -> Placements:
        """The locations of these records, which are complete or None, as columns. Replicas on
        suspect nodes come last."""
        rows = [_MISS if record is None else record for record in records]
        found = [record for record in rows if record is not _MISS]
        if any([record.more for record in found]):  # noqa: C419  # a third of the time
            extents = [self._extents_to_read(record, now_ms) for record in found]
            flat = [extent for of_record in extents for extent in of_record]
            segments = [segment.segment_id for segment, _ in flat]
            offsets = [offset for _, offset in flat]
            counts = iter(map(len, extents))
            replicas = [0 if record is None else next(counts) for record in records]
        else:
            segments = [r.segment.segment_id for r in found if r.segment is not None]
            offsets = [record.offset for record in found]
            replicas = [0 if record is _MISS else 1 for record in rows]
        return Placements(
            sizes=[record.size for record in rows],
            epochs=[record.epoch for record in rows],
            counters=[record.counter for record in rows],
            replicas=replicas,
            segments=segments,
            offsets=offsets,
        )

    def _extents_to_read(self, record: ObjectRecord, now_ms: int) -> list[Extent]:
        alive = [extent for extent in record.extents() if extent[0].alive]
        alive.sort(key=lambda e: self.membership.state_of(e[0].node, now_ms) != liveness.ALIVE)
        return alive
