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
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvstore import calls
from kvstore.calls import NO_PLACEMENTS, DrainStep, Placements, PutOutcome, Version
from kvstore.errors import (
    BusyError,
    InvalidArgumentError,
    KVStoreError,
    NoSpaceError,
    ProtocolError,
    UnavailableError,
    ValueTooLargeError,
)
from kvstore.limits import EPOCH_MAX, REPLICAS_MAX, Key, Namespace
from kvstore.master.state import draining, liveness, repairing, report, shortage
from kvstore.master.state.effects import Answer, Effect, Later, Notice, Outrun, Send
from kvstore.master.state.eviction import LRU, EvictionPolicy
from kvstore.master.state.graves import Grave, Graveyard
from kvstore.master.state.inventory import Claim, Inventory, Tombstones
from kvstore.master.state.liveness import LivenessRules, Node
from kvstore.master.state.membership import GONE_MAX, Membership, describe
from kvstore.master.state.pool import EVICTIONS_PER_STEP, Pool, Shortage
from kvstore.master.state.puts import Pending, PendingPut, WaitingPut
from kvstore.master.state.records import (
    NEVER_MS,
    Extent,
    Name,
    ObjectRecord,
    Remains,
    Segment,
    with_bytes,
)
from kvstore.master.state.repairing import SPARE_SHIFT, RepairRules, Repairs
from kvstore.memory.header import extent_bytes

MAKING_ROOM_MS = 1_000
"""A put that could be granted if more were evicted waits so long, even if it did not ask to."""

WATCH_MS = 1_000
"""How often the master looks whether nodes do what they were asked."""

SERVED_PER_STEP = 512
"""Keys of waiting puts that one step serves, or one put; a put counts for some keys more."""

PUT_COUNTS_FOR = 16

ANSWERED_PER_STEP = 16_384
"""Keys of waiting questions that one step answers, or one question."""

DESCRIBED_MAX = 1_024
"""Segments that one answer describes: the rest is asked for again."""

PUTS_PER_TICK = 512
"""Puts that one tick lets expire, and frees: late does no harm, a long tick does."""

CLEARED_PER_STEP = 512
"""Objects that one ``clear`` removes, which is repeated until none is left."""

HIDE_STEPS = 4_096
"""Records without bytes that a removal forgets at once, for as many objects as it removes; the
background work forgets the rest."""

SWEEP_STEPS = 2_000
"""Records that one slice of background work looks at: 1 to 3 ms."""

_MISS = ObjectRecord(Namespace(""), Key(b""))
"""In place of what is not there; never changed."""

EVICTIONS_AHEAD = 64
"""In one slice of background work: 1 to 2 ms."""

CLAIMS_PER_STEP = 256
"""Objects of an inventory that one slice of background work takes in: 3 to 5 ms."""

JOINING_MS = 600
"""Nodes that were with the master before have joined by then: they try several times a second."""

ASKING_MAX = 4_096
"""Questions that wait for inventories; further ones are answered at once."""

REPAIR_STEPS = 512
"""Objects that one request for copies looks at: 1 to 2 ms."""

REPAIR_ANCESTORS = 16
"""Blocks above an object that are looked at for missing replicas before it is copied itself: a
chain with a hole is of no use. A pass finds the rest."""

TARGETS_MS = 1_000
"""How long it counts which nodes have room for copies, until a copy is begun."""

