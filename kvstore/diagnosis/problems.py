"""Says in words what is wrong now: for the dashboard, ``kvstore status`` and ``kvstore doctor``.

Pure: judges what the master says, and its last hour where that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.auth.validity import Validity
from kvstore.calls import ClusterStatus, GoneNode, NamespaceTraffic, NodeStatus
from kvstore.diagnosis.history import COUNTED, HistoryPoints, added, spread_of
from kvstore.diagnosis.why import Evidence, diagnose, parties_of
from kvstore.fleet import Record
from kvstore.memory.entries import ENTRY_GONE
from kvstore.shortages import CAUSES, guarantees_short
from kvstore.texts import duration_text, name_text, shown_text, size_text

RECENT_S: Final = 600.0
HOUR_S: Final = 3600.0

FULL: Final = 0.95
"""The share of the memory from which the pool counts as full."""

YOUNG_MS: Final = 600_000
"""Objects that are evicted within ten minutes after their last use would often be used again."""

QUARANTINE_SHARE: Final = 0.05
RECLAIM_SHARE: Final = 0.25
"""Shares of a node's memory that may be in quarantine, and await its reclaim, without a warning."""

PINNED_SHARE: Final = 0.5
"""The share of the memory that pins may hold without a warning: then puts begin to feel it."""

LATE_US: Final = 50_000
"""How late the master's loop may be in one of a hundred times, without a warning."""

ENDING_S: Final = 14 * 86_400
"""How long a certificate may still be valid without a warning, if it is not a short one: the bound
of the alert KvstoreIdentityEnds."""

NODES_NAMED: Final = 5
"""Nodes that have a line of their own for one kind of problem."""


ADVICE: Final = {
    "KvstoreNoLeader": "Start a master, or repair etcd.",
    "KvstoreLeaderChanges": "Give etcd a disk of its own, and masters a processor of their own.",
    "KvstoreNodeDead": "Start the node again on its host, with the same --name and memory. If the "
    "host is gone, start one elsewhere.",
    "KvstoreNodeSuspect": "Open the node's data port between all hosts, and look at its host's "
    "load and network. To take it out without a loss: kvstore drain NODE",
    "KvstoreNodeAlone": "kvstore-node --master HOST:PORT --memory 4GiB",
    "KvstoreCorruptMemory": "Look for memory errors on the node's host: dmesg, ras-mc-ctl --errors",
    "KvstoreUnderReplicated": "Start the missing node again, or add one.",
    "KvstorePutsRefused": "Add memory (a node), remove pins (kvstore unpin), or raise at_most of "
    "the tenant whose puts are refused.",
    "KvstoreMemoryHeld": "Find the writers that die: the engines' logs.",
    "KvstoreMemoryPinned": "kvstore unpin KEY, or add memory.",
    "KvstoreHitRatioLow": "kvstore why",
    "KvstoreEvictionsTooYoung": "Add memory: a node.",
    "KvstoreLoopSlow": "Give the master a processor of its own.",
    "KvstoreConnectionsRefused": "The log of the process names the peers. Raise ulimit -n, or "
    "point health checks at /healthz of the HTTP port.",
    "KvstoreRefusals": "The master's log names them (refused count= reason=): issue a file with "
    "the right (kvstore auth issue), or stop the process.",
    "KvstoreIdentityEnds": "kvstore auth rotate, and copy the new file over the old one.",
    "Draining": "Wait until it has left, or: kvstore drain NODE --undo",
    "EventsDropped": "Let subscribers read faster, or subscribe to fewer streams.",
}
"""What to do, by section of the runbook, which says more."""

KEPT_APART: Final = ("other_fingerprint", "other_engine", "other_namespace", "other_tenant")
"""Causes (``diagnosis.why``) that no further prompt cures. Others may only mean new prompts."""


class FoundProblem(NamedTuple):
    level: str
    """bad: something is lost or refused; warning: look at it; note: it was asked for."""
    text: str
    runbook: str
    """The section of docs/runbook.md that says what to do."""

    @property
    def advice(self) -> str:
        """What to do, on one line."""
        return ADVICE[self.runbook]


class _Counted(NamedTuple):
    """By how much counters have grown, and since when."""

    counters: Mapping[str, int]
    when: str
    """Such as ``in the last hour``."""


