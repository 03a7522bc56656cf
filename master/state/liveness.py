"""Decides the state of a node: alive, suspect or dead.

    joined ──► alive ──silence, broken stream, reports of several hosts──► suspect ──► dead
                 ▲                                                           │
                 └───────────────── heard again, resumed ────────────────────┘

Alive and suspect are derived from what was heard and when, never stored, so no transition can be
missed. Dead is an event: the caller unmounts the segments, and the node is forgotten.

A client's report is only its own view: a firewall may be in front of it. The reports make a node
suspect for all clients only when hosts agree: two at least, and most of the recent writers to it.
The host is what the client says. Where clients have identities, the hosts that one identity names
from one address count as one.

While the stream of a node is broken, the report of a single host is enough, and the node is dead: a
process that ended is found so at the first failed transfer. The report of a client with an identity
is not: streams of nodes that live break as well, and one client could make each of these a death.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.calls import NO_VERSION, Version

ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"

AGREEING_MIN = 2
"""Hosts that must report a node before clients of other hosts avoid it."""

AGREEING_MS = 5_000
"""Older reports, and older uses, do not count."""

HOSTS_MAX = 256
"""Hosts that are remembered per node: the last ones that used it, and that reported it."""

NOTED_MS = 10_000
"""Reports of one host about one node are logged at most once in this time."""


@dataclass(slots=True)
class FailureReports:
    """The reports of one host about one node."""

    at_ms: int
    noted_ms: int
    """When it was last logged."""
    source: str
    """Identity and address of the last reporter; empty: it has no identity."""


@dataclass(slots=True, eq=False)
class JoinedNode:
    """A node that has joined and is not dead. Times are the master's own monotonic clock."""

    name: str
    host: str
    session: int | None
    """The session of its stream; None while that is broken."""
    last_heartbeat_ms: int
    reported_ms: int | None = None
    """When a report last counted: hosts agreed, or the stream was broken. Time alone clears it."""
    reports: dict[str, FailureReports] = field(default_factory=dict)
    """By host; the latest report is the last entry."""
    users: dict[str, int] = field(default_factory=dict)
    """Hosts whose clients last got grants on the node, and when."""
    draining: bool = False
    """Whether the node is about to leave, and gets no new objects."""
    drained_from: Version = NO_VERSION
    """The newest version when its draining began: objects moved off the node have later ones."""
    version: str = ""
    """The version of its program; empty: not known."""
    shm_entry_missing: bool = False
    """Whether the node has said that its memory's entry in ``/dev/shm`` was removed."""
    departed: str = ""
    """Why the node has gone; empty: it has not."""
    ahead_ms: int = 0
    """What the node's clock showed when it was last heard, less the master's."""
    address: str = ""
    """Where its data port is; empty: it has none."""
    certified: str = ""
    """As ``SegmentInfo.certified``."""
    unreachable: str = ""
    """Why the master could not connect to its memory when it last tried; empty: it could."""
    stored_bytes: int = 0
    """Payload bytes of objects that were put, moved or repaired there."""
    read_bytes: int = 0
    written_bytes: int = 0
    """What clients have read and written over its data port, as the node says; only shown."""

    @property
    def location_text(self) -> str:
        """Where it is, for people: ``host`` is the id of a running kernel."""
        return self.address or self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessRules:
    suspect_ms: int
    """Silence after which a node is suspect, and how long it stays so after hosts agreed."""
    dead_ms: int
    """Silence after which a node is dead."""


def record_writer(node: JoinedNode, host: str, now_ms: int) -> None:
    """Called when a client on ``host`` got a grant on the node."""
    users = node.users
    if host not in users and len(users) >= HOSTS_MAX:
        del users[next(iter(users))]
    users[host] = now_ms


def record_failure_report(node: JoinedNode, host: str, now_ms: int, source: str = "") -> bool:
    """Called when a client on ``host`` cannot read or write on the node. ``source``: as in
    ``FailureReports``. Returns whether to log this report."""
    reports = node.reports
    report = reports.pop(host, None)
    if report is None:
        if len(reports) >= HOSTS_MAX:
            del reports[next(iter(reports))]
        report = FailureReports(now_ms, now_ms - NOTED_MS, source)
    reports[host] = report
    report.at_ms = now_ms
    report.source = source
    if (node.session is None and not source) or _agree(node, now_ms):
        node.reported_ms = now_ms
    if now_ms - report.noted_ms < NOTED_MS:
        return False
    report.noted_ms = now_ms
    return True


def stream_broken(node: JoinedNode) -> None:
    """Called when the node's stream broke: from now on the report of a single host counts, if its
    client has no identity."""
    for report in node.reports.values():
        if not report.source:
            node.reported_ms = max(node.reported_ms or report.at_ms, report.at_ms)


def _agree(node: JoinedNode, now_ms: int) -> bool:
    since_ms = now_ms - AGREEING_MS
    reporters = {host for host, report in node.reports.items() if report.at_ms >= since_ms}
    agreeing = len({node.reports[host].source or host for host in reporters})
    users = {host for host, used_ms in node.users.items() if used_ms >= since_ms}
    return agreeing >= AGREEING_MIN and 2 * agreeing > len(reporters | users)


def state_of(node: JoinedNode, now_ms: int, rules: LivenessRules) -> str:
    silent_ms = now_ms - node.last_heartbeat_ms
    if silent_ms > rules.dead_ms:
        return DEAD
    fails = node.reported_ms is not None and now_ms - node.reported_ms <= rules.suspect_ms
    if node.session is None and fails:
        return DEAD  # its stream is broken, and a client cannot reach it either
    if node.session is None or silent_ms > rules.suspect_ms or fails:
        return SUSPECT
    return ALIVE
