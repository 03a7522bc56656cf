"""Replicas against a model of memory: whatever happens meanwhile, a copy is what it says it is.

Headers are written as soon as their extents are granted, the worst case before a ``put_end``. The
model knows which version each extent of each memory holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import calls
from kvstore.calls import PutOutcome, Version
from kvstore.limits import Key
from kvstore.master.state.effects import Later
from kvstore.master.state.inventory import Claim
from kvstore.master.state.repairing import RepairRules
from kvstore.master.state.rules import MasterRules
from tests.simulation import inside
from tests.unit.master.cluster import BLOCK, EPOCH, NAMESPACE, Cluster, keys_of

NAMES = "abcde"
NODES = ("n0", "n1", "n2", "n3")
BLOCKS = 60
"""There is room for all of it, quarantine included."""

COPIES_MAX = 3
RULES = MasterRules(
    lease_ms=2_000,
    put_deadline_ms=4_000,
    quarantine_ms=6_000,
    repair=RepairRules(after_ms=4_000, copies_max=COPIES_MAX, pause_max_ms=2_000),
)

names = st.sampled_from(NAMES)
nodes = st.sampled_from(NODES)

Held = dict[int, tuple[str, Version]]


class Memories(Cluster):
    """Whose nodes have memory: what is whole there, by segment and offset."""

    def __init__(self, rules: MasterRules) -> None:
        self.holds: dict[bytes, Held] = {}
        super().__init__(dict.fromkeys(NODES, BLOCKS), rules)

    def of(self, segment: int) -> Held:
        return self.holds.setdefault(self.offers[self.segments[segment]][0].uuid, {})

    def wipe(self) -> None:
        dead = {self.sessions[node] for node in self.silent}
        self.orders = [row for row in self.orders if row[0] not in dead]
        for _, order in self.orders:
            held = self.holds.setdefault(order.uuid, {})
            for offset, *version in zip(order.offsets, order.epochs, order.counters, strict=True):
                if offset in held and held[offset][1] == Version(*version):
                    del held[offset]
        super().wipe()


class RepairMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Memories(RULES)
        self.pending: dict[int, str] = {}
        self.copies: dict[int, tuple[str, Version]] = {}
        self.asked: dict[Version, int] = {}
        """How many replicas; of those that memory alone has told of, at most."""
        self.lost: set[Version] = set()
        """Were on no living node for a while: how many there should be is not known any more."""

    # --- what others do ----------------------------------------------------------------------

    @rule(
        name=names,
        replicas=st.sampled_from([1, 2, 2, 3, 4]),
        overwrite=st.booleans(),
        later=st.booleans(),
    )
    def put(self, name: str, replicas: int, overwrite: bool, later: bool) -> None:
        cluster = self.cluster
        request = calls.PutStart(
            NAMESPACE, keys_of(name), [BLOCK], None, False, replicas, overwrite, 0, "",
            client_number=1,
        )  # fmt: skip
        result = cluster.state.putting.put_start(cluster.now_ms, request)
        grants = cluster.reply(result)
        assert isinstance(grants, calls.Grants)
        for token in grants.tokens:
            version = Version(EPOCH, token)
            self.asked[version] = replicas
            self.pending[token] = name
            for segment, offset in zip(grants.segments, grants.offsets, strict=True):
                cluster.of(segment)[offset] = name, version
        if not later:
            self._end(grants.tokens)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def end_a_put(self, data: st.DataObject) -> None:
        self._end([data.draw(st.sampled_from(sorted(self.pending)))])

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.cluster.remove(name)
        self._forget_late()
        if name in self.pending.values():
            return
        for node in self._alive():
            held = self.cluster.holds.get(self.cluster.offers[node][0].uuid, {})
            assert all(each != name for each, _ in held.values()), f"{node} still holds {name}"

    @rule(ms=st.sampled_from([250, 1_500, 5_000, 12_000]))
    def time_passes(self, ms: int) -> None:
        self.cluster.after(ms)
        self._forget_late()

    @rule(node=nodes)
    def kill(self, node: str) -> None:
        if node in self._alive() and len(self._alive()) > 1:
            self.cluster.kill(node)
            self._note_lost()
            self._forget_late()

    @precondition(lambda self: len(self._alive()) < len(NODES))
    @rule(data=st.data(), keeps=st.booleans())
    def comes_back(self, data: st.DataObject, keeps: bool) -> None:
        dead = [node for node in NODES if node not in self._alive()]
        self._join(data.draw(st.sampled_from(dead)), keeps)

    def _join(self, node: str, keeps: bool) -> None:
        cluster = self.cluster
        if not keeps:
            cluster.join(node, BLOCKS)
            return
        cluster.join(node, again=True, tells=False)
        held = cluster.holds.get(cluster.offers[node][0].uuid, {})
        rows = sorted(held.items(), key=lambda row: row[1][1], reverse=True)
        cluster.tell(
            node,
            *(
                Claim((NAMESPACE, Key(name.encode())), None, BLOCK, version, offset)
                for offset, (name, version) in rows
            ),
        )

    # --- repairing ---------------------------------------------------------------------------

    @rule(limit=st.integers(1, 4), end=st.booleans())
    def repair(self, limit: int, end: bool) -> None:
        self.time_passes(1_500)  # a pass
        for node in self._alive():
            self._ask(node, limit)
        if end:
            self._end_copies(sorted(self.copies))

    @rule(limit=st.integers(1, 4), name=names, overwritten=st.booleans())
    def repair_what_changes(self, limit: int, name: str, overwritten: bool) -> None:
        self.repair(limit, end=False)
        if overwritten:
            self.put(name, 2, overwrite=True, later=False)
        else:
            self.remove(name)
        self._end_copies(sorted(self.copies))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), settled=st.booleans())
    def give_a_copy_up(self, data: st.DataObject, settled: bool) -> None:
        token = data.draw(st.sampled_from(sorted(self.copies)))
        del self.copies[token]
        request = calls.PutRevoke(EPOCH, [token], settled)
        self.cluster.state.putting.put_revoke(self.cluster.now_ms, request)
        self.cluster._settle()

    def _ask(self, node: str, limit: int) -> None:
        cluster = self.cluster
        request = calls.StartMoves(node, 0, limit, 1 << 30, client_number=9, repair=True)
        result = cluster.state.copying.start_moves(cluster.now_ms, request)
        started = cluster.reply(result)
        if isinstance(result, Later):
            self._forget_late()
        assert isinstance(started, calls.MovesStarted)
        grants, sources = started.grants, started.sources
        for row, key in enumerate(started.keys):
            version = Version(sources.epochs[row], sources.counters[row])
            what = key.decode(), version
            assert cluster.segments[sources.segments[row]] == node
            assert cluster.of(sources.segments[row])[sources.offsets[row]] == what
            target, offset = grants.segments[row], grants.offsets[row]
            assert cluster.segments[target] not in cluster.where(key.decode())
            cluster.of(target)[offset] = what
            self.copies[grants.tokens[row]] = what
        assert len(list(inside.repairs(cluster.state))) <= COPIES_MAX

    def _end_copies(self, tokens: list[int]) -> None:
        before = {name: self._version(name) for name in NAMES}
        for token, outcome in zip(tokens, self.cluster.end_tokens(tokens), strict=True):
            name, version = self.copies.pop(token)
            assert outcome is not PutOutcome.STORED or before[name] == version

    # --- what must hold ----------------------------------------------------------------------

    def _alive(self) -> list[str]:
        return [node for node in NODES if node in self.cluster.state.membership.nodes]

    def _end(self, tokens: Sequence[int]) -> None:
        self.cluster.end_tokens(list(tokens))
        for token in tokens:
            self.pending.pop(token, None)

    def _forget_late(self) -> None:
        known = {put.token for put in self.cluster.state.pending}
        self.pending = {t: name for t, name in self.pending.items() if t in known}
        self.copies = {t: what for t, what in self.copies.items() if t in known}

    def _note_lost(self) -> None:
        there = {self._version(name) for name in NAMES}
        self.lost.update(version for version in self.asked if version not in there)

    def _version(self, name: str) -> Version | None:
        if name not in self.cluster.present(NAMES):
            return None
        return self.cluster.stat(name).version

    @invariant()
    def replicas_are_what_they_say(self) -> None:
        cluster = self.cluster
        cluster.state.check_invariants()
        for name in cluster.present(NAMES):
            detail = cluster.stat(name)
            where = cluster.where(name)
            assert len(where) == len(set(where)), f"two replicas of {name} on one node"
            if detail.version not in self.lost:
                assert len(where) <= self.asked[detail.version], f"too many replicas of {name}"
            places = zip(detail.placements.segments, detail.placements.offsets, strict=True)
            for segment, offset in places:
                assert cluster.of(segment).get(offset) == (name, detail.version)

    def teardown(self) -> None:
        """In the end all of it is there again."""
        for node in NODES:
            if node not in self._alive():
                self._join(node, keeps=True)
        for _ in range(20):
            self.cluster.after(1_500)
            self.repair(4, end=True)
        for name in self.cluster.present(NAMES):
            version = self.cluster.stat(name).version
            if version not in self.lost:
                replicas = len(self.cluster.where(name))
                assert replicas == self.asked[version], f"{name} has {replicas} replicas"
        self.replicas_are_what_they_say()


TestRepairing = RepairMachine.TestCase
TestRepairing.settings = settings(stateful_step_count=25)
