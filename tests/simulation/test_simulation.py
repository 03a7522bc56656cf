"""Seeded runs of a whole cluster, that they are repeatable, and that they find what they should.

A failure prints how to run it again. More seeds: ``python -m tests.simulation --seeds 1:1000``.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvstore import calls
from kvstore.auth import rights
from kvstore.calls import MasterWipe, PutOutcome
from kvstore.limits import Namespace
from kvstore.master.state import asking, common
from kvstore.master.state.effects import Later, Outrun
from kvstore.master.state.granting import Granting
from kvstore.master.state.inventory import Tombstones
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.nodes import Nodes
from kvstore.master.state.puts import Granted, Pending
from kvstore.master.state.reclaim import Reclaim
from kvstore.master.state.records import ObjectRecord
from kvstore.memory.header import extent_bytes
from kvstore.node.stamps import Stamps
from kvstore.tenants import TenantRule
from tests.simulation import master as simulated
from tests.simulation.cluster import Options, SimulatedCluster
from tests.simulation.node import Node
from tests.simulation.run import run_seed
from tests.simulation.workload import Mix
from tests.support.twin import MINE

FIRST_SEEDS = range(1, 21)
"""Of ``make test``, with half of the faults."""
SEEDS = range(1, 201)
"""Of ``make test-all``."""
TOGETHER = 20
FAULT_SECONDS = 2.5


def is_safe_and_alive(*seeds: int, fault_seconds: float = FAULT_SECONDS) -> None:
    for seed in seeds:
        result = run_seed(Options(seed=seed, fault_seconds=fault_seconds))
        if result.failure:
            pytest.fail(f"seed {seed}: {result.failure}", pytrace=False)


@pytest.mark.parametrize("seed", FIRST_SEEDS)
def test_safety_under_faults_and_liveness_after_them(seed: int) -> None:
    is_safe_and_alive(seed, fault_seconds=FAULT_SECONDS / 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", SEEDS[::TOGETHER])
def test_more_of_the_same(first: int) -> None:
    """``make sim`` goes on where this ends."""
    is_safe_and_alive(*range(first, first + TOGETHER))


TENANTS = [
    TenantRule("a", ("a",), guaranteed=24 << 10, at_most=96 << 10, pinned=32 << 10, puts=0.5)
]
"""The other namespace of the work belongs to no tenant."""


@pytest.mark.parametrize("seed", [2, 11, 18])
def test_with_tenants(seed: int) -> None:
    """The state asserts after each step what tenants hold, and that each eviction for another
    tenant has left its guarantee to the one that lost an object."""
    made: list[MasterState] = []

    def with_tenants(**given: Any) -> MasterState:
        made.append(MasterState(**given, tenants=TENANTS))
        return made[-1]

    options = Options(seed=seed, fault_seconds=FAULT_SECONDS / 3, new_state=with_tenants)
    result = run_seed(options)
    assert not result.failure, result.failure
    tenants = [tenant for state in made for tenant in state.pool.tenants or ()]
    assert sum(tenant.evicted_by_own + tenant.evicted_by_others for tenant in tenants)


HOARDED = [*TENANTS, TenantRule("liar", (MINE,), at_most=12 << 10)]


class Divided(MasterState):
    """Has tenants; the one of the liars may hold a few blocks."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, tenants=HOARDED)


class Lavish(Divided):
    """Counts allocations for the tenant without a name, as if they had no namespace."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.steps[calls.Allocate] = self._allocate

    def _allocate(self, now_ms: int, request: calls.Allocate) -> calls.Grants | Later:
        return self.putting.allocate(now_ms, request._replace(namespace=Namespace("of nobody")))


HOARDERS = Options(seed=1, masters=1, faults=("client_attacks", "client_lies"), new_state=Divided)


def test_a_client_that_hoards_stays_within_its_bound() -> None:
    """The oracle counts after each grant."""
    cluster = SimulatedCluster(HOARDERS)
    cluster.run_steps(15_000)
    assert cluster.oracle.counts["hoards"]
    assert cluster.master is not None
    tenants = cluster.master.state.pool.tenants
    assert tenants is not None
    assert next(each for each in tenants if each.name == "liar").refused


def test_finds_a_master_in_which_allocations_escape_the_bound() -> None:
    options = replace(HOARDERS, new_state=Lavish)
    found(options, "quota", within_steps=SOON, each=15_000)


@pytest.mark.parametrize("masters", [1, 2, 3])
def test_however_many_masters_there_are(masters: int) -> None:
    options = Options(seed=7, masters=masters, fault_seconds=FAULT_SECONDS)
    result = run_seed(options)
    assert not result.failure, result.failure


def test_the_same_seed_is_the_same_run() -> None:
    digests = []
    for seed in (3, 3, 4):
        cluster = SimulatedCluster(Options(seed=seed))
        cluster.run_steps(6_000)
        digests.append(cluster.scheduler.digest)
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_the_order_of_hash_tables_decides_nothing() -> None:
    """Python hashes strings otherwise in each process. Seed 32 removes in several namespaces."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", "32", "--steps", "2000"]
    digests = set()
    for hashes in ("0", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hashes}
        told = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        digests.update(re.findall("digest=([0-9a-f]+)", told.stdout))
    assert len(digests) == 1, digests


