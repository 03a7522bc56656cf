"""The master's whole state and every decision it takes, as one pure state machine.

Each call takes the time (``now_ms``, any monotonic clock) and a request of ``kvstore.calls``, and
returns its reply, or ``Later`` with a ticket when the answer must wait for something. What is to
be done outside is collected in ``effects``, which the shell takes after each call: answers to
tickets, messages to nodes, notices for the log. Nothing here reads a clock, waits, logs or knows
of sockets, so the same code runs under gRPC, under a property test and in a simulated cluster.

What it promises, and where:

* Bytes are conserved and extents disjoint (``Pool``); an extent is not reused before its leases
  (``Graveyard``), its writer (``Pending``) and its node (wiping) are done with it.
* A match is leased by its tip; only unleased leaves are evicted (``EvictionPolicy``).
* A token is good once, until its deadline, in its epoch.
* Everything has a bound: ``MasterRules`` and ``kvstore.limits``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from kvstore import calls
from kvstore.calls import NO_PLACEMENTS, Placements, Presence, PutOutcome
from kvstore.errors import (
    BusyError,
    InvalidArgumentError,
    KVStoreError,
    NoSpaceError,
    ProtocolError,
    ValueTooLargeError,
)
from kvstore.limits import REPLICAS_MAX, Key, Namespace
from kvstore.master.state import liveness, report
from kvstore.master.state.effects import Answer, Effect, Later, Notice, Send
from kvstore.master.state.eviction import LRU, EvictionPolicy
from kvstore.master.state.graves import Graveyard, Remains
from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.membership import Membership, describe
from kvstore.master.state.pool import Pool, Shortage
from kvstore.master.state.puts import Pending, PendingPut, WaitingPut
from kvstore.master.state.records import Extent, ObjectRecord, Segment
from kvstore.memory.header import SUPERBLOCK_BYTES, extent_bytes

SWEEP_STEPS = 2_000
"""Records that one slice of background work looks at: 1 to 3 ms."""

AnyReply = TypeVar("AnyReply", bound=calls.Reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterRules:
    """The numbers of the master's promises; ``kvstore.config.MasterConfig`` says why these."""

    lease_ms: int = 10_000
    put_deadline_ms: int = 30_000
    quarantine_ms: int = 10_000
    put_wait_max_ms: int = 30_000
    pending_puts_max: int = 65_536
    waiting_puts_max: int = 256
    beat_ms: int = 500
    liveness: LivenessRules = LivenessRules(suspect_ms=2_000, dead_ms=6_000)

    def __post_init__(self) -> None:
        if self.quarantine_ms < self.liveness.dead_ms:
            raise ValueError("quarantine_ms must not be less than dead_ms")


