"""Tenants against what is known of each object: bytes, bounds and guarantees.

The state itself asserts the sums and the bounds (``check_invariants``). The model looks at what a
step took from whom: a put may take another tenant's objects only above the guarantee of that one.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import calls
from kvstore.calls import DrainStep
from kvstore.errors import (
    BusyError,
    InvalidArgumentError,
    KVStoreError,
    NodeNameTakenError,
    NoSpaceError,
)
from kvstore.limits import Namespace
from kvstore.master.state.rules import MasterRules
from kvstore.tenants import UNBOUNDED, TenantMatcher, TenantRule
from tests.unit.master.cluster import EPOCH, EXTENT, Cluster, keys_of

NODES = ("n0", "n1")
BLOCKS = 8
NAMES = "abcdef"
SPACES = tuple(map(Namespace, ("a/1", "a/2", "b/1", "c")))
RULES = MasterRules(pending_puts_max=12, waiting_puts_max=4, pinned_max=1.0, pinned_all_max=1.0)

spaces = st.sampled_from(SPACES)
nodes = st.sampled_from(NODES)
bounds = st.sampled_from([UNBOUNDED, 3 * EXTENT, 5 * EXTENT, 9 * EXTENT])
guarantees = st.sampled_from([0, EXTENT, 2 * EXTENT, 4 * EXTENT, 20 * EXTENT])


@st.composite
def rule_sets(draw: st.DrawFn) -> list[TenantRule]:
    """Some tenants, among which the namespaces are divided in one of several ways."""
    found = []
    ways: list[dict[str, tuple[str, ...]]] = [
        {"a": ("a/*",), "b": ("b/*",)},
        {"a": ("a/1",), "b": ("a/2", "b/*")},
        {"a": ("*",)},
        {"x": ("c",), "b": ("b/1",)},
        {},
    ]
    for name, patterns in draw(st.sampled_from(ways)).items():
        at_most, guaranteed = draw(bounds), draw(guarantees)
        pinned = draw(st.sampled_from([UNBOUNDED, 2 * EXTENT]))
        puts = draw(st.sampled_from([1.0, 0.5]))
        found.append(TenantRule(name, patterns, min(guaranteed, at_most), at_most, pinned, puts))
    return found


class TenantMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tenants: list[TenantRule] = [TenantRule("a", ("a/*",), 4 * EXTENT, 6 * EXTENT)]
        self.cluster = Cluster(dict.fromkeys(NODES, BLOCKS), RULES, self.tenants)
        self.granted: list[int] = []
        self.allocated: list[int] = []

    # --- what a step takes from others --------------------------------------------------------

    def _held(self) -> dict[str, int]:
        """Bytes of objects by tenant."""
        matcher = TenantMatcher(self.tenants)
        held: dict[str, int] = {}
        for record in self.cluster.state.forest.records():
            name = matcher.of(record.namespace)
            size = sum(EXTENT for segment, _ in record.extents() if segment.alive)
            held[name] = held.get(name, 0) + size
        return held

    def _took_from_others(self, before: dict[str, int], taker: str | None) -> None:
        """After a step that puts: whoever has less now is the taker, or keeps its guarantee."""
        after = self._held()
        of_rows = {row.name: row.bytes for row in self.cluster.status().tenants}
        for each in self.tenants:
            if after.get(each.name, 0) < before.get(each.name, 0) and each.name != taker:
                assert of_rows[each.name] >= each.guaranteed, (each, before, after)

    # --- steps --------------------------------------------------------------------------------

    @rule(
        space=spaces,
        start=st.integers(0, 5),
        count=st.integers(1, 3),
        chain=st.booleans(),
        overwrite=st.booleans(),
        replicas=st.integers(1, 2),
        wait_ms=st.sampled_from([0, 0, 3_000]),
        ends=st.sampled_from([True, True, False]),
    )
    def put(
        self, space: Namespace, start: int, count: int, chain: bool, overwrite: bool,
        replicas: int, wait_ms: int, ends: bool,
    ) -> None:  # fmt: skip
        cluster = self.cluster
        self.cluster.work()
        before = self._held()
        names = NAMES[start : start + count]
        try:
            result = cluster.start_or_wait(
                names, chain=chain, replicas=replicas, overwrite=overwrite, wait_ms=wait_ms,
                namespace=space,
            )  # fmt: skip
        except (NoSpaceError, BusyError, InvalidArgumentError) as error:
            self._names_a_tenant(error)
            result = None
        taker = TenantMatcher(self.tenants).of(space)
        if result is None or isinstance(result, calls.Grants):
            self._took_from_others(before, taker)
        if isinstance(result, calls.Grants):
            if ends:
                cluster.end(result)
            else:
                self.granted += result.tokens
        cluster.work()  # waiting puts of anybody, and evictions ahead of need
        self._answers()

    def _names_a_tenant(self, error: KVStoreError) -> None:
        if "quota" in error.fields:
            known = {"", *(each.name for each in self.tenants)}
            assert error.fields["tenant"] in known

    def _answers(self) -> None:
        for ticket, answer in list(self.cluster.answers.items()):
            if isinstance(answer, calls.Grants):
                self.granted += answer.tokens
                del self.cluster.answers[ticket]
            elif isinstance(answer, KVStoreError):
                self._names_a_tenant(answer)
                del self.cluster.answers[ticket]

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), revoke=st.booleans(), settled=st.booleans())
    def end(self, data: st.DataObject, revoke: bool, settled: bool) -> None:
        token = data.draw(st.sampled_from(self.granted))
        self.granted.remove(token)
        if revoke:
            request = calls.PutRevoke(EPOCH, [token], settled)
            self.cluster.state.putting.put_revoke(self.cluster.now_ms, request)
            self.cluster._settle()
        else:
            self.cluster.end_tokens([token])

    @rule(space=spaces, wait_ms=st.sampled_from([0, 0, 3_000]))
    def allocate(self, space: Namespace, wait_ms: int) -> None:
        cluster = self.cluster
        cluster.work()
        before = self._held()
        request = calls.Allocate(space, 3_000, wait_ms, "")
        try:
            result = cluster.state.putting.allocate(cluster.now_ms, request)
        except (NoSpaceError, BusyError) as error:
            self._names_a_tenant(error)
            return
        if isinstance(result, calls.Grants):
            self._took_from_others(before, TenantMatcher(self.tenants).of(space))
            self.allocated += result.tokens
        else:
            cluster.work()
            self._answers()

    @precondition(lambda self: self.allocated)
    @rule(data=st.data(), space=spaces, name=st.sampled_from(NAMES))
    def commit(self, data: st.DataObject, space: Namespace, name: str) -> None:
        """In any namespace, whichever the memory was allocated for."""
        self.cluster.work()
        token = data.draw(st.sampled_from(self.allocated))
        before = self._held()
        try:
            self.cluster.commit(token, name, size=3_000, namespace=space)
        except (NoSpaceError, BusyError, InvalidArgumentError) as error:
            self._names_a_tenant(error)
        else:
            self.allocated.remove(token)
        self._took_from_others(before, TenantMatcher(self.tenants).of(space))

    @precondition(lambda self: self.allocated)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        self.cluster.renew_token(data.draw(st.sampled_from(self.allocated)))

    @precondition(lambda self: self.allocated)
    @rule(data=st.data(), settled=st.booleans())
    def give_up(self, data: st.DataObject, settled: bool) -> None:
        token = data.draw(st.sampled_from(self.allocated))
        self.allocated.remove(token)
        request = calls.PutRevoke(EPOCH, [token], settled)
        self.cluster.state.putting.put_revoke(self.cluster.now_ms, request)
        self.cluster._settle()

    @rule(space=spaces, count=st.integers(1, 4))
    def match(self, space: Namespace, count: int) -> None:
        self.cluster.match(NAMES[:count], namespace=space)

    @rule(space=spaces, names=st.sampled_from([*NAMES, "abc"]), hold_ms=st.sampled_from([0, 9_000]))
    def pin(self, space: Namespace, names: str, hold_ms: int) -> None:
        keeping, now_ms = self.cluster.state.keeping, self.cluster.now_ms
        if not hold_ms:
            keeping.unpin(now_ms, calls.Unpin(space, keys_of(names)))
            return
        self.cluster.work()
        name = TenantMatcher(self.tenants).of(space)
        before = self._pinned(name)
        try:
            keeping.pin(now_ms, calls.Pin(space, keys_of(names), hold_ms))
        except NoSpaceError as error:
            self._names_a_tenant(error)
        else:
            bound = next((each.pinned for each in self.tenants if each.name == name), UNBOUNDED)
            assert self._pinned(name) <= max(bound, before)

    def _pinned(self, name: str) -> int:
        rows = self.cluster.status().tenants
        return next((each.pinned for each in rows if each.name == name), 0)

    @rule(space=spaces, name=st.sampled_from(NAMES))
    def remove(self, space: Namespace, name: str) -> None:
        self.cluster.remove_later(name, namespace=space)

    @rule(ms=st.sampled_from([250, 3_000, 11_000, 61_000]))
    def time_passes(self, ms: int) -> None:
        self.cluster.after(ms)
        self._answers()
        if ms > RULES.put_deadline_ms:
            self.granted.clear()
            self.allocated.clear()

    @rule(rules=rule_sets(), works=st.booleans())
    def other_rules(self, rules: list[TenantRule], works: bool) -> None:
        self.cluster.state.set_tenants(rules)
        self.tenants = rules
        self.cluster._settle()
        if works:
            self.cluster.work()
            self._answers()

    @rule(node=nodes)
    def node_dies_and_another_comes(self, node: str) -> None:
        self.cluster.kill(node)
        self._answers()
        try:
            self.cluster.join(node, BLOCKS)
        except NodeNameTakenError:  # it has wiped something since, which is a sign of life
            self.cluster.silent.discard(node)

    @rule(node=nodes, begin=st.booleans())
    def drain(self, node: str, begin: bool) -> None:
        cluster = self.cluster
        step = DrainStep.BEGIN if begin else DrainStep.UNDO
        drained = cluster.state.nodes.drain(cluster.now_ms, calls.Drain(node, step))
        cluster._settle()
        if not begin:
            return
        cluster.work()
        before = self._held()
        request = calls.StartMoves(node, 0, 4, 1 << 30, evict_up_to=drained.began)
        result = cluster.state.copying.start_moves(cluster.now_ms, request)
        self._took_from_others(before, None)
        started = cluster.reply(result)
        assert isinstance(started, calls.MovesStarted)
        cluster.end_tokens(started.grants.tokens)

    @invariant()
    def all_holds(self) -> None:
        self.cluster.state.check_invariants()


TestTenants = TenantMachine.TestCase
TestTenants.settings = settings(stateful_step_count=40)
