"""Puts in two phases, and allocations, which become objects with a key when they are written.

put_start ──► grants (or waits for room) ──► the client writes ──► put_end ──► objects
allocate  ──► a grant                    ──► the client writes ──► commit  ──► an object
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import calls
from kvstore.calls import PutOutcome, Version
from kvstore.errors import InvalidArgumentError, KVStoreError, ValueTooLargeError
from kvstore.limits import REPLICAS_MAX, Key
from kvstore.master.state import no_space_report
from kvstore.master.state.disk_tier import DiskTier
from kvstore.master.state.effects import DeferredReply
from kvstore.master.state.evictor import AllocationFailure
from kvstore.master.state.grant_manager import GrantManager
from kvstore.master.state.grants import (
    AllocationGrant,
    CopyGrant,
    DiskGrant,
    ObjectGrant,
    PutGrant,
)
from kvstore.master.state.hints import HintHandler
from kvstore.master.state.leases import ReaderLeases
from kvstore.master.state.put_queue import WaitingPuts, Wanting
from kvstore.master.state.reclaim import WipeRequest
from kvstore.master.state.records import Extent, ObjectRecord, StaleExtents
from kvstore.master.state.removals import RemovalHandler
from kvstore.master.state.replication import ReplicationPlanner
from kvstore.master.state.retention import RetentionManager
from kvstore.master.state.state_context import StateContext
from kvstore.memory.header import HEADER_BYTES, extent_bytes

MAKING_ROOM_MS = 1_000
"""Wait of a put that needs more evictions than one step makes, even without a requested wait."""


class PutHandler:
    def __init__(
        self,
        common: StateContext,
        leases: ReaderLeases,
        granting: GrantManager,
        waiting: WaitingPuts,
        removing: RemovalHandler,
        copying: ReplicationPlanner,
        keeping: RetentionManager,
        hints: HintHandler,
        tier: DiskTier,
    ) -> None:
        self._common = common
        self._forest = common.forest
        self._pool = common.pool
        self._pending = common.pending
        self._traffic = common.traffic
        self._reclaim = common.reclaim
        self._leases = leases
        self._granting = granting
        self._waiting = waiting
        self._removing = removing
        self._copying = copying
        self._keeping = keeping
        self._hints = hints
        self._tier = tier

    # --- the first phase ----------------------------------------------------------------------

    def put_start(self, now_ms: int, request: calls.PutStart) -> calls.Grants | DeferredReply:
        self._forest.begin_step()
        if request.released:
            self._leases.release(now_ms, request.released)
        keys = request.keys
        count = len(keys)
        if len(request.sizes) != count:
            raise InvalidArgumentError("put_start requires one size per key")
        if not 1 <= request.replicas <= REPLICAS_MAX:
            raise InvalidArgumentError(
                f"replicas must be 1 to {REPLICAS_MAX}, not {request.replicas}",
                replicas=request.replicas,
            )
        if request.parent is not None and request.parent in keys:
            raise InvalidArgumentError("a key cannot be its own parent")
        self._check_sizes(request.sizes)
        writer = self._traffic.writer_row(now_ms, request.namespace)
        writer.keys += count
        if count:
            writer.key = keys[0]
        tried, found = self._try_put(now_ms, request)
        result = self._reply_or_wait(now_ms, request, tried)
        writer.found += found
        return result

    def allocate(self, now_ms: int, request: calls.Allocate) -> calls.Grants | DeferredReply:
        self._forest.begin_step()
        self._check_sizes([request.size])
        return self._reply_or_wait(now_ms, request, self._try_allocation(now_ms, request))

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        capacity_max = self._pool.capacity_max
        if capacity_max and sizes and extent_bytes(max(sizes)) > capacity_max:
            raise ValueTooLargeError(
                f"a value of {max(sizes)} bytes exceeds the largest segment, {capacity_max} bytes",
                advice="Split it into smaller values, or start a node with more --memory.",
                size_bytes=max(sizes),
                segment_bytes_max=capacity_max,
            )

    def _reply_or_wait(
        self, now_ms: int, request: Wanting, result: calls.Grants | AllocationFailure
    ) -> calls.Grants | DeferredReply:
        if isinstance(result, calls.Grants):
            earlier = self._common.wipes_before_grant(request, result)
            return self._common.reply_when_wiped(now_ms, [], result, earlier) if earlier else result
        wait_ms = min(request.wait_ms, self._common.rules.put_wait_max_ms)
        if result.may_retry:
            wait_ms = max(wait_ms, MAKING_ROOM_MS)
        if (
            wait_ms <= 0
            or result.is_permanent
            or not self._has_reachable_node(request)
            or self._waiting.blocked_by_pins(now_ms + wait_ms, request)
        ):
            raise no_space_report.refusal_error(self._common, now_ms, request, result)
        deferred = self._waiting.add(now_ms, request, wait_ms)
        if result.may_retry:
            self._common.space_freed()
        return deferred

    def _has_reachable_node(self, request: Wanting) -> bool:
        """Return whether a reachable node may ever have space; True without nodes."""
        segments = self._pool.segments.values()
        return not segments or any(
            segment.offer.uuid not in request.avoid_segments
            and (not request.local_only or segment.node.host == request.host)
            and not (segment.offer.is_opaque and isinstance(request, calls.Allocate))
            for segment in segments
        )

    def serve_waiting(self, now_ms: int) -> None:
        self._waiting.serve(now_ms, self._try_grant)

    def _try_grant(self, now_ms: int, request: Wanting) -> calls.Grants | AllocationFailure:
        if isinstance(request, calls.Allocate):
            return self._try_allocation(now_ms, request)
        return self._try_put(now_ms, request)[0]

    def _try_put(
        self, now_ms: int, request: calls.PutStart
    ) -> tuple[calls.Grants | AllocationFailure, int]:
        """Return the result of a put, and how many of its keys are already stored."""
        keys = list(request.keys)
        self._keeping.expire_before_put(now_ms, request.namespace, keys)
        table = self._forest.table(request.namespace)
        outcomes = bytearray([PutOutcome.WRITE]) * len(keys)
        granted: list[int] = []
        stored_count = 0
        known = [None] * len(keys) if table is None else table.get_many(keys)
        disks = self._common.disks
        looks_on_disk = bool(disks) and not request.overwrite
        for index, found in enumerate(known):
            if looks_on_disk and (found is None or not found.complete):
                copy = disks.get_readable(request.namespace, keys[index])
                if copy is not None:
                    outcomes[index] = PutOutcome.FOUND
                    stored_count += 1
                    copy.used_ms = now_ms
                    continue
            if found is None:
                granted.append(index)
                continue
            outcome = _outcome(found, request.overwrite)
            outcomes[index] = outcome
            if outcome is PutOutcome.WRITE:
                granted.append(index)
            elif outcome is PutOutcome.FOUND:
                stored_count += 1
                found.last_used_ms = now_ms
                found.keep_until(now_ms + 1)  # protects it from eviction by this request
        if not granted:
            self._count_not_written(outcomes)
            return self._granting.reply(bytes(outcomes), []), stored_count
        near = None
        first = granted[0]
        parent_key = keys[first - 1] if request.chain and first else request.parent
        parent = None if parent_key is None or table is None else table.get(parent_key)
        if parent is not None and parent.complete:
            parent.keep_until(now_ms + 1)
            near = next(segment for segment, _ in parent.extents() if segment.alive)
        sizes = [request.sizes[index] for index in granted]
        self._common.changing = True
        allocated = self._granting.reserve(
            now_ms, sizes, request.replicas, near=near, host=request.host,
            avoid=request.avoid_segments, here_only=request.local_only,
            owner=self._pool.tenant_of(request.namespace),
        )  # fmt: skip
        if isinstance(allocated, AllocationFailure):
            if parent is not None and request.wait_ms:
                parent.keep_until(now_ms + self._common.rules.lease_ms)
            return allocated, stored_count
        puts = self._create_puts(now_ms, request, keys, granted, sizes, allocated)
        if len(puts) < len(outcomes):
            self._count_not_written(outcomes)
        return self._granting.reply(bytes(outcomes), puts), stored_count

    def _create_puts(
        self,
        now_ms: int,
        request: calls.PutStart,
        keys: list[Key],
        granted: list[int],
        sizes: list[int],
        allocated: list[list[Extent]],
    ) -> list[PutGrant]:
        """Create puts for the ``granted`` indices of ``keys`` and link their records. Raise
        InvalidArgumentError at a cycle, without a change."""
        puts: list[PutGrant] = []
        record: ObjectRecord | None = None
        table = self._forest.ensure_table(request.namespace)
        deadline_ms = now_ms + self._common.rules.put_deadline_ms
        token = self._pending.take_tokens(len(granted))
        chain, root, overwrite = request.chain, request.parent, request.overwrite
        client, replicas, ttl_ms = request.client_number, request.replicas, request.ttl_ms
        for extents, index, size in zip(allocated, granted, sizes, strict=True):
            parent_key = keys[index - 1] if chain and index else root
            if parent_key is None:
                parent_record = None
            elif record is not None and record.key is parent_key:
                parent_record = record
            else:
                parent_record = table.get(parent_key) or table.add(parent_key)
            found = table.get(keys[index])  # an eviction may have dropped the record
            record = table.add(keys[index]) if found is None else found
            token += 1
            put = PutGrant(
                token, record, extents, size, deadline_ms, client, overwrite,
                replicas - len(extents), ttl_ms,
            )  # fmt: skip
            record.writer = token
            self._pending.add(put)
            puts.append(put)
            if found is None and parent_record is None:
                continue  # a new root
            try:
                self._common.adopt(now_ms, record, parent_record)
            except InvalidArgumentError:
                for allocation, of_size in zip(allocated, sizes, strict=True):
                    self._pool.free(allocation, extent_bytes(of_size))
                for made in reversed(puts):
                    self._pending.pop(made.token)
                    self._granting.detach_from_record(made)
                raise
        return puts

    def _try_allocation(
        self, now_ms: int, request: calls.Allocate
    ) -> calls.Grants | AllocationFailure:
        self._common.changing = True
        self._keeping.expire_before_put(now_ms, "", [])
        segments = self._pool.segments.values()
        opaque = [segment.offer.uuid for segment in segments if segment.offer.is_opaque]
        avoid = [*request.avoid_segments, *opaque]
        owner = self._pool.tenant_of(request.namespace)
        allocated = self._granting.reserve(
            now_ms, [request.size], 1, host=request.host, avoid=avoid, here_only=request.local_only,
            owner=owner,
        )  # fmt: skip
        if isinstance(allocated, AllocationFailure):
            return allocated
        put = self._granting.allocation(now_ms, request, allocated[0], owner)
        return self._granting.reply(bytes([PutOutcome.WRITE]), [put])

    # --- the second phase ---------------------------------------------------------------------

    def put_end(self, now_ms: int, request: calls.PutEnd) -> calls.PutEndReply | DeferredReply:
        """Store the objects of puts, and of copies whose source has not changed.

        The reply waits until no client reads a replaced or removed version: after it, every get
        finds the stored version or nothing.
        """
        common = self._common
        self._forest.begin_step()
        outcomes = bytearray([PutOutcome.REFUSED]) * len(request.tokens)
        was_stored = int(PutOutcome.STORED)
        replaced: list[StaleExtents] = []
        outdated: list[CopyGrant] = []
        ended: list[tuple[ObjectGrant, list[Extent]]] = []
        still_read: list[WipeRequest] = []
        pending = self._pending
        common.changing = True
        for index, token in enumerate(request.tokens if request.epoch == common.epoch else ()):
            put = pending.get(token)
            if put is None:
                self._granting.wipe_again(token)
                continue
            if (
                now_ms > put.deadline_ms
                or not isinstance(put, ObjectGrant)
                or isinstance(put, DiskGrant)
            ):
                continue
            self._granting.end(put)
            alive = put.extents
            if len(alive) > 1 or not alive[0][0].alive:
                alive = [extent for extent in put.extents if extent[0].alive]
            if not alive:
                self._granting.abandon(put, now_ms)
                continue
            if isinstance(put, CopyGrant):
                if not self._granting.unexpired(put) or any(
                    put.record is other.record for other, _ in ended
                ):
                    outdated.append(put)
                    continue
                if put.repairs:
                    if self._copying.add_replica(now_ms, put):
                        outcomes[index] = was_stored
                    else:
                        outdated.append(put)
                    continue
            ended.append((put, alive))
            if put.overwrite:
                still_read += self._reclaim.still_read(put.record)
            elif self._reclaim.has_object_wipes:
                still_read += self._reclaim.being_read((put.record.namespace, put.record.key))
            outcomes[index] = was_stored
        self._granting.release_copies(outdated)
        for put, alive in ended:
            used_ms = put.record.last_used_ms
            replaced += self._store(put, alive, now_ms)
            if isinstance(put, CopyGrant):
                put.record.last_used_ms = used_ms  # a move is not a use
                common.counters["moved_objects"] += 1
                common.counters["moved_bytes"] += put.size
        stored = [put for put, _ in ended if isinstance(put, PutGrant)]
        if stored:  # clients end the puts of one namespace at a time
            size = sum([put.size for put in stored])
            self._count_stored(len(stored), size)
            writer = self._traffic.writer_row(now_ms, stored[0].record.namespace)
            writer.stored += len(stored)
            writer.stored_bytes += size
        for put, _ in ended:  # after all are stored: only the last block of a chain is a leaf
            if not put.record.children:
                self._pool.delete_if_unused(put.record)
            if put.record.more:
                self._copying.note_stored(put.record)
        if ended:
            self._common.space_freed()  # they are evictable
            if request.hint:
                tip = ended[-1][0].record
                self._hints.apply(now_ms, tip, request.hint, request.retain_ms)
        reply = calls.PutEndReply(bytes(outcomes))
        overwriting = [put for put, _ in ended if put.overwrite]
        if overwriting or replaced:
            return self._removing.replace(now_ms, replaced, overwriting, reply, still_read)
        return common.reply_when_wiped(now_ms, [], reply, still_read) if still_read else reply

    def put_revoke(self, now_ms: int, request: calls.PutRevoke) -> calls.PutRevokeReply:
        common = self._common
        revoked: list[StaleExtents] = []
        common.changing = True
        for token in request.tokens:
            put = self._granting.find_grant(now_ms, request.epoch, token)
            if put is None:
                if request.quiesced and request.epoch == common.epoch:
                    self._granting.wipe_again(token)
                continue
            self._granting.end(put)
            stale = put.stale_extents(common.epoch)
            if request.quiesced:
                self._pool.free(put.extents, put.length)
            else:
                self._granting.quarantine(put, put.deadline_ms)
                stale = stale._replace(writers=put.writers(request.connections), kept=True)
            revoked.append(stale)
            self._granting.detach_from_record(put)
        common.wipe(revoked)
        common.counters["revoked_puts"] += len(revoked)
        return calls.PutRevokeReply(len(revoked))

    def commit(self, now_ms: int, request: calls.Commit) -> calls.CommitReply | DeferredReply:
        """Turn an allocation into an object, and free the memory that the object does not need."""
        common = self._common
        self._forest.begin_step()
        allocation = self._granting.find_grant(now_ms, request.epoch, request.token)
        if not isinstance(allocation, AllocationGrant) or request.size > allocation.size:
            return calls.CommitReply(PutOutcome.REFUSED)
        namespace, key, parent = request.namespace, request.key, request.parent
        if parent == key:
            raise InvalidArgumentError("a key cannot be its own parent")
        common.changing = True
        self._keeping.expire_before_put(now_ms, namespace, [key])
        outcome = _outcome(self._forest.get(namespace, key), request.overwrite)
        if not request.overwrite and common.disks.get_readable(namespace, key) is not None:
            outcome = PutOutcome.FOUND
        alive = [extent for extent in allocation.extents if extent[0].alive]
        if outcome is not PutOutcome.WRITE or not alive:
            self._granting.end(allocation)
            stale = allocation.stale_extents(common.epoch)
            if request.quiesced:
                self._pool.free(allocation.extents, allocation.length)
                self._common.space_freed()
            else:  # the owner may still read its results
                self._granting.quarantine(allocation, allocation.deadline_ms)
                stale = stale._replace(kept=True)
            common.wipe([stale])
            return calls.CommitReply(outcome if alive else PutOutcome.REFUSED)
        self._ensure_within_limit(now_ms, request, allocation, len(alive))
        parent_record = None if parent is None else self._forest.ensure(namespace, parent)
        record = self._forest.ensure(namespace, key)
        common.adopt(now_ms, record, parent_record)
        if request.overwrite:
            still_read = self._reclaim.still_read(record)
        else:
            still_read = self._reclaim.being_read((namespace, key))
        self._granting.end(allocation)
        put = PutGrant(
            allocation.token, record, allocation.extents, request.size, allocation.deadline_ms,
            allocation.client_number, request.overwrite, 0, request.ttl_ms,
        )  # fmt: skip
        if put.length < allocation.length:
            tails = [(segment, offset + put.length) for segment, offset in alive]
            self._pool.free(tails, allocation.length - put.length)
            # Ends the owner's permission to write the complete extent; no header has this version.
            full_extent = StaleExtents(None, allocation.size, 0, 0, alive, kept=True)
            zeroed = [extent for extent in tails if extent[0].zeroes]
            size = allocation.length - put.length - HEADER_BYTES
            common.wipe([full_extent, StaleExtents(None, size, 0, 0, zeroed)])
        replaced = self._store(put, alive, now_ms)
        self._count_stored(1, request.size)
        writer = self._traffic.writer_row(now_ms, namespace)
        writer.keys += 1
        writer.stored += 1
        writer.stored_bytes += request.size
        writer.key = key
        if request.quiesced:
            record.keep_until(now_ms + 1)  # protects it from eviction by this request
        else:  # the owner has the allocation mapped and relies on it until this reply arrives
            record.keep_until(max(now_ms + common.rules.lease_ms, put.deadline_ms))
        if not record.children:
            self._pool.delete_if_unused(record)
            self._common.space_freed()  # it is evictable
        reply = calls.CommitReply(PutOutcome.STORED)
        if request.next_size:
            reply = self._grant_next(now_ms, request, allocation.client_number, reply)
        overwriting = [put] if request.overwrite else []
        if overwriting or replaced:
            return self._removing.replace(now_ms, replaced, overwriting, reply, still_read)
        return common.reply_when_wiped(now_ms, [], reply, still_read) if still_read else reply

    def _grant_next(
        self, now_ms: int, request: calls.Commit, client_number: int, reply: calls.CommitReply
    ) -> calls.CommitReply:
        """Return the reply with another allocation, if memory for it is free and need not be wiped
        first: then a put in the usual way waits."""
        size = request.next_size
        wanted = calls.Allocate(
            request.namespace, size, 0, request.host, (), request.local_only, client_number
        )
        try:
            self._check_sizes([size])
            granted = self._try_allocation(now_ms, wanted)
        except KVStoreError:
            return reply
        if isinstance(granted, AllocationFailure):
            return reply
        token = granted.tokens[0]
        if self._common.wipes_before_grant(wanted, granted):
            unused = self._pending.get(token)
            assert unused is not None
            self._granting.end(unused)
            self._pool.free(unused.extents, unused.length)
            return reply
        return reply._replace(
            next_token=token, next_segment=granted.segments[0], next_offset=granted.offsets[0]
        )

    def _ensure_within_limit(
        self, now_ms: int, request: calls.Commit, allocation: AllocationGrant, replicas: int
    ) -> None:
        """Evict objects of the new tenant until an allocation of another tenant fits its limit.
        Raise NoSpaceError if it does not, without a change to the allocation."""
        owner = self._pool.tenant_of(request.namespace)
        if owner is allocation.tenant:
            return
        assert owner is not None
        if request.parent is not None:
            until_ms = now_ms + self._common.rules.lease_ms
            self._common.lease(request.namespace, request.parent, until_ms)
        needed = extent_bytes(request.size) * replicas
        missing = self._granting.evict_to_limit(now_ms, owner, needed)
        if missing is not None:
            raise no_space_report.quota_error(self._common, owner, needed, missing)

    def _store(self, put: ObjectGrant, extents: list[Extent], now_ms: int) -> list[StaleExtents]:
        """Set the extents of the put's record. Return the stale ones of the replaced version, still
        allocated. The caller then calls ``MemoryPool.delete_if_unused``."""
        record = put.record
        replaced = self._tier.take(record.namespace, record.key)
        if record.segment is not None:
            replaced.append(StaleExtents.of(record))
            self._pool.take_extents(record, replaced=True)
        else:
            self._pool.pins.drop(record)  # the pin of a lost object
        if record.writer == put.token:
            record.writer = 0
        missing_replicas = put.missing + len(put.extents) - len(extents)
        version = self._common.epoch, put.token
        self._pool.store(record, extents, put.size, version, now_ms, missing_replicas)
        for segment, _ in extents:
            segment.node.stored_bytes += put.size
        if version <= self._common.tombstones.newest:  # an object was removed during the put
            self._common.clear_tombstone(record, Version(*version))
        if isinstance(put, PutGrant):
            self._pool.lifetimes.drop(record)  # the TTL of the replaced version
            if put.ttl_ms:
                self._pool.lifetimes.set(record, now_ms + put.ttl_ms)
        return replaced

    def _count_not_written(self, outcomes: bytearray) -> None:
        counters = self._common.counters
        counters["duplicate_puts"] += outcomes.count(PutOutcome.FOUND)
        counters["overlapping_puts"] += outcomes.count(PutOutcome.BEING_WRITTEN)

    def _count_stored(self, objects: int, size: int) -> None:
        self._common.counters["stored_objects"] += objects
        self._common.counters["stored_bytes"] += size


def _outcome(record: ObjectRecord | None, overwrite: bool) -> PutOutcome:
    if record is None:
        return PutOutcome.WRITE
    if not overwrite and record.complete:
        return PutOutcome.FOUND
    return PutOutcome.BEING_WRITTEN if record.writer else PutOutcome.WRITE
