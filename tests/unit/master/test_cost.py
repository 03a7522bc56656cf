"""What things cost, counted rather than timed: probes, cycles, stack, memory of what is empty."""

from __future__ import annotations

import math

import pytest

from kvstore import calls
from kvstore.errors import InvalidArgumentError
from kvstore.limits import Key, Namespace
from kvstore.master.state import forest as forest_module
from kvstore.master.state.background_sweep import SWEEP_STEPS
from kvstore.master.state.forest import Forest
from kvstore.master.state.memory_pool import SETTLE_STEPS
from kvstore.master.state.records import NamespaceTable
from tests.support.invariants import check_invariants
from tests.unit.master.conftest import NewCluster

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
    cluster.state.nodes.on_node_message(0, cluster.sessions["one"], calls.NodeLeave())

    longest = 0
    while cluster.state.has_work:
        before = cluster.state.forest.steps
        cluster.state.work(cluster.now_ms)
        longest = max(longest, cluster.state.forest.steps - before)
        check_invariants(cluster.state)

    assert longest <= SWEEP_STEPS + SETTLE_STEPS
    assert [row.objects for row in cluster.status().namespaces] == [1]


# --- long chains -------------------------------------------------------------------------------


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
