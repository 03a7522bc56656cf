"""Conditions of ``diagnosis.rows``, for the dashboard, ``kvstore status`` and ``kvstore doctor``.

Pure: judges what the master says, and its last hour where that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.auth.validity import Validity
from kvstore.calls import ClusterStatus, GoneNode, NamespaceTraffic, NodeStatus
from kvstore.diagnosis.history import HistoryPoints, added, spread_of
from kvstore.diagnosis.rows import ADVICE
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


KEPT_APART: Final = ("other_fingerprint", "other_engine", "other_namespace", "other_tenant")
"""Causes (``diagnosis.why``) that no further prompt cures. Others may only mean new prompts."""


class FoundProblem(NamedTuple):
    level: str
    """bad: something is lost or refused; warning: look at it; note: it was asked for."""
    text: str
    runbook: str
    """The name of its row, and of the section of the runbook."""

    @property
    def advice(self) -> str:
        """What to do, on one line."""
        return ADVICE[self.runbook]


class _Counted(NamedTuple):
    """By how much counters have grown, and since when."""

    counters: Mapping[str, int]
    when: str
    """Such as ``in the last hour``."""


class _Seen(NamedTuple):
    """What the conditions judge."""

    status: ClusterStatus
    hour: _Counted
    recent: _Counted
    """Of the last ten minutes."""
    age_ms: float | None = None
    """The median age at eviction; None: not known."""
    late_us: float | None = None
    """How late the master's loop is in one of a hundred times; None: not known."""

    def total(self, of: str) -> int:
        """A sum over all segments."""
        return sum(getattr(segment, of) for node in self.status.nodes for segment in node.segments)

    def counter(self, name: str) -> int:
        return dict(self.status.counters).get(name, 0)


def of_the_store(status: ClusterStatus, history: HistoryPoints, now_ms: int) -> list[FoundProblem]:
    """The problems that a master that leads sees, the worst first."""
    hour, recent = (
        _Counted(added(points), when)
        for points, when in (
            (history.lately(now_ms, HOUR_S), "in the last hour"),
            (history.lately(now_ms, RECENT_S), "in the last 10 min"),
        )
    )
    ages = [each.ages_ms for each in history.lately(now_ms, RECENT_S)]
    late = [each.late_us for each in history.lately(now_ms, 60.0)]
    seen = _Seen(status, hour, recent, spread_of(ages, 0.5), spread_of(late, 0.99))
    return _worst_first([*_now(seen), *_counted(seen)])


def of_a_status(status: ClusterStatus) -> list[FoundProblem]:
    """The problems that one answer of a master shows, the worst first: for programs that do not
    have its last hour. What it has counted since its start is a warning: it may be over."""
    when = f"since the master started, {duration_text(status.uptime_ms)} ago"
    counted = _Counted(dict(status.counters), when)
    seen = _Seen(status, counted, counted)
    since = [each._replace(level="warning") for each in _counted(seen)]
    return _worst_first([*_now(seen), *since])


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
    text = f"This master's certificate ends in {left}: issue another one (kvstore auth issue)."
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


# --- conditions: level, row, and what is wrong; an empty text: nothing of the kind ----------------


def _now(seen: _Seen) -> Iterator[FoundProblem]:
    for level, what, row, why in OF_NODES:
        wrong = [(node, said) for node in seen.status.nodes if (said := why(node))]
        yield from _named(level, wrong, what, row)
    yield from _gone(seen.status.gone)
    for level, row, condition in OF_STORE:
        if text := condition(seen):
            yield FoundProblem(level, text, row)


def _counted(seen: _Seen) -> Iterator[FoundProblem]:
    for level, row, counter, one, text in OF_COUNTERS:
        counted = seen.hour if counter in IN_AN_HOUR else seen.recent
        count = counted.counters.get(counter, 0)
        if count:
            said = f"{_count(count, one)} {text.format(when=counted.when)}"
            yield FoundProblem(level, said, row)


