"""``MasterState`` against a dictionary of its promises, computed the simple way.

The model cannot predict evictions, so it checks them: an object that is gone must have been a leaf
without a live promise or a pin, or its time to live was over. Everything else is predicted: each
answer, each reply that comes later, and above all that no range of memory is given out while a
reader, a writer or a wipe may need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore import calls
from kvstore.calls import Placements, Presence, PutOutcome, Version
from kvstore.errors import (
    BusyError,
    InvalidArgumentError,
    KVStoreError,
    NodeNameTakenError,
    NoSpaceError,
    SegmentGoneError,
    UnavailableError,
    ValueTooLargeError,
)
from kvstore.limits import DEFAULT_NAMESPACE, PROTOCOL_VERSION, Key, Namespace
from kvstore.master.state import keeping, pool, reclaim, records, removing, sweeping, waiting
from kvstore.master.state.effects import Answer, Effect, Hangup, Later, Notice, Send
from kvstore.master.state.ends import STEP_MS
from kvstore.master.state.jobs import DRAW, FREE
from kvstore.master.state.liveness import AGREEING_MS, LivenessRules
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.putting import MAKING_ROOM_MS
from kvstore.master.state.records import Extent, ObjectRecord
from kvstore.master.state.repairing import RepairRules
from kvstore.master.state.rules import MasterRules
from kvstore.memory.header import SUPERBLOCK_BYTES, extent_bytes
from tests.simulation.follower import Follower

EPOCH = 7
RULES = MasterRules(
    lease_ms=100,
    put_deadline_ms=150,
    quarantine_ms=80,
    put_wait_max_ms=120,
    pending_puts_max=10,
    waiting_puts_max=2,
    pinned_max=0.7,
    liveness=LivenessRules(suspect_ms=25, dead_ms=75),
    repair=RepairRules(bytes_per_s=0),  # the subject of test_repairing
)
NAMESPACES = [Namespace("a"), Namespace("b")]
KEYS = [Key(b"%02d" % index) for index in range(8)]
SIZES = [0, 500, 1024, 2500]
NODES = ["n0", "n1", "n2"]
HOSTS = ["h0", "h1"]

LATE_MS = RULES.put_deadline_ms - RULES.lease_ms
"""By which the lease on a committed allocation may be longer than others, and what is removed after
it ends in turn."""

Name = tuple[Namespace, Key]
Place = tuple[int, int]
"""Segment id and offset."""

namespaces = st.sampled_from(NAMESPACES)
keys = st.sampled_from(KEYS)
key_lists = st.integers(1, 8).map(lambda count: KEYS[:count]) | st.lists(
    keys, unique=True, min_size=1, max_size=5
)
hosts = st.sampled_from(HOSTS)
waits = st.sampled_from([0, 0, 40, 500])
lifetimes = st.sampled_from([0, 0, 0, 1, 100, 400])
"""Times to live of puts; 0: none."""


@dataclass
class Stored:
    """A complete object."""

    version: Version
    size: int
    places: list[Place]
    parent: Key | None
    gone_at_ms: int = 0
    """When its time to live is over; 0: never."""
    pinned_until_ms: int = 0
    """What ``pin`` has promised; 0: it is not pinned."""


@dataclass
class Unwiped:
    """A range that was removed, and whose node has not said yet that it is wiped."""

    name: Name
    length: int
    free_at_ms: int
    """When no reader has a lease any more. The master may know it later by ``LATE_MS``."""
    ended: bool = False
    """Whether the master has noted that."""


@dataclass
class Granted:
    """A put under way, or an allocation (no name)."""

    name: Name | None
    parent: Key | None
    size: int
    places: list[Place]
    deadline_ms: int
    overwrite: bool = False
    ttl_ms: int = 0


@dataclass
class Waiting:
    request: calls.PutStart | calls.Allocate
    deadline_ms: int


@dataclass
class ModelNode:
    name: str
    session: int | None
    heard_ms: int
    offers: list[calls.SegmentOffer]
    ids: list[int]
    reported_ms: int | None = None
    """When hosts last agreed that it fails, or one said so of a broken stream."""
    alone_ms: int | None = None
    """When one host alone last said so."""
    agreed_ms: int | None = None
    orders: list[calls.MasterWipe] = field(default_factory=list)

    def state(self, now_ms: int) -> str:
        silent_ms = now_ms - self.heard_ms
        reported = self.reported_ms is not None and now_ms - self.reported_ms <= 25
        if silent_ms > 75 or (self.session is None and reported):
            return "dead"
        return "suspect" if self.session is None or silent_ms > 25 or reported else "alive"


@dataclass(frozen=True)
class Taboo:
    """A range that must not be given out."""

    where: bytes | int
    """The memory's uuid, or one mounting of it by its segment id."""
    start: int
    end: int
    until_ms: int
    why: str
    lease: int = 0
    """The number under which it can be released; 0: it cannot."""