@pytest.mark.slow
def test_everything_happens_somewhere() -> None:
    """A simulation that does nothing finds nothing."""
    happened: dict[str, int] = {}
    for seed in range(100, 112):
        cluster = SimulatedCluster(Options(seed=seed, fault_seconds=4))
        cluster.run()
        for what, number in cluster.oracle.counts.items():
            happened[what] = happened.get(what, 0) + number
    for what in ("put", "put_chain", "get", "view", "remove", "allocate", "evicted", "lost",
                 "matched", "waited_grants", "reads", "drain", "moved"):  # fmt: skip
        assert happened.get(what), f"{what} never happened: {happened}"


# --- it can find ---------------------------------------------------------------------------------


def found(options: Options, *rules: str, within_steps: int, each: int | None = None) -> int:
    """In how many steps, over as many seeds as that takes, one of ``rules`` is seen to be broken;
    fails the test when that is not within so many, or something else is found.

    Args:
        each: steps of one seed; None: all that it has.
    """
    steps = 0
    for seed in itertools.count(1):
        result = run_seed(replace(options, seed=seed), each)
        steps += result.steps
        if result.failure:
            assert result.rule in rules, f"found something else: {result.failure}"
            assert steps <= within_steps, f"found in {steps} steps, by seed {seed}"
            print(f"found [{result.rule}] in {steps} steps, by seed {seed}")
            return steps
        assert steps <= within_steps, f"{seed} seeds, {steps} steps have not found it"
    raise AssertionError


SOON = 60_000
"""Steps within which each of the five rules is found that a store must not break: one seed of eight
finds it within 2,500."""


class OneReader(MasterState):
    """Ends the lease on an object for all of its readers when one of them releases it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps[calls.PutStart] = self._put_start

    def _put_start(self, now_ms: int, request: calls.PutStart) -> calls.Grants | Later:
        groups = [self.leases._groups.get(number) for number in request.released]
        for record in [record for group in groups if group is not None for record in group.records]:
            record.lease_until_ms = min(record.lease_until_ms, now_ms)
            record.kept_until_ms = min(record.kept_until_ms, now_ms)
            if record.ticket:
                self.pool.lease_ended(record)
        return self.putting.put_start(now_ms, request)


def test_finds_reuse_before_the_lease_ends() -> None:
    options = Options(seed=0, new_state=OneReader, faults=())
    found(options, "evicted_leased", "granted_leased", "granted_view", within_steps=SOON)


class Timeless(MasterState):
    """Takes a put_end of an earlier epoch for one of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps[calls.PutEnd] = self._put_end

    def _put_end(self, now_ms: int, request: calls.PutEnd) -> calls.PutEnded | Later:
        if request.epoch != self.epoch:
            return calls.PutEnded(bytes([PutOutcome.STORED]) * len(request.tokens))
        return self.putting.put_end(now_ms, request)


def test_finds_a_put_end_of_an_old_epoch() -> None:
    faults = ("restart_master", "die_at_step")
    options = Options(seed=0, new_state=Timeless, faults=faults)
    found(options, "not_stored", within_steps=SOON, each=2_500)


