"""Conditions of ``diagnosis.rows``, for the dashboard, ``kvstore status`` and ``kvstore doctor``.

Pure: judges the master's status and, where known, its last hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.calls import (
    ClusterStatus,
    DepartedNode,
    NamespaceTraffic,
    NodeStatus,
    SegmentStatus,
)
from kvstore.calls.fleet_records import FleetRecord
from kvstore.calls.no_space_messages import guarantee_warning
from kvstore.console.diagnostics.history import HistoryPoints, added, spread_of
from kvstore.console.diagnostics.rows import PROBLEMS, ProblemRow
from kvstore.console.diagnostics.why import Evidence, diagnose, parties_of
from kvstore.memory.shm_entries import SHM_ENTRY_MISSING
from kvstore.runtime.formatting import duration_text, name_text, sanitize, size_text
from kvstore.security.validity import ValidityPeriod

RECENT_S: Final = 600.0
HOUR_S: Final = 3600.0

FULL: Final = 0.95
"""Used share of the memory from which the pool counts as full."""

YOUNG_MS: Final = 600_000
"""Objects that are evicted within ten minutes after their last use would often be used again."""

SHARES: Final = {"quarantined": 0.05, "reclaim": 0.25}
"""Shares of a node's memory in quarantine, and awaiting reclaim, without a warning."""

PINNED_SHARE: Final = 0.5
"""Share of the memory that pins may hold without a warning: above it, puts are affected."""

LATE_US: Final = 50_000
"""99th percentile of the event loop lag without a warning."""

ENDING_S: Final = 14 * 86_400
"""Remaining validity of a certificate without a warning, if it is not a short one; also the bound
of the alert KvstoreCertificateExpiring."""

NODES_NAMED: Final = 5
"""Nodes with their own line for one kind of problem."""


KEPT_APART: Final = ("other_fingerprint", "other_engine", "other_namespace", "other_tenant")
"""Causes (``diagnosis.why``) that no further prompt cures. Others may only mean new prompts."""


class DetectedProblem(NamedTuple):
    level: str
    """As ``ProblemRow.level``."""
    text: str
    runbook: str
    """The name of the row and of the runbook's section."""
    advice: str


def _found(name: str, **words: object) -> DetectedProblem:
    row = PROBLEMS[name]
    return _of_row(row, row.text.format(**words))


def _of_row(row: ProblemRow, text: str) -> DetectedProblem:
    return DetectedProblem(row.level, text, row.row, row.advice)


class _CounterDeltas(NamedTuple):
    """The increase of counters, and the period."""

    counters: Mapping[str, int]
    when: str
    """Such as ``in the last hour``."""


class _Seen(NamedTuple):
    """The input of the conditions."""

    status: ClusterStatus
    hour: _CounterDeltas
    recent: _CounterDeltas
    """Of the last ten minutes."""
    age_ms: float | None = None
    """The median age at eviction; None: not known."""
    late_us: float | None = None
    """99th percentile of the event loop lag; None: not known."""

    def total(self, of: str) -> int:
        return sum(_held(node, of) for node in self.status.nodes)

    def counter(self, name: str) -> int:
        return dict(self.status.counters).get(name, 0)


def leader_problems(
    status: ClusterStatus, history: HistoryPoints, now_ms: int
) -> list[DetectedProblem]:
    """Return the problems that a leader detects, the worst first."""
    hour, recent = (
        _CounterDeltas(added(points), when)
        for points, when in (
            (history.lately(now_ms, HOUR_S), "in the last hour"),
            (history.lately(now_ms, RECENT_S), "in the last 10 min"),
        )
    )
    ages = [sample.ages_ms for sample in history.lately(now_ms, RECENT_S)]
    late = [sample.late_us for sample in history.lately(now_ms, 60.0)]
    seen = _Seen(status, hour, recent, spread_of(ages, 0.5), spread_of(late, 0.99))
    return _worst_first([*_now(seen), *_counted(seen)])


