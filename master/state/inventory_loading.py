"""Loads the inventories of returning segments."""

from __future__ import annotations

from kvstore import calls
from kvstore.calls import Version
from kvstore.errors import InvalidArgumentError, ProtocolError
from kvstore.master.state import repair_queue
from kvstore.master.state.background_jobs import ANSWER, CLAIM
from kvstore.master.state.disk_index import DiskCopy, stale_extents
from kvstore.master.state.effects import LogClusterEvent, SendToNode
from kvstore.master.state.inventory import Claim, InventoryLoad
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.membership import GONE_MAX
from kvstore.master.state.records import MountedSegment, ObjectRecord, StaleExtents
from kvstore.master.state.removal_watermarks import RemovalWatermarks
from kvstore.master.state.replication import ReplicationPlanner
from kvstore.master.state.state_context import StateContext

CLAIMS_PER_STEP = 256
"""Claims that one slice of background work processes: 3 to 5 ms."""


class InventoryLoader:
    def __init__(
        self, common: StateContext, watermarks: RemovalWatermarks, replication: ReplicationPlanner
    ) -> None:
        self._common = common
        self._forest = common.forest
        self._pool = common.pool
        self._watermarks = watermarks
        self._replication = replication
        self._inventories: dict[MountedSegment, InventoryLoad] = {}
        self._absent_since: dict[bytes, int] = {}
        """Unmounted memory (uuid), and the number of tombstones at that time."""

    @property
    def in_progress(self) -> bool:
        """Whether inventories of memory are loading: misses do not wait for disks."""
        return any(not segment.is_disk for segment in self._inventories)

    def segment_mounted(self, segment: MountedSegment) -> None:
        """Start the inventory of a mounted segment, before any of its memory is granted."""
        absent_since = self._absent_since.pop(segment.offer.uuid, 0)
        if segment.inventory_complete:
            self._watermarks.propagate_to(segment)
            return
        inventory = InventoryLoad(segment, segment.node.last_heartbeat_ms, absent_since)
        inventory.outdated = self._watermarks.is_outdated(segment)
        self._inventories[segment] = inventory
        self._common.reclaim.hold_removals(segment)

    def segment_died(self, segment: MountedSegment) -> None:
        """Note that unmounted memory may bring back objects that are removed from now on."""
        absent_since = self._common.tombstones.made
        inventory = self._inventories.pop(segment, None)
        if inventory is not None:
            absent_since = inventory.absent_since
            self._common.jobs.note(CLAIM, self._has_claims())
            self._common.effects += self._common.reclaim.release_held(segment)
        self._absent_since.pop(segment.offer.uuid, None)
        self._absent_since[segment.offer.uuid] = absent_since
        if len(self._absent_since) > GONE_MAX:
            del self._absent_since[next(iter(self._absent_since))]

    def late(self, now_ms: int) -> list[MountedSegment]:
        patience_ms = self._common.rules.node_patience_ms
        inventories = self._inventories.items()
        return [
            segment for segment, inventory in inventories if inventory.is_late(now_ms, patience_ms)
        ]

    def node_claims(self, now_ms: int, node: JoinedNode, claims: calls.NodeClaims) -> None:
        """Raise ProtocolError for an unknown segment or more claims than requested."""
        segments = self._common.membership.segments[node.name]
        index = claims.segment
        if index >= len(segments):
            raise ProtocolError(
                f"claims for segment {index} of a node with {len(segments)} segments"
            )
        if segments[index] in self._inventories:
            self._inventories[segments[index]].add(now_ms, claims)
            self._common.jobs.due |= CLAIM
        elif node.session is not None:  # a repeated inventory, already complete
            self._common.effect(SendToNode(node.session, calls.MasterClaimsAck(index)))

    def take_claims(self, now_ms: int) -> None:
        for segment, inventory in self._inventories.items():
            if inventory.has_work:
                if not inventory.all_claimed:
                    self._take_slice(now_ms, segment, inventory)
                elif inventory.free_gaps(self._common.reclaim.free_unclaimed):
                    self._finish(now_ms, segment, inventory)
                break
        self._common.jobs.note(CLAIM, self._has_claims())

    def _has_claims(self) -> bool:
        return any(inventory.has_work for inventory in self._inventories.values())

    def _finish(self, now_ms: int, segment: MountedSegment, inventory: InventoryLoad) -> None:
        common = self._common
        segment.inventory_complete = True
        self._common.space_freed()
        del self._inventories[segment]
        common.jobs.due |= ANSWER
        self._watermarks.propagate_to(segment)
        self._replication.nodes_changed(now_ms, segment.usable_at_ms)
        common.effects += common.reclaim.release_held(segment)
        fields = {"claimed": inventory.claimed, "refused": inventory.refused}
        common.effect(LogClusterEvent("inventory_done", {"node": segment.node.name, **fields}))

    def _take_slice(self, now_ms: int, segment: MountedSegment, inventory: InventoryLoad) -> None:
        common = self._common
        claims, ends_message = inventory.next(CLAIMS_PER_STEP)
        rejected: list[StaleExtents] = []
        stored: list[ObjectRecord] = []
        copies = 0
        for claim in claims:
            record: ObjectRecord | DiskCopy | None
            if segment.is_disk:
                record = self._accept_disk_claim(now_ms, inventory, claim)
            else:
                record = self._accept_claim(now_ms, inventory, claim)
            if record is None:
                self._forest.missing.object_claimed(segment)
                extents = [(segment, claim.offset)]
                # It may overlap a claimed object. Gaps are zeroed after the last claim.
                rejected.append(
                    StaleExtents(claim.name, claim.size, *claim.version, extents, kept=True)
                )
            elif isinstance(record, ObjectRecord):
                stored.append(record)
            else:
                copies += 1
        for record in stored:  # most children have found their parents by now
            if not record.children:
                self._pool.delete_if_unused(record)
                self._common.space_freed()  # it is evictable
        inventory.claimed += len(stored) + copies
        inventory.refused += len(rejected)
        common.counters["recovered_objects"] += len(stored)
        if rejected:
            common.counters["refused_claims"] += len(rejected)
            common.effects += common.reclaim.clean(rejected)
        if ends_message and segment.node.session is not None:
            index = common.membership.segments[segment.node.name].index(segment)
            common.effect(SendToNode(segment.node.session, calls.MasterClaimsAck(index)))

    def _is_rejected(self, inventory: InventoryLoad, claim: Claim) -> bool:
        common, version = self._common, claim.version
        return (
            version > common.newest_granted
            or (version.epoch == common.epoch and common.pending.get(version.counter) is not None)
            or claim.parent == claim.name[1]
            or inventory.outdated
            or common.tombstones.forbids(claim.name, version, inventory.absent_since)
            or not inventory.fits(claim.offset, claim.size)
        )

    def _accept_disk_claim(
        self, now_ms: int, inventory: InventoryLoad, claim: Claim
    ) -> DiskCopy | None:
        """Return the claimed copy on a disk; None if the claim is rejected."""
        disks = self._common.disks
        (namespace, key), parent, size, version, offset = claim
        disk = disks.disks[inventory.segment.segment_id]
        used_ms = inventory.next_use_ms()
        record = self._forest.get(namespace, key)
        copy = disks.get(namespace, key)
        if copy is not None and copy.disk is disk and copy.offset == offset:
            return copy  # claimed before
        known = Version(0, 0) if copy is None else Version(copy.epoch, copy.counter)
        if record is not None and record.complete:
            stored = Version(record.epoch, record.counter)
            if stored > version or (stored == version and record.size != size):
                return None
            if stored < version:  # an older version returned with other memory
                stale = [StaleExtents.of(record, forbid=True)]
                self._pool.remove(record, self._forest.steps)
                self._common.reply_when_wiped(now_ms, stale, calls.RemoveReply(b""))
                record = None
        else:
            record = None
        if known >= version or self._is_rejected(inventory, claim):
            return None
        if copy is not None:
            disks.drop(copy)
            self._common.effects += self._common.reclaim.clean([stale_extents(copy)])
        copy = DiskCopy(disk, offset, namespace, key, parent, size, *version, used_ms)
        disks.add(copy, self._forest.ensure_table(namespace))
        if record is None:
            disks.found_alone(copy, used_ms)
        inventory.claim_range(offset, size)
        return copy

    def _accept_claim(
        self, now_ms: int, inventory: InventoryLoad, claim: Claim
    ) -> ObjectRecord | None:
        """Return the record of the claimed object, now complete; None if the claim is rejected."""
        common = self._common
        (namespace, key), parent, size, version, offset = claim
        extent = inventory.segment, offset
        used_ms = inventory.next_use_ms()
        record = self._forest.get(namespace, key)
        known = None
        if record is not None and record.complete:
            known = Version(record.epoch, record.counter)
            if known == version and record.size == size and extent in record.extents():
                return record  # claimed before
            if known > version or (known == version and record.size != size):
                return None
        copy = common.disks.get(namespace, key)
        if copy is not None and (copy.epoch, copy.counter) > version:
            return None
        if self._is_rejected(inventory, claim):
            return None
        if record is not None and known == version:
            if not self._replication.claim_replica(now_ms, record, extent):
                return None
        elif record is not None and known is not None:
            replaced = [StaleExtents.of(record, forbid=True)]
            self._pool.take_extents(record, replaced=True)
            self._pool.lifetimes.drop(record)
            self._pool.store(record, [extent], size, version, used_ms)
            common.reply_when_wiped(now_ms, replaced, calls.RemoveReply(b""))
        else:
            record = self._forest.ensure(namespace, key)
            missing_replicas = 0
            if record.lost and version == (record.epoch, record.counter):
                used_ms = record.last_used_ms
                missing_replicas = repair_queue.desired_replicas(record) - 1
            parent_record = None if parent is None else self._forest.ensure(namespace, parent)
            try:
                common.adopt(now_ms, record, parent_record)
            except InvalidArgumentError:  # they form a cycle
                self._pool.delete_if_unused(record)
                return None
            self._pool.store(record, [extent], size, version, used_ms, missing_replicas)
        if known != version:
            self._forest.missing.object_claimed(inventory.segment)
        if copy is not None and (copy.epoch, copy.counter) != version:
            common.disks.drop(copy)
            common.effects += common.reclaim.clean([stale_extents(copy)])
        inventory.claim_range(offset, size)
        # The previous master may have leased the object until then.
        record.keep_until(inventory.segment.usable_at_ms)
        return record