def of_the_store(status: ClusterStatus, history: HistoryPoints, now_ms: int) -> list[FoundProblem]:
    """The problems that a master that leads sees, the worst first."""
    hour, recent = (
        _Counted({name: added(points, name) for name in COUNTED}, when)
        for points, when in (
            (history.lately(now_ms, HOUR_S), "in the last hour"),
            (history.lately(now_ms, RECENT_S), "in the last 10 min"),
        )
    )
    found = [
        *_nodes(status), *_memory(status), *_refused(recent), *_ages(status, history, now_ms),
        *_lately(hour, recent), *_loop(history, now_ms),
    ]  # fmt: skip
    return _worst_first(found)


def of_a_status(status: ClusterStatus) -> list[FoundProblem]:
    """The problems that one answer of a master shows, the worst first: for programs that do not
    have its last hour. What it has counted since its start is a warning: it may be over."""
    when = f"since the master started, {duration_text(status.uptime_ms)} ago"
    counted = _Counted(dict(status.counters), when)
    since = [
        each._replace(level="warning") for each in [*_refused(counted), *_lately(counted, counted)]
    ]
    return _worst_first([*_nodes(status), *_memory(status), *since])


def _worst_first(found: list[FoundProblem]) -> list[FoundProblem]:
    order = ("bad", "warning", "note")
    return sorted(found, key=lambda problem: order.index(problem.level))


def of_engines(spaces: Sequence[NamespaceTraffic], records: Sequence[Record]) -> list[FoundProblem]:
    """The problems of engines that asked a moment ago and found nothing, because what other engines
    of their model put is kept apart from what they ask for."""
    everyone = parties_of(spaces, records)
    asking = [
        party
        for party in everyone
        if party.asked and not party.found
        if min((row.idle_ms for row in party.askers), default=0) < RECENT_S * 1000
    ]
    causes = diagnose(Evidence(uptime_ms=0, spaces=spaces, records=records), asking, everyone)
    found = []
    for cause in causes[:NODES_NAMED]:
        if cause.code in KEPT_APART:
            fields = f": {'; '.join(cause.lines)}" if cause.lines else ""
            text = shown_text(f"{cause.text}{fields}. {cause.remedy}", 600)
            found.append(FoundProblem("warning", f"{text} (kvstore why)", "KvstoreHitRatioLow"))
    return found


def of_identity(valid: Validity | None, now_ms: int) -> list[FoundProblem]:
    """The problem of a master whose certificate ends soon. ``valid``: its; None: no
    authentication."""
    now_s = now_ms / 1000
    if valid is None or not valid.ends_soon(now_s, ENDING_S):
        return []
    left_s = valid.until - now_s
    if left_s <= 0:
        text = "This master's certificate has ended: issue it anew."
        return [FoundProblem("bad", text, "KvstoreIdentityEnds")]
    left = duration_text(int(left_s * 1000))
    text = f"This master's certificate ends in {left}: issue it anew (kvstore auth rotate)."
    return [FoundProblem("warning", text, "KvstoreIdentityEnds")]


def of_a_standby(leader: str) -> list[FoundProblem]:
    if leader:
        return []
    return [
        FoundProblem(
            "bad",
            "No master leads: every call of clients waits or fails. Is etcd well?",
            "KvstoreNoLeader",
        )
    ]


def _silent(node: NodeStatus) -> str:
    return f"not heard of for {duration_text(node.silent_ms)}; no new object goes there"


_WRONG_WITH_NODES: Final[Sequence[tuple[str, str, str, Callable[[NodeStatus], str]]]] = (
    ("bad", "is suspect", "KvstoreNodeSuspect",
     lambda node: _silent(node) if node.state == "suspect" else ""),
    ("bad", "is dead", "KvstoreNodeDead",
     lambda node: "its objects are gone" if node.state == "dead" else ""),
    ("note", "is draining", "Draining",
     lambda node: "its objects move away" if node.state == "draining" else ""),
    ("bad", "is unreachable from the master", "KvstoreNodeSuspect",
     lambda node: node.unreachable),
    ("bad", "has no entry in /dev/shm any more", "KvstoreNodeDead",
     lambda node: ENTRY_GONE if node.entry_gone else ""),
)  # fmt: skip
"""Level, what is wrong with nodes, the section of the runbook, and why it is with one node; empty:
nothing of the kind."""