def _rounded(end_ms: int) -> int:
    """As the master keeps ends."""
    return -(-end_ms // STEP_MS) * STEP_MS


def _of_wiping(order: reclaim.Wiping) -> list[tuple[Place, Version]]:
    rows = zip(order.offsets, order.epochs, order.counters, strict=True)
    segment_id = order.segment.segment_id
    return [((segment_id, offset), Version(epoch, count)) for offset, epoch, count in rows]


class MasterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = MasterState(epoch=EPOCH, rules=RULES, events=True)
        self.follower = Follower(self.state)
        self.now_ms = 0
        self.objects: dict[Name, Stored] = {}
        self.granted: dict[int, Granted] = {}
        self.old_tokens: list[int] = []
        self.nodes: dict[str, ModelNode] = {}
        self.uuids: dict[int, bytes] = {}  # of every segment that ever was
        self.offers: dict[str, list[calls.SegmentOffer]] = {}  # of every node that ever was
        self.links: dict[Name, Key | None] = {}  # to the latest parent of every key
        self.memories_made = 0
        self.sessions = 0
        self.old_sessions: list[int] = []
        self.ticked_ms = -1
        self.taboos: list[Taboo] = []
        self.unwiped: dict[tuple[Place, Version], Unwiped] = {}
        self.removals: dict[int, set[tuple[Place, Version]]] = {}  # by ticket
        self.none_left_ms = -1
        self.held_below: dict[ObjectRecord, ObjectRecord | None] = {}
        """Records that pins hold, and the parent of each when that began. One that has another
        parent now counts none of its new ancestors."""
        """When the last of the nodes died, if ever."""
        self.held_ms = -RULES.lease_ms
        """When a put last leased what it found, or its parent, while it waits or writes; or when
        something was last removed, whose bytes are free one lease later."""
        self.waiting: dict[int, Waiting] = {}
        self.untold: dict[int, tuple[calls.Grants, set[tuple[Place, Version]]]] = {}
        """Granted, but not told before what was evicted for it is wiped, and nobody reads removed
        versions (these) of what it found."""
        self.tickets: set[int] = set()  # all that were ever given
        self.expired: set[Name] = set()
        """Of which a version was ever taken back after its time to live."""

    # --- nodes -------------------------------------------------------------------------------

    memories = st.lists(st.integers(3, 24), min_size=1, max_size=2)

    @initialize(units=st.lists(memories, min_size=1, max_size=3))
    def cluster_starts(self, units: list[list[int]]) -> None:
        for name, its_units in zip(NODES, units, strict=False):
            self._join(name, HOSTS[name == "n1"], self._new_memory(its_units))

    @rule(name=st.sampled_from(NODES), host=hosts, units=memories)
    def node_joins_with_new_memory(self, name: str, host: str, units: list[int]) -> None:
        self._join(name, host, self._new_memory(units))

    def _new_memory(self, units: list[int]) -> list[calls.SegmentOffer]:
        offers = []
        for count in units:
            self.memories_made += 1
            size = SUPERBLOCK_BYTES + 1024 * count + (200 if count == 5 else 0)
            uuid = b"%016d" % self.memories_made
            offers.append(calls.SegmentOffer(size, uuid, "", "", b"", 0, 1, True))
        return offers

    @precondition(lambda self: self.offers)
    @rule(data=st.data(), host=hosts, unheard=st.booleans())
    def node_comes_back(self, data: st.DataObject, host: str, unheard: bool) -> None:
        """Its process was restarted: the same memory, which others may still read. Or it never
        heard that it had joined, and has fenced nobody off."""
        name = data.draw(st.sampled_from(sorted(self.offers)))
        offers = self.offers[name]
        if unheard:
            uuids = {offer.uuid for offer in offers}
            self.taboos += [
                replace(taboo, where=self.uuids[taboo.where])
                for taboo in self.taboos
                if isinstance(taboo.where, int) and self.uuids[taboo.where] in uuids
            ]
            for granted in self.granted.values():
                self._outlives_its_node(granted, uuids)
        self._join(name, host, [offer._replace(fresh=unheard) for offer in offers])

    def _join(self, name: str, host: str, offers: list[calls.SegmentOffer]) -> None:
        known = self.nodes.get(name)
        same = known is not None and {o.uuid for o in known.offers} == {o.uuid for o in offers}
        taken = known is not None and not same and known.state(self.now_ms) == "alive"
        self.sessions += 1
        session = self.sessions
        join = calls.NodeJoin(name, host, PROTOCOL_VERSION, 0, offers)
        try:
            accepted = self.state.nodes.joined(self.now_ms, session, join)
        except NodeNameTakenError:
            assert taken
            self._see()
            return
        assert not taken
        if known is not None:
            self._node_dies(known)
        ids = list(accepted.segment_ids)
        self.nodes[name] = ModelNode(name, session, self.now_ms, offers, ids)
        new = not {offer.uuid for offer in offers} & set(self.uuids.values())
        for segment_id in ids:
            waits_ms = self.state.pool.segments[segment_id].usable_at_ms - self.now_ms
            assert waits_ms == 0 if new else waits_ms >= RULES.lease_ms
        assert len(set(accepted.segment_ids)) == len(offers)
        for segment_id, offer in zip(accepted.segment_ids, offers, strict=True):
            assert segment_id not in self.uuids, "a segment id was used twice"
            self.uuids[segment_id] = offer.uuid
        self.offers[name] = offers
        self._see()
        for index, offer in enumerate(offers):
            if not offer.fresh:
                told = calls.NodeClaims(index, True, True, [], [], [], [], [], [], [], [])
                self._hear(self.nodes[name], told)
        self._see()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), epoch=st.sampled_from([EPOCH, EPOCH, EPOCH - 1]))
    def node_resumes(self, data: st.DataObject, epoch: int) -> None:
        node = self._any_node(data)
        self.sessions += 1
        offers = list(reversed(node.offers))
        join = calls.NodeJoin(node.name, "h0", PROTOCOL_VERSION, epoch, offers)
        try:
            accepted = self.state.nodes.joined(self.now_ms, self.sessions, join)
        except SegmentGoneError:
            known = [self.state.pool.segments[id_] for id_ in node.ids]
            assert epoch != EPOCH or not all(segment.whole for segment in known)
            self._see()
            return
        assert epoch == EPOCH
        assert list(accepted.segment_ids) == list(reversed(node.ids))
        if node.session is not None:
            self.old_sessions.append(node.session)
        node.session, node.heard_ms = self.sessions, self.now_ms
        node.orders = []
        self._see()
        resent = {
            (place, version)
            for order in node.orders
            for place, version in self._of_order(node, order)
        }
        assert resent == {item for item in self.unwiped if item[0][0] in node.ids}

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), what=st.sampled_from(["breaks", "breaks", "reported", "leaves"]))
    def trouble(self, data: st.DataObject, what: str) -> None:
        node = self._any_node(data)
        match what:
            case "breaks":
                self._node_stream_breaks(node)
            case "reported":
                self._clients_report_failure(node, data.draw(st.sampled_from((1, 5))))
            case "leaves":
                self._node_leaves(node)

    def _node_stream_breaks(self, node: ModelNode) -> None:
        if node.session is not None:
            self.old_sessions.append(node.session)
            self.state.nodes.stream_broken(node.session)
            node.session = None
            if node.alone_ms is not None:
                node.reported_ms = node.alone_ms
        self._see()

    @rule(name=st.sampled_from(NODES), data=st.data())
    def strangers_speak(self, name: str, data: st.DataObject) -> None:
        if self.old_sessions:
            session = data.draw(st.sampled_from(self.old_sessions))
            said: list[calls.NodeMessage] = [
                calls.NodeBeat(1),
                calls.NodeWiped(1),
                calls.NodeLeave(),
            ]
            self.state.nodes.said(self.now_ms, session, data.draw(st.sampled_from(said)))
            self.state.nodes.stream_broken(session)
            assert not self.state.effects
        offer = calls.SegmentOffer(8192, b"x" * 16, "", "", b"", 0, 1, False)
        join = calls.NodeJoin(name, "h0", PROTOCOL_VERSION, EPOCH, [offer])
        self.sessions += 1
        with pytest.raises(SegmentGoneError):
            self.state.nodes.joined(self.now_ms, self.sessions, join)
        self._see()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def node_beats(self, data: st.DataObject) -> None:
        node = self._any_node(data)
        if node.session is None:
            return
        self._hear(node, calls.NodeBeat(5))
        node.heard_ms = self.now_ms
        assert self.state.effects == [Send(node.session, calls.MasterBeat(5))]
        self._see()

    def _node_leaves(self, node: ModelNode) -> None:
        if node.session is None:
            return
        self._hear(node, calls.NodeLeave())
        self._node_dies(node)
        self._see()

    @precondition(lambda self: any(node.orders for node in self.nodes.values()))
    @rule(data=st.data(), again=st.booleans())
    def node_wiped(self, data: st.DataObject, again: bool) -> None:
        ordered = [node for node in self.nodes.values() if node.orders and node.session is not None]
        if not ordered:
            return
        node = data.draw(st.sampled_from(ordered))
        order = data.draw(st.sampled_from(node.orders))
        stranger = data.draw(st.sampled_from(sorted(self.nodes)))
        teller = self.nodes[stranger]
        if teller is not node and teller.session is not None:
            self._hear(teller, calls.NodeWiped(order.order))  # not its business: ignored
            teller.heard_ms = self.now_ms
            assert not self.state.effects
        self._hear(node, calls.NodeWiped(order.order))
        node.heard_ms = self.now_ms
        for item in self._of_order(node, order):
            self._wiped(item)
        if not again:
            node.orders.remove(order)
        self._see()

    def _clients_report_failure(self, node: ModelNode, hosts: int) -> None:
        """One, or more than there are others."""
        ids = [node.ids[0], 999_999]
        reported = calls.Reported(0)
        for number in range(hosts):
            report = calls.ReportFailure(ids, "client", f"reporter-{number}", "refused", EPOCH)
            reported = self.state.nodes.report_failure(self.now_ms, report)
        node.alone_ms = self.now_ms
        if hosts > 1:
            node.agreed_ms = self.now_ms
        if node.session is None or (
            node.agreed_ms is not None and self.now_ms - node.agreed_ms <= AGREEING_MS
        ):
            node.reported_ms = self.now_ms
        self._expire_nodes()
        states = [node.state(self.now_ms) for node in self.nodes.values()]
        assert reported.suspects == states.count("suspect")
        self._see()

    def _any_node(self, data: st.DataObject) -> ModelNode:
        return self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))]

    def _hear(self, node: ModelNode, message: calls.NodeMessage) -> None:
        assert node.session is not None
        self.state.nodes.said(self.now_ms, node.session, message)

    def _expire_nodes(self) -> None:
        for node in list(self.nodes.values()):
            if node.state(self.now_ms) == "dead":
                self._node_dies(node)

    def _node_dies(self, node: ModelNode) -> None:
        del self.nodes[node.name]
        if not self.nodes:
            self.none_left_ms = self.now_ms
        if node.session is not None:
            self.old_sessions.append(node.session)
        for name, stored in list(self.objects.items()):
            alive = [place for place in stored.places if place[0] not in node.ids]
            stored.places = alive
            if not stored.places:
                del self.objects[name]
        for granted in self.granted.values():
            if granted.name is None:
                self._outlives_its_node(granted, {offer.uuid for offer in node.offers})

    def _of_order(self, node: ModelNode, order: calls.MasterWipe) -> list[tuple[Place, Version]]:
        (segment_id,) = (id_ for id_ in node.ids if self.uuids[id_] == order.uuid)
        rows = zip(order.offsets, order.epochs, order.counters, strict=True)
        return [((segment_id, offset), Version(epoch, count)) for offset, epoch, count in rows]

    def _wiped(self, item: tuple[Place, Version]) -> None:
        self.unwiped.pop(item, None)
        for items in self.removals.values():
            items.discard(item)
        for _, items in self.untold.values():
            items.discard(item)

    # --- putting -----------------------------------------------------------------------------

    @rule(
        namespace=namespaces,
        batch=key_lists,
        size=st.sampled_from(SIZES),
        parent=st.none() | st.none() | keys,
        chain=st.booleans(),
        replicas=st.sampled_from([1, 1, 2, 3]),
        overwrite=st.sampled_from([False, False, True]),
        wait_ms=waits,
        host=hosts,
        ttl_ms=lifetimes,
    )
    def put_start(
        self,
        namespace: Namespace,
        batch: list[Key],
        size: int,
        parent: Key | None,
        chain: bool,
        replicas: int,
        overwrite: bool,
        wait_ms: int,
        host: str,
        ttl_ms: int,
    ) -> None:
        sizes = [SIZES[(SIZES.index(size) + index // 3) % 4] for index in range(len(batch))]
        request = calls.PutStart(
            namespace, batch, sizes, parent, chain, replicas, overwrite, wait_ms, host,
            ttl_ms=ttl_ms,
        )  # fmt: skip
        self._start(request)

    @rule(
        namespace=namespaces,
        count=st.integers(1, 8),
        size=st.sampled_from(SIZES),
        replicas=st.sampled_from([1, 1, 2]),
        overwrite=st.sampled_from([False, False, False, True]),
        skip=st.sampled_from([0, 0, 0, 1, 3]),
        ttl_ms=lifetimes,
    )
    def store_chain(
        self, namespace: Namespace, count: int, size: int, replicas: int, overwrite: bool,
        skip: int, ttl_ms: int,
    ) -> None:  # fmt: skip
        batch = KEYS[skip : skip + count]
        parent = KEYS[skip - 1] if skip else None
        sizes = [size] * len(batch)
        before = set(self.granted)
        self._start(
            calls.PutStart(
                namespace, batch, sizes, parent, True, replicas, overwrite, 0, "h0", ttl_ms=ttl_ms
            )
        )
        tokens = [token for token in self.granted if token not in before]
        if tokens:
            self._end(EPOCH, tokens)

    @rule(namespace=namespaces, size=st.sampled_from(SIZES))
    def store_whole_chain(self, namespace: Namespace, size: int) -> None:
        self.store_chain(namespace, len(KEYS), size, 1, False, 0, 0)

    @rule(namespace=namespaces)
    def match_whole_chain(self, namespace: Namespace) -> None:
        self.match([namespace], KEYS, True, 0)

    @rule(size=st.sampled_from(SIZES), wait_ms=waits, host=hosts)
    def allocate(self, size: int, wait_ms: int, host: str) -> None:
        self._start(calls.Allocate(DEFAULT_NAMESPACE, size, wait_ms, host))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def press(self, data: st.DataObject) -> None:
        """Ask for a whole segment: whatever nobody needs is evicted."""
        offer = data.draw(st.sampled_from(self._any_node(data).offers))
        units = (offer.size - SUPERBLOCK_BYTES) // 1024
        before = set(self.granted)
        self._start(calls.Allocate(DEFAULT_NAMESPACE, (units - 1) * 1024, 0, ""))
        for token in self.granted.keys() - before:
            del self.granted[token]
            self.old_tokens.append(token)
            revoke = calls.PutRevoke(EPOCH, [token], True)
            assert self.state.putting.put_revoke(self.now_ms, revoke).revoked == 1
        self._see()

    def _start(self, request: calls.PutStart | calls.Allocate) -> None:
        outcomes = self._outcomes(request)
        if PutOutcome.FOUND in outcomes or getattr(request, "parent", None) is not None:
            self.held_ms = self.now_ms
        wanted = outcomes.count(PutOutcome.WRITE)
        busy = wanted > 0 and len(self.granted) + wanted > RULES.pending_puts_max
        try:
            result = (
                self.state.putting.put_start(self.now_ms, request)
                if isinstance(request, calls.PutStart)
                else self.state.putting.allocate(self.now_ms, request)
            )
        except InvalidArgumentError:
            assert isinstance(request, calls.PutStart)
            assert request.parent in request.keys or self._could_ring(request)
            self._see(may_evict=True)
            return
        except ValueTooLargeError:
            capacities = [
                offer.size - 4096 for node in self.nodes.values() for offer in node.offers
            ]
            assert extent_bytes(max(self._sizes(request))) > max(capacities)
            self._see()
            return
        except BusyError:
            assert busy or len(self.waiting) == RULES.waiting_puts_max
            self._see(may_evict=True)
            return
        except NoSpaceError as error:
            assert not busy
            if request.wait_ms:
                until_ms = self.now_ms + min(request.wait_ms, RULES.put_wait_max_ms)
                assert self._held_by_pins(until_ms), "refused, and no pin outlasts the wait"
            self._check_shortage(request, error, outcomes)
            self._see(may_evict=True)
            return
        if isinstance(result, Later):
            self._new_ticket(result.ticket)
            if not any(put.ticket == result.ticket for put in self.state.common.waiting):
                assert not busy
                grants = self._note_untold(result.ticket, request)
                assert grants is not None
                assert list(grants.outcomes) == outcomes
                self._see(may_evict=True)
                return
            assert len(self.waiting) < RULES.waiting_puts_max
            wait_ms = min(request.wait_ms, RULES.put_wait_max_ms)
            *_, last = self.state.common.waiting
            deadline_ms = last.deadline_ms
            allowed = {wait_ms, max(wait_ms, MAKING_ROOM_MS)} - {0}
            assert deadline_ms - self.now_ms in allowed
            self.waiting[result.ticket] = Waiting(request, deadline_ms)
        else:
            assert not busy
            assert list(result.outcomes) == outcomes
            for item in self._read_of_found(request, result):
                self._check_nobody_reads(item)
            self._see_gone(may_evict=True)
            self._take_grants(request, result)
        self._see(may_evict=True)

    def _note_untold(
        self, ticket: int, request: calls.PutStart | calls.Allocate
    ) -> calls.Grants | None:
        """Take note of grants that the state keeps back, if it does, and of what they wait for."""
        orders = [
            (order, removal.reply)
            for order in self.state.reclaim._unwiped.values()
            for removal in order.removals
            if removal.ticket == ticket
        ]
        if not orders:
            return None
        grants = orders[0][1]
        assert isinstance(grants, calls.Grants)
        read = self._read_of_found(request, grants)
        waits_for = {item for order, _ in orders for item in _of_wiping(order)}
        assert read or self._waits_for_others(), "what is there to wait for?"
        assert read <= waits_for, "it does not wait for readers"
        self._see_gone(may_evict=True)
        self._take_grants(request, grants)
        self.untold[ticket] = grants, read
        return grants

    def _read_of_found(
        self, request: calls.PutStart | calls.Allocate, grants: calls.Grants
    ) -> set[tuple[Place, Version]]:
        """What a put that found these objects waits for."""
        if isinstance(request, calls.Allocate):
            return set()
        found = zip(request.keys, grants.outcomes, strict=True)
        keys = [key for key, outcome in found if outcome == PutOutcome.FOUND]
        return {item for key in keys for item in self._being_read((request.namespace, key))}

    def _sizes(self, request: calls.PutStart | calls.Allocate) -> list[int]:
        return [request.size] if isinstance(request, calls.Allocate) else list(request.sizes)

    def _outcomes(self, request: calls.PutStart | calls.Allocate) -> list[PutOutcome]:
        if isinstance(request, calls.Allocate):
            return [PutOutcome.WRITE]
        return [self._outcome((request.namespace, key), request.overwrite) for key in request.keys]

    def _outcome(self, name: Name, overwrite: bool) -> PutOutcome:
        if self._present(name) and not overwrite:
            return PutOutcome.FOUND
        writing = any(granted.name == name for granted in self.granted.values())
        return PutOutcome.BEING_WRITTEN if writing else PutOutcome.WRITE

    def _could_ring(self, request: calls.PutStart) -> bool:
        """Whether the asked links close a ring with any link that may still be remembered."""
        links = {
            (key, parent)
            for (namespace, key), parent in self.links.items()
            if namespace == request.namespace and parent is not None
        }
        above = request.parent
        for key in request.keys:
            if above is not None:
                links.add((key, above))
            if request.chain:
                above = key
        for key in KEYS:
            seen = {parent for child, parent in links if child == key}
            for _ in KEYS:
                seen |= {parent for child, parent in links if child in seen}
            if key in seen:
                return True
        return False

    def _check_shortage(
        self,
        request: calls.PutStart | calls.Allocate,
        error: NoSpaceError,
        outcomes: list[PutOutcome],
    ) -> None:
        assert int(error.fields["missing_bytes"]) > 0
        quiet = not (self.taboos or self.granted or self.unwiped)
        total = sum(
            extent_bytes(size)
            for size, outcome in zip(self._sizes(request), outcomes, strict=True)
            if outcome is PutOutcome.WRITE
        )
        longest = max(map(extent_bytes, self._sizes(request)))
        offers = [offer for node in self.nodes.values() for offer in node.offers]
        quiet &= all(offer.size - SUPERBLOCK_BYTES >= longest for offer in offers)
        quiet &= len(self._choosable()) == len(self.nodes)
        quiet &= not self.state.has_work
        quiet &= not self._held_by_pins(self.now_ms)
        quiet &= self.now_ms >= self.held_ms + RULES.lease_ms
        if quiet:
            replicas = getattr(request, "replicas", 1)
            roomy = [
                node
                for node in self._choosable()
                if any(size >= total + 1024 for size in self._usable(node))
            ]
            assert len(roomy) < min(replicas, len(self._choosable())) or not roomy, (
                "nothing is in use, it would fit, and yet there is no room"
            )

    def _choosable(self) -> list[ModelNode]:
        return [
            node
            for node in self.nodes.values()
            if node.state(self.now_ms) == "alive" and self._usable(node)
        ]

    def _usable(self, node: ModelNode) -> list[int]:
        """What each of its segments that may be used could hold, in bytes."""
        segments = [self.state.pool.segments[segment_id] for segment_id in node.ids]
        return [s.capacity for s in segments if s.usable(self.now_ms)]

    def _take_grants(self, request: calls.PutStart | calls.Allocate, grants: calls.Grants) -> None:
        assert grants.epoch == EPOCH
        assert grants.deadline_ms == RULES.put_deadline_ms
        places = list(zip(grants.segments, grants.offsets, strict=True))
        write = [i for i, outcome in enumerate(grants.outcomes) if outcome == PutOutcome.WRITE]
        assert len(grants.tokens) == len(write)
        assert len(places) == len(write) * grants.replicas
        sizes = self._sizes(request)
        largest = max((extent_bytes(sizes[index]) for index in write), default=0)
        if write:
            holders = [
                node
                for node in self._choosable()
                if any(size >= largest for size in self._usable(node))
            ]
            assert grants.replicas > 0
            assert grants.replicas == min(getattr(request, "replicas", 1), len(holders))
        for row, index in enumerate(write):
            token = grants.tokens[row]
            assert token not in self.granted
            assert token not in self.old_tokens
            its = places[row * grants.replicas : (row + 1) * grants.replicas]
            nodes = [self._node_of(segment_id) for segment_id, _ in its]
            assert len({node.name for node in nodes}) == len(its), "two replicas on one node"
            for (segment_id, offset), node in zip(its, nodes, strict=True):
                assert node in self._choosable()
                self._check_may_be_given(segment_id, offset, extent_bytes(sizes[index]))
            deadline_ms = self.now_ms + RULES.put_deadline_ms
            granted = Granted(None, None, sizes[index], its, deadline_ms)
            if isinstance(request, calls.PutStart):
                granted.name = name = (request.namespace, request.keys[index])
                granted.overwrite, granted.ttl_ms = request.overwrite, request.ttl_ms
                above = request.keys[index - 1] if request.chain and index else request.parent
                granted.parent = self.objects[name].parent if name in self.objects else above
                self.links[name] = granted.parent
            self.granted[token] = granted

    def _check_may_be_given(self, segment_id: int, offset: int, length: int) -> None:
        assert offset >= SUPERBLOCK_BYTES
        assert offset % 1024 == 0
        for taboo in self._living_taboos():
            if taboo.where in (segment_id, self.uuids[segment_id]):
                overlap = offset < taboo.end and taboo.start < offset + length
                assert not overlap, f"given out, but {taboo}"
        for ((its_segment, its_offset), _), unwiped in self.unwiped.items():
            overlap = offset < its_offset + unwiped.length and its_offset < offset + length
            assert its_segment != segment_id or not overlap, "given out before it was wiped"

    def _living_taboos(self) -> list[Taboo]:
        return [taboo for taboo in self.taboos if taboo.until_ms > self.now_ms]

    def _promise(self, stored: Stored, lease: int = 0) -> None:
        for segment_id, offset in stored.places:
            end = offset + extent_bytes(stored.size)
            until_ms = self.now_ms + RULES.lease_ms
            self.taboos.append(
                Taboo(self.uuids[segment_id], offset, end, until_ms, "readers have a lease", lease)
            )

    def _quarantine(self, granted: Granted, until_ms: int) -> None:
        for segment_id, offset in granted.places:
            end = offset + extent_bytes(granted.size)
            self.taboos.append(Taboo(segment_id, offset, end, until_ms, "a write may land"))

    def _outlives_its_node(self, granted: Granted, uuids: set[bytes]) -> None:
        """Its writer is not fenced off this memory when that is mounted anew."""
        until_ms = granted.deadline_ms + RULES.quarantine_ms
        for segment_id, offset in granted.places:
            uuid = self.uuids[segment_id]
            if uuid in uuids:
                end = offset + extent_bytes(granted.size)
                self.taboos.append(Taboo(uuid, offset, end, until_ms, "its writer is not fenced"))

    def _node_of(self, segment_id: int) -> ModelNode:
        (node,) = (node for node in self.nodes.values() if segment_id in node.ids)
        return node

    def _alive(self, places: Iterable[Place]) -> list[Place]:
        alive = {id_ for node in self.nodes.values() for id_ in node.ids}
        return [place for place in places if place[0] in alive]

    def _tokens(self, data: st.DataObject) -> list[int]:
        tokens = st.sampled_from([*self.granted, *self.old_tokens[-3:], 10_000])
        return data.draw(st.lists(tokens, min_size=1, max_size=8))

    def _valid(self, epoch: int, token: int) -> Granted | None:
        granted = self.granted.get(token) if epoch == EPOCH else None
        return granted if granted is not None and self.now_ms <= granted.deadline_ms else None

    epochs = st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH - 1])

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), epoch=epochs, everything=st.booleans())
    def put_end(self, data: st.DataObject, epoch: int, everything: bool) -> None:
        self._end(epoch, list(self.granted) if everything else self._tokens(data))

    def _end(self, epoch: int, tokens: list[int]) -> None:
        expected = []
        replaced: set[tuple[Place, Version]] = set()
        for token in tokens:
            granted = self._valid(epoch, token)
            if granted is None or granted.name is None:
                expected.append(PutOutcome.REFUSED)
                continue
            self._forget_token(token)
            places = self._alive(granted.places)
            if not places:
                expected.append(PutOutcome.REFUSED)
                continue
            expected.append(PutOutcome.STORED)
            before = self.objects.get(granted.name)
            replaced |= self._to_be_wiped(granted.name)
            replaced |= (self._unwiped_of if granted.overwrite else self._being_read)(granted.name)
            version = Version(EPOCH, token)
            stored = Stored(version, granted.size, places, granted.parent)
            self._keep(stored, granted.ttl_ms, before)
            self.objects[granted.name] = stored
        result = self.state.putting.put_end(self.now_ms, calls.PutEnd(epoch, tokens))
        reply = self._reply_now_or_later(result, replaced)
        if reply is not None:
            assert isinstance(reply, calls.PutEnded)
            assert list(reply.outcomes) == expected
        self._see()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), epoch=epochs, settled=st.booleans())
    def put_revoke(self, data: st.DataObject, epoch: int, settled: bool) -> None:
        tokens = self._tokens(data)
        revoked = 0
        for token in tokens:
            granted = self._valid(epoch, token)
            if granted is not None:
                revoked += 1
                self._forget_token(token)
                if not settled:
                    self._give_up(granted)
        reply = self.state.putting.put_revoke(self.now_ms, calls.PutRevoke(epoch, tokens, settled))
        assert reply == calls.Revoked(revoked)
        self._see()

    @precondition(lambda self: any(granted.name is None for granted in self.granted.values()))
    @rule(
        data=st.data(),
        epoch=epochs,
        namespace=namespaces,
        key=keys,
        parent=st.none() | keys,
        size=st.sampled_from(SIZES),
        overwrite=st.booleans(),
        ttl_ms=lifetimes,
    )
    def commit(
        self,
        data: st.DataObject,
        epoch: int,
        namespace: Namespace,
        key: Key,
        parent: Key | None,
        size: int,
        overwrite: bool,
        ttl_ms: int,
    ) -> None:
        allocations = [token for token, granted in self.granted.items() if granted.name is None]
        token = data.draw(st.sampled_from([*allocations, *allocations, *self.granted, 10_000]))
        name = namespace, key
        request = calls.Commit(epoch, token, namespace, key, parent, size, overwrite, ttl_ms)
        granted = self._valid(epoch, token)
        refused = granted is None or granted.name is not None or size > granted.size
        outcome = self._outcome(name, overwrite)
        try:
            result = self.state.putting.commit(self.now_ms, request)
        except InvalidArgumentError:
            assert not refused
            links = calls.PutStart(namespace, [key], [0], parent, True, 1, False, 0, "")
            assert parent == key or self._could_ring(links)
            self._see()
            return
        if refused or granted is None:
            assert result == calls.Committed(PutOutcome.REFUSED)
            self._see()
            return
        self._forget_token(token)
        places = self._alive(granted.places)
        if not places or outcome is not PutOutcome.WRITE:
            self._give_up(granted)
            assert result == calls.Committed(outcome if places else PutOutcome.REFUSED)
            self._see()
            return
        if name in self.objects and not self._present(name):
            self._expired(name)
        before = self.objects.get(name)
        above = parent if before is None else before.parent
        self.links[name] = above
        replaced = self._to_be_wiped(name)
        replaced |= (self._unwiped_of if overwrite else self._being_read)(name)
        stored = Stored(Version(EPOCH, token), size, places, above)
        self._keep(stored, ttl_ms, before)
        self.objects[name] = stored
        self._promise(stored)
        reply = self._reply_now_or_later(result, replaced)
        assert reply in (None, calls.Committed(PutOutcome.STORED))
        self._see()

    def _give_up(self, granted: Granted) -> None:
        """It may still be written, or looked at: by the owner of an allocation even after its node
        has come back."""
        self._quarantine(granted, granted.deadline_ms + RULES.quarantine_ms)
        if granted.name is None:
            self._outlives_its_node(granted, set(self.uuids.values()))

    def _forget_token(self, token: int) -> None:
        del self.granted[token]
        self.old_tokens.append(token)

    # --- getting -----------------------------------------------------------------------------

    @rule(
        asked=st.lists(namespaces, min_size=1, max_size=2),
        batch=key_lists,
        places=st.booleans(),
        lease=st.integers(0, 3),
    )
    def match(self, asked: list[Namespace], batch: list[Key], places: bool, lease: int) -> None:
        request = calls.MatchPrefix(asked, batch, places, lease=lease)
        reply = self.state.asking.match_prefix(self.now_ms, request)
        assert (reply.epoch, reply.lease_ms) == (EPOCH, RULES.lease_ms)
        for namespace, found in zip(asked, reply.matches, strict=True):
            expected = 0
            while expected < len(batch) and self._is_match((namespace, batch[expected])):
                expected += 1
            names = [(namespace, key) for key in batch]
            if places or self._is_chain(names[:expected]):
                assert found.matched == expected
            else:
                continue
            for name in names[:expected]:
                self._promise(self.objects[name], lease)
            if places:
                self._check_placements(names[:expected], found.placements)
            written = [any(g.name == name for g in self.granted.values()) for name in names]
            following = [*written[expected:], False]
            assert found.being_written == following.index(False)
        self._see()

    def _is_match(self, name: Name) -> bool:
        return self._present(name) and self._reachable(name)

    def _reachable(self, name: Name) -> bool:
        at: Name | None = name
        while at is not None:
            if at not in self.objects:
                return False
            parent = self.objects[at].parent
            at = None if parent is None else (name[0], parent)
        return True

    def _is_chain(self, names: list[Name]) -> bool:
        return all(self.objects[name].parent == above[1] for above, name in pairwise(names))

    @rule(namespace=namespaces, batch=st.lists(keys, max_size=6), lease=st.integers(0, 3))
    def lookup(self, namespace: Namespace, batch: list[Key], lease: int) -> None:
        reply = self.state.asking.lookup(self.now_ms, calls.Lookup(namespace, batch, lease))
        names = [(namespace, key) for key in batch]
        self._check_placements(names, reply.placements)
        for name in names:
            if self._present(name):
                self._promise(self.objects[name], lease)
        presence = self.state.asking.exists(self.now_ms, calls.Exists(namespace, batch)).presence
        written = {granted.name for granted in self.granted.values()}
        for name, known in zip(names, presence, strict=True):
            if self._present(name):
                assert known == Presence.COMPLETE
            else:
                expected = Presence.BEING_WRITTEN if name in written else Presence.ABSENT
                assert known == expected
        self._see()

    @rule(released=st.lists(st.integers(1, 4), max_size=3))
    def release(self, released: list[int]) -> None:
        """Also leases that are unknown, or were released before."""
        self.state.asking.release(self.now_ms, calls.Release(released))
        self.taboos = [taboo for taboo in self.taboos if taboo.lease not in released]
        self._see()

    def _check_placements(self, names: list[Name], found: Placements) -> None:
        at = 0
        assert len(found.segments) == len(found.offsets) == sum(found.replicas)
        for row, name in enumerate(names):
            stored = self.objects[name] if self._present(name) else None
            count = found.replicas[row]
            places = list(zip(found.segments, found.offsets, strict=True))[at : at + count]
            at += count
            if stored is None:
                assert count == 0
                continue
            assert found.sizes[row] == stored.size
            assert Version(found.epochs[row], found.counters[row]) == stored.version
            assert sorted(places) == sorted(stored.places)
            states = [self._node_of(segment).state(self.now_ms) for segment, _ in places]
            assert states == sorted(states, key=lambda state: state != "alive")

    @rule(
        namespace=namespaces,
        batch=st.lists(keys, max_size=4),
        old=st.booleans(),
        where=st.sampled_from(["there", "beside", "in other memory"]),
        data=st.data(),
    )
    def renew(
        self, namespace: Namespace, batch: list[Key], old: bool, where: str, data: st.DataObject
    ) -> None:
        names = [(namespace, key) for key in batch]
        stored = [self.objects[name] if self._present(name) else None for name in names]
        versions = [s.version if s is not None and not old else Version(EPOCH, 0) for s in stored]
        tokens = self._tokens(data)
        epoch = data.draw(self.epochs)
        reply = self.state.asking.renew(
            self.now_ms,
            calls.Renew(
                namespace,
                batch,
                [version.epoch for version in versions],
                [version.counter for version in versions],
                epoch,
                tokens,
                *self._leased_places(stored, where),
            ),
        )
        lost = where in ("beside", "in other memory")
        for its, held in zip(stored, reply.keys_held, strict=True):
            if its is None or old or lost:
                assert not held
            else:
                assert held
                self._promise(its)
        for token, held in zip(tokens, reply.tokens_held, strict=True):
            granted = self._valid(epoch, token)
            alive = granted is not None and self._alive(granted.places) == granted.places
            assert held == alive
            if alive and granted is not None:
                granted.deadline_ms = self.now_ms + RULES.put_deadline_ms
        self._see()

    def _leased_places(
        self, stored: Sequence[Stored | None], where: str
    ) -> tuple[list[bytes], list[int]]:
        places = [(0, 0) if its is None else its.places[-1] for its in stored]
        others = where == "in other memory"
        uuids = [bytes(16) if others else self.uuids.get(at, bytes(16)) for at, _ in places]
        return uuids, [offset + (where == "beside") for _, offset in places]

    # --- keeping -----------------------------------------------------------------------------

    @rule(
        namespace=namespaces,
        batch=key_lists | st.lists(keys, min_size=1, max_size=1),
        hold_ms=st.sampled_from([1, 100, 400]),
    )
    def pin(self, namespace: Namespace, batch: list[Key], hold_ms: int) -> None:
        names = [(namespace, key) for key in batch]
        pins = self.state.pool.pins
        before = pins.held(namespace)
        added = {
            record: extent_bytes(record.size) * len(self._alive_extents(record))
            for record in self._with_ancestors(filter(self._present, names))
            if not pins.holds(record)
        }
        capacity = sum(segment.capacity for segment in self.state.pool.segments.values())
        wanted = sum(added.values())
        fits = before[1] + wanted <= int(capacity * RULES.pinned_max)
        fits = fits and pins.size + wanted <= int(capacity * RULES.pinned_all_max)
        try:
            reply = self.state.keeping.pin(self.now_ms, calls.Pin(namespace, batch, hold_ms))
        except NoSpaceError:
            assert any(added.values())
            assert not fits
            assert pins.held(namespace) == before
            self._see()
            return
        assert fits or not any(added.values())
        assert [bool(one) for one in reply.pinned] == [self._present(name) for name in names]
        for name in filter(self._present, names):
            stored = self.objects[name]
            stored.pinned_until_ms = max(stored.pinned_until_ms, _rounded(self.now_ms + hold_ms))
        assert pins.held(namespace) == (before[0] + len(added), before[1] + sum(added.values()))
        self._see()

    @rule(namespace=namespaces)
    def pin_a_tip(self, namespace: Namespace) -> None:
        chain = [key for key in KEYS if (namespace, key) in self.objects]
        if chain:
            self.pin(namespace, chain[-1:], 400)

    @rule(namespace=namespaces, batch=st.lists(keys, min_size=1, max_size=4))
    def unpin(self, namespace: Namespace, batch: list[Key]) -> None:
        reply = self.state.keeping.unpin(self.now_ms, calls.Unpin(namespace, batch))
        for key, unpinned in zip(batch, reply.unpinned, strict=True):
            stored = self.objects.get((namespace, key))
            if stored is None:
                assert not unpinned
                continue
            if stored.pinned_until_ms > self.now_ms:
                assert unpinned
            elif not stored.pinned_until_ms:
                assert not unpinned
            stored.pinned_until_ms = 0
        self._see()

    def _present(self, name: Name) -> bool:
        """Whether it is complete, and its time to live is not over."""
        stored = self.objects.get(name)
        return stored is not None and not 0 < stored.gone_at_ms <= self.now_ms

    def _keep(self, stored: Stored, ttl_ms: int, before: Stored | None) -> None:
        """``before``: what it replaces."""
        if ttl_ms:
            stored.gone_at_ms = _rounded(self.now_ms + ttl_ms)
        if before is not None:
            stored.pinned_until_ms = before.pinned_until_ms

    def _expired(self, name: Name) -> None:
        """The master has taken back its memory, which may be free one lease later."""
        del self.objects[name]
        self.expired.add(name)
        self.held_ms = self.now_ms

    def _held_by_pins(self, until_ms: int) -> bool:
        """Whether any pin ends later."""
        return any(stored.pinned_until_ms > until_ms for stored in self.objects.values())

    def _with_ancestors(self, names: Iterable[Name]) -> set[ObjectRecord]:
        """The complete ones of these objects and their ancestors, also above gaps, as far as a pin
        counts them."""
        found: set[ObjectRecord] = set()
        for name in names:
            at = self.state.forest.get(*name)
            while at is not None and at not in found:
                found.add(at)
                is_new = self.held_below.get(at, at.parent) is not at.parent
                at = None if is_new else at.parent
        return {record for record in found if record.complete}

    @staticmethod
    def _alive_extents(record: ObjectRecord) -> list[Extent]:
        return [extent for extent in record.extents() if extent[0].alive]

    def _check_counts_of_pins(self) -> None:
        """All that is over has been taken back."""
        pins = self.state.pool.pins
        total = 0, 0
        for namespace in NAMESPACES:
            held = self._with_ancestors(
                name
                for name, stored in self.objects.items()
                if name[0] == namespace and stored.pinned_until_ms > self.now_ms
            )
            sizes = [
                extent_bytes(record.size) * len(self._alive_extents(record)) for record in held
            ]
            assert pins.held(namespace) == (len(held), sum(sizes)), namespace
            total = total[0] + len(held), total[1] + sum(sizes)
        assert (pins.objects, pins.size) == total

    # --- removing ----------------------------------------------------------------------------

    @rule(namespace=namespaces, batch=st.lists(keys, min_size=1, max_size=3))
    def remove(self, namespace: Namespace, batch: list[Key]) -> None:
        self._remove(namespace, batch)

    @rule(namespace=namespaces)
    def remove_a_tip(self, namespace: Namespace) -> None:
        chain = [key for key in KEYS if (namespace, key) in self.objects]
        self._remove(namespace, chain[-1:])

    def _remove(self, namespace: Namespace, batch: list[Key]) -> None:
        removed = []
        for key in batch:
            removed.append((namespace, key) in self.objects)
            self._to_be_wiped((namespace, key))
        if not self.nodes and self.state.returning._absent_since:
            with pytest.raises(UnavailableError):
                self.state.removing.remove(self.now_ms, calls.Remove(namespace, batch))
            return
        items = self._unwiped_of(*((namespace, key) for key in batch))
        result = self.state.removing.remove(self.now_ms, calls.Remove(namespace, batch))
        reply = self._reply_now_or_later(result, items)
        if reply is not None:
            assert isinstance(reply, calls.Removed)
            assert [bool(one) for one in reply.removed] == removed
        self._see()

    @rule(namespace=st.sampled_from(["", "a", "b"]), limit=st.integers(1, 5))
    def clear(self, namespace: str, limit: int) -> None:
        before = set(self.objects)
        if not self.nodes and self.state.returning._absent_since:
            with pytest.raises(UnavailableError):
                self.state.removing.clear(self.now_ms, calls.Clear(namespace, limit))
            return
        result = self.state.removing.clear(self.now_ms, calls.Clear(namespace, limit))
        gone = {name for name in before if self._actual(name) is None}
        assert len(gone) <= limit
        assert all(namespace in ("", name[0]) for name in gone)
        for name in gone:
            self._to_be_wiped(name)
        items = {
            item for item, unwiped in self.unwiped.items() if namespace in ("", unwiped.name[0])
        }
        self._reply_now_or_later(result, items)
        self._see()

    def _to_be_wiped(self, name: Name) -> set[tuple[Place, Version]]:
        stored = self.objects.pop(name, None)
        if stored is None:
            return set()
        items = {(place, stored.version) for place in stored.places}
        free_at_ms = self.now_ms + RULES.lease_ms
        self.held_ms = self.now_ms
        for item in items:
            self.unwiped[item] = Unwiped(name, extent_bytes(stored.size), free_at_ms)
        return items

    def _unwiped_of(self, *names: Name) -> set[tuple[Place, Version]]:
        """Also of earlier removals."""
        return {item for item, unwiped in self.unwiped.items() if unwiped.name in names}

    def _being_read(self, name: Name) -> set[tuple[Place, Version]]:
        """Of what was removed before, that on which leases are left: a put of the key, which does
        not overwrite, waits for no more. Until the master notes that the leases have ended, it may
        take them for left."""
        orders = self.state.reclaim.being_read(name)
        left = {item for order in orders for item in _of_wiping(order)}
        return {
            item
            for item in self._unwiped_of(name)
            if self.unwiped[item].free_at_ms > self.now_ms
            or (item in left and not self.unwiped[item].ended)
        }

    def _reply_now_or_later(
        self, result: calls.Reply | Later, items: set[tuple[Place, Version]]
    ) -> calls.Reply | None:
        if not isinstance(result, Later):
            for item in items:
                self._check_nobody_reads(item)
            return result
        assert items or self._waits_for_others(), "what is there to wait for?"
        self._new_ticket(result.ticket)
        self.removals[result.ticket] = set(items)
        return None

    def _waits_for_others(self) -> bool:
        """Whether there may be more to a removal than wiping what the model knows of."""
        reclaim = self.state.reclaim
        return bool(
            self.state.returning.under_way
            or reclaim._still_read
            or reclaim._unclean
            or any(reclaim.of_objects(self.expired))
        )

    # --- time --------------------------------------------------------------------------------

    @rule(by=st.integers(1, 40), beat=st.sampled_from([True, True, True, True, False]))
    def let_time_pass(self, by: int, beat: bool) -> None:
        self.now_ms += by
        if beat:
            for node in self.nodes.values():
                if node.session is not None and node.state(self.now_ms) != "dead":
                    self._hear(node, calls.NodeBeat(1))
                    node.heard_ms = self.now_ms
        self._see()

    @rule(rounds=st.integers(1, 12))
    def let_promises_end(self, rounds: int) -> None:
        for _ in range(rounds):
            self.let_time_pass(24, True)
            self.tick()

    @rule()
    def tick(self) -> None:
        self.state.tick(self.now_ms)
        self.ticked_ms = self.now_ms
        if not self.state.common.jobs.due & FREE:
            self._note_ended()
        self.taboos = self._living_taboos()
        self._expire_nodes()
        for token, granted in list(self.granted.items()):
            if granted.deadline_ms < self.now_ms:
                self._forget_token(token)
                self._give_up(granted)
                self._quarantine(granted, self.now_ms + RULES.quarantine_ms)
        self._see(may_evict=True)
        for put in self.waiting.values():
            assert put.deadline_ms > self.now_ms, "not answered in time"
        next_ms = self.state.next_tick_ms(self.now_ms)
        assert next_ms is None or next_ms > self.now_ms or self.state.has_work, (
            "nothing is due, and yet it asks"
        )
        assert next_ms is not None or not (self.granted or self.waiting or self.nodes)

    def _note_ended(self) -> None:
        for unwiped in self.unwiped.values():
            unwiped.ended |= unwiped.free_at_ms + LATE_MS <= self.now_ms

    @rule()
    def tick_when_asked(self) -> None:
        next_ms = self.state.next_tick_ms(self.now_ms)
        if next_ms is not None:
            self.now_ms = max(self.now_ms, next_ms)
            self.tick()

    @rule()
    def work_until_done(self) -> None:
        for _ in range(2_000):
            if not self.state.has_work:
                break
            self.state.work(self.now_ms)
            self._see(may_evict=True)
        else:
            raise AssertionError("the background work does not end")
        if self.ticked_ms == self.now_ms:
            self._note_ended()
            for item, unwiped in list(self.unwiped.items()):
                if unwiped.ended and not self._alive([item[0]]):
                    self._wiped(item)
            self._see(may_evict=True)
        if self.ticked_ms == self.now_ms:
            self._check_counts_of_pins()
        for record in self.state.forest.records():
            segment = record.segment
            if record.complete and segment is not None and not record.children:
                assert segment.alive, "a leaf that nobody can evict"
                assert self.state.forest.reachable(record) or segment.candidates.detached(record)
        status = self.state.report.status(self.now_ms, calls.Status())
        if not self.granted:  # lost blocks right above a put under way are counted until it ends
            counts = {row.name: (row.objects, row.size) for row in status.namespaces}
            for namespace in NAMESPACES:
                sizes = [s.size for name, s in self.objects.items() if name[0] == namespace]
                assert counts.get(namespace, (0, 0)) == (len(sizes), sum(sizes))
        assert [n.name for n in status.nodes] == sorted(self.nodes)
        for row in status.nodes:
            assert row.state == self.nodes[row.name].state(self.now_ms)

    @rule(namespace=st.sampled_from(["", "a", "b"]), limit=st.integers(1, 6))
    def list_all(self, namespace: str, limit: int) -> None:
        found: dict[Name, str] = {}
        cursor = 0
        while True:
            request = calls.ListObjects(namespace, b"", cursor, limit)
            page = self.state.report.list_objects(self.now_ms, request)
            assert len(page.objects) <= limit
            for row in page.objects:
                assert (row.namespace, row.key) not in found
                found[Namespace(row.namespace), row.key] = row.state
            cursor = page.next_cursor
            if not cursor:
                break
        written = {g.name for g in self.granted.values() if g.name is not None}
        everything = {*filter(self._present, self.objects), *written}
        assert set(found) == {name for name in everything if namespace in ("", name[0])}
        for name, state in found.items():
            if self._present(name):
                assert state == ("complete" if self._reachable(name) else "detached")
                assert self._stat(name).placements.replicas == [len(self.objects[name].places)]
            else:
                assert state == "being_written"

    @rule(namespace=st.sampled_from(["", "a", "b"]), batch=st.lists(keys, max_size=3))
    def chains(self, namespace: str, batch: list[Key]) -> None:
        """Each branch consists of the blocks that are above its last one."""
        assert not self.state.effects
        later = self.state.chains.find(self.now_ms, calls.Chains(namespace, batch))
        self._new_ticket(later.ticket)
        while self.state.common.jobs.due & DRAW:
            self.state.chains.walk_on(self.now_ms)
        (answer,) = self.state.take_effects()
        assert isinstance(answer, Answer)
        assert isinstance(answer.result, calls.ChainsFound)
        assert answer.result.whole
        for number, row in enumerate(answer.result.branches, 1):
            space = Namespace(row.namespace)
            request = calls.Blocks(space, [row.last], row.blocks - 1)
            blocks = self.state.chains.blocks(self.now_ms, request).blocks
            assert (len(blocks), blocks[-1].key) == (row.blocks, row.first)
            assert row.size == sum(block.size for block in blocks)
            states = [block.state for block in blocks]
            counts = states.count("missing"), states.count("being_written")
            assert (row.missing, row.being_written) == counts
            for block in blocks:
                assert (block.state == "complete") == self._present((space, block.key))
            above = answer.result.branches[row.above - 1].last if row.above else b""
            assert row.above < number
            assert blocks[-1].parent == above

    def _stat(self, name: Name) -> calls.ObjectDetail:
        return self.state.report.stat_object(self.now_ms, calls.StatObject(*name))

    # --- what the state says and does ----------------------------------------------------------

    def _new_ticket(self, ticket: int) -> None:
        assert ticket not in self.tickets, "a ticket was given twice"
        self.tickets.add(ticket)

    def _note_parents(self) -> None:
        pins = self.state.pool.pins
        for table in self.state.forest.namespaces.values():
            for record in filter(pins.holds, table):
                if self.held_below.setdefault(record, record.parent) is not record.parent:
                    self.held_below[record] = record  # for as long as a pin holds it
        for record in [each for each in self.held_below if not pins.holds(each)]:
            del self.held_below[record]

    def _see(self, *, may_evict: bool = False) -> None:
        """Take note of the effects, and of what was evicted."""
        self._note_parents()
        sessions = {node.session: node for node in self.nodes.values() if node.session is not None}
        for effect in self._effects():
            match effect:
                case Answer(ticket, result):
                    self._see_answer(ticket, result)
                case Send(session, message):
                    if isinstance(message, calls.MasterWipe):
                        node = sessions[session]
                        ordered = self._of_order(node, message)
                        if ordered and all(item in self.unwiped for item in ordered):
                            node.orders.append(message)
                        else:  # evicted, or given up, or a mark: it is done at once
                            assert not any(item in self.unwiped for item in ordered)
                            self._hear(node, calls.NodeWiped(message.order))
                            node.heard_ms = self.now_ms
                    else:
                        assert isinstance(message, calls.MasterBeat | calls.MasterClaimed)
                case Hangup(session, error):
                    assert session not in sessions
                    assert session in self.old_sessions
                    assert isinstance(error, KVStoreError)
                case Notice(event, fields):
                    assert event
                    assert all(isinstance(value, (str, int)) for value in fields.values())
        if self.waiting:
            self.held_ms = self.now_ms
        for ticket, items in self.removals.items():
            if not self._waits_for_others():
                assert items, f"ticket {ticket} was not answered, although all is wiped"
        for ticket, (_, items) in self.untold.items():
            if not self._waits_for_others():
                assert items, f"ticket {ticket} was not granted, although all is wiped"
        self._see_gone(may_evict=may_evict)

    def _effects(self) -> Iterator[Effect]:
        while self.state.effects:
            self._note_served()
            yield from self.state.take_effects()

    def _note_served(self) -> None:
        """Take note of what waiting puts were granted, in the order in which they were."""
        queue = {put.ticket for put in self.state.common.waiting}
        answers = {
            each.ticket: each.result for each in self.state.effects if isinstance(each, Answer)
        }
        for ticket, waited in list(self.waiting.items()):
            if ticket in queue:
                continue
            before = self._outcomes(waited.request)
            self._see_gone(may_evict=True)
            after = self._outcomes(waited.request)  # one served before may have evicted some
            grants = answers.get(ticket)
            if isinstance(grants, KVStoreError):
                continue
            if grants is None:
                grants = self._note_untold(ticket, waited.request)
            else:
                assert isinstance(grants, calls.Grants)
                self._take_grants(waited.request, grants)
                self.untold[ticket] = grants, self._read_of_found(waited.request, grants)
            assert grants is not None, "neither waits nor was answered"
            for got, first, then in zip(grants.outcomes, before, after, strict=True):
                assert got in (first, then)
            del self.waiting[ticket]

    def _see_answer(self, ticket: int, result: calls.Reply | KVStoreError) -> None:
        if ticket in self.removals:
            items = self.removals.pop(ticket)
            if self._is_unrecorded(result):
                return
            for item in items:
                self._check_nobody_reads(item)
            assert isinstance(
                result, (calls.Removed, calls.Cleared, calls.PutEnded, calls.Committed)
            )
            return
        if ticket in self.untold:
            grants, read = self.untold.pop(ticket)
            if self._is_unrecorded(result):
                return
            assert result == grants
            for item in read:
                self._check_nobody_reads(item)
            return
        if isinstance(result, calls.Dropped):
            return  # of what is over: no client waits for its wiping
        waited = self.waiting.pop(ticket)  # once only
        if isinstance(result, NoSpaceError):
            assert self.now_ms >= waited.deadline_ms, "refused too early"
            assert int(result.fields["missing_bytes"]) > 0
        else:
            assert isinstance(result, (BusyError, InvalidArgumentError))

    def _is_unrecorded(self, result: calls.Reply | KVStoreError) -> bool:
        """Whether no node is left that could record a removal."""
        if not isinstance(result, UnavailableError):
            return False
        assert self.none_left_ms == self.now_ms, "a node is left that could record the removal"
        return True

    def _check_nobody_reads(self, item: tuple[Place, Version]) -> None:
        assert not self._alive([item[0]]), "acknowledged before it was wiped"
        ended = item not in self.unwiped or self.unwiped[item].free_at_ms <= self.now_ms
        assert ended, "acknowledged, but it may still be read on the node that is dead"

    def _actual(self, name: Name) -> Stored | None:
        """The object as the state has it."""
        record = self.state.forest.get(*name)
        if record is None or not record.complete:
            return None
        places = [(s.segment_id, offset) for s, offset in record.extents() if s.alive]
        parent = None if record.parent is None else record.parent.key
        return Stored(Version(record.epoch, record.counter), record.size, places, parent)

    def _see_gone(self, *, may_evict: bool) -> None:
        """Every object is as the model has it, but for what was evicted, which was allowed."""
        granted_before = [granted for granted in self.granted.values() if granted.name is not None]
        gone = []
        for name, stored in self.objects.items():
            actual = self._actual(name)
            if actual is None or actual.version != stored.version:
                gone.append(name)
            else:
                actual.gone_at_ms, actual.pinned_until_ms = (
                    stored.gone_at_ms, stored.pinned_until_ms
                )  # fmt: skip
                actual.places.sort()
                stored.places.sort()
                assert actual == stored
        for name in [name for name in gone if not self._present(name)]:
            gone.remove(name)
            self._expired(name)
        assert may_evict or not gone, "lost"
        lost = [self.objects.pop(name) for name in gone]
        for stored in lost:
            assert stored.pinned_until_ms <= self.now_ms, "evicted, but pinned"
            for segment_id, offset in stored.places:
                for taboo in self._living_taboos():
                    leased = taboo.where == self.uuids[segment_id] and taboo.start <= offset
                    assert not (leased and offset < taboo.end), "evicted, but leased"
        for namespace, key in gone:
            for name, stored in self.objects.items():
                assert name[0] != namespace or stored.parent != key, "evicted, but no leaf"
            for granted in granted_before:
                assert granted.name is not None
                above = granted.name[0], granted.parent
                assert above != (namespace, key), "evicted, but somebody writes its child"

    @invariant()
    def state_is_sound(self) -> None:
        self.state.check_invariants()
        assert not self.state.effects
        self.follower.follow()
        recorded = {r.namespace + r.key.decode() for r in self.state.forest.records() if r.complete}
        assert recorded == {name[0] + name[1].decode() for name in self.objects}


