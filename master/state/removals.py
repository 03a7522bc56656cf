"""Removes objects, namespaces, corrupt replicas and versions replaced by puts.

A removed object is not found any more. The removal is acknowledged when no memory can bring back an
older version: headers are wiped, copies are stopped, and absent or unreported memory is accounted
for (docs/decisions/removals.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore import calls
from kvstore.calls import Version
from kvstore.master.state.background_jobs import FREE
from kvstore.master.state.disk_tier import DiskTier
from kvstore.master.state.effects import DeferredReply, LogClusterEvent
from kvstore.master.state.grant_manager import GrantManager
from kvstore.master.state.grants import ObjectGrant, PutGrant
from kvstore.master.state.reclaim import WipeRequest
from kvstore.master.state.records import (
    MountedSegment,
    Name,
    ObjectRecord,
    StaleExtents,
    with_bytes,
)
from kvstore.master.state.removal_watermarks import RemovalWatermarks, unrecorded_removal_error
from kvstore.master.state.state_context import AnyReply, StateContext

CLEARED_PER_STEP = 512
"""Objects that one ``clear`` removes; the caller repeats it."""

HIDE_STEPS = 4_096
"""Records without bytes that one removal call deletes; background work does the rest."""


class RemovalHandler:
    def __init__(
        self,
        common: StateContext,
        watermarks: RemovalWatermarks,
        granting: GrantManager,
        tier: DiskTier,
    ) -> None:
        self._common = common
        self._forest = common.forest
        self._pool = common.pool
        self._reclaim = common.reclaim
        self._watermarks = watermarks
        self._granting = granting
        self._tier = tier

    def remove(self, now_ms: int, request: calls.Remove) -> calls.RemoveReply | DeferredReply:
        """Raise UnavailableError if no joined node can record the removal."""
        self._check_recordable()
        removed = bytearray(len(request.keys))
        stale: list[StaleExtents] = []
        steps_max = self._forest.steps + HIDE_STEPS
        self._common.changing = True
        for index, key in enumerate(request.keys):
            record = self._forest.get(request.namespace, key)
            self._granting.end_copies(now_ms, (request.namespace, key))
            readers = self._reclaim.still_read(record)
            self._reclaim.add_reader(readers, (request.namespace, key))  # ``_earlier`` finds them
            copies = self._tier.take(request.namespace, key)
            removed[index] = bool(copies)
            stale += copies
            if record is not None and record.segment is not None:
                removed[index] |= self._pool.is_stored(record, now_ms)
                stale.append(StaleExtents.of(record))
                self._pool.remove(record, steps_max)
            self._common.add_tombstone(request.namespace, key)
        self._common.counters["removed_objects"] += len({each.name for each in stale})
        earlier = self._earlier([(request.namespace, key) for key in request.keys])
        reply = calls.RemoveReply(bytes(removed))
        return self._common.reply_when_wiped(now_ms, stale, reply, earlier)

    def clear(self, now_ms: int, request: calls.Clear) -> calls.ClearReply | DeferredReply:
        self._check_recordable()
        namespace = request.namespace
        if namespace:
            table = self._forest.table(namespace)
            tables = [] if table is None else [table]
        else:
            tables = self._forest.namespaces.values()
        chosen = list(islice(with_bytes(tables), max(1, min(request.limit, CLEARED_PER_STEP))))
        stale: list[StaleExtents] = []
        steps_max = self._forest.steps + HIDE_STEPS
        self._common.changing = True
        copied = self._granting.copied(namespace)
        for name in copied[:CLEARED_PER_STEP]:
            self._granting.end_copies(now_ms, name)
        for record in chosen:
            if record.segment is not None:  # a lost one may be deleted with an earlier record
                readers = self._reclaim.still_read(record)
                self._reclaim.add_reader(readers, (record.namespace, record.key))
                stale += self._tier.take(record.namespace, record.key)
                stale.append(StaleExtents.of(record))
                self._pool.remove(record, steps_max)
        disks = self._common.disks
        for copy in disks.some_of(tables, max(1, CLEARED_PER_STEP - len(stale))):
            stale += self._tier.take(copy.namespace, copy.key)
        cleared = len({each.name for each in stale})
        self._common.counters["removed_objects"] += cleared
        remaining = sum(table.objects for table in tables) if namespace else self._forest.objects
        remaining += len(disks.some_of(tables, 1))
        remaining += max(0, len(copied) - CLEARED_PER_STEP)
        self._common.add_tombstone(namespace, None)
        earlier = [*self._reclaim.for_namespace(namespace), *self._elsewhere()]
        earlier += self._reclaim.still_read(None)
        reply = calls.ClearReply(cleared, remaining)
        return self._common.reply_when_wiped(now_ms, stale, reply, earlier)

    def report_corrupt(self, now_ms: int, request: calls.ReportCorrupt) -> calls.ReportCorruptReply:
        """Remove the reported objects without waiting for the wipe. An object with another replica
        stays, and that replica is read first."""
        corrupt: dict[ObjectRecord, set[MountedSegment]] = {}
        rows = zip(request.keys, request.epochs, request.counters, request.uuids, strict=True)
        for key, epoch, counter, uuid in rows:
            record = self._forest.get(request.namespace, key)
            if record is None or (record.epoch, record.counter) != (epoch, counter):
                continue
            for segment, _ in record.extents():
                if segment.alive and segment.offer.uuid == uuid:
                    corrupt.setdefault(record, set()).add(segment)
        stale: list[StaleExtents] = []
        steps_max = self._forest.steps + HIDE_STEPS
        counters = self._common.counters
        self._common.changing = True
        for record, segments in corrupt.items():
            if record.segment is None:
                continue  # already deleted with an earlier record
            self._granting.end_copies(now_ms, (record.namespace, record.key))
            counters["corrupt_replicas"] += len(segments)
            self._common.effect(_corrupt_event(record, segments))
            if all(segment in segments for segment, _ in record.extents() if segment.alive):
                stale.append(StaleExtents.of(record, forbid=True))
                self._pool.remove(record, steps_max)
            else:
                self._pool.demote(record, segments)
        counters["corrupt_objects"] += len(stale)
        reply = calls.ReportCorruptReply(len(stale))
        self._common.reply_when_wiped(now_ms, stale, reply)
        return reply

    def replace(
        self,
        now_ms: int,
        replaced: list[StaleExtents],
        puts: Sequence[ObjectGrant],
        reply: AnyReply,
        still_read: Sequence[WipeRequest],
    ) -> AnyReply | DeferredReply:
        """Reply once no older version of the written objects remains.

        Args:
            replaced: stale extents of the replaced versions.
            still_read: result of ``SpaceReclaimer.still_read`` before the puts were stored.
        """
        names: list[Name] = []
        for put in puts:
            namespace, key = name = put.record.namespace, put.record.key
            names.append(name)
            if isinstance(put, PutGrant):
                self._granting.end_copies(now_ms, name)
            version = Version(self._common.epoch, put.token)
            self._common.add_tombstone(namespace, key, but=version)
        earlier = [*self._earlier(names), *still_read]
        return self._common.reply_when_wiped(now_ms, replaced, reply, earlier)

    def _earlier(self, names: Sequence[Name]) -> list[WipeRequest]:
        """Return the requests to wait for: pending wipes of these objects, and elsewhere."""
        return [*self._reclaim.for_objects(names), *self._elsewhere()]

    def _elsewhere(self) -> list[WipeRequest]:
        """Return pending inventories and watermarks: other memory may hold the object."""
        self._watermarks.advance()
        return [*self._reclaim.held_removals(), *self._reclaim.unmarked()]

    def _check_recordable(self) -> None:
        if not self._pool.segments:
            raise unrecorded_removal_error()

    def free(self, now_ms: int) -> None:
        self._common.effects += self._reclaim.end_reading(now_ms)
        effects, has_more = self._reclaim.end_next(now_ms)
        self._common.effects += effects
        self._common.effects += self._reclaim.request_zeroing(now_ms)
        self._common.jobs.note(FREE, has_more)
        if has_more:
            self._common.space_freed()


def _corrupt_event(record: ObjectRecord, segments: set[MountedSegment]) -> LogClusterEvent:
    nodes = ",".join(segment.node.name for segment in segments)
    key_hex = record.key.hex()
    return LogClusterEvent(
        "corrupt_object", {"namespace": record.namespace, "key": key_hex, "nodes": nodes}
    )