def _nodes(status: ClusterStatus) -> Iterator[FoundProblem]:
    if not status.nodes:
        yield FoundProblem("bad", "No node has joined: nothing can be stored.", "KvstoreNodeAlone")
    for level, what, section, why in _WRONG_WITH_NODES:
        wrong = [(node, said) for node in status.nodes if (said := why(node))]
        yield from _named(level, wrong, what, section)
    yield from _gone(status.gone)
    short = dict(status.counters).get("under_replicated_objects", 0)
    if short:
        yield FoundProblem(
            "warning",
            f"{_count(short, 'object')} with fewer replicas than were asked for.",
            "KvstoreUnderReplicated",
        )


def _gone(gone: Sequence[GoneNode]) -> Iterator[FoundProblem]:
    """Nodes that have left or died, with the objects that went with them."""
    shown = [each for each in gone if each.why != "left" or each.missing or each.lost]
    for each in shown[:NODES_NAMED]:
        who = f"Node {name_text(each.name)} ({each.host})"
        how = "left" if each.why == "left" else f"died ({each.why})"
        ago = f"{duration_text(each.gone_ms)} ago"
        if each.reports:
            text = f"{who} is back and reports its objects: {_count(each.missing, 'object')} to go."
            yield FoundProblem("note", text, "KvstoreNodeDead")
        elif each.missing:
            yield FoundProblem(
                "warning" if each.why == "left" else "bad",
                f"{who} {how} {ago}: {_count(each.missing, 'object')} that no other node has. They "
                "are back once it is started again with the same --name and memory.",
                "KvstoreNodeDead",
            )
        elif each.lost:
            lost = f"{_count(each.lost, 'object')} that no other node had did not come back"
            text = f"{who} {how} {ago}: {lost}, and are lost."
            yield FoundProblem("bad", text, "KvstoreNodeDead")
        else:
            yield FoundProblem("bad", f"{who} {how} {ago}.", "KvstoreNodeDead")
    if len(shown) > NODES_NAMED:
        text = f"{len(shown) - NODES_NAMED} more nodes left or died."
        yield FoundProblem("bad", text, "KvstoreNodeDead")


def _named(
    level: str, nodes: list[tuple[NodeStatus, str]], what: str, section: str
) -> Iterator[FoundProblem]:
    for node, why in nodes[:NODES_NAMED]:
        text = f"Node {node.name} ({node.address or node.host}) {what}: {why}."
        yield FoundProblem(level, text, section)
    if len(nodes) > NODES_NAMED:
        text = f"{len(nodes) - NODES_NAMED} more nodes: each {what}."
        yield FoundProblem(level, text, section)


def _waiting(status: ClusterStatus) -> Iterator[FoundProblem]:
    """Memory that is not given out yet after a start of the master or of the nodes."""
    alive = [node for node in status.nodes if node.state == "alive"]
    segments = [segment for node in alive for segment in node.segments]
    waiting = [segment for segment in segments if segment.ready_ms or segment.reports]
    if not waiting or len(waiting) < len(segments):
        return
    longest_ms = min(segment.ready_ms for segment in waiting)
    reports = all(segment.reports for segment in waiting)
    when = f"for {duration_text(longest_ms)} more" if longest_ms else "yet"
    also = ", and until a node has reported its objects" if reports else ""
    yield FoundProblem(
        "bad",
        f"No put finds room {when}{also}: the master or all nodes have just started, and memory is "
        "given out when no reader of before can have a lease on it. Puts wait, gets work.",
        "KvstorePutsRefused",
    )


def _refused(recent: _Counted) -> Iterator[FoundProblem]:
    for cause, (_, _, why) in CAUSES.items():
        refused = recent.counters.get(f"refused_{cause}", 0)
        if refused:
            what = f"{_count(refused, 'put')} found no room {recent.when}"
            yield FoundProblem("bad", f"{what}: {why}.", "KvstorePutsRefused")
    unpinned = recent.counters.get("refused_pins", 0)
    if unpinned:
        yield FoundProblem(
            "warning",
            f"{_count(unpinned, 'pin')} refused {recent.when}: pins hold all that they may "
            "(--pinned-max).",
            "KvstoreMemoryPinned",
        )