def of_a_status(status: ClusterStatus) -> list[DetectedProblem]:
    """Return the problems that one status reply shows, the worst first, for programs without the
    last hour. Counts since the master's start are warnings, because they may be over."""
    when = f"since the master started, {duration_text(status.uptime_ms)} ago"
    counted = _CounterDeltas(dict(status.counters), when)
    seen = _Seen(status, counted, counted)
    since = [problem._replace(level="warning") for problem in _counted(seen)]
    return _worst_first([*_now(seen), *since])


def _worst_first(found: list[DetectedProblem]) -> list[DetectedProblem]:
    order = ("bad", "warning", "note")
    return sorted(found, key=lambda problem: order.index(problem.level))


def of_engines(
    spaces: Sequence[NamespaceTraffic], records: Sequence[FleetRecord]
) -> list[DetectedProblem]:
    """Return the problems of engines with recent lookups and no hits, because fingerprint or
    namespace separate them from other engines of their model."""
    everyone = parties_of(spaces, records)
    asking = [
        party
        for party in everyone
        if party.requested_keys and not party.found
        if min((row.idle_ms for row in party.readers), default=0) < RECENT_S * 1000
    ]
    causes = diagnose(Evidence(uptime_ms=0, spaces=spaces, records=records), asking, everyone)
    found = []
    for cause in causes[:NODES_NAMED]:
        if cause.code in KEPT_APART:
            fields = f": {'; '.join(cause.lines)}" if cause.lines else ""
            text = sanitize(f"{cause.text}{fields}. {cause.remedy}", 600)
            found.append(_found("kept_apart", text=text))
    return found


def of_identity(valid: ValidityPeriod | None, now_ms: int) -> list[DetectedProblem]:
    """Return the problem of a certificate that expires soon. ``valid``: None without
    authentication."""
    now_s = now_ms / 1000
    if valid is None or not valid.ends_soon(now_s, ENDING_S):
        return []
    left_s = valid.until - now_s
    name = "certificate_ends" if left_s > 0 else "certificate_ended"
    return [_found(name, left=duration_text(max(0, int(left_s * 1000))))]


def standby_problems(leader: str) -> list[DetectedProblem]:
    return [] if leader else [_found("no_leader")]


def _now(seen: _Seen) -> Iterator[DetectedProblem]:
    for name, holds in OF_NODES.items():
        yield from _of_nodes(name, [node for node in seen.status.nodes if holds(node)])
    gone = [
        node for node in seen.status.departed if node.reason != "left" or node.missing or node.lost
    ]
    yield from map(_departed_node, gone[:NODES_NAMED])
    if len(gone) > NODES_NAMED:
        text = f"{len(gone) - NODES_NAMED} more nodes left or died."
        yield _of_row(PROBLEMS["died"], text)
    for name, words_of in OF_STORE.items():
        if (words := words_of(seen)) is not None:
            yield _found(name, **words)


def _counted(seen: _Seen) -> Iterator[DetectedProblem]:
    for counter, row in PROBLEMS.items():
        counted = seen.hour if counter in IN_AN_HOUR else seen.recent
        if row.one and (count := counted.counters.get(counter, 0)):
            said = row.text.format(when=counted.when)
            yield _of_row(row, f"{_count(count, row.one)} {said}")


def _of_nodes(name: str, nodes: Sequence[NodeStatus]) -> Iterator[DetectedProblem]:
    row = PROBLEMS[name]
    for node in nodes[:NODES_NAMED]:
        found = _found(
            name, node=node, shm_entry_missing=SHM_ENTRY_MISSING,
            silent=duration_text(node.silent_ms),
            **{share: size_text(_held(node, share)) for share in SHARES},
        )  # fmt: skip
        who = f"Node {node.name} ({node.address or node.host})"
        yield found._replace(text=f"{who} {row.what}: {found.text}.")
    if len(nodes) > NODES_NAMED:
        text = f"{len(nodes) - NODES_NAMED} more nodes: each {row.what}."
        yield _of_row(row, text)