class Forgetful(MasterState):
    """Has no place for children whose parent was removed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps[calls.Remove] = self._remove

    def _remove(self, now_ms: int, request: calls.Remove) -> calls.Removed | Later:
        gone = [self.forest.get(request.namespace, key) for key in request.keys]
        children = [
            record
            for record in self.forest.records()
            if record.parent is not None and record.parent in gone and record.complete
        ]
        for child in children:
            size = child.size
            extents = self.pool.hide(child, self.forest.steps + 1_000)
            self.pool.free(extents, extent_bytes(size))
        return self.removing.remove(now_ms, request)


def test_finds_forgotten_children() -> None:
    options = Options(seed=0, new_state=Forgetful, faults=())
    found(options, "vanished", "evicted_leased", within_steps=SOON, each=10_000)


class Credulous(Node):
    """Serves what it finds in memory that was left, as it is."""

    verifies = False


def test_finds_what_is_served_before_it_is_verified() -> None:
    options = Options(seed=0, new_node=Credulous, faults=("kill_node",))
    found(options, "served_unverified", "wrong_bytes", within_steps=SOON, each=2_500)


class Hasty(MasterState):
    """Believes that every put that is given up is settled, and needs no quarantine."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps[calls.PutRevoke] = self._put_revoke

    def _put_revoke(self, now_ms: int, request: calls.PutRevoke) -> calls.Revoked:
        return self.putting.put_revoke(now_ms, request._replace(settled=True))


@pytest.mark.slow
def test_finds_a_missing_quarantine() -> None:
    faults = ("stall_node", "cut_both_ways", "break_stream")
    found(Options(seed=0, new_state=Hasty, faults=faults), "late_write", within_steps=10**6)


class Trusting(Node):
    """Wipes what was given up, and leaves the connections that may carry it still."""

    cuts = False


@pytest.mark.slow
def test_finds_what_lands_after_it_was_given_up() -> None:
    options = Options(seed=0, new_node=Trusting, faults=("hold_back",))
    found(options, "late_write", within_steps=10**6, each=25_000)


class Unmindful(Trusting):
    """Nor does it wipe what was given up once more, before it tells the next master."""

    remembers = False


@pytest.mark.slow
def test_finds_that_what_was_given_up_is_read_after_a_removal() -> None:
    mix = Mix(
        weights={"put": 2.0, "get": 4.0, "remove": 4.0}, size_bytes_max=1_000, think_s=0.05,
        overwrite=0.3, replicas=0.0, hold_s=0.1,
    )  # fmt: skip
    options = Options(
        seed=0, new_node=Unmindful, mix=mix, masters=1, faults=("hold_back_a_put",),
        waived=frozenset({"late_write"}),
    )  # fmt: skip
    found(options, "given_up_read", within_steps=500_000, each=15_000)


class Oblivious(Node):
    """Cuts and wipes what was given up, and forgets it: shared memory cannot be cut."""

    remembers = False