def _named(
    level: str, nodes: list[tuple[NodeStatus, str]], what: str, row: str
) -> Iterator[FoundProblem]:
    for node, why in nodes[:NODES_NAMED]:
        text = f"Node {node.name} ({node.address or node.host}) {what}: {why}."
        yield FoundProblem(level, text, row)
    if len(nodes) > NODES_NAMED:
        text = f"{len(nodes) - NODES_NAMED} more nodes: each {what}."
        yield FoundProblem(level, text, row)


def _gone(gone: Sequence[GoneNode]) -> Iterator[FoundProblem]:
    """Nodes that have left or died, with the objects that went with them."""
    shown = [each for each in gone if each.why != "left" or each.missing or each.lost]
    for each in shown[:NODES_NAMED]:
        who = f"Node {name_text(each.name)} ({each.host})"
        how = "left" if each.why == "left" else f"died ({each.why})"
        level, text = "bad", f"{who} {how} {duration_text(each.gone_ms)} ago"
        missing = _count(each.missing, "object")
        if each.reports:
            level, text = "note", f"{who} is back and reports its objects: {missing} to go"
        elif each.missing:
            level = "warning" if each.why == "left" else "bad"
            text += (
                f": {missing} that no other node has. They are back once it is started again with "
                "the same --name and memory"
            )
        elif each.lost:
            lost = _count(each.lost, "object")
            text += f": {lost} that no other node had did not come back, and are lost"
        yield FoundProblem(level, f"{text}.", "KvstoreNodeDead")
    if len(shown) > NODES_NAMED:
        text = f"{len(shown) - NODES_NAMED} more nodes left or died."
        yield FoundProblem("bad", text, "KvstoreNodeDead")


def _held(share: float, of: str, why: str) -> Callable[[NodeStatus], str]:
    def condition(node: NodeStatus) -> str:
        held = sum(getattr(each, of) for each in node.segments)
        is_heavy = held > share * node.size
        return f"{size_text(held)}, {why}" if is_heavy else ""

    return condition


def _waiting(seen: _Seen) -> str:
    """Memory that is not given out yet after a start of the master or of the nodes."""
    alive = [node for node in seen.status.nodes if node.state == "alive"]
    segments = [segment for node in alive for segment in node.segments]
    if not segments or not all(each.ready_ms or each.reports for each in segments):
        return ""
    longest_ms = min(segment.ready_ms for segment in segments)
    when = f"for {duration_text(longest_ms)} more" if longest_ms else "yet"
    reports = all(segment.reports for segment in segments)
    also = ", and until a node has reported its objects" if reports else ""
    return (
        f"No put finds room {when}{also}: the master or all nodes have just started, and memory is "
        "given out when no reader of before can have a lease on it. Puts wait, gets work."
    )


def _pinned(seen: _Seen) -> str:
    pinned, size = seen.counter("pinned_bytes"), seen.total("size")
    if not size or pinned <= PINNED_SHARE * size:
        return ""
    by_size = sorted(seen.status.namespaces, key=lambda each: -each.pinned_bytes)
    most = [
        f"{name_text(each.name)} {size_text(each.pinned_bytes)}"
        for each in by_size[:3]
        if each.pinned_bytes
    ]
    of = f" (most: {', '.join(most)})" if most else ""
    return (
        f"Pins keep {size_text(pinned)} of {size_text(size)}{of}: puts have only the rest. Pins "
        "end by themselves, after a day at most, or by unpin."
    )


def _ages(seen: _Seen) -> str:
    is_full = seen.total("used") > FULL * seen.total("size")
    if seen.age_ms is None or not is_full or seen.age_ms >= YOUNG_MS:
        return ""
    return (
        "The pool is full, and evicts objects soon after their last use: half of them within "
        f"{duration_text(int(seen.age_ms))} (last 10 min). More memory would raise the hit ratio."
    )


