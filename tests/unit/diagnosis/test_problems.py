"""What is wrong, in words."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import shortages
from kvstore.calls import (
    ClusterStatus,
    Counter,
    GoneNode,
    NamespaceStatus,
    NodeStatus,
    SegmentStatus,
    TenantStatus,
)
from kvstore.diagnosis.history import COUNTED, HistoryPoints, sample
from kvstore.diagnosis.problems import (
    NODES_NAMED,
    of_a_standby,
    of_a_status,
    of_engines,
    of_the_store,
)
from tests.unit.diagnosis.test_history import EVERY_MS, histogram, measured
from tests.unit.diagnosis.test_why import asks, record, writes


def status(*nodes: NodeStatus, **counters: int) -> ClusterStatus:
    return ClusterStatus(7, "1", 0, nodes, [], [Counter(*each) for each in counters.items()])


def node(name: str = "a", state: str = "alive", **segment: int) -> NodeStatus:
    fields: dict[str, Any] = {"segment_id": 1, "size": 1 << 30, "used": 0, "largest_free": 1 << 30}
    fields.update(segment)
    segments = [SegmentStatus(shm_name="x", **fields)]
    return NodeStatus(name, "h", state, "10.0.0.8:50003", 2300, segments)


def texts(
    found: ClusterStatus, history: HistoryPoints | None = None, now_ms: int = EVERY_MS
) -> str:
    return "\n".join(each.text for each in of_the_store(found, history or HistoryPoints(), now_ms))


def after(**counters: int) -> HistoryPoints:
    history = HistoryPoints()
    history.add(sample(0, measured(counters={}), status()))
    history.add(sample(EVERY_MS, measured(counters={}), status(node(), **counters)))
    return history


def test_of_a_healthy_store_nothing_is_wrong() -> None:
    assert texts(status(node(used=1 << 29), stored_objects=5), after(stored_objects=5)) == ""


def test_nodes_in_trouble_are_named_the_worst_first() -> None:
    found = status(node("a", "draining"), node("b", "suspect"), under_replicated_objects=3)
    problems = of_the_store(found, HistoryPoints(), 0)
    assert [each.level for each in problems] == ["bad", "warning", "note"]
    assert "Node b (10.0.0.8:50003) is suspect: not heard of for 2.3 s" in problems[0].text
    assert "3 objects" in problems[1].text
    assert "Node a" in problems[2].text
    assert "No node has joined" in texts(status())


def test_pins_that_hold_most_of_the_memory_are_named() -> None:
    spaces = [
        NamespaceStatus(name, 9, 1, 9, size << 20)
        for name, size in zip("abcd", (1, 400, 9, 300), strict=True)
    ]
    found = status(node(), pinned_bytes=710 << 20)._replace(namespaces=spaces)
    assert "Pins keep 710 MiB of 1.00 GiB (most: b 400 MiB, d 300 MiB, c 9.00 MiB)" in texts(found)
    assert "Pins" not in texts(status(node(), pinned_bytes=1 << 29))
    assert "3 pins refused in the last 10 min" in texts(status(node()), after(refused_pins=3))


def test_guarantees_that_the_pool_does_not_have_are_a_problem() -> None:
    tenants = [TenantStatus(name, 0, 600 << 20, 0, 0, 0, 0, 0, 0, 0) for name in "ab"]
    said = "Tenants are guaranteed 1.2 GiB of a pool of 1 GiB"
    assert said in texts(status(node())._replace(tenants=tenants))
    assert "guaranteed" not in texts(status(node())._replace(tenants=tenants[:1]))
    assert "guaranteed" not in texts(status()._replace(tenants=tenants))


def test_many_suspect_nodes_have_a_bounded_number_of_lines() -> None:
    found = status(*(node(f"n{number}", "suspect") for number in range(500)))
    lines = texts(found).splitlines()
    assert len(lines) == NODES_NAMED + 1
    assert "495 more nodes" in lines[-1]


def gone(name: str, why: str = "silent", **fields: Any) -> GoneNode:
    usual = {"gone_ms": 12_000, "missing": 0, "lost": 0, "reports": False}
    return GoneNode(name, "h", why, **usual | fields)


def test_nodes_that_are_away_are_named_with_what_went_with_them() -> None:
    found = status(node())._replace(
        gone=[
            gone("a", missing=7), gone("b", "left", missing=3), gone("c", lost=1), gone("d"),
            gone("e", missing=5, reports=True), gone("f", "left"),
        ]
    )  # fmt: skip
    told = texts(found)
    assert "Node a (h) died (silent) 12.0 s ago: 7 objects that no other node has" in told
    assert "started again with the same --name" in told
    assert "Node b (h) left 12.0 s ago: 3 objects" in told
    assert "Node c (h) died (silent) 12.0 s ago: 1 object" in told
    assert "are lost" in told
    assert "Node d (h) died (silent) 12.0 s ago." in told
    assert "Node e (h) is back and reports its objects: 5 objects to go" in told
    assert "Node f" not in told, "it was stopped, and nothing went with it"
    many = status(node())._replace(gone=[gone(f"n{number}") for number in range(60)])
    assert "55 more nodes left or died" in texts(many)


def test_a_removed_entry_is_a_problem_of_its_node() -> None:
    found = status(node()._replace(entry_gone=True))
    assert "Node a (10.0.0.8:50003) has no entry in /dev/shm any more" in texts(found)
    assert "RemoveIPC" in texts(found)


def test_memory_that_is_not_given_out_yet_is_a_problem_while_there_is_no_other() -> None:
    waits, reports = node(ready_ms=7_300), node("b", reports=True)
    assert "No put finds room for 7.3 s more:" in texts(status(waits))
    assert "until a node has reported its objects" in texts(status(reports))
    assert texts(status(waits, node("c"))) == ""


def test_why_puts_were_refused() -> None:
    told = texts(status(node()), after(refused_no_space=2, refused_restarted=2))
    assert told == (
        "2 puts found no room in the last 10 min: the master or the nodes had just started, and "
        "did not give out memory yet."
    )
    causes = {value for name, value in vars(shortages).items() if name in NAMED}
    assert causes == shortages.CAUSES.keys()


def test_calls_that_were_refused_are_a_problem() -> None:
    told = texts(status(node()), after(refused=1020))
    assert "1,020 calls refused: without an identity, with a revoked one" in told
    assert "in the last 10 min" in told
    found = of_a_status(status(node(), refused=1))
    assert [each.runbook for each in found] == ["KvstoreRefusals"]
    assert "1 call refused" in found[0].text


def test_an_engine_of_another_dtype_is_a_problem_of_the_page() -> None:
    records = [record("a"), record("b", dtype="float16")]
    spaces = [writes(records[0].namespaces[0]), asks(records[1].namespaces[0])]
    (told,) = of_engines(spaces, records)
    assert told.level == "warning"
    assert "dtype: bfloat16 writes, float16 asks" in told.text
    assert "--dtype" in told.text
    assert of_engines([writes("x"), asks("x", objects=8)], []) == [], "prompts may be new"
    assert of_engines([], []) == []


NAMED = (
    "AVOIDED", "NOT_HERE", "ON_DEVICE", "RESTARTED", "SUSPECT", "DRAINING", "LEASED", "NO_NODE",
    "QUOTA", "GUARANTEES",
)  # fmt: skip


def test_a_full_pool_is_only_wrong_if_what_it_evicts_is_young() -> None:
    def history(age_ms: float) -> HistoryPoints:
        made = HistoryPoints()
        made.add(sample(0, measured(), status()))
        ages = measured(eviction_age_ms=histogram(age_ms, age_ms))
        made.add(sample(EVERY_MS, ages, status(node())))
        return made

    full = status(node(used=(1 << 30) - 5))
    assert "The pool is full" in texts(full, history(5_000.0))
    assert texts(full, history(5e7)) == ""
    assert texts(status(node(used=1 << 20)), history(5_000.0)) == ""


def test_memory_in_quarantine_and_memory_that_awaits_reclaim() -> None:
    assert "quarantine: 512 MiB" in texts(status(node(quarantined=1 << 29)))
    assert "awaits its reclaim: 512 MiB" in texts(status(node(reclaim=1 << 29)))


@pytest.mark.parametrize(
    "counter",
    sorted(
        set(COUNTED)
        - {"matched_objects", "missed_objects", "stored_objects", "stored_bytes", "evicted_objects"}
    ),
)
def test_what_happened_lately_is_told_and_then_forgotten(counter: str) -> None:
    history = after(**{counter: 2})
    assert " 2 " in " " + texts(status(node()), history), counter
    assert texts(status(node()), history, EVERY_MS + 3_700_000) == ""


def test_a_slow_loop() -> None:
    history = HistoryPoints()
    history.add(sample(0, measured(), status()))
    late = measured(late_us=histogram(*[200_000.0] * 10))
    history.add(sample(EVERY_MS, late, status(node())))
    assert "loop is slow" in texts(status(node()), history)


def test_a_master_that_stands_by_misses_a_leader() -> None:
    assert of_a_standby("10.0.0.1:50001") == []
    assert of_a_standby("")[0].level == "bad"