@pytest.mark.slow
def test_finds_a_copy_that_lands_after_its_object_was_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The master wipes what it gave up once, although its writer may not have ended."""
    monkeypatch.setattr(Granting, "wipe_again", lambda self, token: None)
    mix = Mix(
        weights={"put": 4.0, "get": 4.0, "remove": 3.0, "drain": 1.0}, size_bytes_max=3_000,
        think_s=0.05, overwrite=0.3, replicas=0.0, hold_s=0.1,
    )  # fmt: skip
    options = Options(
        seed=0, new_node=Oblivious, mix=mix, masters=1, faults=("restart_amid_copies",),
    )  # fmt: skip
    found(options, "given_up_read", within_steps=500_000, each=15_000)


class Lenient(Pending):
    """Remembers expired tokens for a while."""

    def __init__(self) -> None:
        super().__init__()
        self._expired: OrderedDict[int, Granted] = OrderedDict()
        self._abandoned: set[int] = set()
        """Expired ones whose end the master has seen to: what ends them next is their writer."""

    def get(self, token: int) -> Granted | None:
        return super().get(token) or self._expired.get(token)

    def pop(self, token: int) -> Granted | None:
        if token in self._expired and token not in self._abandoned:
            self._abandoned.add(token)
            return None
        return super().pop(token) or self._expired.pop(token, None)

    def renew(self, put: Granted, deadline_ms: int) -> None:
        if put.token not in self._expired:
            super().renew(put, deadline_ms)

    def pop_expired(self, now_ms: int) -> Iterator[Granted]:
        for put in super().pop_expired(now_ms):
            self._expired[put.token] = put
            yield put


class Forgiving(MasterState):
    """Takes a put_end after its deadline."""

    def __init__(self, **settings: Any) -> None:
        settings["rules"] = replace(settings["rules"], put_deadline_ms=1_200)  # stalls are longer
        super().__init__(**settings)


def _granted(granting: Granting, now_ms: int, epoch: int, token: int) -> Granted | None:
    del now_ms
    return granting._pending.get(token) if epoch == granting._common.epoch else None


@pytest.mark.slow
def test_finds_a_put_end_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "Pending", Lenient)
    monkeypatch.setattr(Granting, "granted", _granted)
    faults = ("stall_client", "stall_master", "cut_both_ways", "stall_node_long")
    options = Options(seed=0, new_state=Forgiving, faults=faults, fault_seconds=10)
    found(options, "invariants", within_steps=2 * 10**6)


class Careless(Node):
    """Says that headers are wiped, and leaves them."""

    wipes = False

    def _wipe(self, message: MasterWipe) -> None:
        del message


def test_finds_headers_that_are_not_wiped() -> None:
    work = {"put": 3.0, "get": 6.0, "remove": 3.0}
    mix = Mix(
        weights=work, size_bytes_max=1_000, think_s=0.01, overwrite=0.0, replicas=0.0, hold_s=0.1
    )
    options = Options(seed=0, new_node=Careless, faults=(), mix=mix)
    found(options, "removed_read", within_steps=SOON, each=5_000)


class Zeroing(Node):
    zeroes = True


@pytest.mark.parametrize("seed", [3, 5, 17])
def test_memory_is_zero_when_it_is_granted(seed: int) -> None:
    """And no view of a program changes by that."""
    result = run_seed(Options(seed=seed, new_node=Zeroing, fault_seconds=FAULT_SECONDS / 2))
    assert not result.failure, result.failure


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 61, TOGETHER))
def test_memory_is_zero_with_more_seeds(first: int) -> None:
    for seed in range(first, first + TOGETHER):
        result = run_seed(Options(seed=seed, new_node=Zeroing, fault_seconds=FAULT_SECONDS))
        assert not result.failure, f"seed {seed}: {result.failure}"


class Unzeroing(Zeroing):
    """Wipes headers alone."""

    def _wipe(self, message: MasterWipe) -> None:
        super()._wipe(message._replace(lengths=()))


def test_finds_memory_that_is_not_zeroed() -> None:
    options = Options(seed=0, new_node=Unzeroing, faults=())
    found(options, "not_zeroed", within_steps=SOON, each=5_000)


@pytest.mark.slow
def test_finds_a_removed_version_that_is_read_after_a_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The put is acknowledged while the removal still waits for a node that hangs."""
    monkeypatch.setattr(Reclaim, "being_read", lambda self, name: [])
    mix = Mix(
        weights={"put": 4.0, "get": 30.0, "remove": 3.0}, size_bytes_max=1_000, think_s=0.01,
        overwrite=0.0, replicas=0.0, hold_s=0.1,
    )  # fmt: skip
    options = Options(seed=0, mix=mix, masters=1, faults=("stall_node_long", "isolate_node"))
    rules = "removed_read", "removed_twice_read", "removed_read_from_dead"
    found(options, *rules, within_steps=10**6, each=15_000)


LENT = Mix(
    weights={"put": 3.0, "get": 1.0, "view": 4.0}, size_bytes_max=3_000, think_s=0.02,
    overwrite=0.0, replicas=1.0, hold_s=5.0, ttl=0.5,
)  # fmt: skip
"""Views of objects with two replicas, whose time is soon over."""


@pytest.mark.slow
def test_finds_what_comes_back_after_its_time_to_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master does not remember what its nodes had yet to wipe when they ended."""
    monkeypatch.setattr(Tombstones, "add_version", lambda self, version: None)
    options = Options(seed=0, mix=LENT, masters=1, faults=("kill_node",))
    found(options, "over_again", within_steps=10**6, each=15_000)


def all_alive(record: ObjectRecord) -> bool:
    return all(segment.alive or not segment.segment_id for segment, _ in record.extents())


class Placeless(MasterState):
    """Renews a lease by key and version, wherever the leased memory is."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps[calls.Renew] = self._renew

    def _renew(self, now_ms: int, request: calls.Renew) -> calls.Renewed:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asking, "_is_at", lambda record, *_: all_alive(record))
            return self.asking.renew(now_ms, request)