class SlicedMachine(MasterMachine):
    """The same with slices of work so small that everything goes on in a later one."""

    slices = (
        (pool, "EVICTIONS_PER_STEP", 1),
        (pool, "SETTLE_STEPS", 1),
        (pool, "_REMARKS_PER_LOOK", 1),
        (pool, "MOVES_PER_STEP", 2),
        (sweeping, "SWEEP_STEPS", 2),
        (removing, "HIDE_STEPS", 1),
        (keeping, "HIDE_STEPS", 1),
        (keeping, "EXPIRED_PER_STEP", 1),
        (keeping, "ENDED_PER_STEP", 1),
        (reclaim, "WIPES_PER_ORDER", 2),
        (waiting, "SERVED_PER_STEP", 1),
        (records, "ONE_SHARD_RECORDS", 2),
    )

    def __init__(self) -> None:
        self.patches = pytest.MonkeyPatch()
        for module, name, value in self.slices:
            self.patches.setattr(module, name, value)
        super().__init__()

    def teardown(self) -> None:
        self.patches.undo()


MasterMachine.TestCase.settings = settings(stateful_step_count=50)
SlicedMachine.TestCase.settings = settings(stateful_step_count=50)
test_master_state = MasterMachine.TestCase
test_master_state_in_small_slices = SlicedMachine.TestCase
