"""What is wrong, in words."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.calls import ClusterStatus, Counter, NamespaceStatus, NodeStatus, SegmentStatus
from kvstore.web.history import COUNTED, History, sample
from kvstore.web.problems import NODES_NAMED, of_a_standby, of_the_store
from tests.unit.web.test_history import EVERY_MS, histogram, measured


def status(*nodes: NodeStatus, **counters: int) -> ClusterStatus:
    return ClusterStatus(7, "1", 0, nodes, [], [Counter(*each) for each in counters.items()])


def node(name: str = "a", state: str = "alive", **segment: int) -> NodeStatus:
    fields: dict[str, Any] = {"segment_id": 1, "size": 1 << 30, "used": 0, "largest_free": 1 << 30}
    fields.update(segment)
    segments = [SegmentStatus(shm_name="x", **fields)]
    return NodeStatus(name, "h", state, "10.0.0.8:50003", 2300, segments)


def texts(found: ClusterStatus, history: History | None = None, now_ms: int = EVERY_MS) -> str:
    return "\n".join(each.text for each in of_the_store(found, history or History(), now_ms))


def after(**counters: int) -> History:
    history = History()
    history.add(sample(0, measured(counters={}), status()))
    history.add(sample(EVERY_MS, measured(counters={}), status(node(), **counters)))
    return history


def test_of_a_healthy_store_nothing_is_wrong() -> None:
    assert texts(status(node(used=1 << 29), stored_objects=5), after(stored_objects=5)) == ""


def test_nodes_in_trouble_are_named_the_worst_first() -> None:
    found = status(node("a", "draining"), node("b", "suspect"), under_replicated_objects=3)
    problems = of_the_store(found, History(), 0)
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


def test_many_suspect_nodes_have_a_bounded_number_of_lines() -> None:
    found = status(*(node(f"n{number}", "suspect") for number in range(500)))
    lines = texts(found).splitlines()
    assert len(lines) == NODES_NAMED + 1
    assert "495 more nodes" in lines[-1]


def test_a_full_pool_is_only_wrong_if_what_it_evicts_is_young() -> None:
    def history(age_ms: float) -> History:
        made = History()
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
    history = History()
    history.add(sample(0, measured(), status()))
    late = measured(late_us=histogram(*[200_000.0] * 10))
    history.add(sample(EVERY_MS, late, status(node())))
    assert "loop is slow" in texts(status(node()), history)


def test_a_master_that_stands_by_misses_a_leader() -> None:
    assert of_a_standby("10.0.0.1:50001") == []
    assert of_a_standby("")[0].level == "bad"