def _loop(seen: _Seen) -> str:
    if seen.late_us is None or seen.late_us <= LATE_US:
        return ""
    return (
        f"The master's loop is slow: one call in a hundred waits {seen.late_us / 1000:.0f} ms or "
        "more. Its host may lack processor time."
    )


def _short_of_replicas(seen: _Seen) -> str:
    short = seen.counter("under_replicated_objects")
    return f"{_count(short, 'object')} with fewer replicas than were asked for." if short else ""


def _count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


OF_NODES: Final[Sequence[tuple[str, str, str, Callable[[NodeStatus], str]]]] = (
    ("bad", "is suspect", "KvstoreNodeSuspect",
     lambda node: f"not heard of for {duration_text(node.silent_ms)}; no new object goes there"
     if node.state == "suspect" else ""),
    ("bad", "is dead", "KvstoreNodeDead",
     lambda node: "its objects are gone" if node.state == "dead" else ""),
    ("note", "is draining", "Draining",
     lambda node: "its objects move away" if node.state == "draining" else ""),
    ("bad", "is unreachable from the master", "KvstoreNodeSuspect",
     lambda node: node.unreachable),
    ("bad", "has no entry in /dev/shm any more", "KvstoreNodeDead",
     lambda node: ENTRY_GONE if node.entry_gone else ""),
    ("warning", "has memory in quarantine", "KvstoreMemoryHeld",
     _held(QUARANTINE_SHARE, "quarantined", "of writers that did not end their puts")),
    ("warning", "has memory that awaits its reclaim", "KvstoreMemoryHeld",
     _held(RECLAIM_SHARE, "reclaim", "until leases on it have ended")),
)  # fmt: skip

OF_STORE: Final[Sequence[tuple[str, str, Callable[[_Seen], str]]]] = (
    ("bad", "KvstoreNodeAlone",
     lambda seen: "" if seen.status.nodes else "No node has joined: nothing can be stored."),
    ("warning", "KvstoreUnderReplicated", _short_of_replicas),
    ("bad", "KvstorePutsRefused", _waiting),
    ("warning", "KvstorePutsRefused", lambda seen: guarantees_short(seen.status)),
    ("warning", "KvstoreMemoryPinned", _pinned),
    ("warning", "KvstoreEvictionsTooYoung", _ages),
    ("warning", "KvstoreLoopSlow", _loop),
)  # fmt: skip

IN_AN_HOUR: Final = ("corrupt_objects", "corrupt_replicas")
"""Counters that are judged over an hour, and not over ten minutes."""

OF_COUNTERS: Final[Sequence[tuple[str, str, str, str, str]]] = (
    *(("bad", "KvstorePutsRefused", f"refused_{cause}", "put", f"found no room {{when}}: {why}.")
      for cause, (_, _, why) in CAUSES.items()),
    ("warning", "KvstoreMemoryPinned", "refused_pins", "pin",
     "refused {when}: pins hold all that they may (--pinned-max)."),
    ("bad", "KvstoreCorruptMemory", "corrupt_objects", "object",
     "had no replica with good bytes: look at the memory of its nodes (see Events), {when}."),
    ("bad", "KvstoreCorruptMemory", "corrupt_replicas", "replica", "had bad bytes, {when}."),
    ("warning", "KvstoreConnectionsRefused", "connections_stalled", "connection",
     "cut because the client did not read, {when}."),
    ("warning", "KvstoreConnectionsRefused", "connections_refused", "connection",
     "refused: no token, too many, or another protocol, {when}."),
    ("warning", "KvstoreRefusals", "refused", "call",
     "refused: without an identity, with a revoked one, or without the right, {when}."),
    ("warning", "EventsDropped", "events_dropped", "event",
     "dropped: subscribers begin anew, {when}."),
    ("warning", "KvstoreLeaderChanges", "etcd_failures", "call", "to etcd failed, {when}."),
)  # fmt: skip
"""Level, row, counter, what it counts, and what happened to it."""
