"""What goes when room is needed, and in which order. Room is made by puts without a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.calls.tenants import TenantRule
from kvstore.config.servers import EVICTION_POLICIES, MasterConfig
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state import eviction_hints
from kvstore.master.state.candidates import MOVES_PER_STEP, EvictionCandidates, SweepCursor
from kvstore.master.state.density import density
from kvstore.master.state.eviction import NewPolicy, lru
from kvstore.master.state.evictor import EVICTIONS_PER_STEP
from kvstore.master.state.forest import Forest
from kvstore.master.state.records import HITS_MAX, ObjectRecord
from kvstore.master.state.tenants import UnlimitedTenancy, open_tenancy
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import NAMESPACE
from tests.unit.master.conftest import NewCluster

LEASE_MS = 10_000
POLICIES: dict[str, Callable[[], NewPolicy]] = {"lru": lru, "density": density}


@pytest.fixture(params=[(p, t) for p in POLICIES for t in (None, [TenantRule("t", ("model",))])])
def any_cluster(request: pytest.FixtureRequest, new_cluster: NewCluster) -> NewCluster:
    """With each policy, with tenants and without."""
    policy, tenants = request.param
    return partial(new_cluster, policy=POLICIES[policy](), tenants=tenants)


def test_each_policy_has_a_name_that_the_setting_takes() -> None:
    assert EVICTION_POLICIES.keys() == POLICIES.keys()
    for name, path in EVICTION_POLICIES.items():
        assert resolve_name(path) is POLICIES[name]
        assert MasterConfig.model_validate({"eviction": name}).eviction == name


def test_the_least_recently_used_goes_first(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=3)
    for name in "abc":
        cluster.after(1)
        cluster.put(name)
    cluster.after(1)
    cluster.match("a")
    cluster.after(LEASE_MS)

    cluster.put("x")

    assert cluster.present("abcx") == "acx"


def test_the_age_of_what_is_evicted_is_counted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=2)
    cluster.put("ab")
    ages = cluster.state.pool.eviction_ages_ms
    cluster.after(3 * LEASE_MS)
    cluster.put("x")
    assert ages.total == 3 * LEASE_MS
    cluster.after(2 * LEASE_MS)
    cluster.put("y")
    assert ages.total == (3 + 5) * LEASE_MS
    assert sum(ages.counts) == 2 == cluster.state.counters["evicted_objects"]


def test_a_chain_goes_from_its_tip(any_cluster: NewCluster) -> None:
    cluster = any_cluster(one=3)
    cluster.put("abc")

    cluster.put("x")

    assert cluster.match("abc") == 2


def test_a_parent_inherits_the_recency_of_its_child(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=4)
    cluster.put("ab")
    cluster.after(1)
    cluster.put("c")
    cluster.after(1)
    cluster.match("ab")  # the tip is used, and the root with it
    cluster.after(1)
    cluster.put("d")
    cluster.after(LEASE_MS)

    cluster.put("xy")  # c, and then the tip

    assert cluster.present("abcdxy") == "adxy"
    cluster.put("z")
    assert cluster.present("adxyz") == "dxyz"


def test_a_lease_on_the_tip_protects_the_chain(any_cluster: NewCluster) -> None:
    cluster = any_cluster(one=4)
    cluster.put("abcd")
    assert cluster.match("abcd") == 4

    with pytest.raises(NoSpaceError):
        cluster.put("x")

    cluster.after(LEASE_MS)
    cluster.put("x")
    assert cluster.match("abcd") == 3


def test_a_lease_on_an_inner_block_outlives_those_behind_it(any_cluster: NewCluster) -> None:
    cluster = any_cluster(one=4)
    cluster.put("abcd")
    cluster.match("ab")

    cluster.put("xy")

    assert cluster.present("abcd") == "ab"
    with pytest.raises(NoSpaceError):
        cluster.put("uvw")


def test_removing_a_leased_tip_leaves_its_ancestors_protected(any_cluster: NewCluster) -> None:
    cluster = any_cluster(one=3)
    cluster.put("abc")
    cluster.match("abc")

    cluster.remove("c")

    with pytest.raises(NoSpaceError):
        cluster.put("x")
    assert cluster.match("ab") == 2


def test_detached_blocks_go_before_older_ones(any_cluster: NewCluster) -> None:
    cluster = any_cluster(one=5)
    cluster.put("x")
    cluster.after(1)
    cluster.put("abc")
    cluster.remove("b")
    cluster.after(LEASE_MS)

    cluster.put("uvw")  # two blocks were free

    assert cluster.present("abcxuvw") == "axuvw"


def test_many_breaks_do_not_keep_the_background_work_from_ending_a_round(
    any_cluster: NewCluster,
) -> None:
    cluster = any_cluster(one=5_000, two=10)
    cluster.after(1)
    cluster.put([f"w{index}" for index in range(4_500)], chain=False, host="host-one")
    cluster.put("abc", host="host-two")
    cluster.remove("b")

    for name in [f"w{index}" for index in range(100)]:
        cluster.put([f"{name}x"], parent=name)
        cluster.remove_later([name])  # another break
        cluster.state.work(cluster.now_ms)

    record = cluster.state.forest.get(NAMESPACE, Key(b"c"))
    assert record is not None
    assert cluster.state.pool.marked_detached(record)


def test_more_than_one_step_may_evict_is_evicted_in_further_steps(any_cluster: NewCluster) -> None:
    blocks = 3 * EVICTIONS_PER_STEP
    cluster = any_cluster(one=blocks)
    cluster.put([f"a{index}" for index in range(blocks)], chain=False)

    ticket = cluster.start_or_wait([f"b{index}" for index in range(blocks)], chain=False)

    assert isinstance(ticket, int)
    assert cluster.state.counters["evicted_objects"] == EVICTIONS_PER_STEP
    cluster.work()
    assert ticket in cluster.answers


def test_a_batch_that_can_never_fit_evicts_nothing(any_cluster: NewCluster) -> None:
    cluster = any_cluster(one=3, two=3)
    cluster.put("ab")

    with pytest.raises(NoSpaceError):
        cluster.put("stuvwxy")

    assert cluster.present("ab") == "ab"


def test_making_room_may_forget_the_place_of_what_is_put(new_cluster: NewCluster) -> None:
    """Found by the simulation: what was known of the key before is in no table any more."""
    cluster = new_cluster(one=1)
    cluster.put("b", parent="a")  # a is the place of a parent that is missing
    cluster.after(cluster.rules.lease_ms + 1_000)

    cluster.put("a")  # b has to go, and with it the place of its parent

    assert cluster.present("ab") == "a"
    check_invariants(cluster.state)


# --- what holds with any policy, whatever happens ------------------------------------------------


def made(number: int) -> ObjectRecord:
    record = ObjectRecord(NAMESPACE, Key(b"%06d" % number))
    record.counter = number
    return record


@pytest.mark.parametrize("policy", POLICIES)
def test_a_peek_that_meets_too_many_leased_says_that_it_is_unfinished_and_gets_there(
    policy: str,
) -> None:
    candidates = EvictionCandidates(POLICIES[policy](), UnlimitedTenancy(), Counter())
    queue = candidates.queues[1]
    records = [made(index) for index in range(2_000)]
    for record in records:
        candidates.add(record)
        record.lease_until_ms = 10
    records[-1].lease_until_ms = 0

    answers = [queue.peek(5)]
    while queue.unfinished:
        assert queue.moved == MOVES_PER_STEP + 1
        answers.append(queue.peek(5))

    assert answers[-1] is records[-1]
    assert answers[:-1] == [None] * (len(answers) - 1)
    assert len(answers) > 2
    assert candidates.next_lease_end_ms(0) == 10
    check_invariants(candidates)


class CandidatesMachine(RuleBasedStateMachine):
    """The candidates of a segment, with tenants or without. What is due is known here as well."""

    policy: Callable[[], NewPolicy]

    @initialize(with_tenants=st.booleans())
    def begin(self, with_tenants: bool) -> None:
        forest = Forest()
        rules = [TenantRule("a", ("a*",)), TenantRule("b", ("b*",))]
        accounts = open_tenancy(rules if with_tenants else None, forest.namespaces, {})
        forest.tenants = accounts
        self.forest = forest
        new_policy = self.policy()
        self.learns_hints = new_policy(1).learns_hints
        self.candidates = EvictionCandidates(new_policy, accounts, Counter())
        self.now_ms = 0
        self.count = 0
        self.records: list[ObjectRecord] = []
        self.detached: set[ObjectRecord] = set()
        self.not_before_ms: dict[ObjectRecord, int] = {}

    @rule(namespace=st.sampled_from("abc"), detached=st.booleans(), again=st.booleans())
    def add(self, namespace: str, detached: bool, again: bool) -> None:
        self.count += not again
        record = self.forest.ensure(Namespace(namespace), Key(b"%d" % self.count))
        if record not in self.records:
            record.last_used_ms, record.counter, record.hits = self.now_ms, self.count, 0
            self.candidates.add(record, detached=detached)
            self.records.append(record)
            if detached:
                self.detached.add(record)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), leased_ms=st.integers(0, 20))
    def use(self, data: st.DataObject, leased_ms: int) -> None:
        record = data.draw(st.sampled_from(self.records))
        record.last_used_ms = self.now_ms
        record.hits += record.hits & HITS_MAX < HITS_MAX
        record.keep_until(self.now_ms + leased_ms)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), hint=st.sampled_from(["over", "demoted", "retained", ""]))
    def hint(self, data: st.DataObject, hint: str) -> None:
        record = data.draw(st.sampled_from(self.records))
        number = eviction_hints.dismissed(self.now_ms, over=hint == "over")
        if hint in ("retained", ""):
            number = self.now_ms + 20 if hint else 0
        self.candidates.hint(record, number)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.records))
        record.lease_until_ms = self.now_ms
        self.candidates.lease_ended(record)
        self.not_before_ms.pop(record, None)

    @rule(ms=st.integers(1, 30))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @precondition(lambda self: self.records)
    @rule(data=st.data(), evicted=st.booleans())
    def discard(self, data: st.DataObject, evicted: bool) -> None:
        self._discard(data.draw(st.sampled_from(self.records)), evicted=evicted)

    def _discard(self, record: ObjectRecord, *, evicted: bool) -> None:
        self.candidates.discard(record, evicted=evicted)
        self.records.remove(record)
        self.detached.discard(record)
        self.not_before_ms.pop(record, None)

    def _may_go(self, record: ObjectRecord) -> bool:
        until_ms = max(record.lease_until_ms, self.not_before_ms.get(record, 0))
        return until_ms <= self.now_ms

    @rule(moves=st.sampled_from([0, 1, 5, 1_000]), then=st.sampled_from(["evict", "defer", ""]))
    def peek(self, moves: int, then: str) -> None:
        for number, queue in self.candidates.queues.items():
            record = queue.peek(self.now_ms, moves)
            assert queue.moved <= moves + 1
            due = {r for r in self.records if r.queue == number and self._may_go(r)}
            if record is None:
                assert queue.unfinished or not due
                continue
            assert record in due
            assert (record in self.detached) == queue.is_detached(record)
            order, rank, _ = queue.value(record)
            assert rank >= 0
            if not queue.is_detached(record):
                assert not due & self.detached
            if record.hint >= 0 and not self.learns_hints:
                assert all(eviction_hints.has_ended(r, self.now_ms) for r in due if r.hint < 0)
            if queue.is_retained(record):
                assert record.hint > self.now_ms
                assert self.learns_hints or all(r.hint > 0 for r in due), "the others go first"
            assert self.learns_hints or order <= 3 or queue.is_retained(record)
            if then == "evict":
                self._discard(record, evicted=True)
            elif then == "defer":
                self.not_before_ms[record] = self.now_ms + 10
                queue.defer(record, self.now_ms + 10)

    @rule(count=st.integers(1, 4))
    def sweep(self, count: int) -> None:
        seen: list[ObjectRecord] = []
        cursor = SweepCursor()
        while slice_of_them := self.candidates.after(cursor, count):
            seen += slice_of_them
            cursor = SweepCursor(seen[-1].queue, seen[-1].position)
        assert sorted(map(id, seen)) == sorted(map(id, self.records))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "candidates"):
            check_invariants(self.candidates)
            assert len(self.candidates) == len(self.records)

    def teardown(self) -> None:
        """All can be evicted in the end."""
        self.now_ms += 1_000
        for queue in self.candidates.queues.values():
            while len(queue):
                record = queue.peek(self.now_ms)
                assert record is not None
                self._discard(record, evicted=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_contract_of_policies(policy: str) -> None:
    machine = type("Machine", (CandidatesMachine,), {"policy": staticmethod(POLICIES[policy])})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, deadline=None))
