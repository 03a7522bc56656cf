"""Handles clients' queries: prefix matches, locations and existence of objects.

Misses wait while nodes still report their inventories to a new master.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore import calls
from kvstore.calls import NO_PLACEMENTS, Presence
from kvstore.limits import BATCH_KEYS_MAX, Key, Namespace
from kvstore.master.state.background_jobs import ANSWER
from kvstore.master.state.disk_index import DiskCopy
from kvstore.master.state.disk_tier import DiskTier
from kvstore.master.state.effects import DeferredReply, SendReply
from kvstore.master.state.grant_manager import GrantManager
from kvstore.master.state.hints import HintHandler
from kvstore.master.state.inventory_loading import InventoryLoader
from kvstore.master.state.leases import ReaderLeases
from kvstore.master.state.records import HIT_GAP_MS, NamespaceTable, ObjectRecord
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.traffic import Caller
from kvstore.runtime.histograms import Histogram

ANSWERED_PER_STEP = 16_384
"""Keys of waiting queries that one step processes; at least one query."""

JOINING_MS = 600
"""Time for the nodes of the previous master to join; they retry several times a second."""

STATE_PROBES_MAX = BATCH_KEYS_MAX
"""Objects that one query probes for recurrent states, from the end of the chain."""

ASKING_MAX = 4_096
"""Queries that wait for inventories; further ones are answered immediately."""

_ABSENT: Final = 0
_COMPLETE: Final = 1
"""Values of ``Presence``, without an attribute lookup per call."""

Query = calls.MatchPrefix | calls.Lookup | calls.Exists
QueryReply = calls.MatchPrefixReply | calls.LookupReply | calls.ExistsReply


class QueryHandler:
    def __init__(
        self,
        common: StateContext,
        leases: ReaderLeases,
        granting: GrantManager,
        returning: InventoryLoader,
        hints: HintHandler,
        tier: DiskTier,
    ) -> None:
        self._common = common
        self._leases = leases
        self._jobs = common.jobs
        self._forest = common.forest
        self._granting = granting
        self._pool = common.pool
        self._lifetimes = common.pool.lifetimes
        self._traffic = common.traffic
        self.reuses_ms = Histogram()
        """Idle time of each object that a call leased; of a chain, only of its tip."""
        self._returning = returning
        self._hints = hints
        self._tier = tier
        self._disks = common.disks
        self._wanted: list[DiskCopy] = []
        """Copies on disks that the query in progress waits for."""
        self._is_final = False
        """Whether the query in progress has waited: what is not in memory now is a miss."""
        self._bringing: dict[int, tuple[Caller, Query]] = {}
        """The queries that wait for copies on disks, by reply id."""
        self._may_wait = common.rules.inventory_wait_ms > 0
        self._waiting: deque[tuple[int, Caller, Query]] = deque()
        """Reply id, caller and request of the queries that wait for inventories."""

    def find(self, now_ms: int, request: Query) -> QueryReply | DeferredReply:
        self._forest.begin_step()
        if request.released:
            self._leases.release(now_ms, request.released)
        self._is_final = len(self._bringing) >= ASKING_MAX
        reply = self._find(now_ms, request)
        if self._wanted:
            reply_id = self._tier.wait(now_ms, self._wanted)
            self._wanted = []
            if reply_id:
                self._bringing[reply_id] = self._traffic.caller, request
                return DeferredReply(reply_id)
            self._is_final = True
            reply = self._find(now_ms, request)
        if (
            self._may_wait
            and len(self._waiting) < ASKING_MAX
            and _misses(request, reply)
            and self._is_loading_inventories(now_ms)
        ):
            reply_id = self._common.new_reply_id()
            self._waiting.append((reply_id, self._traffic.caller, request))
            return DeferredReply(reply_id)
        return reply

    def cancel(self, reply_id: int) -> None:
        if self._bringing.pop(reply_id, None) is not None:
            return
        for entry in self._waiting:
            if entry[0] == reply_id:
                self._waiting.remove(entry)
                return

    def _find(self, now_ms: int, request: Query) -> QueryReply:
        match request:
            case calls.MatchPrefix():
                return self.match_prefix(now_ms, request)
            case calls.Lookup():
                return self.lookup(now_ms, request)
            case calls.Exists():
                return self.exists(now_ms, request)

    def match_prefix(self, now_ms: int, request: calls.MatchPrefix) -> calls.MatchPrefixReply:
        common = self._common
        count = len(request.keys)
        matches = []
        for namespace in request.namespaces:
            table = self._forest.table(namespace)
            if table is None:
                matches.append(calls.PrefixMatch(0, 0, NO_PLACEMENTS))
                common.counters["missed_objects"] += count
                self._record_traffic(now_ms, namespace, request.keys, 0, 0 if count else -1)
                continue
            keys = request.keys
            live_keys = keys
            if now_ms >= self._lifetimes.next_ms:
                live_keys = self._live_prefix(now_ms, table, keys)
            matched, holding, records = self._forest.match(
                table, live_keys, records=request.placements
            )
            self._lease(now_ms, request.lease, holding)
            on_disk = 0
            if self._disks:
                following, copies = self._tier.following(now_ms, table, live_keys, matched)
                if request.placements and not self._is_final:
                    self._wanted += copies
                elif not request.placements:
                    on_disk = following
                    if request.bring:
                        self._tier.bring(copies)
            in_memory, matched = matched, matched + on_disk
            being_written = 0
            for index in range(matched, count):
                record_after = table.get(keys[index])
                if record_after is None or not record_after.writer:
                    break
                being_written += 1
            placements = NO_PLACEMENTS
            if request.placements and in_memory:
                placements = common.placements(records, now_ms)
            matches.append(calls.PrefixMatch(matched, being_written, placements, on_disk))
            if self._wanted:
                continue
            common.counters["matched_objects"] += matched
            common.counters["missed_objects"] += count - matched
            missing = matched < count and not being_written
            tip = holding[-1].key if holding else None
            if request.hint and holding:
                self._hints.apply(now_ms, holding[-1], request.hint, request.retain_ms)
            self._record_traffic(now_ms, namespace, keys, matched, matched if missing else -1, tip)
        state = 0
        if request.states:
            length = min([match.matched for match in matches], default=count)
            state = self._last_state(now_ms, request, request.keys[:length])
        return calls.MatchPrefixReply(common.epoch, common.rules.lease_ms, matches, state)

    def _last_state(self, now_ms: int, request: calls.MatchPrefix, keys: Sequence[Key]) -> int:
        """Return the number of ``keys`` up to the last one that is stored in all of
        ``request.states``, and lease its objects; 0 if none of the probed keys is. Begin to bring
        those on disks, if the request says so."""
        namespaces = request.states
        stored: list[ObjectRecord] = []
        copies: list[DiskCopy] = []
        state, remaining = len(keys), STATE_PROBES_MAX
        while state and remaining > 0:
            stored, copies = self._objects_under_key(now_ms, namespaces, keys[state - 1])
            if len(stored) + len(copies) == len(namespaces):
                break
            remaining -= len(stored) + len(copies) + 1
            state -= 1
        found = len(stored) + len(copies) == len(namespaces)
        if found:
            self._lease(now_ms, request.lease, stored)
            if request.bring:
                self._tier.bring(copies)
        probed = keys[state - 1 : state] if found else keys[-1:]
        self._common.counters["matched_objects"] += found * len(namespaces)
        self._common.counters["missed_objects"] += (len(probed) - found) * len(namespaces)
        for namespace in namespaces if probed else ():
            self._record_traffic(now_ms, namespace, probed, int(found), -1 if found else 0)
        return state if found else 0

    def _objects_under_key(
        self, now_ms: int, namespaces: Sequence[Namespace], key: Key
    ) -> tuple[list[ObjectRecord], list[DiskCopy]]:
        """List the objects of the first namespaces that have one, in memory or on a disk only."""
        stored: list[ObjectRecord] = []
        copies: list[DiskCopy] = []
        for namespace in namespaces:
            record = self._forest.get(namespace, key)
            if record is not None and self._pool.is_stored(record, now_ms):
                stored.append(record)
                continue
            table = self._forest.table(namespace)
            found = [] if table is None else self._tier.following(now_ms, table, [key], 0)[1]
            if not found:
                break
            copies += found
        return stored, copies

    def _live_prefix(
        self, now_ms: int, table: NamespaceTable, keys: Sequence[Key]
    ) -> Sequence[Key]:
        """Return the keys before the first object that has expired but is not deleted yet."""
        for index, record in enumerate(table.get_many(keys)):
            if record is not None and self._lifetimes.ended(record, now_ms):
                return keys[:index]
        return keys

    def lookup(self, now_ms: int, request: calls.Lookup) -> calls.LookupReply:
        common = self._common
        table = self._forest.table(request.namespace)
        keys = request.keys
        records: list[ObjectRecord | None]
        records = [None] * len(keys) if table is None else table.get_many(keys)
        some_ended = now_ms >= self._lifetimes.next_ms
        for index, record in enumerate(records):
            if record is None:
                continue
            segment = record.segment
            if (
                segment is None
                or not (segment.alive or record.complete)
                or (some_ended and self._lifetimes.ended(record, now_ms))
            ):
                records[index] = None
        stored = [record for record in records if record is not None]
        if self._disks and len(stored) < len(records) and not self._is_final:
            self._wanted = self._copies_of_missing(now_ms, request, records)
            if self._wanted:
                for record in stored:  # until the others are there
                    record.keep_until(now_ms + common.rules.bring_ms_max)
                return calls.LookupReply(common.epoch, common.rules.lease_ms, NO_PLACEMENTS)
        self._lease(now_ms, request.lease, stored)
        count, found = len(records), len(stored)
        first = -1
        if found < count:
            first = records.index(None) if count > 1 else 0
        self._record_traffic(now_ms, request.namespace, keys, found, first)
        placements = common.placements(records, now_ms)
        return calls.LookupReply(common.epoch, common.rules.lease_ms, placements)

    def _copies_of_missing(
        self, now_ms: int, request: calls.Lookup, records: Sequence[ObjectRecord | None]
    ) -> list[DiskCopy]:
        copies: list[DiskCopy] = []
        for key, record in zip(request.keys, records, strict=True):
            copy = None if record is not None else self._disks.get_readable(request.namespace, key)
            if copy is not None:
                copy.used_ms = now_ms
                copies.append(copy)
        return copies

    def exists(self, now_ms: int, request: calls.Exists) -> calls.ExistsReply:
        keys = request.keys
        table = self._forest.table(request.namespace)
        presence = bytes(len(keys)) if table is None else table.presence(keys)
        if table is not None and now_ms >= self._lifetimes.next_ms:
            known = bytearray(presence)
            for index, record in enumerate(table.get_many(keys)):
                if record is not None and self._lifetimes.ended(record, now_ms):
                    known[index] = Presence.BEING_WRITTEN if record.writer else Presence.ABSENT
            presence = bytes(known)
        if self._disks and _ABSENT in presence:
            known = bytearray(presence)
            for index, key in enumerate(keys):
                if known[index] == _ABSENT and self._disks.get_readable(request.namespace, key):
                    known[index] = _COMPLETE
            presence = bytes(known)
        if request.lease and table is not None:
            records = zip(table.get_many(keys), presence, strict=True)
            stored = [
                r
                for r, presence_value in records
                if r is not None and presence_value == _COMPLETE and r.complete
            ]
            self._lease(now_ms, request.lease, stored)
        found = count = len(presence)
        first = -1
        if _ABSENT in presence:
            first = presence.index(_ABSENT) if count > 1 else 0
            found -= presence.count(_ABSENT) if count > 1 else 1
        self._record_traffic(now_ms, request.namespace, keys, found, first)
        return calls.ExistsReply(presence)

    def _lease(self, now_ms: int, number: int, records: Sequence[ObjectRecord]) -> None:
        self._leases.lease(now_ms, number, records, now_ms + self._common.rules.lease_ms)
        if self._pool.learns_uses:
            for record in records:
                if now_ms - record.last_used_ms >= HIT_GAP_MS:
                    self._pool.used(record, now_ms)
        used_ms, uses = now_ms, 0  # most objects of one call were used together before
        for record in records:
            if record.last_used_ms != used_ms:
                if uses:
                    self.reuses_ms.add(max(0, now_ms - used_ms), uses)
                used_ms, uses = record.last_used_ms, 0
            uses += 1
            record.last_used_ms = now_ms
            if record.hint:
                self._hints.on_use(record)
        if uses:
            self.reuses_ms.add(max(0, now_ms - used_ms), uses)

    def _record_traffic(
        self,
        now_ms: int,
        namespace: Namespace,
        keys: Sequence[Key],
        found: int,
        first: int,
        tip: Key | None = None,
    ) -> None:
        """Record a query, unless inventories are loading: misses are not final then."""
        if not (self._may_wait and self._is_loading_inventories(now_ms)):
            self._traffic.record_query(now_ms, namespace, keys, found, first, tip)

    def renew(self, now_ms: int, request: calls.Renew) -> calls.RenewReply:
        """Extend grants, and leases of objects with the same version and location."""
        common, rules = self._common, self._common.rules
        keys_held = bytearray(len(request.keys))
        some_ended = now_ms >= self._lifetimes.next_ms
        columns = zip(request.keys, request.epochs, request.counters, strict=True)
        for index, (key, epoch, counter) in enumerate(columns):
            record = self._forest.get(request.namespace, key)
            if (
                record is not None
                and record.segment is not None
                and (record.epoch, record.counter) == (epoch, counter)
                and _is_at(record, request.uuids[index], request.offsets[index])
                and not (some_ended and self._lifetimes.ended(record, now_ms))
            ):
                record.last_used_ms = now_ms
                record.keep_until(now_ms + rules.lease_ms)
                keys_held[index] = 1
        tokens_held = bytearray(len(request.tokens))
        common.changing |= bool(request.tokens)
        for index, token in enumerate(request.tokens):
            put = self._granting.find_grant(now_ms, request.epoch, token)
            if put is not None and all(segment.alive for segment, _ in put.extents):
                self._granting.renew(now_ms, put)
                tokens_held[index] = 1
        return calls.RenewReply(
            rules.lease_ms, rules.put_deadline_ms, bytes(keys_held), bytes(tokens_held)
        )

    def release(self, now_ms: int, request: calls.Release) -> calls.ReleaseReply:
        self._leases.release(now_ms, request.released)
        return calls.ReleaseReply()

    def _is_loading_inventories(self, now_ms: int) -> bool:
        age_ms = now_ms - self._common.started_ms
        in_progress = self._returning.in_progress
        segments = self._common.pool.segments.values()
        joining = age_ms < JOINING_MS and not any(s.offer.fresh for s in segments)
        self._may_wait = age_ms < self._common.rules.inventory_wait_ms and (
            age_ms < JOINING_MS or in_progress
        )
        if self._waiting and not self._may_wait:
            self._jobs.due |= ANSWER
        return self._may_wait and (joining or in_progress)

    def reply(self, now_ms: int) -> None:
        self._jobs.note(ANSWER, False)
        self._reply_to_arrived(now_ms)
        if not self._waiting or self._is_loading_inventories(now_ms):
            return
        keys = 0
        while self._waiting and keys < ANSWERED_PER_STEP:
            reply_id, self._traffic.caller, request = self._waiting.popleft()
            keys += len(request.keys)
            self._common.effect(SendReply(reply_id, self._find(now_ms, request)))
        self._jobs.note(ANSWER, bool(self._waiting or self._tier.arrived))

    def _reply_to_arrived(self, now_ms: int) -> None:
        """Answer queries whose copies have been brought from disks, or have taken too long."""
        keys = 0
        self._is_final = True
        while self._tier.arrived and keys < ANSWERED_PER_STEP:
            reply_id = self._tier.arrived.pop(0)
            waiting = self._bringing.pop(reply_id, None)
            if waiting is not None:
                self._traffic.caller, request = waiting
                keys += len(request.keys)
                self._common.effect(SendReply(reply_id, self._find(now_ms, request)))
        self._jobs.note(ANSWER, bool(self._tier.arrived))


def _is_at(record: ObjectRecord, uuid: bytes, offset: int) -> bool:
    for segment, at in record.extents():
        if at == offset and segment.alive and segment.offer.uuid == uuid:
            return True
    return False


def _misses(request: Query, reply: QueryReply) -> bool:
    match reply:
        case calls.MatchPrefixReply(matches=matches, state=state):
            count = len(request.keys)
            lacks = isinstance(request, calls.MatchPrefix) and request.states and state < count
            return bool(lacks) or any(match.matched < count for match in matches)
        case calls.LookupReply(placements=placements):
            return 0 in placements.replicas
        case calls.ExistsReply(presence=presence):
            return 0 in presence
