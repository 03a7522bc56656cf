"""What things cost, counted rather than timed: probes, cycles, stack, memory of what is empty."""

from __future__ import annotations

import math

import pytest

from kvstore import calls
from kvstore.errors import BusyError, InvalidArgumentError
from kvstore.limits import Key, Namespace
from kvstore.master.state import forest as forest_module
from kvstore.master.state.effects import Later
from kvstore.master.state.forest import Forest
from kvstore.master.state.pool import SETTLE_STEPS
from kvstore.master.state.records import NamespaceTable
from kvstore.master.state.sweeping import SWEEP_STEPS
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import NAMESPACE, keys_of
from tests.unit.master.conftest import NewCluster
from tests.unit.master.test_inventories import back, claim

BLOCKS = 131_072


def _chain(count: int) -> list[Key]:
    return [Key(index.to_bytes(4, "big")) for index in range(count)]


def _forest(keys: list[Key]) -> Forest:
    """All of one chain. They are given no bytes, but remembered as reachable."""
    forest = Forest()
    above = None
    for key in keys:
        record = forest.ensure(Namespace("n"), key)
        record.writer = 1
        forest.link(record, above)
        record.checked = forest.breaks
        above = record
    return forest


@pytest.mark.parametrize("present", [1, 1_000, 65_537, BLOCKS])
def test_a_match_takes_a_logarithmic_number_of_probes(
    present: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = _chain(BLOCKS)
    forest = _forest(keys[:present])
    table = forest.table("n")
    assert table is not None
    probes: list[Key] = []
    get = NamespaceTable.get

    def counted(self: NamespaceTable, key: Key) -> object:
        probes.append(key)
        return get(self, key)

    monkeypatch.setattr(NamespaceTable, "get", counted)
    found = forest.match(table, keys)

    assert found.matched == present
    assert len(probes) <= 2 * math.log2(BLOCKS) + 4


def test_a_death_is_cleared_away_in_slices(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=12_000, two=12_000)
    cluster.put([f"c{index}" for index in range(6_000)], host="host-one")
    cluster.put([f"x{index}" for index in range(5_000)], chain=False, host="host-one")
    cluster.put("z", host="host-two")
    cluster.state.nodes.said(0, cluster.sessions["one"], calls.NodeLeave())

    longest = 0
    while cluster.state.has_work:
        before = cluster.state.forest.steps
        cluster.state.work(cluster.now_ms)
        longest = max(longest, cluster.state.forest.steps - before)
        check_invariants(cluster.state)

    assert longest <= SWEEP_STEPS + SETTLE_STEPS
    assert [row.objects for row in cluster.status().namespaces] == [1]


# --- long chains -------------------------------------------------------------------------------


@pytest.fixture
def short_walks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(forest_module, "WALK_STEPS", 100)
    return 100


def test_a_match_of_a_long_chain_is_answered_in_slices(
    new_cluster: NewCluster, short_walks: int
) -> None:
    cluster = new_cluster(one=1_100)
    names = [f"k{index}" for index in range(1_000)]
    cluster.put(names)
    cluster.put("ab")
    cluster.remove("a")  # a break: all must be looked at anew

    request = calls.MatchPrefix([NAMESPACE], keys_of(names), False)
    later = cluster.state.asking.find(cluster.now_ms, request)
    assert isinstance(later, Later)
    steps = longest = 0
    while later.ticket not in cluster.answers:
        before = cluster.state.forest.steps
        cluster.state.work(cluster.now_ms)
        longest = max(longest, cluster.state.forest.steps - before)
        cluster._settle()
        steps += 1
        assert steps < 100
    answer = cluster.answers.pop(later.ticket)

    assert isinstance(answer, calls.Matched)
    assert answer.matches[0].matched == 1_000
    assert steps >= 1_000 // short_walks
    assert longest <= 2 * short_walks
    assert cluster.match(names) == 1_000, "and is remembered"


def test_a_question_about_a_long_chain_can_be_given_up(
    new_cluster: NewCluster, short_walks: int
) -> None:
    cluster = new_cluster(one=300)
    names = [f"k{index}" for index in range(250)]
    cluster.put(names)
    cluster.put("ab")
    cluster.remove("a")
    request = calls.MatchPrefix([NAMESPACE], keys_of(names), False)
    later = cluster.state.asking.find(cluster.now_ms, request)
    assert isinstance(later, Later)

    cluster.state.cancel(later.ticket)
    cluster.work()

    assert later.ticket not in cluster.answers


@pytest.mark.usefixtures("short_walks")
def test_a_missing_block_is_put_below_a_long_chain(new_cluster: NewCluster) -> None:
    """Whether that closes a ring is found out in several steps."""
    cluster = new_cluster(one=1_100)
    names = [f"k{index}" for index in range(500)]
    cluster.put(names)
    cluster.put("y", parent="x")  # x is missing, and has a child
    cluster.put("ab")
    cluster.remove("a")

    grants = cluster.start_or_wait(["x"], parent=names[-1])
    assert isinstance(grants, int)
    cluster.work()
    answer = cluster.answers.pop(grants)
    assert isinstance(answer, calls.Grants)
    cluster.end(answer)

    assert cluster.match([*names, "x", "y"]) == 502


@pytest.mark.usefixtures("short_walks")
def test_a_commit_below_a_long_chain_is_asked_for_again(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=600)
    names = [f"k{index}" for index in range(250)]
    cluster.put(names)
    cluster.put("y", parent="x")
    cluster.put("ab")
    cluster.remove("a")
    token = cluster.allocate()

    outcomes = []
    for _ in range(20):
        try:
            outcomes.append(cluster.commit(token, "x", parent=names[-1]))
            break
        except BusyError:
            check_invariants(cluster.state)

    assert outcomes == [calls.PutOutcome.STORED]
    assert cluster.match([*names, "x", "y"]) == 252


@pytest.mark.usefixtures("short_walks")
def test_claims_below_a_long_chain_are_taken_in_over_several_steps(new_cluster: NewCluster) -> None:
    cluster = new_cluster(one=600)
    names = [f"k{index}" for index in range(350)]
    cluster.put(names)
    cluster.put("ab")
    cluster.remove("a")

    back(cluster, "two", claim("y", 0, parent="x"), claim("x", 1, parent=names[-1]))

    assert cluster.match([*names, "x", "y"]) == 352


def test_a_chain_without_a_root_has_a_bound(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forest_module, "RING_STEPS", 50)
    cluster = new_cluster(one=200)
    names = [f"k{index}" for index in range(100)]
    cluster.put(names, parent="nowhere")
    cluster.put("y", parent="x")

    with pytest.raises(InvalidArgumentError, match="without a root"):
        cluster.put("x", parent=names[-1])
    cluster.put("x", parent=names[20])
    assert cluster.present("xy") == "xy"
