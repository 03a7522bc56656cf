"""Seeded runs of a whole cluster, that they are repeatable, and that they find what they should.

A failure prints how to run it again. More seeds: ``python -m tests.simulation --seeds 1:1000``.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvstore import calls
from kvstore.calls import MasterWipe
from kvstore.master.state.eviction import LRU
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.puts import Pending, PendingPut
from kvstore.master.state.records import ObjectRecord
from tests.simulation.cluster import RULES, Cluster, Options
from tests.simulation.node import Node
from tests.simulation.oracle import SimulationError
from tests.simulation.run import told


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of failed nodes."""
    logger = logging.getLogger("kvstore")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


SEEDS = range(1, 33)


@pytest.mark.parametrize("seed", SEEDS)
def test_safety_under_faults_and_liveness_after_them(seed: int) -> None:
    cluster = Cluster(Options(seed=seed))
    try:
        cluster.run()
    except Exception as error:
        pytest.fail(told(cluster, error, lines=60), pytrace=False)


def test_the_same_seed_is_the_same_run() -> None:
    digests = []
    for seed in (3, 3, 4):
        cluster = Cluster(Options(seed=seed))
        cluster.run_steps(6_000)
        digests.append(cluster.scheduler.digest)
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_everything_happens_somewhere() -> None:
    """A simulation that does nothing finds nothing."""
    happened: dict[str, int] = {}
    for seed in range(100, 104):
        cluster = Cluster(Options(seed=seed, fault_seconds=4))
        cluster.run()
        for what, number in cluster.oracle.counts.items():
            happened[what] = happened.get(what, 0) + number
    for what in ("put", "put_chain", "get", "view", "remove", "allocate", "evicted", "lost",
                 "matched", "waited_grants", "reads"):  # fmt: skip
        assert happened.get(what), f"{what} never happened: {happened}"


# --- it can find ---------------------------------------------------------------------------------


def found(options: Options, *rules: str, seeds: int = 12) -> str:
    """The rule that a mutant breaks within so many seeds; one of ``rules``."""
    for seed in range(1, seeds + 1):
        try:
            Cluster(replace(options, seed=seed)).run()
        except SimulationError as error:
            if error.rule not in rules:
                pytest.fail(f"found something else: {error}")
            return error.rule
    pytest.fail(f"{seeds} seeds have not found it")


class Impatient(LRU):
    """Evicts what is leased for less than half a lease still."""

    def peek(self, now_ms: int) -> ObjectRecord | None:
        return super().peek(now_ms + RULES.lease_ms // 2)


def test_finds_reuse_before_the_lease_ends() -> None:
    found(Options(seed=0, policy=Impatient), "evicted_leased", "granted_leased", "granted_view")


class Hasty(MasterState):
    """Believes that every put that is given up is settled, and needs no quarantine."""

    def put_revoke(self, now_ms: int, request: calls.PutRevoke) -> calls.Revoked:
        return super().put_revoke(now_ms, request._replace(settled=True))


def test_finds_a_missing_quarantine() -> None:
    faults = ("stall_node", "cut_both_ways", "break_stream")
    found(Options(seed=0, new_state=Hasty, faults=faults), "late_write", seeds=30)


class Lenient(Pending):
    """Remembers expired tokens for a while."""

    def __init__(self) -> None:
        super().__init__()
        self._expired: OrderedDict[int, PendingPut] = OrderedDict()

    def get(self, token: int) -> PendingPut | None:
        return super().get(token) or self._expired.get(token)

    def pop(self, token: int) -> PendingPut | None:
        return super().pop(token) or self._expired.pop(token, None)

    def pop_expired(self, now_ms: int) -> Iterator[PendingPut]:
        for put in super().pop_expired(now_ms):
            self._expired[put.token] = put
            yield put


class Forgiving(MasterState):
    """Takes a put_end after its deadline."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._pending = Lenient()

    def _granted(self, now_ms: int, epoch: int, token: int) -> PendingPut | None:
        del now_ms
        return self._pending.get(token) if epoch == self.epoch else None


def test_finds_a_put_end_after_its_deadline() -> None:
    faults = ("stall_client", "stall_master", "cut_both_ways", "stall_node_long")
    options = Options(seed=0, new_state=Forgiving, faults=faults, fault_seconds=10)
    found(options, "invariants", seeds=40)


class Careless(Node):
    """Says that headers are wiped, and leaves them."""

    wipes = False

    def _wipe(self, message: MasterWipe) -> None:
        del message


def test_finds_headers_that_are_not_wiped() -> None:
    found(Options(seed=0, new_node=Careless, faults=()), "removed_read")


class Unfenced(Node):
    """Joins anew, and lets writers of before go on."""

    fences = False


def test_finds_a_missing_fence() -> None:
    faults = ("kill_node", "isolate_node")
    found(Options(seed=0, new_node=Unfenced, faults=faults), "late_write", "old_epoch_write")


class Trusting(Node):
    """Takes a join that was not answered for one that was not accepted."""

    fences_unanswered_joins = False


def test_finds_an_unanswered_join_that_was_accepted() -> None:
    faults = ("kill_node", "isolate_node")
    options = Options(seed=0, new_node=Trusting, faults=faults)
    found(options, "late_write", "old_epoch_write", seeds=30)
