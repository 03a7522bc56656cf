"""Determines the state of a node: alive, suspect or dead.

    joined ──► alive ──silence, broken stream, reports of several hosts──► suspect ──► dead
                 ▲                                                           │
                 └──────────── message received, stream resumed ─────────────┘

Alive and suspect are derived from the last messages, never stored, so no transition can be missed.
Dead is an event: the caller unmounts the segments and forgets the node.

A client's report is only its own view, for example through a firewall. Reports make a node suspect
for all clients only if at least two hosts, and most of its recent writers' hosts, agree. Clients
name their hosts; with authentication, all hosts that one identity names from one address count as
one.

While the stream of a node is broken, a report of one host makes it dead: the first failed transfer
detects a process that ended. Reports with an identity do not, because streams of live nodes break
as well, and one client could kill each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.calls import NO_VERSION, Version

ALIVE, SUSPECT, DEAD = "alive", "suspect", "dead"

AGREEING_MIN = 2
"""Minimum number of reporting hosts before clients of other hosts avoid a node."""

AGREEING_MS = 5_000
"""Older reports and uses do not count."""

HOSTS_MAX = 256
"""Hosts remembered per node: the last users and reporters."""

NOTED_MS = 10_000
"""Minimum interval between log entries of one host about one node."""


@dataclass(slots=True)
class FailureReports:
    at_ms: int
    noted_ms: int
    source: str
    """Identity and address of the last reporter; empty without an identity."""


@dataclass(slots=True, eq=False)
class JoinedNode:
    """A node that has joined and is not dead. Times are the master's monotonic clock."""

    name: str
    host: str
    session: int | None
    """Session of its stream; None while that is broken."""
    last_heartbeat_ms: int
    reported_ms: int | None = None
    """Time of the last effective report (hosts agreed, or the stream was broken)."""
    reports: dict[str, FailureReports] = field(default_factory=dict)
    """By host; the latest report is the last entry."""
    users: dict[str, int] = field(default_factory=dict)
    """Time of the last grant on the node, by the client's host."""
    draining: bool = False
    """Whether the node is leaving and gets no new objects."""
    drained_from: Version = NO_VERSION
    """Newest version when its draining began; moved objects have later ones."""
    version: str = ""
    """Version of its program; empty: unknown."""
    shm_entry_missing: bool = False
    """Whether the node reported that its ``/dev/shm`` entry was removed."""
    departed: str = ""
    """Reason of its departure; empty: it has not departed."""
    ahead_ms: int = 0
    """The node's clock at its last message, less the master's."""
    address: str = ""
    """Address of its data port; empty: none."""
    certified: str = ""
    unreachable: str = ""
    """Error of the last connectivity probe; empty: none."""
    stored_bytes: int = 0
    """Payload bytes put, moved or repaired to the node."""
    read_bytes: int = 0
    written_bytes: int = 0
    """Bytes read and written over its data port, as reported; only displayed."""

    @property
    def location_text(self) -> str:
        """Return its location for messages; ``host`` is the id of a running kernel."""
        return self.address or self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessRules:
    suspect_ms: int
    """Silence after which a node is suspect; also how long it stays so after hosts agreed."""
    dead_ms: int


def record_writer(node: JoinedNode, host: str, now_ms: int) -> None:
    users = node.users
    if host not in users and len(users) >= HOSTS_MAX:
        del users[next(iter(users))]
    users[host] = now_ms


def record_failure_report(node: JoinedNode, host: str, now_ms: int, source: str = "") -> bool:
    """Record a report of a client on ``host``, and return whether to log it."""
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
    """Record a broken stream: one report without an identity suffices from now on."""
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
        return DEAD  # stream broken, and a client cannot connect either
    if node.session is None or silent_ms > rules.suspect_ms or fails:
        return SUSPECT
    return ALIVE