def _ages(status: ClusterStatus, history: HistoryPoints, now_ms: int) -> Iterator[FoundProblem]:
    segments = [segment for node in status.nodes for segment in node.segments]
    size, used = (sum(getattr(each, of) for each in segments) for of in ("size", "used"))
    recent = history.lately(now_ms, RECENT_S)
    age_ms = spread_of([each.ages_ms for each in recent], 0.5)
    if size and used > FULL * size and age_ms is not None and age_ms < YOUNG_MS:
        yield FoundProblem(
            "warning",
            "The pool is full, and evicts objects soon after their last use: half of them within "
            f"{duration_text(int(age_ms))} (last 10 min). More memory would raise the hit ratio.",
            "KvstoreEvictionsTooYoung",
        )


def _memory(status: ClusterStatus) -> Iterator[FoundProblem]:
    segments = [segment for node in status.nodes for segment in node.segments]
    size = sum(each.size for each in segments)
    yield from _waiting(status)
    if said := guarantees_short(status):
        yield FoundProblem("warning", said, "KvstorePutsRefused")
    pinned = dict(status.counters).get("pinned_bytes", 0)
    if size and pinned > PINNED_SHARE * size:
        by_size = sorted(status.namespaces, key=lambda each: -each.pinned_bytes)
        most = [
            f"{name_text(each.name)} {size_text(each.pinned_bytes)}"
            for each in by_size[:3]
            if each.pinned_bytes
        ]
        of = f" (most: {', '.join(most)})" if most else ""
        yield FoundProblem(
            "warning",
            f"Pins keep {size_text(pinned)} of {size_text(size)}{of}: puts have only the rest. "
            "Pins end by themselves, after a day at most, or by unpin.",
            "KvstoreMemoryPinned",
        )
    heavy: list[tuple[NodeStatus, str]] = []
    waiting: list[tuple[NodeStatus, str]] = []
    for node in status.nodes:
        whole = sum(each.size for each in node.segments)
        quarantined = sum(each.quarantined for each in node.segments)
        reclaim = sum(each.reclaim for each in node.segments)
        if quarantined > QUARANTINE_SHARE * whole:
            heavy.append(
                (node, f"{size_text(quarantined)}, of writers that did not end their puts")
            )
        if reclaim > RECLAIM_SHARE * whole:
            waiting.append((node, f"{size_text(reclaim)}, until leases on it have ended"))
    yield from _named("warning", heavy, "has memory in quarantine", "KvstoreMemoryHeld")
    yield from _named("warning", waiting, "has memory that awaits its reclaim", "KvstoreMemoryHeld")


def _lately(hour: _Counted, recent: _Counted) -> Iterator[FoundProblem]:
    for counted, of, level, one, text, section in (
        (hour, "corrupt_objects", "bad", "object",
         "had no replica with good bytes: look at the memory of its nodes (see Events)",
         "KvstoreCorruptMemory"),
        (hour, "corrupt_replicas", "bad", "replica", "had bad bytes", "KvstoreCorruptMemory"),
        (recent, "connections_stalled", "warning", "connection",
         "cut because the client did not read", "KvstoreConnectionsRefused"),
        (recent, "connections_refused", "warning", "connection",
         "refused: no token, too many, or another protocol", "KvstoreConnectionsRefused"),
        (recent, "refused", "warning", "call",
         "refused: without an identity, with a revoked one, or without the right",
         "KvstoreRefusals"),
        (recent, "events_dropped", "warning", "event",
         "dropped: subscribers begin anew", "EventsDropped"),
        (recent, "etcd_failures", "warning", "call", "to etcd failed", "KvstoreLeaderChanges"),
    ):  # fmt: skip
        count = counted.counters.get(of, 0)
        if count:
            said = f"{_count(count, one)} {text}, {counted.when}."
            yield FoundProblem(level, said, section)


def _loop(history: HistoryPoints, now_ms: int) -> Iterator[FoundProblem]:
    late_us = spread_of([each.late_us for each in history.lately(now_ms, 60.0)], 0.99)
    if late_us is not None and late_us > LATE_US:
        yield FoundProblem(
            "warning",
            f"The master's loop is slow: one call in a hundred waits {late_us / 1000:.0f} ms "
            "or more. Its host may lack processor time.",
            "KvstoreLoopSlow",
        )


def _count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"