@pytest.mark.slow
def test_finds_a_lease_that_is_renewed_where_the_object_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The object has come back elsewhere, so its version counts as held."""
    monkeypatch.setattr(Tombstones, "add_version", lambda self, version: None)
    options = Options(
        seed=0, new_state=Placeless, mix=LENT, masters=1, faults=("kill_node",),
        waived=frozenset({"over_again"}),
    )  # fmt: skip
    found(options, "granted_view", "view_changed", within_steps=10**6, each=15_000)


class Unfenced(Node):
    """Joins anew, and lets writers of before go on."""

    fences = False


@pytest.mark.slow
def test_finds_a_missing_fence() -> None:
    faults = ("kill_node", "isolate_node")
    found(
        Options(seed=0, new_node=Unfenced, faults=faults),
        "late_write",
        "old_epoch_write",
        "corrupt",
        within_steps=10**6,
    )


class Talkative(Node):
    """Is read by clients after it has left its master."""

    leaves_fenced = False


@pytest.mark.slow
def test_finds_a_node_that_is_read_after_it_has_left() -> None:
    mix = Mix(
        weights={"put": 4.0, "get": 8.0, "remove": 3.0}, size_bytes_max=1_000, think_s=0.01,
        overwrite=0.5, replicas=0.0, hold_s=0.1,
    )  # fmt: skip
    options = Options(
        seed=0, new_node=Talkative, mix=mix, masters=1, faults=("leave_node",), waived=frozenset()
    )
    found(options, "removed_read_from_dead", within_steps=500_000, each=15_000)


LIARS = Options(
    seed=0,
    masters=1,
    faults=("client_lies", "node_lies", "client_attacks", "restart_master"),
    stamps=True,
)


@pytest.mark.slow
def test_clients_and_nodes_that_lie_break_no_rule() -> None:
    happened: Counter[str] = Counter()
    wanted = {
        "lies_answered", "liars_joined", "claimed_by_liars", "attacks_refused", "floods", "forged",
        "hoards",
    }  # fmt: skip
    for seed in range(1, 16):
        result = run_seed(replace(LIARS, seed=seed, fault_seconds=FAULT_SECONDS))
        assert not result.failure, result.failure
        happened.update(result.counts)
        if seed >= 5 and wanted <= happened.keys():
            return
    raise AssertionError(f"never happened: {wanted - happened.keys()}; {happened}")


@pytest.mark.parametrize("lacks", ["rights", "owners"])
def test_finds_a_master_that_lets_anybody(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks == "rights":
        monkeypatch.setattr(rights, "check", lambda who, request: None)
    else:
        monkeypatch.setattr(simulated, "names_anothers", lambda *_: False)
    rules = ["allowed"]
    if lacks == "owners":  # late_write: the put that somebody else has given up is still written
        rules = ["granted_allocation", "allocation_outlived", "late_write"]
    options = replace(LIARS, faults=("client_attacks",), stamps=False)
    found(options, *rules, within_steps=SOON, each=20_000)


@pytest.mark.slow
def test_finds_a_node_that_believes_every_valid_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stamps, "__call__", lambda *_: True)
    options = replace(LIARS, faults=("client_attacks", "restart_master"))
    rules = "foreign", "served_unverified"  # of the liar, for others; a wide one that is served
    found(options, *rules, within_steps=10**6)


def test_an_attacker_does_not_make_nodes_suspect() -> None:
    """By reports from hosts that it invents, also while their streams break."""
    faults = ("client_attacks", "break_stream")
    cluster = SimulatedCluster(replace(LIARS, seed=2, faults=faults))
    cluster.run_steps(20_000)
    assert cluster.oracle.counts["floods"]
    assert cluster.master is not None
    members = cluster.master.state.membership
    assert any(node.reports for node in members.nodes.values())
    assert all(node.reported_ms is None for node in members.nodes.values())


def test_finds_a_master_that_believes_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def believes(nodes: Nodes, now_ms: int, join: calls.Join) -> None:
        if join.highest_epoch > nodes._common.epoch:
            nodes._common.effect(Outrun(join.highest_epoch))

    monkeypatch.setattr(Nodes, "client_joined", believes)
    options = replace(LIARS, faults=("client_lies",))
    found(options, "believed", within_steps=SOON, each=12_000)


class Boundless(MasterState):
    """Believes a node whatever epoch it reports."""

    def __init__(self, **settings: Any) -> None:
        settings["epoch_max"] = 1 << 64
        super().__init__(**settings)


def test_finds_a_master_that_believes_a_node_without_a_bound() -> None:
    options = replace(LIARS, faults=("node_lies",), new_state=Boundless)
    found(options, "believed", within_steps=10**6, each=10_000)