AnyReply = TypeVar("AnyReply", bound=calls.Reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterRules:
    """The numbers of the master's promises; ``kvstore.config.MasterConfig`` says why these."""

    lease_ms: int = 10_000
    put_deadline_ms: int = 30_000
    quarantine_ms: int = 20_000
    put_wait_max_ms: int = 30_000
    gather_ms: int = 0
    """After the start: what would be a miss waits so long for nodes to tell what they hold."""
    node_patience_ms: int = 30_000
    """A node that is alive, but for so long has told nothing of its inventory, or has not wiped
    what it was ordered to, must join anew: removals wait for both."""
    pending_puts_max: int = 65_536
    waiting_puts_max: int = 256
    beat_ms: int = 500
    liveness: LivenessRules = field(
        default_factory=lambda: LivenessRules(suspect_ms=2_000, dead_ms=6_000)
    )
    repair: RepairRules = field(default_factory=RepairRules)

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
        cluster: str = "",
        rules: MasterRules | None = None,
        policy: Callable[[], EvictionPolicy] = LRU,
        started_ms: int = 0,
    ) -> None:
        self.epoch = epoch
        self.version = version
        self.cluster = cluster
        self.rules = rules = rules or MasterRules()
        self.started_ms = started_ms
        self.effects: list[Effect] = []
        self.changing = False
        """Set by a step before its first change. An exception that is no ``KVStoreError`` leaves
        the state half changed then; the caller clears it before a step."""
        self.pool = Pool()
        self.forest = self.pool.forest
        self.counters = self.pool.counters
        self.membership = Membership(
            epoch=epoch,
            rules=rules.liveness,
            beat_ms=rules.beat_ms,
            lease_ms=rules.lease_ms,
            unfenced_ms=rules.put_deadline_ms + rules.quarantine_ms,
            new_policy=policy,
            cluster=cluster,
        )
        self._pending = Pending()
        self._waiting: deque[WaitingPut] = deque()
        self._graves = Graveyard()
        self._inventories: dict[Segment, tuple[Inventory, Grave]] = {}
        """Under way, each with what removals wait for meanwhile."""
        self._tombstones = Tombstones()
        self._absent_since: dict[bytes, int] = {}
        """Memory (uuid) that was unmounted, and how many tombstones there were then."""
        self._mark = calls.NO_MARK
        """The newest that any memory keeps: what has an older one was away when something was
        removed."""
        self._found_mark = calls.NO_MARK
        """The newest of a master before us."""
        self._outdated: set[bytes] = set()
        """Memory (uuid) that was believed until it was found to be outdated."""
        self._in_doubt = True
        """Whether some memory may have gone away, or stayed away, since the last mark was made."""
        self._pressed: dict[Segment, None] = {}
        """Full segments with less free than should be."""
        self._sweeps: deque[tuple[Segment, int | None]] = deque()
        """Background work: a segment and how far its candidates were seen; None: it is dead."""
        self._swept_breaks = self.forest.breaks
        self._gathering = rules.gather_ms > 0
        self._asking: deque[tuple[int, calls.MatchPrefix | calls.Lookup | calls.Exists]] = deque()
        """Questions that wait for inventories, with their tickets."""
        self._walking: deque[tuple[int, calls.MatchPrefix | calls.Lookup | calls.Exists]] = deque()
        """Questions about chains that are too long for one step."""
        self._graves_due = False
        """Whether more removed bytes may be free now than one tick frees."""
        self._next_token = 0
        self._next_ticket = 0
        self._tried_ms = started_ms
        """When the waiting puts were last tried."""
        self._watched_ms = started_ms
        """When it was last looked which nodes do not do what they should."""
        self._room_made = False
        """Whether anything was freed or mounted since the waiting puts were last tried."""
        self._repairs = Repairs(rules.repair, rules.lease_ms, started_ms)
        self._copies: dict[Name, list[PendingPut]] = {}
        """Under way, for draining or repair: by the object whose bytes are copied."""
        self._targets: tuple[int, list[Segment]] = NEVER_MS, []
        """When it was looked where copies may go, and what was found: the emptiest first."""
        self._told_short = 0
        """Objects with missing replicas, as the log was last told."""
        self._told_repaired = 0

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    # --- getting ------------------------------------------------------------------------------

    def find(
        self, now_ms: int, request: calls.MatchPrefix | calls.Lookup | calls.Exists
    ) -> calls.Matched | calls.Found | calls.Existing | Later:
        """Answers at once, but for what would be a miss while a new master hears what is there, and
        a chain that is too long to be walked over in one step."""
        self.forest.begin_step()
        reply = self._find(now_ms, request)
        if self.forest.unfinished:
            self.forest.unfinished = False
            ticket = self._ticket()
            self._walking.append((ticket, request))
            return Later(ticket)
        if not (self._gathering and self._gathers(now_ms) and _misses(request, reply)):
            return reply
        if len(self._asking) == ASKING_MAX:
            return reply
        ticket = self._ticket()
        self._asking.append((ticket, request))
        return Later(ticket)

    def _find(
        self, now_ms: int, request: calls.MatchPrefix | calls.Lookup | calls.Exists
    ) -> calls.Matched | calls.Found | calls.Existing:
        match request:
            case calls.MatchPrefix():
                return self.match_prefix(now_ms, request)
            case calls.Lookup():
                return self.lookup(now_ms, request)
            case calls.Exists():
                return self.exists(now_ms, request)

    def _gathers(self, now_ms: int) -> bool:
        """Whether it is worth waiting for what nodes have to tell."""
        age_ms = now_ms - self.started_ms
        joining = age_ms < JOINING_MS and not any(
            s.offer.fresh for s in self.pool.segments.values()
        )
        self._gathering = age_ms < self.rules.gather_ms and (
            age_ms < JOINING_MS or bool(self._inventories)
        )
        return self._gathering and (joining or bool(self._inventories))

    def match_prefix(self, now_ms: int, request: calls.MatchPrefix) -> calls.Matched:
        lease_until_ms = now_ms + self.rules.lease_ms
        matches = []
        for namespace in request.namespaces:
            table = self.forest.table(namespace)
            if table is None:
                matches.append(calls.PrefixMatch(0, 0, NO_PLACEMENTS))
                continue
            keys = request.keys
            matched, holding, records = self.forest.match(table, keys, records=request.placements)
            if self.forest.unfinished:
                break
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
                placements = self.placements(records, now_ms)
            matches.append(calls.PrefixMatch(matched, being_written, placements))
            self.counters["matched_objects"] += matched
            self.counters["missed_objects"] += len(keys) - matched
        return calls.Matched(self.epoch, self.rules.lease_ms, matches)

    def lookup(self, now_ms: int, request: calls.Lookup) -> calls.Found:
        table = self.forest.table(request.namespace)
        records: list[ObjectRecord | None]
        records = [None] * len(request.keys) if table is None else table.get_many(request.keys)
        lease_until_ms = now_ms + self.rules.lease_ms
        for index, record in enumerate(records):
            if record is None:
                continue
            segment = record.segment
            if segment is not None and (segment.alive or record.complete):
                record.last_used_ms = now_ms
                record.lease_until_ms = lease_until_ms
            else:
                records[index] = None
        return calls.Found(self.epoch, self.rules.lease_ms, self.placements(records, now_ms))

    def exists(self, now_ms: int, request: calls.Exists) -> calls.Existing:
        del now_ms
        table = self.forest.table(request.namespace)
        if table is None:
            return calls.Existing(bytes(len(request.keys)))
        return calls.Existing(table.presence(request.keys))

    def renew(self, now_ms: int, request: calls.Renew) -> calls.Renewed:
        rules = self.rules
        keys_held = bytearray(len(request.keys))
        columns = zip(request.keys, request.epochs, request.counters, strict=True)
        for index, (key, epoch, counter) in enumerate(columns):
            record = self.forest.get(request.namespace, key)
            if (
                record is not None
                and all(s.alive or not s.segment_id for s, _ in record.extents())
                and record.segment is not None
                and (record.epoch, record.counter) == (epoch, counter)
            ):
                record.last_used_ms = now_ms
                record.lease_until_ms = now_ms + rules.lease_ms
                keys_held[index] = 1
        tokens_held = bytearray(len(request.tokens))
        self.changing |= bool(request.tokens)
        for index, token in enumerate(request.tokens):
            put = self._granted(now_ms, request.epoch, token)
            if put is not None and all(segment.alive for segment, _ in put.extents):
                self._pending.renew(put, now_ms + rules.put_deadline_ms)
                self._note_allocation(put)
                tokens_held[index] = 1
        return calls.Renewed(
            rules.lease_ms, rules.put_deadline_ms, bytes(keys_held), bytes(tokens_held)
        )

    # --- putting ------------------------------------------------------------------------------

    def put_start(self, now_ms: int, request: calls.PutStart) -> calls.Grants | Later:
        self.forest.begin_step()
        if len(request.sizes) != len(request.keys):
            raise InvalidArgumentError("put_start needs one size per key")
        if not 1 <= request.replicas <= REPLICAS_MAX:
            raise InvalidArgumentError(
                f"replicas is 1 to {REPLICAS_MAX}, not {request.replicas}",
                replicas=request.replicas,
            )
        if request.parent is not None and request.parent in request.keys:
            raise InvalidArgumentError("a key cannot be its own parent")
        self._check_sizes(request.sizes)
        return self._grant_or_wait(now_ms, request)

    def allocate(self, now_ms: int, request: calls.Allocate) -> calls.Grants | Later:
        self.forest.begin_step()
        self._check_sizes([request.size])
        return self._grant_or_wait(now_ms, request)

    def put_end(self, now_ms: int, request: calls.PutEnd) -> calls.PutEnded | Later:
        self.forest.begin_step()
        outcomes = bytearray([PutOutcome.REFUSED]) * len(request.tokens)
        was_stored = int(PutOutcome.STORED)
        replaced: list[Remains] = []
        outdated: list[PendingPut] = []
        ended: list[tuple[PendingPut, list[Extent]]] = []
        mourned: list[Grave] = []
        pending = self._pending
        self.changing = True
        for index, token in enumerate(request.tokens if request.epoch == self.epoch else ()):
            put = pending.get(token)
            if put is None:
                self._wipe_again(token)
                continue
            if now_ms > put.deadline_ms or put.record is None:
                continue
            pending.pop(token)
            if put.moves is not None:
                self._copy_ended(put)
            alive = put.extents
            if len(alive) > 1 or not alive[0][0].alive:
                alive = [extent for extent in put.extents if extent[0].alive]
            if not alive:
                self._abandon(put, now_ms)
                continue
            if put.moves is not None and (
                not self._still_moves(put) or any(put.record is other.record for other, _ in ended)
            ):
                outdated.append(put)
                continue
            if put.repairs:
                if self._repaired(now_ms, put):
                    outcomes[index] = was_stored
                else:
                    outdated.append(put)
                continue
            ended.append((put, alive))
            if put.overwrite:
                mourned += self._graves.mourned(put.record)
            outcomes[index] = was_stored
        self._give_back(outdated)
        for put, alive in ended:
            used_ms = 0 if put.record is None else put.record.last_used_ms
            replaced += self._store(put, put.record, alive, put.size, now_ms)
            if put.moves is not None and put.record is not None:
                put.record.last_used_ms = used_ms  # moving it is no use of it
                self.counters["moved_objects"] += 1
                self.counters["moved_bytes"] += put.size
        stored = [put.size for put, _ in ended if put.moves is None]
        self._count_stored(len(stored), sum(stored))
        for put, _ in ended:  # now that all are whole: only the last block of a chain is a leaf
            if put.record is not None:
                if not put.record.children:
                    self.pool.settle(put.record)
                if put.record.more and self._repairs.enabled:
                    self._note_short(now_ms, put.record)
        self._room_made |= bool(ended)  # they can be evicted
        reply = calls.PutEnded(bytes(outcomes))
        overwriting = [put for put, _ in ended if put.overwrite]
        if overwriting or replaced:
            return self._replace(now_ms, replaced, overwriting, reply, mourned)
        return reply

    def put_revoke(self, now_ms: int, request: calls.PutRevoke) -> calls.Revoked:
        given_up: list[Remains] = []
        self.changing = True
        for token in request.tokens:
            put = self._granted(now_ms, request.epoch, token)
            if put is None:
                if request.settled and request.epoch == self.epoch:
                    self._wipe_again(token)
                continue
            self._pending.pop(token)
            if put.moves is not None:
                self._copy_ended(put)
            remains = put.remains(self.epoch)
            if request.settled:
                self.pool.free(put.extents, put.length)
            else:
                self._pending.quarantine(
                    put.token, remains, put.deadline_ms + self.rules.quarantine_ms
                )
                remains = remains._replace(writers=put.writers(request.connections))
            given_up.append(remains)
            self._unclaim(put)
        revoked = len(given_up)
        self._clean(given_up)
        self.counters["revoked_puts"] += revoked
        return calls.Revoked(revoked)

    def commit(self, now_ms: int, request: calls.Commit) -> calls.Committed | Later:
        self.forest.begin_step()
        put = self._granted(now_ms, request.epoch, request.token)
        if put is None or put.record is not None or request.size > put.size:
            return calls.Committed(PutOutcome.REFUSED)
        if request.parent == request.key:
            raise InvalidArgumentError("a key cannot be its own parent")
        self.changing = True
        outcome = self._outcome(request.namespace, request.key, request.overwrite)
        alive = [extent for extent in put.extents if extent[0].alive]
        if outcome is not PutOutcome.WRITE or not alive:
            self._pending.pop(request.token)
            # Its owner may still look at what it computed, so not at once.
            remains = put.remains(self.epoch)
            self._pending.quarantine(put.token, remains, put.deadline_ms + self.rules.quarantine_ms)
            self._clean([remains])
            return calls.Committed(outcome if alive else PutOutcome.REFUSED)
        namespace, parent = request.namespace, request.parent
        above = None if parent is None else self.forest.ensure(namespace, parent)
        record = self.forest.ensure(namespace, request.key)
        mourned = self._graves.mourned(record) if request.overwrite else []
        self.forest.resumes = True
        try:
            self._adopt(now_ms, record, above)
        finally:
            self.forest.resumes = False
        self._pending.pop(request.token)
        kept = extent_bytes(request.size)
        if kept < put.length:
            tails = [(segment, offset + kept) for segment, offset in alive]
            self.pool.free(tails, put.length - kept)
        replaced = self._store(put, record, alive, request.size, now_ms)
        self._count_stored(1, request.size)
        # Its owner has it mapped, and believes in his allocation until this reply is there.
        lease_until_ms = max(now_ms + self.rules.lease_ms, put.deadline_ms)
        record.lease_until_ms = max(record.lease_until_ms, lease_until_ms)
        self._settle(record)
        reply = calls.Committed(PutOutcome.STORED)
        put.record = record
        overwriting = [put] if request.overwrite else []
        if overwriting or replaced:
            return self._replace(now_ms, replaced, overwriting, reply, mourned)
        return reply

    def _replace(
        self,
        now_ms: int,
        replaced: list[Remains],
        puts: Sequence[PendingPut],
        reply: AnyReply,
        mourned: Sequence[Grave],
    ) -> AnyReply | Later:
        """Answer with ``reply`` once nothing older of what these puts have written is left."""
        names = [(put.record.namespace, put.record.key) for put in puts if put.record is not None]
        for put, (namespace, key) in zip(puts, names, strict=True):
            if put.moves is None:
                self._end_copies(now_ms, (namespace, key))
            version = Version(self.epoch, put.token)
            self._tombstones.add(namespace, key, self._present, but=version)
        return self._bury(now_ms, replaced, reply, [*self._earlier(names), *mourned])

    def _earlier(self, names: Sequence[Name]) -> list[Grave]:
        """What else may hold these objects: earlier versions, removals of them (this one may be the
        same, sent again), memory that has not yet told what it holds."""
        return [*self._graves.of_objects(names), *self._elsewhere()]

    def _check_remembered(self) -> None:
        """Raises UnavailableError: no memory is there that would remember the removal if we died,
        and memory that is away, or has not joined yet, may hold what is to be removed."""
        if not self.pool.segments:
            raise UnavailableError(
                "no node is connected that could record the removal, and a node that "
                "joins may hold the object",
                advice="Try again when a node has joined.",
            )

    def _elsewhere(self) -> list[Grave]:
        """What a removal must wait for, because other memory may hold what is removed: that which
        has not told yet what it holds; and that others know that the rest is outdated."""
        if self._in_doubt:
            self._in_doubt = False
            number = self._mark.counter + 1 if self._mark.epoch == self.epoch else 1
            self._mark = Version(self.epoch, number)
            for segment in self.pool.segments.values():
                if segment.whole:
                    self.effects += self._graves.keep_mark(segment, self._mark)
        untold = [held for _, held in self._inventories.values()]
        return [*untold, *self._graves.unmarked()]

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        capacity_max = self.pool.capacity_max
        if capacity_max and sizes and extent_bytes(max(sizes)) > capacity_max:
            raise ValueTooLargeError(
                f"a value of {max(sizes)} bytes does not fit into any segment, "
                f"the largest has room for {capacity_max}",
                advice="Split it into smaller values, or start a node with more --memory.",
                size_bytes=max(sizes),
                segment_bytes_max=capacity_max,
            )

    def _grant_or_wait(
        self, now_ms: int, request: calls.PutStart | calls.Allocate
    ) -> calls.Grants | Later:
        result = self._try_grant(now_ms, request)
        if isinstance(result, calls.Grants):
            unclean = self._unclean(result)
            return self._bury(now_ms, [], result, unclean) if unclean else result
        wait_ms = min(request.wait_ms, self.rules.put_wait_max_ms)
        if result.goes_on:
            wait_ms = max(wait_ms, MAKING_ROOM_MS)
            self._room_made = True
        if wait_ms <= 0 or not self._could_take(request):
            raise self._no_space(now_ms, request, result)
        if len(self._waiting) >= self.rules.waiting_puts_max:
            raise BusyError(
                f"{len(self._waiting)} puts are waiting for space, the limit",
                advice="Add memory (kvstore-node --memory), or put less at a time.",
                waiting_puts=len(self._waiting),
            )
        if not self._waiting:
            self._tried_ms = now_ms
        ticket = self._ticket()
        self._waiting.append(WaitingPut(ticket, request, now_ms + wait_ms))
        self.counters["waited_puts"] += 1
        return Later(ticket)

    def _could_take(self, request: calls.PutStart | calls.Allocate) -> bool:
        """Whether any node but those that the client cannot reach may have room for it some time;
        where there is none at all, one may come."""
        segments = self.pool.segments.values()
        return not segments or any(
            segment.offer.uuid not in request.avoid
            and (not request.here_only or segment.node.host == request.host)
            for segment in segments
        )

    def _unclean(self, grants: calls.Grants) -> list[Grave]:
        """What must be wiped before the writers of these are told where to write."""
        segments = self.pool.segments
        unclean = self._graves.unclean([segments[i] for i in dict.fromkeys(grants.segments)])
        return [grave for grave in unclean if grave.offsets]  # marks concern no writer

    def _try_grant(
        self, now_ms: int, request: calls.PutStart | calls.Allocate
    ) -> calls.Grants | Shortage:
        if isinstance(request, calls.Allocate):
            self.changing = True
            room = self._take(
                now_ms, [request.size], 1, None, request.host, None, request.avoid,
                request.here_only,
            )  # fmt: skip
            if isinstance(room, Shortage):
                return room
            put = self._new_put(now_ms, None, room[0], request.size, request.client_number)
            return self._grants(bytes([PutOutcome.WRITE]), [put])
        keys = list(request.keys)
        table = self.forest.table(request.namespace)
        lease_until_ms = now_ms + self.rules.lease_ms
        outcomes = bytearray([PutOutcome.WRITE]) * len(keys)
        granted: list[int] = []
        known = [None] * len(keys) if table is None else table.get_many(keys)
        for index, found in enumerate(known):
            if found is None:
                granted.append(index)
                continue
            outcome = self._outcome_of(found, request.overwrite)
            outcomes[index] = outcome
            if outcome is PutOutcome.WRITE:
                granted.append(index)
            elif outcome is PutOutcome.FOUND:
                found.last_used_ms = now_ms
                found.lease_until_ms = max(found.lease_until_ms, lease_until_ms)
        if not granted:
            return self._grants(bytes(outcomes), [])
        near = None
        first = granted[0]
        parent_key = keys[first - 1] if request.chain and first else request.parent
        parent = None if parent_key is None or table is None else table.get(parent_key)
        if parent is not None and parent.complete:
            parent.lease_until_ms = max(parent.lease_until_ms, lease_until_ms)
            near = next(segment for segment, _ in parent.extents() if segment.alive)
        sizes = [request.sizes[index] for index in granted]
        self.changing = True
        taken = self._take(
            now_ms, sizes, request.replicas, near, request.host, None, request.avoid,
            request.here_only,
        )  # fmt: skip
        if isinstance(taken, Shortage):
            return taken
        puts: list[PendingPut] = []
        record: ObjectRecord | None = None
        table = self.forest.ensure_table(request.namespace)
        deadline_ms, token = now_ms + self.rules.put_deadline_ms, self._next_token
        chain, root, overwrite = request.chain, request.parent, request.overwrite
        self._next_token += len(granted)
        for extents, index, size in zip(taken, granted, sizes, strict=True):
            parent_key = keys[index - 1] if chain and index else root
            if parent_key is None:
                above = None
            elif record is not None and record.key is parent_key:
                above = record
            else:
                above = table.get(parent_key) or table.add(parent_key)
            found = table.get(keys[index])  # making room may have forgotten what was known of it
            record = table.add(keys[index]) if found is None else found
            token += 1
            put = PendingPut(
                token, record, extents, size, deadline_ms,
                client_number=request.client_number, overwrite=overwrite,
                missing=request.replicas - len(extents),
            )  # fmt: skip
            record.writer = token
            self._pending.add(put)
            puts.append(put)
            if found is None and above is None:
                continue  # a new root
            try:
                self._adopt(now_ms, record, above)
            except (InvalidArgumentError, BusyError) as error:
                for given, of_size in zip(taken, sizes, strict=True):
                    self.pool.free(given, extent_bytes(of_size))
                for made in reversed(puts):
                    self._pending.pop(made.token)
                    self._unclaim(made)
                if isinstance(error, BusyError):
                    return Shortage(0, goes_on=True)  # how long the chain is shows in further steps
                raise
        return self._grants(bytes(outcomes), puts)

    def _outcome(self, namespace: Namespace, key: Key, overwrite: bool) -> PutOutcome:
        return self._outcome_of(self.forest.get(namespace, key), overwrite)

    @staticmethod
    def _outcome_of(record: ObjectRecord | None, overwrite: bool) -> PutOutcome:
        if record is None:
            return PutOutcome.WRITE
        if not overwrite and record.complete:
            return PutOutcome.FOUND
        return PutOutcome.BEING_WRITTEN if record.writer else PutOutcome.WRITE

    def _take(
        self,
        now_ms: int,
        sizes: list[int],
        replicas: int,
        near: Segment | None,
        host: str,
        used_before_ms: int | None = None,
        avoid: Sequence[bytes] = (),
        here_only: bool = False,
    ) -> list[list[Extent]] | Shortage:
        if len(self._pending) + len(sizes) > self.rules.pending_puts_max:
            raise BusyError(
                f"{len(self._pending)} puts are under way, at most "
                f"{self.rules.pending_puts_max} are allowed",
                advice="Finish or revoke some first.",
                pending_puts=len(self._pending),
            )
        alive = self.membership.alive_segments(now_ms)
        usable = [segment for segment in alive if segment.usable(now_ms)]
        if avoid:
            usable = [segment for segment in usable if segment.offer.uuid not in avoid]
        if here_only:
            usable = [segment for segment in usable if segment.node.host == host]
        taken = self.pool.allocate(
            sizes,
            replicas=replicas,
            usable=usable,
            near=near,
            host=host,
            now_ms=now_ms,
            used_before_ms=used_before_ms,
        )
        if self.pool.evicted:
            for remains in self.pool.evicted:
                for segment, _ in remains.extents:
                    segment.pressed = True
            self.effects += self._graves.clean(self.pool.evicted)
            self.pool.evicted.clear()
        for segment in usable:
            if segment.pressed:
                free = segment.allocator.free_bytes + segment.wiping_bytes
                if free < segment.reserve_bytes // 2:
                    self._pressed[segment] = None
        if host and not isinstance(taken, Shortage):
            for segment, _ in taken[0]:  # most often all go to the same
                liveness.used(segment.node, host, now_ms)
        return taken

    def _new_put(
        self,
        now_ms: int,
        record: ObjectRecord | None,
        extents: list[Extent],
        size: int,
        client_number: int,
        moves: Version | None = None,
        *,
        repairs: bool = False,
        missing: int = 0,
    ) -> PendingPut:
        self._next_token += 1
        put = PendingPut(
            self._next_token,
            record,
            extents,
            size,
            now_ms + self.rules.put_deadline_ms,
            client_number=client_number,
            overwrite=moves is not None and not repairs,
            moves=moves,
            repairs=repairs,
            missing=missing,
        )
        if record is not None and moves is None:
            record.writer = put.token
        if record is not None and moves is not None:
            self._copies.setdefault((record.namespace, record.key), []).append(put)
        self._pending.add(put)
        self._note_allocation(put)
        return put

    def _note_allocation(self, put: PendingPut) -> None:
        if put.record is None:
            for segment, _ in put.extents:
                segment.allocated_until_ms = put.deadline_ms + self.rules.quarantine_ms

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

    def _adopt(self, now_ms: int, record: ObjectRecord, above: ObjectRecord | None) -> None:
        """Give a record that is not complete its place in the forest."""
        try:
            if record.lost:
                self.pool.strip(record)
            if record.segment is None:
                self.pool.link(record, above, now_ms + self.rules.lease_ms)
        finally:
            if above is not None and not above.children:
                self.pool.settle(above)  # made for nothing

    def _store(
        self,
        put: PendingPut,
        record: ObjectRecord | None,
        extents: list[Extent],
        size: int,
        now_ms: int,
    ) -> list[Remains]:
        """The put's record has these bytes now; returns what they replaced, still allocated.
        ``_settle`` it afterwards."""
        assert record is not None
        replaced: list[Remains] = []
        if record.segment is not None:
            replaced.append(Remains.of(record))
            self.pool.strip(record)
        if record.writer == put.token:
            record.writer = 0
        lacks = put.missing + len(put.extents) - len(extents)
        self.pool.store(record, extents, size, (self.epoch, put.token), now_ms, lacks)
        return replaced

    def _count_stored(self, objects: int, size: int) -> None:
        self.counters["stored_objects"] += objects
        self.counters["stored_bytes"] += size

    def _settle(self, record: ObjectRecord | None) -> None:
        if record is not None and not record.children:
            self.pool.settle(record)
            self._room_made = True  # it can be evicted

    def _abandon(self, put: PendingPut, now_ms: int) -> None:
        """A put that cannot end any more; its writer may not have noticed yet."""
        if put.moves is not None:
            self._copy_ended(put)
        remains = put.remains(self.epoch)
        until_ms = max(now_ms, put.deadline_ms) + self.rules.quarantine_ms
        self._pending.quarantine(put.token, remains, until_ms)
        self._clean([remains._replace(writers=put.writers())])
        self._unclaim(put)

    def _clean(self, given_up: Sequence[Remains]) -> None:
        """These versions will never be stored; wipe what their writers may have left."""
        self.effects += self._graves.clean(given_up)
        for remains in given_up:
            if remains.of_replica:
                continue
            if not all(segment.alive for segment, _ in remains.extents):
                self._tombstones.add_version(Version(remains.epoch, remains.counter))

    def _wipe_again(self, token: int) -> None:
        """The writer of an abandoned put has ended. What it wrote through shared memory since the
        first wiping is not left for the next master to find."""
        remains = self._pending.quarantined(token)
        if remains is not None:
            self.effects += self._graves.clean([remains])

    def _unclaim(self, put: PendingPut) -> None:
        record = put.record
        if record is not None and record.writer == put.token:
            record.writer = 0
            if record.segment is None:
                self.pool.settle(record)
        self._room_made = True

    def _no_space(
        self, now_ms: int, request: calls.PutStart | calls.Allocate, found: Shortage
    ) -> NoSpaceError:
        return shortage.explained(
            self.pool.segments.values(), self.membership, now_ms, request, found, len(self._pending)
        )

    # --- removing -----------------------------------------------------------------------------

    def remove(self, now_ms: int, request: calls.Remove) -> calls.Removed | Later:
        self._check_remembered()
        removed = bytearray(len(request.keys))
        gone: list[Remains] = []
        mourned: list[Grave] = []
        steps_max = self.forest.steps + HIDE_STEPS
        self.changing = True
        for index, key in enumerate(request.keys):
            record = self.forest.get(request.namespace, key)
            if self._copies:
                self._end_copies(now_ms, (request.namespace, key))
            mourned += self._graves.mourned(record)
            if record is not None and record.segment is not None:
                removed[index] = record.complete
                gone.append(Remains.of(record))
                self.pool.hide(record, steps_max)
            self._tombstones.add(request.namespace, key, self._present)
        self.counters["removed_objects"] += len(gone)
        earlier = [*self._earlier([(request.namespace, key) for key in request.keys]), *mourned]
        return self._bury(now_ms, gone, calls.Removed(bytes(removed)), earlier)

    def clear(self, now_ms: int, request: calls.Clear) -> calls.Cleared | Later:
        self._check_remembered()
        if request.namespace:
            table = self.forest.table(request.namespace)
            tables = [] if table is None else [table]
        else:
            tables = self.forest.namespaces.values()
        chosen = list(islice(with_bytes(tables), max(1, min(request.limit, CLEARED_PER_STEP))))
        gone: list[Remains] = []
        steps_max = self.forest.steps + HIDE_STEPS
        self.changing = True
        space = request.namespace
        copied = [name for name in self._copies if not space or name[0] == space]
        for name in copied[:CLEARED_PER_STEP]:
            self._end_copies(now_ms, name)
        for record in chosen:
            if record.segment is not None:  # a lost one may have gone along with another
                gone.append(Remains.of(record))
                self.pool.hide(record, steps_max)
        self.counters["removed_objects"] += len(gone)
        remaining = (
            sum(table.objects for table in tables) if request.namespace else self.forest.objects
        )
        remaining += max(0, len(copied) - CLEARED_PER_STEP)
        reply = calls.Cleared(len(gone), remaining)
        self._tombstones.add(request.namespace, None, self._present)
        earlier = [*self._graves.of_namespace(request.namespace), *self._elsewhere()]
        earlier += self._graves.mourned(None)
        return self._bury(now_ms, gone, reply, earlier)

    @property
    def _newest_stored(self) -> Version:
        """No version up to this one will be stored any more. A put that is under way was granted
        before others that have ended, and may still replace what those have stored."""
        first = self._pending.first_token()
        return self._present if first is None else Version(self.epoch, first - 1)

    @property
    def _present(self) -> Version:
        """No version is newer until the next put begins."""
        return Version(self.epoch, self._next_token)

    def report_corrupt(self, now_ms: int, request: calls.ReportCorrupt) -> calls.Dropped:
        """An object with a replica left that nobody has complained of keeps it, and offers it
        first; any other one is removed. Who reports does not wait for the wiping."""
        bad: dict[ObjectRecord, set[Segment]] = {}
        rows = zip(request.keys, request.epochs, request.counters, request.uuids, strict=True)
        for key, epoch, counter, uuid in rows:
            record = self.forest.get(request.namespace, key)
            if record is None or (record.epoch, record.counter) != (epoch, counter):
                continue
            for segment, _ in record.extents():
                if segment.alive and segment.offer.uuid == uuid:
                    bad.setdefault(record, set()).add(segment)
        gone: list[Remains] = []
        steps_max = self.forest.steps + HIDE_STEPS
        self.changing = True
        for record, segments in bad.items():
            if record.segment is None:
                continue  # went along with one before
            self._end_copies(now_ms, (record.namespace, record.key))
            self.counters["corrupt_replicas"] += len(segments)
            nodes = ",".join(segment.node.name for segment in segments)
            key_hex = record.key.hex()
            self._effect(
                Notice(
                    "corrupt_object",
                    {"namespace": record.namespace, "key": key_hex, "nodes": nodes},
                )
            )
            if all(segment in segments for segment, _ in record.extents() if segment.alive):
                gone.append(Remains.of(record))
                self.pool.hide(record, steps_max)
            else:
                self.pool.demote(record, segments)
        self.counters["corrupt_objects"] += len(gone)
        reply = calls.Dropped(len(gone))
        self._bury(now_ms, gone, reply)
        return reply

    def _bury(
        self, now_ms: int, gone: list[Remains], reply: AnyReply, earlier: Sequence[Grave] = ()
    ) -> AnyReply | Later:
        """Answer with ``reply``, once the headers of what is gone are wiped."""
        ticket = self._ticket()
        free_at_ms = now_ms + self.rules.lease_ms
        effects, waits = self._graves.bury(gone, free_at_ms, ticket, reply, earlier)
        self.effects += effects
        return Later(ticket) if waits else reply

    def cancel(self, ticket: int) -> None:
        """Nobody waits for this answer any more. A removal is carried out all the same."""
        for waiting in self._waiting:
            if waiting.ticket == ticket:
                self._waiting.remove(waiting)
                self._room_made = True  # the next in the queue may want less
                return
        for questions in (self._asking, self._walking):
            for asking in questions:
                if asking[0] == ticket:
                    questions.remove(asking)
                    return

    # --- segments and nodes -------------------------------------------------------------------

    def describe_segments(self, now_ms: int, request: calls.DescribeSegments) -> calls.Segments:
        del now_ms
        known = self.pool.segments
        asked = islice(dict.fromkeys(i for i in request.segment_ids if i in known), DESCRIBED_MAX)
        mounted = [describe(known[i]) for i in asked]
        return calls.Segments(self.epoch, mounted)

    def report_failure(self, now_ms: int, request: calls.ReportFailure) -> calls.Reported:
        self.changing = True
        for segment_id in request.segment_ids:
            segment = self.pool.segments.get(segment_id)
            if segment is not None:
                self.membership.reported(now_ms, segment.node, request)
                self.counters["reported_failures"] += 1
        self.membership.bury_dead(now_ms)
        self._after_membership(now_ms)
        states = [self.membership.state_of(n, now_ms) for n in self.membership.nodes.values()]
        return calls.Reported(states.count(liveness.SUSPECT))

    def node_joined(self, now_ms: int, session: int, join: calls.NodeJoin) -> calls.MasterAccepted:
        """First message on a node's stream; errors as ``Membership.join``, and then no session.

        A node that knows of a later master is not let in: what is newer than our epoch would count
        as outdated, and would be wiped. It joins our next term, which begins above that.
        """
        self.membership.check(join)
        if join.highest_epoch > self.epoch:
            self._effect(Outrun(join.highest_epoch))
            raise outrun_by(f"node {join.name}", join.highest_epoch, self.epoch)
        accepted = self.membership.join(now_ms, session, join, self._changes)
        if not join.resume_epoch:
            self._found(session, max(offer.mark for offer in join.segments))
        self._after_membership(now_ms)
        for segment_id in accepted.segment_ids:
            self.effects += self._graves.send_again(self.pool.segments[segment_id])
        self._room_made = True
        return accepted

    def _changes(self) -> None:
        self.changing = True

    def _found(self, session: int, mark: Version) -> None:
        """A node that joins has kept a mark of a master before us. Whoever joined before with an
        older one must join again, and is not believed then."""
        if mark.epoch >= self.epoch or mark <= self._found_mark:
            return
        self._found_mark = mark
        self._mark = max(self._mark, mark)
        for node in list(self.membership.nodes.values()):
            segments = self.membership.segments[node.name]
            older = [s for s in segments if s.offer.mark < mark and not s.offer.fresh]
            if older and node.session != session:
                self._outdated.update(segment.offer.uuid for segment in older)
                self.membership.declare_dead(node, "outdated")

    def node_said(self, now_ms: int, session: int, message: calls.NodeMessage) -> None:
        """Any later message. What comes on a session that is over is ignored."""
        node = self.membership.of(session)
        if node is None:
            return
        if self.membership.state_of(node, now_ms) != liveness.ALIVE:
            self._room_made = True  # if that was silence, it can be chosen again
        self.membership.heard(now_ms, node)
        self.changing = True
        match message:
            case calls.NodeBeat(number):
                repair = self._repairs.waits(node.name) and self._may_copy(now_ms)
                self._effect(Send(session, calls.MasterBeat(number, repair)))
            case calls.NodeWiped(order):
                segment = self._graves.segment_of(order)
                if segment is not None and segment.node is node:
                    self.effects += self._graves.wiped(order)
                    self._room_made = True
            case calls.NodeClaims(segment=index):
                self._take_claims(now_ms, node, index, message)
            case calls.NodeLeave():
                self.membership.leave(node)
                self._after_membership(now_ms, left=True)
            case calls.NodeJoin():
                raise ProtocolError("a node joins once per stream")

    def node_stream_broken(self, session: int) -> None:
        self.changing = True
        self.membership.stream_broken(session)
        self._after_membership(0)  # nobody dies of that

    def _after_membership(self, now_ms: int, *, left: bool = False) -> None:
        """``left``: a node has said so, and serves nobody any more."""
        members = self.membership
        self.effects += members.effects
        for segment in members.lost:
            self._in_doubt = True
            self.pool.unmount(segment)
            if not left:
                segment.died_ms = now_ms
            self._sweeps.append((segment, None))
            absent_since = self._tombstones.made
            if segment in self._inventories:
                inventory, held = self._inventories.pop(segment)
                absent_since = inventory.absent_since
                self.effects += self._graves.let_go(held)
            self._absent_since.pop(segment.offer.uuid, None)
            self._absent_since[segment.offer.uuid] = absent_since
            if len(self._absent_since) > GONE_MAX:
                del self._absent_since[next(iter(self._absent_since))]
            self.effects += self._graves.segment_died(segment)
            if not left:
                self._graves.mourn(segment, self._newest_stored, now_ms + self.rules.lease_ms)
        for segment in members.mounted:
            self.pool.mount(segment)
            absent_since = self._absent_since.pop(segment.offer.uuid, 0)
            if segment.whole:
                self._up_to_date(segment)
            else:
                inventory = Inventory(segment, segment.node.heard_ms, absent_since)
                inventory.outdated = (
                    segment.offer.uuid in self._outdated or segment.offer.mark < self._found_mark
                )
                self._inventories[segment] = inventory, self._graves.hold(segment)
        if members.lost or members.mounted:
            ready_ms = max((s.usable_at_ms for s in members.mounted if s.whole), default=0)
            self._nodes_changed(now_ms, ready_ms)
        for changes in (members.effects, members.lost, members.mounted):
            changes.clear()

    def _up_to_date(self, segment: Segment) -> None:
        """Whatever was removed by now it does not hold."""
        if segment.offer.mark < self._mark:
            self.effects += self._graves.keep_mark(segment, self._mark)

    # --- inventories --------------------------------------------------------------------------

    def _take_claims(self, now_ms: int, node: Node, index: int, claims: calls.NodeClaims) -> None:
        """Raises ProtocolError: no such segment, or more than was asked for."""
        segments = self.membership.segments[node.name]
        if index >= len(segments):
            raise ProtocolError(f"a node of {len(segments)} segments claims for another")
        if segments[index] in self._inventories:
            self._inventories[segments[index]][0].add(now_ms, claims)
        elif node.session is not None:  # known by now: it did not hear so, and begins again
            self._effect(Send(node.session, calls.MasterClaimed(index)))

    def _claim_more(self, now_ms: int) -> bool:
        """One slice of an inventory; whether there was one."""
        for segment, (inventory, held) in self._inventories.items():
            if not inventory.has_work:
                continue
            if inventory.all_claimed:
                if inventory.free_gaps():
                    segment.whole = self._room_made = True
                    del self._inventories[segment]
                    self._outdated.discard(segment.offer.uuid)
                    self._gathers(now_ms)
                    self._up_to_date(segment)
                    self._nodes_changed(now_ms, segment.usable_at_ms)
                    self.effects += self._graves.let_go(held)
                    fields = {"claimed": inventory.claimed, "refused": inventory.refused}
                    self._effect(Notice("inventory_done", {"node": segment.node.name, **fields}))
                return True
            self._claim_slice(now_ms, segment, inventory)
            return True
        return False

    def _claim_slice(self, now_ms: int, segment: Segment, inventory: Inventory) -> None:
        claims, is_answered = inventory.next(CLAIMS_PER_STEP)
        newest = max((claim.version.epoch for claim in claims), default=0)
        if self.epoch < newest < EPOCH_MAX:  # of a node that cannot say so when it joins
            self._effect(Outrun(newest))
            return
        refused: list[Remains] = []
        stored: list[ObjectRecord] = []
        self.forest.resumes = True
        for claim in claims:
            try:
                record = self._claim(now_ms, inventory, claim)
            except BusyError:  # its chain is long: on with it in the next slice
                inventory.put_back(len(claims) - len(stored) - len(refused))
                is_answered = False
                break
            if record is None:
                of = [(segment, claim.offset)]
                refused.append(Remains(claim.name, claim.size, *claim.version, of))
            else:
                stored.append(record)
        self.forest.resumes = False
        for record in stored:  # now that most children have found their parents
            if not record.children:
                self._settle(record)
        inventory.claimed += len(stored)
        inventory.refused += len(refused)
        self.counters["claimed_objects"] += len(stored)
        if refused:
            self.counters["refused_claims"] += len(refused)
            self.effects += self._graves.clean(refused)
        if is_answered and segment.node.session is not None:
            index = self.membership.segments[segment.node.name].index(segment)
            self._effect(Send(segment.node.session, calls.MasterClaimed(index)))

    def _claim(self, now_ms: int, inventory: Inventory, claim: Claim) -> ObjectRecord | None:
        """The record of that object, which is complete, if the claim is believed."""
        (namespace, key), parent, size, version, offset = claim
        extent = inventory.segment, offset
        used_ms = inventory.next_use_ms()
        record = self.forest.get(namespace, key)
        known = None
        if record is not None and record.complete:
            known = Version(record.epoch, record.counter)
            if known == version and record.size == size and extent in record.extents():
                return record  # it was told before
            if known > version or (known == version and record.size != size):
                return None
        if (
            version > self._present
            or (version.epoch == self.epoch and self._pending.get(version.counter) is not None)
            or parent == key
            or inventory.outdated
            or self._tombstones.forbids(claim.name, version, inventory.absent_since)
            or not inventory.fits(offset, size)
        ):
            return None
        if record is not None and known == version:
            if not self._claim_replica(now_ms, record, extent):
                return None
        elif record is not None and known is not None:
            replaced = [Remains.of(record)]
            self.pool.strip(record)
            self.pool.store(record, [extent], size, version, used_ms)
            self._bury(now_ms, replaced, calls.Removed(b""))
        else:
            record = self.forest.ensure(namespace, key)
            lacks = 0
            if record.lost and version == (record.epoch, record.counter):
                used_ms = record.last_used_ms
                lacks = repairing.wanted(record) - 1
            above = None if parent is None else self.forest.ensure(namespace, parent)
            try:
                self._adopt(now_ms, record, above)
            except InvalidArgumentError:  # they form a ring
                self.pool.settle(record)
                return None
            except BusyError:
                self.pool.settle(record)
                raise
            self.pool.store(record, [extent], size, version, used_ms, lacks)
        inventory.take(offset, size)
        # The master before may have leased it until then.
        record.lease_until_ms = max(record.lease_until_ms, inventory.segment.usable_at_ms)
        return record

    # --- draining -----------------------------------------------------------------------------

    def drain(self, now_ms: int, request: calls.Drain) -> calls.Drained:
        members = self.membership
        if request.step is DrainStep.LEAVE and request.node not in members.nodes:
            return calls.Drained(self.epoch, 0, 0)  # it has left
        node = self._node(request.node)
        self.changing = True
        if request.step is DrainStep.LEAVE:
            self._must_drain(node)
            members.dismiss(node)
        else:
            members.drain(node, draining=request.step is DrainStep.BEGIN)
            self._room_made = True  # where it may be chosen again
        segments = set(members.segments.get(node.name, ()))
        self._after_membership(now_ms)
        used = sum(segment.capacity - segment.allocator.free_bytes for segment in segments)
        pending = sum(any(s in segments for s, _ in put.extents) for put in self._pending)
        return calls.Drained(self.epoch, used, pending)

    def start_moves(self, now_ms: int, request: calls.StartMoves) -> calls.MovesStarted | Later:
        self.forest.begin_step()
        node = self._node(request.node)
        if request.repair:
            return self._start_repairs(now_ms, node, request)
        self._must_drain(node)
        segments = set(self.membership.segments[node.name])
        page = draining.page(
            self.forest, segments, request.cursor, request.limit, request.bytes_max
        )
        self.changing = True
        puts: list[PendingPut] = []
        goes_to: dict[ObjectRecord, Segment] = {}
        left = left_bytes = 0
        evicted = self.counters["evicted_objects"]
        for record, was_found in page.records.items():
            if not record.complete:
                continue  # a replica elsewhere was evicted for one of those before
            room = self._room_to_move(now_ms, record, goes_to, request.avoid)
            if isinstance(room, Shortage):
                left += was_found
                left_bytes += record.size * was_found
                continue
            version = Version(record.epoch, record.counter)
            client = request.client_number
            puts.append(
                self._new_put(
                    now_ms,
                    record,
                    room,
                    record.size,
                    client,
                    version,
                    missing=repairing.missing(record),
                )
            )
            goes_to[record] = room[0][0]
        self._give_back([put for put in puts if not self._still_moves(put)])
        puts = [put for put in puts if self._still_moves(put)]
        next_cursor = page.next_cursor
        if not puts and next_cursor == request.cursor:
            next_cursor += 1  # there is no room for the beginning of a long chain
            left += 1  # its tip
        return self._copies_started(
            now_ms,
            puts,
            self.placements([put.record for put in puts if put.record is not None], now_ms),
            next_cursor=next_cursor,
            skipped=page.skipped,
            left=left,
            left_bytes=left_bytes,
            evicted=self.counters["evicted_objects"] - evicted,
        )

    def _copies_started(
        self,
        now_ms: int,
        puts: list[PendingPut],
        sources: Placements,
        *,
        next_cursor: int = 0,
        skipped: int = 0,
        left: int = 0,
        left_bytes: int = 0,
        evicted: int = 0,
        keeps_version: bool = False,
    ) -> calls.MovesStarted | Later:
        """Answers once what is granted is wiped."""
        records = [put.record for put in puts if put.record is not None]
        grants = self._grants(bytes([PutOutcome.WRITE]) * len(puts), puts)
        reply = calls.MovesStarted(
            next_cursor=next_cursor,
            skipped=skipped,
            left=left,
            left_bytes=left_bytes,
            evicted=evicted,
            namespaces=[record.namespace for record in records],
            keys=[record.key for record in records],
            sources=sources,
            grants=grants,
            keeps_version=keeps_version,
        )
        unclean = self._unclean(grants)
        return self._bury(now_ms, [], reply, unclean) if unclean else reply

    def _room_to_move(
        self,
        now_ms: int,
        record: ObjectRecord,
        goes_to: dict[ObjectRecord, Segment],
        avoid: Sequence[bytes],
    ) -> list[Extent] | Shortage:
        """Beside its parent, if that can be; at the cost of what nobody used for longer."""
        parent = record.parent
        near = None
        if parent is not None and parent.complete:
            near = goes_to.get(parent) or next(s for s, _ in parent.extents() if s.alive)
        replicas = sum(segment.alive for segment, _ in record.extents())
        taken = self._take(now_ms, [record.size], replicas, near, "", record.last_used_ms, avoid)
        return taken if isinstance(taken, Shortage) else taken[0]

    def _still_moves(self, put: PendingPut) -> bool:
        """Whether the object whose bytes were to be copied is the one that is there."""
        record = put.record
        assert record is not None
        return (
            self.forest.get(record.namespace, record.key) is record
            and record.complete
            and (record.epoch, record.counter) == put.moves
        )

    def _give_back(self, puts: Sequence[PendingPut]) -> None:
        """Moves that came to nothing, and whose writers are done."""
        for put in puts:
            self._pending.pop(put.token)
            self._copy_ended(put)
            self.pool.free(put.extents, put.length)
        self._clean([put.remains(self.epoch) for put in puts])

    # --- repairing ----------------------------------------------------------------------------

    def _nodes_changed(self, now_ms: int, ready_ms: int) -> None:
        """Replicas may be missing, or there may be room for some, from ``ready_ms`` on."""
        self._targets = NEVER_MS, []
        if self._repairs.enabled and self.pool.has_replicas:
            self._repairs.changed(max(now_ms + WATCH_MS, ready_ms))

    def _note_short(self, now_ms: int, record: ObjectRecord) -> None:
        """It was stored just now."""
        lacks = repairing.missing(record)
        if lacks:
            has = repairing.wanted(record) - lacks
            self._repairs.note(record, hopeful=has < self._nodes_for_copies(now_ms))

    def _room_for_copies(self, now_ms: int) -> list[Segment]:
        """Where copies may go, the emptiest first. None while a node is suspect, which may be back
        in a moment with what is missing, or while puts wait for room."""
        found_ms, found = self._targets
        if now_ms - found_ms < TARGETS_MS:
            return found
        found = []
        members = self.membership
        if not self._waiting and all(
            members.state_of(node, now_ms) == liveness.ALIVE for node in members.nodes.values()
        ):
            found = [
                segment
                for segment in members.alive_segments(now_ms)
                if segment.usable(now_ms)
                and segment.allocator.free_bytes > segment.capacity >> SPARE_SHIFT
            ]
            found.sort(key=lambda segment: segment.allocator.free_bytes, reverse=True)
        self._targets = now_ms, found
        return found

    def _nodes_for_copies(self, now_ms: int) -> int:
        """The nodes that are alive; 0: none of them has room. An object with as many replicas
        cannot get another one."""
        return len(self.membership.nodes) if self._room_for_copies(now_ms) else 0

    def _may_copy(self, now_ms: int) -> bool:
        return self._repairs.may_begin(now_ms) and bool(self._room_for_copies(now_ms))

    def _begin_pass(self, now_ms: int) -> None:
        repairs = self._repairs
        if repairs.needs_room and self._nodes_for_copies(now_ms) <= repairs.fewest:
            repairs.due_ms = now_ms + WATCH_MS
        else:
            repairs.begin_pass()

    def _scan(self, now_ms: int) -> None:
        repairs = self._repairs
        alive = {segment.node.name for segment in self.membership.alive_segments(now_ms)}
        if not repairs.scan(self.forest, now_ms, len(alive)):
            return
        short, repaired = repairs.found, self.counters["repaired_objects"]
        self.pool.short_objects = short
        if (short, repaired) != (self._told_short, self._told_repaired):
            done = repaired - self._told_repaired
            self._told_short, self._told_repaired = short, repaired
            self._effect(Notice("replicas_missing", {"objects": short, "repaired": done}))

    def _start_repairs(
        self, now_ms: int, node: Node, request: calls.StartMoves
    ) -> calls.MovesStarted | Later:
        """What this node is to copy now: nothing, if the bounds are reached."""
        repairs = self._repairs
        self._targets = NEVER_MS, []  # as it is now
        avoid = set(request.avoid)
        usable = [s for s in self._room_for_copies(now_ms) if s.offer.uuid not in avoid]
        roomy = dict.fromkeys(usable)
        self.changing = True
        puts: list[PendingPut] = []
        size = steps = 0
        while roomy and len(puts) < request.limit and steps < REPAIR_STEPS:
            record = repairs.next(node.name)
            if record is None:
                break
            for each in self._short_line(record):
                steps += 1
                if (
                    len(puts) >= request.limit
                    or (puts and size + each.size > request.bytes_max)
                    or not repairs.may_begin(now_ms, each.size)
                    or len(self._pending) >= self.rules.pending_puts_max // 2
                ):
                    repairs.put_back(record)
                    roomy = {}
                    break
                put = self._copy_once_more(now_ms, node, each, roomy, request.client_number)
                if put is not None:
                    puts.append(put)
                    size += each.size
        records = [put.record for put in puts if put.record is not None]
        extents = [self._extent_on(node, record) for record in records]
        sources = Placements(
            sizes=[record.size for record in records],
            epochs=[record.epoch for record in records],
            counters=[record.counter for record in records],
            replicas=[1] * len(records),
            segments=[extent[0].segment_id for extent in extents if extent is not None],
            offsets=[extent[1] for extent in extents if extent is not None],
        )
        return self._copies_started(now_ms, puts, sources, keeps_version=True)

    def _short_line(self, record: ObjectRecord) -> list[ObjectRecord]:
        """It and those of its ancestors that lack replicas, too, from above."""
        if self.forest.get(record.namespace, record.key) is not record or not repairing.missing(
            record
        ):
            return []
        line = [record]
        above = record.parent
        for _ in range(REPAIR_ANCESTORS):
            if above is None:
                break
            if repairing.missing(above) and (above.namespace, above.key) not in self._copies:
                line.append(above)
            above = above.parent
        return line[::-1]

    def _copy_once_more(
        self,
        now_ms: int,
        node: Node,
        record: ObjectRecord,
        roomy: dict[Segment, None],
        client_number: int,
    ) -> PendingPut | None:
        """A grant for one more replica of it, if it can be copied from this node now."""
        if (
            record.writer
            or (record.namespace, record.key) in self._copies
            or self._extent_on(node, record) is None
            or repairing.sign(record, now_ms - self._repairs.after_ms) is None
        ):
            self._repairs.left()
            return None
        parent = record.parent
        near = None
        if parent is not None and parent.more:  # where its parent's further replica is
            near = next((s for s, _ in parent.extents() if s in roomy and s.node is not node), None)
        extent = self.pool.room_for_copy(record, roomy, near)
        if extent is None:
            self._repairs.left()
            return None
        version = Version(record.epoch, record.counter)
        put = self._new_put(
            now_ms, record, [extent], record.size, client_number, version, repairs=True
        )
        self.pool.note_copied(record)
        self._repairs.begun(put.size)
        return put

    @staticmethod
    def _extent_on(node: Node, record: ObjectRecord) -> Extent | None:
        for extent in record.extents():
            if extent[0].alive and extent[0].node is node:
                return extent
        return None

    def _repaired(self, now_ms: int, put: PendingPut) -> bool:
        """Whether the copy is a replica of its object now. It is not, if there is none missing any
        more, or there is one on that node by now."""
        record, (segment, offset) = put.record, put.extents[0]
        assert record is not None
        instead_of = repairing.sign(record, now_ms - self._repairs.after_ms)
        if instead_of is None or self._extent_on(segment.node, record) is not None:
            return False
        self.pool.add_replica(record, (segment, offset), instead_of)
        self.counters["repaired_objects"] += 1
        self.counters["repaired_bytes"] += put.size
        self._repairs.done()
        if repairing.missing(record):
            self._repairs.note(record, hopeful=True)
        return True

    def _claim_replica(self, now_ms: int, record: ObjectRecord, extent: Extent) -> bool:
        """Whether memory that has come back has one more replica of a complete object: one that is
        missing, or that this master did not know of. Of an object that was copied meanwhile, one
        that is not missing is one too many."""
        if self._extent_on(extent[0].node, record) is not None:
            return False
        uuid = extent[0].offer.uuid
        gone = [each for each in record.extents() if not each[0].alive]
        instead_of = next((each for each in gone if each[0].offer.uuid == uuid), None)
        if instead_of is None:
            instead_of = repairing.sign(record, now_ms - self.rules.lease_ms)
        if instead_of is None and (
            repairing.was_copied(record) or len(record.more) + 1 >= REPLICAS_MAX
        ):
            return False
        self.pool.add_replica(record, extent, instead_of)
        return True

    def _copy_ended(self, put: PendingPut) -> None:
        """It is not under way any more, however it ended; may be said twice."""
        record = put.record
        assert record is not None
        name = record.namespace, record.key
        puts = self._copies.get(name, [])
        if put not in puts:
            return
        puts.remove(put)
        if not puts:
            del self._copies[name]
        if put.repairs:
            self._repairs.ended(put.size)

    def _end_copies(self, now_ms: int, name: Name) -> None:
        """Its bytes must not arrive any more: what has arrived is wiped, and removals wait."""
        for put in self._copies.get(name, ())[:]:
            self._pending.pop(put.token)
            self._abandon(put, now_ms)

    def _node(self, name: str) -> Node:
        node = self.membership.nodes.get(name)
        if node is None:
            raise InvalidArgumentError(
                f"there is no node {name}", advice="kvstore status lists the nodes."
            )
        return node

    @staticmethod
    def _must_drain(node: Node) -> None:
        if not node.draining:
            raise InvalidArgumentError(
                f"node {node.name} is not being drained", advice=f"kvstore drain {node.name}"
            )

    # --- operators ----------------------------------------------------------------------------

    def status(self, now_ms: int, request: calls.Status) -> calls.ClusterStatus:
        return report.status(self, now_ms, request)

    def list_objects(self, now_ms: int, request: calls.ListObjects) -> calls.Listed:
        return report.list_objects(self, now_ms, request)

    def stat_object(self, now_ms: int, request: calls.StatObject) -> calls.ObjectDetail:
        return report.stat_object(self, now_ms, request)

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Do all that is due. Calling it too often is harmless; see ``next_tick_ms``."""
        self.forest.begin_step()
        self.membership.bury_dead(now_ms)
        if now_ms - self._watched_ms >= WATCH_MS:
            self._watched_ms = now_ms
            self._fence_idle(now_ms)
        self._after_membership(now_ms)
        expired = list(islice(self._pending.pop_expired(now_ms), PUTS_PER_TICK))
        for put in expired:
            self._abandon(put, now_ms)
        if expired:
            self.counters["expired_puts"] += len(expired)
            size = sum(put.size for put in expired)
            self._effect(Notice("puts_expired", {"puts": len(expired), "bytes": size}))
        over = list(islice(self._pending.pop_quarantined(now_ms), PUTS_PER_TICK))
        for remains in over:
            self.pool.free(remains.extents, extent_bytes(remains.size))
            self._room_made = True
        self.effects += self._graves.clean(over)
        self._free_graves(now_ms)
        if self._asking:
            self._answer_asking(now_ms)
        self._try_waiting(now_ms)
        self._repairs.plan_next(now_ms)
        if self._repairs.is_due(now_ms):
            self._begin_pass(now_ms)

    def _fence_idle(self, now_ms: int) -> None:
        """Removals do not wait for ever for a node that beats and does nothing else."""
        patience_ms = self.rules.node_patience_ms
        late = {
            segment.node: "untold"
            for segment, (inventory, _) in self._inventories.items()
            if inventory.late(now_ms, patience_ms)
        }
        for segment in self._graves.unanswered(now_ms, patience_ms):
            late.setdefault(segment.node, "unwiped")
        for node, why in late.items():
            self.membership.declare_dead(node, why)

    def _answer_asking(self, now_ms: int) -> None:
        """A few of those that need not wait any more."""
        if self._gathers(now_ms):
            return
        keys = 0
        while self._asking and keys < ANSWERED_PER_STEP:
            ticket, request = self._asking.popleft()
            keys += len(request.keys)
            reply = self._find(now_ms, request)
            if self.forest.unfinished:
                self.forest.unfinished = False
                self._walking.append((ticket, request))
            else:
                self._effect(Answer(ticket, reply))

    def _walk_on(self, now_ms: int) -> None:
        """A slice of the way up a long chain, for the first that asks."""
        ticket, request = self._walking[0]
        self.forest.resumes = True
        reply = self._find(now_ms, request)
        self.forest.resumes = False
        if self.forest.unfinished:
            self.forest.unfinished = False
            return
        self._walking.popleft()
        self._effect(Answer(ticket, reply))

    def next_tick_ms(self, now_ms: int) -> int | None:
        """When ``tick`` has something to do next; None: not before another call."""
        times = [
            self.membership.next_change_ms(now_ms),
            self._pending.next_deadline_ms(),
            self._pending.next_release_ms(),
            self._graves.next_end_ms(),
            self._repairs.due_ms,
        ]
        if self._waiting:
            times.append(min(put.deadline_ms for put in self._waiting))
            changes = [*self.membership.trusted_again_ms()]
            for segment in self.pool.segments.values():
                changes += (segment.candidates.next_lease_end_ms() or 0, segment.usable_at_ms)
            times += [time for time in changes if time > self._tried_ms]
        return min((time for time in times if time is not None), default=None)

    @property
    def has_work(self) -> bool:
        """Whether ``work`` should be called soon, between other calls."""
        return (
            bool(self._sweeps)
            or bool(self._pressed)
            or bool(self._walking)
            or any(inventory.has_work for inventory, _ in self._inventories.values())
            or (bool(self._asking) and not self._gathering)
            or bool(self.pool.unsettled)
            or self._graves_due
            or self._swept_breaks != self.forest.breaks
            or (self._room_made and bool(self._waiting))
            or self._repairs.scanning
        )

    def work(self, now_ms: int) -> None:
        """One bounded slice of what need not be done at once (a few milliseconds)."""
        self.forest.begin_step()
        if self._room_made and self._waiting:
            self._try_waiting(now_ms)
            return
        if self._graves_due:
            self._free_graves(now_ms)
            return
        if self._inventories and self._claim_more(now_ms):
            return
        if self._asking and not self._gathering:
            self._answer_asking(now_ms)
            return
        if self._walking:
            self._walk_on(now_ms)
            return
        if self._pressed:
            self._evict_ahead(now_ms)
            return
        if self.pool.unsettled:
            self.pool.settle_more(SWEEP_STEPS)
            return
        if not self._sweeps and self._swept_breaks == self.forest.breaks:
            if self._repairs.scanning:
                self._scan(now_ms)
            return
        if not self._sweeps:
            self._swept_breaks = self.forest.breaks
            self._sweeps.extend((segment, 0) for segment in self.pool.segments.values())
            return
        segment, ticket = self._sweeps[0]
        if ticket is None:
            if not self.pool.sweep_dead(segment, SWEEP_STEPS):
                self._sweeps.popleft()
            return
        further = self.pool.sweep_detached(segment, ticket, SWEEP_STEPS)
        if further is None:
            self._sweeps.popleft()
        else:
            self._sweeps[0] = (segment, further)

    def _evict_ahead(self, now_ms: int) -> None:
        segment = next(iter(self._pressed))
        evicted: list[Remains] = []
        goes_on = False
        if segment.alive and segment.usable(now_ms) and not segment.node.draining:
            evicted, goes_on = self.pool.evict_ahead(segment, EVICTIONS_AHEAD, now_ms)
        if not goes_on:
            del self._pressed[segment]
        self.effects += self._graves.clean_ahead(evicted)

    def _free_graves(self, now_ms: int) -> None:
        self.effects += self._graves.end_mourning(now_ms)
        effects, self._graves_due = self._graves.end_next(now_ms)
        self.effects += effects
        self._room_made |= self._graves_due

    def _try_waiting(self, now_ms: int) -> None:
        """Serve the puts that wait for room, in their order, until one must go on waiting; refuse
        those whose time is up. Goes on in the next step (``_room_made``) before it takes long."""
        self._room_made = False
        self._tried_ms = now_ms
        served = 0
        missing: Shortage | None = None
        evicted_max = self.counters["evicted_objects"] + EVICTIONS_PER_STEP
        while self._waiting and missing is None and not self._room_made:
            waiting = self._waiting[0]
            self.forest.resumes = True
            result = self._try_grant_safely(now_ms, waiting)
            self.forest.resumes = False
            if isinstance(result, Shortage):
                missing = result
                self._room_made = result.goes_on
                break
            ticket = self._waiting.popleft().ticket
            if isinstance(result, calls.Grants) and (unclean := self._unclean(result)):
                effects, _ = self._graves.bury([], now_ms, ticket, result, unclean)
                self.effects += effects
            else:
                self._effect(Answer(ticket, result))
            served += PUT_COUNTS_FOR + _keys_of(waiting.request)
            self._room_made = (
                served >= SERVED_PER_STEP or self.counters["evicted_objects"] >= evicted_max
            )
        for put in [put for put in self._waiting if put.deadline_ms <= now_ms]:
            if put is not self._waiting[0] or missing is None:
                missing = Shortage(
                    shortage.asked_bytes(put.request)
                )  # all of it: its turn did not come
            self._waiting.remove(put)
            self._room_made = True  # the next in the queue may want less
            self.counters["refused_no_space"] += 1
            self._effect(Answer(put.ticket, self._no_space(now_ms, put.request, missing)))

    def _try_grant_safely(
        self, now_ms: int, waiting: WaitingPut
    ) -> calls.Grants | Shortage | KVStoreError:
        try:
            return self._try_grant(now_ms, waiting.request)
        except KVStoreError as error:
            return error

    # --- helpers ------------------------------------------------------------------------------

    def placements(self, records: Sequence[ObjectRecord | None], now_ms: int) -> Placements:
        """Columns of where these are, all complete or None; replicas of suspect nodes come last."""
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

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _effect(self, effect: Effect) -> None:
        self.effects.append(effect)

    def check_invariants(self) -> None:
        """Everything that must always hold; for tests and the simulator, O(objects)."""
        self.membership.check_invariants()
        self._pending.check_invariants()
        self._graves.check_invariants()
        untold = [
            (segment, *gap)
            for segment, (inventory, _) in self._inventories.items()
            for gap in inventory.gaps()
        ]
        self.pool.check_invariants([*self._pending.ranges(), *self._graves.ranges(), *untold])
        assert not self.pool.evicted, "evicted, and nobody wipes it"
        copies = [put for put in self._pending if put.moves is not None]
        known = [put for puts in self._copies.values() for put in puts]
        assert sorted(p.token for p in copies) == sorted(p.token for p in known), "a lost copy"
        assert all(self._copies.values())
        repairs = [put for put in copies if put.repairs]
        assert self._repairs.copies == len(repairs)
        assert self._repairs.copied_bytes == sum(put.size for put in repairs)
        assert all(len(put.extents) == 1 and not put.missing for put in repairs)
        self._repairs.check_invariants()
        writers = {
            put.token: put.record
            for put in self._pending
            if put.record is not None and put.moves is None
        }
        for record in self.forest.records():
            assert not record.writer or writers.pop(record.writer) is record, "a lost writer"
        assert not writers, "a put whose record does not know it"
        mounted = [s for segments in self.membership.segments.values() for s in segments]
        assert {id(s) for s in mounted} == {id(s) for s in self.pool.segments.values()}
        assert {s for s in mounted if not s.whole} == self._inventories.keys()
        assert len(self._waiting) <= self.rules.waiting_puts_max


def outrun_by(who: str, epoch: int, own: int) -> UnavailableError:
    """What somebody is told who has joined a later master: see ``Outrun``."""
    return UnavailableError(
        f"{who} has joined a master of epoch {epoch} before; this one has epoch {own}, and begins "
        "a new term above that",
        advice="Join again. The clock of a master's host was set back.",
        epoch=epoch,
    )


def _misses(
    request: calls.MatchPrefix | calls.Lookup | calls.Exists,
    reply: calls.Matched | calls.Found | calls.Existing,
) -> bool:
    match reply:
        case calls.Matched(matches=matches):
            return any(match.matched < len(request.keys) for match in matches)
        case calls.Found(placements=placements):
            return 0 in placements.replicas
        case calls.Existing(presence=presence):
            return 0 in presence


def _keys_of(request: calls.PutStart | calls.Allocate) -> int:
    return len(request.keys) if isinstance(request, calls.PutStart) else 1