def _departed_node(node: DepartedNode) -> DetectedProblem:
    """Return the problem of a departed node, with the objects that were lost with it."""
    left, missing = node.reason == "left", _count(node.missing, "object")
    name = "died_empty"
    if node.reports:
        name = "back"
    elif node.missing:
        name = "left" if left else "died"
    elif node.lost:
        name = "lost"
    return _found(
        name, who=f"Node {name_text(node.name)} ({node.host})", missing=missing,
        lost=_count(node.lost, "object"), ago=duration_text(node.departed_ms),
        how="left" if left else f"died ({node.reason})",
    )  # fmt: skip


def _held(node: NodeStatus, of: str) -> int:
    return sum(getattr(segment, of) for segment in node.segments)


def _holds_much(of: str) -> Callable[[NodeStatus], bool]:
    return lambda node: (
        not any(map(_starts, node.segments))
        and (_held(node, of) > SHARES[of] * _held(node, "size"))
    )


def _starts(segment: SegmentStatus) -> bool:
    """Whether memory is not available yet after a start of the master or of the node."""
    return bool(segment.ready_ms or segment.reports)


def _count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


# --- conditions: the values for a row's text; None: the condition does not hold ------------------

Words = Mapping[str, object] | None


def _waiting(seen: _Seen) -> Words:
    alive = [node for node in seen.status.nodes if node.state == "alive"]
    segments = [segment for node in alive for segment in node.segments]
    if not segments or not all(map(_starts, segments)):
        return None
    longest_ms = min(segment.ready_ms for segment in segments)
    when = f"for {duration_text(longest_ms)} more" if longest_ms else "yet"
    reports = all(segment.reports for segment in segments)
    return {"when": when + (", and until a node has reported its objects" if reports else "")}


def _pinned(seen: _Seen) -> Words:
    pinned, size = seen.counter("pinned_bytes"), seen.total("size")
    if not size or pinned <= PINNED_SHARE * size:
        return None
    by_size = sorted(seen.status.namespaces, key=lambda each: -each.pinned_bytes)
    most = [
        f"{name_text(each.name)} {size_text(each.pinned_bytes)}"
        for each in by_size[:3]
        if each.pinned_bytes
    ]
    of = f" (most: {', '.join(most)})" if most else ""
    return {"pinned": size_text(pinned), "size": size_text(size), "most": of}


def _young(seen: _Seen) -> Words:
    is_full = seen.total("used") > FULL * seen.total("size")
    has_disks = any(node.disks for node in seen.status.nodes)  # what is evicted stays there
    if seen.age_ms is None or not is_full or has_disks or seen.age_ms >= YOUNG_MS:
        return None
    return {"age": duration_text(int(seen.age_ms))}


def _slow_loop(seen: _Seen) -> Words:
    is_late = seen.late_us is not None and seen.late_us > LATE_US
    return {"late_ms": seen.late_us / 1000} if is_late and seen.late_us else None


def _under_replicated(seen: _Seen) -> Words:
    found = seen.counter("under_replicated_objects")
    return {"count": _count(found, "object")} if found else None


def _guarantees(seen: _Seen) -> Words:
    short = guarantee_warning(seen.status)
    return {"short": short} if short else None


OF_NODES: Final[Mapping[str, Callable[[NodeStatus], object]]] = {
    "suspect": lambda node: node.state == "suspect",
    "draining": lambda node: node.state == "draining",
    "unreachable": lambda node: node.unreachable,
    "shm_entry_missing": lambda node: node.shm_entry_missing,
    "disk_failed": lambda node: any(disk.failed for disk in node.disks),
    "disk_budget": lambda node: any(
        disk.budget < DISK_BUDGET * disk.size and not disk.failed for disk in node.disks
    ),
    **{of: _holds_much(of) for of in SHARES},
}

OF_STORE: Final[Mapping[str, Callable[[_Seen], Words]]] = {
    "no_node": lambda seen: None if seen.status.nodes else {},
    "under_replicated": _under_replicated,
    "waiting": _waiting,
    "guarantees": _guarantees,
    "pinned": _pinned,
    "young": _young,
    "slow_loop": _slow_loop,
}

DISK_BUDGET: Final = 0.1
"""The part of a disk below which its budget for writes counts as spent."""

IN_AN_HOUR: Final = ("corrupt_objects", "corrupt_replicas")
"""Counters that are judged over an hour instead of ten minutes."""