class MasterState:
    """See the module. One thread at a time; construct one per epoch."""

    def __init__(
        self,
        *,
        epoch: int,
        version: str = "",
        rules: MasterRules | None = None,
        policy: Callable[[], EvictionPolicy] = LRU,
        started_ms: int = 0,
    ) -> None:
        self.epoch = epoch
        self.version = version
        self.rules = rules = rules or MasterRules()
        self.started_ms = started_ms
        self.effects: list[Effect] = []
        self.pool = Pool(policy)
        self.forest = self.pool.forest
        self.counters = self.pool.counters
        self.membership = Membership(
            epoch=epoch,
            rules=rules.liveness,
            beat_ms=rules.beat_ms,
            lease_ms=rules.lease_ms,
            new_policy=policy,
            mounted=self._segment_mounted,
            lost=self._segment_lost,
            effects=self._effect,
        )
        self._pending = Pending()
        self._waiting: deque[WaitingPut] = deque()
        self._graves = Graveyard()
        self._sweeps: deque[tuple[Segment, int | None]] = deque()
        """Background work: a segment and how far its candidates were seen; None: it is dead."""
        self._swept_breaks = self.forest.breaks
        self._next_token = 0
        self._next_ticket = 0
        self._room_made = False
        """Whether anything was freed or mounted since the waiting puts were last tried."""

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    # --- getting ------------------------------------------------------------------------------

    def match_prefix(self, now_ms: int, request: calls.MatchPrefix) -> calls.Matched:
        lease_until_ms = now_ms + self.rules.lease_ms
        matches = []
        for namespace in request.namespaces:
            table = self.forest.table(namespace)
            if table is None:
                matches.append(calls.PrefixMatch(0, 0, NO_PLACEMENTS))
                continue
            keys = request.keys
            matched, holding = self.forest.match(table, keys)
            for record in holding:
                record.last_used_ms = now_ms
                record.lease_until_ms = lease_until_ms
            being_written = 0
            for index in range(matched, len(keys)):
                record_after = table.get(keys[index])
                if record_after is None or not record_after.writer:
                    break
                being_written += 1
            placements = NO_PLACEMENTS
            if request.placements and matched:
                records = [table.get(keys[index]) for index in range(matched)]
                placements = self.placements(records, now_ms)
            matches.append(calls.PrefixMatch(matched, being_written, placements))
            self.counters["matched_objects"] += matched
            self.counters["missed_objects"] += len(keys) - matched
        return calls.Matched(self.epoch, self.rules.lease_ms, matches)

    def lookup(self, now_ms: int, request: calls.Lookup) -> calls.Found:
        table = self.forest.table(request.namespace)
        records: list[ObjectRecord | None] = [None] * len(request.keys)
        if table is not None:
            lease_until_ms = now_ms + self.rules.lease_ms
            for index, key in enumerate(request.keys):
                record = table.get(key)
                if record is not None and record.complete:
                    record.last_used_ms = now_ms
                    record.lease_until_ms = lease_until_ms
                    records[index] = record
        return calls.Found(self.epoch, self.rules.lease_ms, self.placements(records, now_ms))

    def exists(self, now_ms: int, request: calls.Exists) -> calls.Existing:
        del now_ms
        table = self.forest.table(request.namespace)
        if table is None:
            return calls.Existing(bytes(len(request.keys)))
        presence = bytearray(len(request.keys))
        for index, key in enumerate(request.keys):
            record = table.get(key)
            if record is not None:
                if record.complete:
                    presence[index] = Presence.COMPLETE
                elif record.writer:
                    presence[index] = Presence.BEING_WRITTEN
        return calls.Existing(bytes(presence))

    def renew(self, now_ms: int, request: calls.Renew) -> calls.Renewed:
        rules = self.rules
        keys_held = bytearray(len(request.keys))
        columns = zip(request.keys, request.epochs, request.counters, strict=True)
        for index, (key, epoch, counter) in enumerate(columns):
            record = self.forest.get(request.namespace, key)
            if (
                record is not None
                and record.complete
                and (record.epoch, record.counter) == (epoch, counter)
            ):
                record.last_used_ms = now_ms
                record.lease_until_ms = now_ms + rules.lease_ms
                keys_held[index] = 1
        tokens_held = bytearray(len(request.tokens))
        for index, token in enumerate(request.tokens):
            put = self._granted(now_ms, request.epoch, token)
            if put is not None and all(segment.alive for segment, _ in put.extents):
                put.deadline_ms = now_ms + rules.put_deadline_ms
                tokens_held[index] = 1
        return calls.Renewed(
            rules.lease_ms, rules.put_deadline_ms, bytes(keys_held), bytes(tokens_held)
        )

    # --- putting ------------------------------------------------------------------------------

    def put_start(self, now_ms: int, request: calls.PutStart) -> calls.Grants | Later:
        if len(request.sizes) != len(request.keys):
            raise InvalidArgumentError("put_start needs one size per key")
        if not 1 <= request.replicas <= REPLICAS_MAX:
            raise InvalidArgumentError(
                f"replicas is 1 to {REPLICAS_MAX}, not {request.replicas}",
                replicas=request.replicas,
            )
        if request.parent is not None and request.parent in request.keys:
            raise InvalidArgumentError("a key cannot be its own parent")
        self._check_puttable(request.sizes, len(request.keys))
        return self._grant_or_wait(now_ms, request)

    def allocate(self, now_ms: int, request: calls.Allocate) -> calls.Grants | Later:
        self._check_puttable([request.size], 1)
        return self._grant_or_wait(now_ms, request)

    def put_end(self, now_ms: int, request: calls.PutEnd) -> calls.PutEnded | Later:
        outcomes = bytearray(len(request.tokens))
        replaced: list[Remains] = []
        ended: list[tuple[PendingPut, list[Extent]]] = []
        for index, token in enumerate(request.tokens):
            outcomes[index] = PutOutcome.REFUSED
            put = self._granted(now_ms, request.epoch, token)
            if put is None or put.record is None:
                continue
            self._pending.pop(token)
            alive = [extent for extent in put.extents if extent[0].alive]
            if not alive:
                self._abandon(put, now_ms)
                continue
            ended.append((put, alive))
            outcomes[index] = PutOutcome.STORED
        # From the tips to the roots: then only the last block of a chain becomes a leaf.
        for put, alive in reversed(ended):
            replaced += self._complete(put, put.record, alive, put.size, now_ms)
        reply = calls.PutEnded(bytes(outcomes))
        return self._bury(now_ms, replaced, reply) if replaced else reply

    def put_revoke(self, now_ms: int, request: calls.PutRevoke) -> calls.Revoked:
        revoked = 0
        for token in request.tokens:
            put = self._granted(now_ms, request.epoch, token)
            if put is None:
                continue
            self._pending.pop(token)
            if request.settled:
                self.pool.free(put.extents, put.length)
                self._room_made = True
            else:
                until_ms = put.deadline_ms + self.rules.quarantine_ms
                self._pending.quarantine(put.extents, put.length, until_ms)
            self._unclaim(put)
            revoked += 1
        self.counters["revoked_puts"] += revoked
        return calls.Revoked(revoked)

    def commit(self, now_ms: int, request: calls.Commit) -> calls.Committed | Later:
        put = self._granted(now_ms, request.epoch, request.token)
        if put is None or put.record is not None or request.size > put.size:
            return calls.Committed(PutOutcome.REFUSED)
        if request.parent == request.key:
            raise InvalidArgumentError("a key cannot be its own parent")
        outcome = self._outcome(request.namespace, request.key, request.overwrite)
        alive = [extent for extent in put.extents if extent[0].alive]
        self._pending.pop(request.token)
        if outcome is not PutOutcome.WRITE or not alive:
            # Its owner may still look at what it computed, so not at once.
            until_ms = put.deadline_ms + self.rules.quarantine_ms
            self._pending.quarantine(put.extents, put.length, until_ms)
            return calls.Committed(outcome if alive else PutOutcome.REFUSED)
        record = self.forest.ensure(request.namespace, request.key)
        try:
            self._adopt(record, request.namespace, request.parent)
        except InvalidArgumentError:
            self._pending.add(put)
            raise
        kept = extent_bytes(request.size)
        for segment, offset in alive:
            if kept < put.length:
                segment.allocator.free(offset + kept, put.length - kept)
        replaced = self._complete(put, record, alive, request.size, now_ms)
        reply = calls.Committed(PutOutcome.STORED)
        return self._bury(now_ms, replaced, reply) if replaced else reply

    def _check_puttable(self, sizes: Sequence[int], count: int) -> None:
        segments = self.pool.segments.values()
        room = max((s.offer.size for s in segments), default=None)
        if room is not None and sizes:
            largest = max(sizes)
            if extent_bytes(largest) > room - SUPERBLOCK_BYTES:
                raise ValueTooLargeError(
                    f"a value of {largest} bytes does not fit into any segment, "
                    f"the largest has {room} bytes",
                    advice="Cut it into smaller values, or start a node with more --memory.",
                    size_bytes=largest,
                    segment_bytes_max=room,
                )
        if len(self._pending) + count > self.rules.pending_puts_max:
            raise BusyError(
                f"{len(self._pending)} puts are under way, at most "
                f"{self.rules.pending_puts_max} are allowed",
                advice="Finish or revoke some first.",
                pending_puts=len(self._pending),
            )

    def _grant_or_wait(
        self, now_ms: int, request: calls.PutStart | calls.Allocate
    ) -> calls.Grants | Later:
        result = self._try_grant(now_ms, request)
        if isinstance(result, calls.Grants):
            return result
        wait_ms = min(request.wait_ms, self.rules.put_wait_max_ms)
        if result.goes_on:
            wait_ms = max(wait_ms, 1_000)
            self._room_made = True
        if wait_ms <= 0:
            raise self._no_space(result)
        if len(self._waiting) >= self.rules.waiting_puts_max:
            raise BusyError(
                f"{len(self._waiting)} puts are waiting for room already",
                advice="Add memory, or put less.",
                waiting_puts=len(self._waiting),
            )
        ticket = self._ticket()
        self._waiting.append(WaitingPut(ticket, request, now_ms + wait_ms))
        self.counters["waited_puts"] += 1
        return Later(ticket)

    def _try_grant(
        self, now_ms: int, request: calls.PutStart | calls.Allocate
    ) -> calls.Grants | Shortage:
        if isinstance(request, calls.Allocate):
            shortage = self._take(now_ms, [request.size], 1, None, request.host)
            if isinstance(shortage, Shortage):
                return shortage
            put = self._new_put(now_ms, None, shortage[0], request.size)
            return self._grants(bytes([PutOutcome.WRITE]), [put])
        outcomes = bytearray(len(request.keys))
        table = self.forest.table(request.namespace)
        lease_until_ms = now_ms + self.rules.lease_ms
        for index, key in enumerate(request.keys):
            outcome = self._outcome(request.namespace, key, request.overwrite)
            outcomes[index] = outcome
            if outcome is PutOutcome.FOUND and table is not None:
                found = table.get(key)
                assert found is not None
                found.last_used_ms = now_ms
                found.lease_until_ms = max(found.lease_until_ms, lease_until_ms)
        granted = [i for i, outcome in enumerate(outcomes) if outcome == PutOutcome.WRITE]
        if not granted:
            return self._grants(bytes(outcomes), [])
        near = None
        parent_key = (
            request.keys[granted[0] - 1] if request.chain and granted[0] else request.parent
        )
        if parent_key is not None and table is not None:
            parent = table.get(parent_key)
            if parent is not None and parent.complete:
                parent.lease_until_ms = max(parent.lease_until_ms, lease_until_ms)
                near = next(segment for segment, _ in parent.extents() if segment.alive)
        taken = self._take(
            now_ms, [request.sizes[i] for i in granted], request.replicas, near, request.host
        )
        if isinstance(taken, Shortage):
            return taken
        puts: list[PendingPut] = []
        for extents, index in zip(taken, granted, strict=True):
            record = self.forest.ensure(request.namespace, request.keys[index])
            parent_key = request.keys[index - 1] if request.chain and index else request.parent
            put = self._new_put(now_ms, record, extents, request.sizes[index])
            puts.append(put)
            try:
                self._adopt(record, request.namespace, parent_key)
            except InvalidArgumentError:
                for given, of_given in zip(taken, granted, strict=True):
                    self.pool.free(given, extent_bytes(request.sizes[of_given]))
                for made in reversed(puts):
                    self._pending.pop(made.token)
                    self._unclaim(made)
                raise
        return self._grants(bytes(outcomes), puts)

    def _outcome(self, namespace: Namespace, key: Key, overwrite: bool) -> PutOutcome:
        record = self.forest.get(namespace, key)
        if record is None:
            return PutOutcome.WRITE
        if record.writer:
            return PutOutcome.BEING_WRITTEN
        return PutOutcome.FOUND if record.complete and not overwrite else PutOutcome.WRITE

    def _take(
        self, now_ms: int, sizes: list[int], replicas: int, near: Segment | None, host: str
    ) -> list[list[Extent]] | Shortage:
        segments = [
            segment
            for node in self.membership.nodes.values()
            if self.membership.state_of(node, now_ms) == liveness.ALIVE
            for segment in node.segments
        ]
        usable = [s for s in segments if s.usable_at_ms <= now_ms]
        if not usable:
            soonest = min((segment.usable_at_ms for segment in segments), default=None)
            return Shortage(sum(map(extent_bytes, sizes)), soonest)
        return self.pool.allocate(
            sizes,
            replicas=min(replicas, len({segment.node.name for segment in usable})),
            usable=usable,
            near=near if near in usable else None,
            host=host,
            now_ms=now_ms,
        )

    def _new_put(
        self, now_ms: int, record: ObjectRecord | None, extents: list[Extent], size: int
    ) -> PendingPut:
        self._next_token += 1
        put = PendingPut(
            token=self._next_token,
            record=record,
            extents=extents,
            length=extent_bytes(size),
            size=size,
            deadline_ms=now_ms + self.rules.put_deadline_ms,
        )
        if record is not None:
            record.writer = put.token
        self._pending.add(put)
        return put

    def _grants(self, outcomes: bytes, puts: list[PendingPut]) -> calls.Grants:
        return calls.Grants(
            epoch=self.epoch,
            deadline_ms=self.rules.put_deadline_ms,
            outcomes=outcomes,
            replicas=len(puts[0].extents) if puts else 0,
            tokens=[put.token for put in puts],
            segments=[segment.segment_id for put in puts for segment, _ in put.extents],
            offsets=[offset for put in puts for _, offset in put.extents],
        )

    def _granted(self, now_ms: int, epoch: int, token: int) -> PendingPut | None:
        put = self._pending.get(token) if epoch == self.epoch else None
        return put if put is not None and now_ms <= put.deadline_ms else None

    def _adopt(self, record: ObjectRecord, namespace: Namespace, parent: Key | None) -> None:
        """Give a record that is not complete its place in the forest."""
        if record.segment is None:
            above = None if parent is None else self.forest.ensure(namespace, parent)
            try:
                self.pool.link(record, above)
            finally:
                if above is not None and not above.children:
                    self.pool.settle(above, 0)  # made for nothing: the link was refused

    def _complete(
        self,
        put: PendingPut,
        record: ObjectRecord | None,
        extents: list[Extent],
        size: int,
        now_ms: int,
    ) -> list[Remains]:
        """The put's record has these bytes now; returns what they replaced, still allocated."""
        assert record is not None
        replaced: list[Remains] = []
        if record.segment is not None:
            replaced.append(Remains.of(record))
            self.pool.strip(record)
        record.writer = 0
        self.pool.store(record, extents, size, (self.epoch, put.token), now_ms)
        self.counters["stored_objects"] += 1
        self.counters["stored_bytes"] += size
        return replaced

    def _abandon(self, put: PendingPut, now_ms: int) -> None:
        """A put that cannot end any more; its writer may not have noticed yet."""
        until_ms = max(now_ms, put.deadline_ms) + self.rules.quarantine_ms
        self._pending.quarantine(put.extents, put.length, until_ms)
        self._unclaim(put)

    def _unclaim(self, put: PendingPut) -> None:
        record = put.record
        if record is not None and record.writer == put.token:
            record.writer = 0
            if record.segment is None:
                self.pool.settle(record, record.last_used_ms)

    def _no_space(self, shortage: Shortage) -> NoSpaceError:
        if not self.pool.segments:
            return NoSpaceError(
                "no node has mounted any memory",
                advice="Start one: kvstore-node --master HOST:PORT --memory 4GiB",
                missing_bytes=shortage.missing_bytes,
            )
        return NoSpaceError(
            f"no room: {max(0, shortage.missing_bytes)} bytes are missing, and all that is "
            "there is leased, being written or on nodes that cannot be used now",
            advice="Wait longer (wait_ms), put less, or add a node.",
            missing_bytes=max(0, shortage.missing_bytes),
            retry_at_ms=shortage.retry_at_ms or 0,
        )

    # --- removing -----------------------------------------------------------------------------

    def remove(self, now_ms: int, request: calls.Remove) -> calls.Removed | Later:
        removed = bytearray(len(request.keys))
        gone: list[Remains] = []
        for index, key in enumerate(request.keys):
            record = self.forest.get(request.namespace, key)
            if record is not None and record.segment is not None:
                removed[index] = record.complete
                gone.append(self._hide(record))
        self.counters["removed_objects"] += len(gone)
        return self._bury(now_ms, gone, calls.Removed(bytes(removed)))

    def clear(self, now_ms: int, request: calls.Clear) -> calls.Cleared | Later:
        if request.namespace:
            table = self.forest.table(request.namespace)
            tables = [] if table is None else [table]
        else:
            tables = list(self.forest.namespaces.values())
        complete = (record for table in tables for record in table if record.segment is not None)
        chosen = list(islice(complete, max(1, request.limit)))
        gone = [self._hide(record) for record in chosen]
        self.counters["removed_objects"] += len(gone)
        remaining = sum(table.objects for table in tables)
        return self._bury(now_ms, gone, calls.Cleared(len(gone), remaining))

    def _hide(self, record: ObjectRecord) -> Remains:
        remains = Remains.of(record)
        self.pool.strip(record)
        self.pool.settle(record, record.last_used_ms)
        return remains

    def _bury(self, now_ms: int, gone: list[Remains], reply: AnyReply) -> AnyReply | Later:
        """Answer with ``reply``, once the headers of what is gone are wiped."""
        ticket = self._ticket()
        effects, waits = self._graves.bury(gone, now_ms + self.rules.lease_ms, ticket, reply)
        self.effects += effects
        return Later(ticket) if waits else reply

    def cancel(self, ticket: int) -> None:
        """Nobody waits for this answer any more. A removal is carried out all the same."""
        for waiting in self._waiting:
            if waiting.ticket == ticket:
                self._waiting.remove(waiting)
                return

    # --- segments and nodes -------------------------------------------------------------------

    def describe_segments(self, now_ms: int, request: calls.DescribeSegments) -> calls.Segments:
        del now_ms
        known = self.pool.segments
        return calls.Segments([describe(known[i]) for i in request.segment_ids if i in known])

    def report_failure(self, now_ms: int, request: calls.ReportFailure) -> calls.Reported:
        for segment_id in request.segment_ids:
            segment = self.pool.segments.get(segment_id)
            if segment is not None:
                segment.node.reported_ms = now_ms
                self.counters["reported_failures"] += 1
        self.membership.bury_dead(now_ms)
        states = [self.membership.state_of(n, now_ms) for n in self.membership.nodes.values()]
        return calls.Reported(states.count(liveness.SUSPECT))

    def node_joined(self, now_ms: int, session: int, join: calls.NodeJoin) -> calls.MasterAccepted:
        """First message on a node's stream; errors as ``Membership.join``, and then no session."""
        accepted = self.membership.join(now_ms, session, join)
        node = self.membership.of(session)
        assert node is not None
        for segment in node.segments:
            self.effects += self._graves.send_again(segment)
        return accepted

    def node_said(self, now_ms: int, session: int, message: calls.NodeMessage) -> None:
        """Any later message. What comes on a session that is over is ignored."""
        node = self.membership.heard(now_ms, session)
        if node is None:
            return
        match message:
            case calls.NodeBeat(number):
                self._effect(Send(session, calls.MasterBeat(number)))
            case calls.NodeWiped(order):
                segment = self._graves.segment_of(order)
                if segment is not None and segment.node is node:
                    self.effects += self._graves.wiped(order)
                    self._room_made = True
            case calls.NodeLeave():
                self.membership.leave(session)
            case calls.NodeJoin():
                raise ProtocolError("a node joins once per stream")

    def node_stream_broken(self, session: int) -> None:
        self.membership.stream_broken(session)

    def _segment_mounted(self, segment: Segment) -> None:
        self.pool.mount(segment)
        self._room_made = True

    def _segment_lost(self, segment: Segment) -> None:
        self.pool.unmount(segment)
        self._sweeps.append((segment, None))
        self.effects += self._graves.segment_died(segment)

    # --- operators ----------------------------------------------------------------------------

    def status(self, now_ms: int, request: calls.Status) -> calls.ClusterStatus:
        del request
        return report.status(self, now_ms)

    def list_objects(self, now_ms: int, request: calls.ListObjects) -> calls.Listed:
        return report.list_objects(self, now_ms, request)

    def stat_object(self, now_ms: int, request: calls.StatObject) -> calls.ObjectDetail:
        return report.stat_object(self, now_ms, request)

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Do all that is due. Calling it too often is harmless; see ``next_tick_ms``."""
        self.membership.bury_dead(now_ms)
        for put in self._pending.pop_expired(now_ms):
            self._abandon(put, now_ms)
            self.counters["expired_puts"] += 1
            self._effect(Notice("put_expired", {"token": put.token, "bytes": put.size}))
        for extents, length in self._pending.pop_quarantined(now_ms):
            self.pool.free(extents, length)
            self._room_made = True
        if self._graves.free_ended(now_ms):
            self._room_made = True
        self._try_waiting(now_ms)

    def next_tick_ms(self, now_ms: int) -> int | None:
        """When ``tick`` has something to do next; None: not before another call."""
        times = [
            self.membership.next_change_ms(),
            self._pending.next_deadline_ms(),
            self._pending.next_release_ms(),
            self._graves.next_end_ms(),
        ]
        if self._waiting:
            times.append(min(put.deadline_ms for put in self._waiting))
            for segment in self.pool.segments.values():
                for change_ms in (segment.candidates.next_lease_end_ms(), segment.usable_at_ms):
                    if change_ms is not None and change_ms > now_ms:
                        times.append(change_ms)
        return min((time for time in times if time is not None), default=None)

    @property
    def has_work(self) -> bool:
        """Whether ``work`` should be called soon, between other calls."""
        return (
            bool(self._sweeps)
            or self._swept_breaks != self.forest.breaks
            or (self._room_made and bool(self._waiting))
        )

    def work(self, now_ms: int) -> None:
        """One bounded slice of what need not be done at once (a few milliseconds)."""
        if self._room_made and self._waiting:
            self._try_waiting(now_ms)
            return
        if self._swept_breaks != self.forest.breaks:
            self._swept_breaks = self.forest.breaks
            self._sweeps = deque(sweep for sweep in self._sweeps if sweep[1] is None)
            self._sweeps.extend((segment, 0) for segment in self.pool.segments.values())
        if not self._sweeps:
            return
        segment, ticket = self._sweeps[0]
        if ticket is None:
            if not self.pool.sweep_dead(segment, SWEEP_STEPS // 4):
                self._sweeps.popleft()
            return
        further = self.pool.sweep_detached(segment, ticket, SWEEP_STEPS)
        if further is None:
            self._sweeps.popleft()
        else:
            self._sweeps[0] = (segment, further)

    def _try_waiting(self, now_ms: int) -> None:
        """Serve the puts that wait for room, in their order, until one must go on waiting."""
        self._room_made = False
        while self._waiting:
            first = self._waiting[0]
            result = self._try_grant_safely(now_ms, first)
            if isinstance(result, Shortage):
                if result.goes_on:
                    self._room_made = True
                    break
                if now_ms < first.deadline_ms:
                    break
                self._waiting.popleft()
                self.counters["refused_no_space"] += 1
                self._effect(Answer(first.ticket, self._no_space(result)))
                continue
            self._waiting.popleft()
            self._effect(Answer(first.ticket, result))
        for late in [put for put in self._waiting if put.deadline_ms <= now_ms]:
            if late is not self._waiting[0]:
                self._waiting.remove(late)
                self.counters["refused_no_space"] += 1
                self._effect(Answer(late.ticket, self._no_space(Shortage(0, None))))

    def _try_grant_safely(
        self, now_ms: int, waiting: WaitingPut
    ) -> calls.Grants | Shortage | KVStoreError:
        try:
            return self._try_grant(now_ms, waiting.request)
        except KVStoreError as error:
            return error

    # --- helpers ------------------------------------------------------------------------------

    def placements(self, records: Sequence[ObjectRecord | None], now_ms: int) -> Placements:
        """Columns of where these are; replicas of suspect nodes come last."""
        sizes: list[int] = []
        epochs: list[int] = []
        counters: list[int] = []
        replicas: list[int] = []
        segments: list[int] = []
        offsets: list[int] = []
        for record in records:
            if record is None or record.segment is None:
                sizes.append(0)
                epochs.append(0)
                counters.append(0)
                replicas.append(0)
                continue
            sizes.append(record.size)
            epochs.append(record.epoch)
            counters.append(record.counter)
            if not record.more:
                replicas.append(1)
                segments.append(record.segment.segment_id)
                offsets.append(record.offset)
                continue
            alive = [extent for extent in record.extents() if extent[0].alive]
            alive.sort(key=lambda e: self.membership.state_of(e[0].node, now_ms) != liveness.ALIVE)
            replicas.append(len(alive))
            segments += [segment.segment_id for segment, _ in alive]
            offsets += [offset for _, offset in alive]
        return Placements(sizes, epochs, counters, replicas, segments, offsets)

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _effect(self, effect: Effect) -> None:
        self.effects.append(effect)

    def check_invariants(self) -> None:
        """Everything that must always hold; for tests and the simulator, O(objects)."""
        self.membership.check_invariants()
        self.pool.check_invariants([*self._pending.ranges(), *self._graves.ranges()])
        writers = {put.token: put.record for put in self._pending if put.record is not None}
        for record in self.forest.records():
            assert not record.writer or writers.pop(record.writer) is record, "a lost writer"
        assert not writers, "a put whose record does not know it"
        mounted = [s for node in self.membership.nodes.values() for s in node.segments]
        assert {id(s) for s in mounted} == {id(s) for s in self.pool.segments.values()}
        assert len(self._waiting) <= self.rules.waiting_puts_max
