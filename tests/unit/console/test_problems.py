"""What is wrong, in words: every row that a master's status shows is reachable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.calls import (
    ClusterStatus,
    Counter,
    DepartedNode,
    DiskStatus,
    NamespaceStatus,
    NodeStatus,
    SegmentStatus,
    TenantStatus,
)
from kvstore.console.diagnostics.history import HistoryPoints, sample
from kvstore.console.diagnostics.problems import (
    NODES_NAMED,
    OF_NODES,
    OF_STORE,
    DetectedProblem,
    leader_problems,
    of_a_status,
    of_engines,
    of_identity,
    standby_problems,
)
from kvstore.console.diagnostics.rows import PROBLEMS, ROWS
from kvstore.security.validity import ValidityPeriod
from tests.unit.console.test_history import EVERY_MS, histogram, measured
from tests.unit.console.test_why import asks, record, writes


def status(*nodes: NodeStatus, **counters: int) -> ClusterStatus:
    return ClusterStatus(7, "1", 0, nodes, [], [Counter(*each) for each in counters.items()])


def node(name: str = "a", state: str = "alive", **segment: int) -> NodeStatus:
    fields: dict[str, Any] = {"segment_id": 1, "size": 1 << 30, "used": 0, "largest_free": 1 << 30}
    fields.update(segment)
    segments = [SegmentStatus(shm_name="x", **fields)]
    return NodeStatus(name, "h", state, "10.0.0.8:50003", 2300, segments)


def disk(**fields: Any) -> DiskStatus:
    return DiskStatus(2, 1 << 30, 0, 0, 0, 0, 0, **{"budget": 1 << 30, **fields})


def gone(name: str, why: str = "silent", **fields: Any) -> ClusterStatus:
    usual = {"departed_ms": 12_000, "missing": 0, "lost": 0, "reports": False}
    return status(node())._replace(departed=[DepartedNode(name, "h", why, **usual | fields)])


def after(*, now: Any = None, **counters: int) -> HistoryPoints:
    history = HistoryPoints()
    history.add(sample(0, measured(counters={}), status()))
    history.add(sample(EVERY_MS, now or measured(counters={}), status(node(), **counters)))
    return history


def store(
    found: ClusterStatus, history: HistoryPoints | None = None, now_ms: int = EVERY_MS
) -> list[DetectedProblem]:
    return leader_problems(found, history or HistoryPoints(), now_ms)


def guarantee(*names: str) -> ClusterStatus:
    tenants = [TenantStatus(name, 0, 600 << 20, 0, 0, 0, 0, 0, 0, 0) for name in names]
    return status(node())._replace(tenants=tenants)


def pinned(size: int, *of: int) -> ClusterStatus:
    spaces = [NamespaceStatus(name, 9, 1, 9, each << 20) for name, each in zip("abcd", of)]
    return status(node(), pinned_bytes=size)._replace(namespaces=spaces)


YOUNG = measured(counters={}, eviction_age_ms=histogram(5_000.0, 5_000.0))
OLD = measured(counters={}, eviction_age_ms=histogram(5e7, 5e7))
LATE = measured(counters={}, late_us=histogram(*[200_000.0] * 10))
FULL = node(used=(1 << 30) - 5)

CASES: list[tuple[str, str, str, list[DetectedProblem]]] = [
    ("bad", "KvstoreNodeNotJoined", "No node has joined: nothing can be stored.", store(status())),
    ("bad", "KvstoreNodeSuspect", "Node b (10.0.0.8:50003) is suspect: no heartbeat for 2.3 s",
     store(status(node("b", "suspect")))),
    ("note", "Draining", "Node a (10.0.0.8:50003) is draining: its objects are moved",
     store(status(node("a", "draining")))),
    ("bad", "KvstoreNodeSuspect", "is unreachable from the master: refused.",
     store(status(node()._replace(unreachable="refused")))),
    ("warning", "KvstoreDiskFailed", "Node a (10.0.0.8:50003) has a disk that failed",
     store(status(node()._replace(disks=[disk(failed=True)])))),
    ("warning", "KvstoreDiskBudgetSpent", "may not be written any more today",
     store(status(node()._replace(disks=[disk(budget=1)])))),
    ("bad", "KvstoreNodeDead", "RemoveIPC", store(status(node()._replace(shm_entry_missing=True)))),
    ("warning", "KvstoreUnderReplicated", "3 objects with fewer replicas",
     store(status(node(), under_replicated_objects=3))),
    ("bad", "KvstoreNodeDead", "Node a (h) died (silent) 12.0 s ago: 7 objects that no other node "
     "had. They are back once it is started again with the same --name",
     store(gone("a", missing=7))),
    ("warning", "KvstoreNodeDead", "Node b (h) left 12.0 s ago: 3 objects",
     store(gone("b", "left", missing=3))),
    ("bad", "KvstoreNodeDead", "1 object that no other node had did not come back.",
     store(gone("c", lost=1))),
    ("bad", "KvstoreNodeDead", "Node d (h) died (silent) 12.0 s ago.", store(gone("d"))),
    ("note", "KvstoreNodeDead", "has rejoined and reports its objects: 5 objects remaining.",
     store(gone("e", missing=5, reports=True))),
    ("bad", "KvstorePutsRefused", "Puts get no memory for 7.3 s more:",
     store(status(node(ready_ms=7_300)))),
    ("bad", "KvstorePutsRefused", "yet, and until a node has reported its objects",
     store(status(node(reports=True)))),
    ("warning", "KvstorePutsRefused", "Tenants are guaranteed 1.2 GiB of a pool of 1 GiB",
     store(guarantee("a", "b"))),
    ("warning", "KvstoreMemoryPinned",
     "Pins keep 710 MiB of 1.00 GiB (most: b 400 MiB, d 300 MiB, c 9.00 MiB)",
     store(pinned(710 << 20, 1, 400, 9, 300))),
    ("warning", "KvstoreMemoryNotReusable", "quarantine: 512 MiB",
     store(status(node(quarantined=1 << 29)))),
    ("warning", "KvstoreMemoryNotReusable", "awaits its reclaim: 512 MiB",
     store(status(node(reclaim=1 << 29)))),
    ("warning", "KvstoreEvictionAgeLow", "The pool is full",
     store(status(FULL), after(now=YOUNG))),
    ("warning", "KvstoreEventLoopLag", "loop is slow", store(status(node()), after(now=LATE))),
    ("warning", "KvstoreAuthRejections", "1,020 calls rejected: no identity",
     store(status(node()), after(refused=1020))),
    ("bad", "KvstorePutsRefused", "2 puts found no room in the last 10 min: the master or the "
     "nodes had just started, and granted no memory yet.",
     store(status(node()), after(refused_restarted=2))),
    ("warning", "KvstoreAuthRejections", "1 call rejected", of_a_status(status(node(), refused=1))),
    ("bad", "KvstoreNoLeader", "No leader", standby_problems("")),
    ("bad", "KvstoreCertificateExpiring", "has expired", of_identity(ValidityPeriod(0, 9), 10_000)),
    ("warning", "KvstoreHitRatioLow", "dtype: bfloat16 writes, float16 reads",
     of_engines([writes("vllm/a"), asks("vllm/b")], [record("a"), record("b", dtype="float16")])),
]  # fmt: skip


@pytest.mark.parametrize(("level", "row", "words", "found"), CASES)
def test_a_problem_has_its_level_words_and_advice(
    level: str, row: str, words: str, found: list[DetectedProblem]
) -> None:
    assert [(each.level, each.runbook) for each in found] == [(level, row)]
    assert words in found[0].text
    assert found[0].advice
    assert "\n" not in found[0].advice


def test_after_a_take_over_the_advice_is_to_wait() -> None:
    found = store(status(node(ready_ms=7_300)), after(refused_restarted=2))
    assert len(found) == 2
    assert all("wait" in each.advice.lower() for each in found)
    assert not any("add " in each.advice.lower() for each in found)


COUNTERS = [name for name, row in PROBLEMS.items() if row.one]


@pytest.mark.parametrize("counter", COUNTERS)
def test_a_counter_is_a_problem_while_it_is_recent(counter: str) -> None:
    history = after(**{counter: 2})
    (found,) = store(status(node()), history)
    assert (found.level, found.runbook) == (PROBLEMS[counter].level, PROBLEMS[counter].row)
    assert found.text.startswith("2 ")
    assert store(status(node()), history, EVERY_MS + 3_700_000) == []
    (since,) = of_a_status(status(node(), **{counter: 2}))
    assert since.level == "warning"
    assert "since the master started" in since.text


@pytest.mark.parametrize(
    "found",
    [
        store(status(node(used=1 << 29), stored_objects=5), after(stored_objects=5)),
        store(status(node(ready_ms=7_300), node("c"))),
        store(guarantee("a")),
        store(pinned(1 << 29)),
        store(gone("f", "left")),
        store(status(FULL), after(now=OLD)),
        store(status(node(used=1 << 20)), after(now=YOUNG)),
        standby_problems("10.0.0.1:50001"),
        of_identity(None, 0),
        of_engines([writes("x"), asks("x", objects=8)], []),
        of_engines([], []),
    ],
)
def test_nothing_is_wrong(found: list[DetectedProblem]) -> None:
    assert found == []


def test_every_row_and_counter_is_reached() -> None:
    reached = {row for _, row, _, _ in CASES} | {PROBLEMS[name].row for name in COUNTERS}
    named = {PROBLEMS[name].row for name in (*OF_NODES, *OF_STORE)}
    assert named <= reached <= {row.name for row in ROWS}
    only_of_prometheus = {"KvstoreCacheTooSmall", "KvstoreBreakerOpen"}
    assert {row.name for row in ROWS} == reached | only_of_prometheus


@pytest.mark.parametrize(
    ("many", "rest"),
    [
        (
            lambda: status(*(node(f"n{number}", "suspect") for number in range(500))),
            "495 more nodes",
        ),
        (
            lambda: status(node())._replace(departed=[*gone("n").departed] * 60),
            "55 more nodes left or died",
        ),
    ],
)
def test_problems_of_many_nodes_are_few_and_the_worst_come_first(
    many: Callable[[], ClusterStatus], rest: str
) -> None:
    found = store(many())
    assert len(found) == NODES_NAMED + 1
    assert rest in found[-1].text
    mixed = store(status(node("a", "draining"), node("b", "suspect"), under_replicated_objects=3))
    assert [each.level for each in mixed] == ["bad", "warning", "note"]
