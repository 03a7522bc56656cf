"""Decides whether a master leads or stands by, and its next step: pure, time is an argument.

    following ── no leader ────► grant a lease, campaign ── won ──► leading
        ▲                                │ another one was faster       │ its lease was not kept in
        └────────────────────────────────┴──────────────────────────────┘ time, or is gone

One rule makes a second leader impossible: a leader acts only while ``now < until``. ``until`` is
the lease's time to live, counted from *before* the request that granted or renewed it was sent,
less a margin for clocks of different speeds. So the leader has stopped before etcd lets another
master win.

A lease serves one campaign, and each election has its own epoch, higher than any before. A master
that has lost its lease, or may have, leads again only under a new lease and epoch.

Times are seconds of ``kvstore.runtime.clock.uptime``. Every ``next_action`` is followed by the one
report that its action asks for."""

from __future__ import annotations

from typing import Final, NamedTuple

MARGIN: Final = 0.1
"""Share of a lease that its leader does not use: clock speeds differ by far less than 1 %."""

KEEP_SHARE: Final = 1 / 3
"""Share of a lease after which the leader renews it: two attempts may be lost."""

RETRY_SHARE: Final = 1 / 15
"""Share of a lease after which the leader repeats a failed renewal."""

BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Pauses of a master that stands by and cannot reach etcd; the last one is repeated."""


class ReadLeader(NamedTuple):
    """Read the leader's key. Report: ``on_leader_read`` or ``on_etcd_failed``."""


class WatchLeader(NamedTuple):
    """Wait, for a limited time, until the leader's key changes after ``revision``. Report:
    ``on_leader_changed`` or ``on_etcd_failed``."""

    revision: int


class AcquireLease(NamedTuple):
    """Get a lease. Report: ``on_lease_granted`` or ``on_etcd_failed``."""


class Campaign(NamedTuple):
    """Write this master's address as the leader's, if there is none, and get an epoch. Report:
    ``campaigned`` or ``on_etcd_failed``."""

    lease_id: int


class KeepAlive(NamedTuple):
    """Keep the lease, and check that the leader's key still names this master; by ``deadline``.
    Report: ``on_lease_kept`` or ``on_etcd_failed``."""

    lease_id: int
    deadline: float


class ReleaseLease(NamedTuple):
    """End a lease that is no longer needed, if possible. No report."""

    lease_id: int


class BecomeLeader(NamedTuple):
    """Begin to serve under this epoch. No report."""

    epoch: int


class StepDown(NamedTuple):
    """Stop serving, at once. No report."""

    reason: str


class WaitUntil(NamedTuple):
    """Do nothing until that time. No report."""

    until: float


Action = (
    ReadLeader
    | WatchLeader
    | AcquireLease
    | Campaign
    | KeepAlive
    | ReleaseLease
    | BecomeLeader
    | StepDown
    | WaitUntil
)


class LeaderKey(NamedTuple):
    """The leader as etcd knows it."""

    address: str
    lease_id: int
    revision: int
    """The revision at which the key was written."""


class ElectionStateMachine:
    """See the module. One per process, for its whole life."""

    def __init__(self) -> None:
        self.epoch = 0
        """The epoch of the present or last term."""
        self.until = 0.0
        """This master may act as the leader only before this time; 0: it does not lead."""
        self.epoch_least = 0
        """The least epoch of the next term; nodes have joined a master of the epoch just below."""
        self.leader: LeaderKey | None = None
        """Another master that was last seen as the leader."""
        self._leading = False
        self._why = ""
        """Why this master no longer leads, until ``StepDown`` is returned."""
        self._revision = 0
        """The etcd revision up to which ``leader`` is known; 0: ``ReadLeader`` first."""
        self._lease_id = 0
        self._stale: list[int] = []
        """Leases to revoke."""
        self._ttl_s = 0.0
        self._asked_at = 0.0
        """When ``next_action`` returned the action under way: its request is sent later than
        that."""
        self._granted_until = 0.0
        self._not_before = 0.0
        self._failures = 0

    @property
    def is_leading(self) -> bool:
        """Whether ``BecomeLeader`` has been returned, and ``StepDown`` has not."""
        return self._leading

    def next_action(self, now: float) -> Action:
        """The next action."""
        self._asked_at = now
        if self._leading:
            if not self._why and now >= self.until:
                self._why = "lease_not_kept"
            if self._why:
                why, self._why = self._why, ""
                self._end()
                return StepDown(why)
            if now < self._not_before:
                return WaitUntil(min(self._not_before, self.until))
            return KeepAlive(self._lease_id, min(self.until, now + self._ttl_s * KEEP_SHARE))
        if self._stale:
            return ReleaseLease(self._stale.pop())
        if self.until:
            if now < self.until:
                self._leading = True
                self._not_before = now
                return BecomeLeader(self.epoch)
            self._end()
            return self.next_action(now)
        if now < self._not_before:
            return WaitUntil(self._not_before)
        if not self._revision:
            return ReadLeader()
        if self.leader is not None:
            return WatchLeader(self._revision)
        return Campaign(self._lease_id) if self._lease_id else AcquireLease()

    # --- reports ------------------------------------------------------------------------------

    def on_leader_read(self, leader: LeaderKey | None, revision: int) -> None:
        """After ``ReadLeader``: who leads, at that revision of the store."""
        self._failures = 0
        self.leader, self._revision = leader, revision

    def on_leader_changed(self) -> None:
        """After ``WatchLeader``: the leader changed, or the watch is over."""
        self._revision = 0

    def on_lease_granted(self, lease_id: int, ttl_s: float) -> None:
        """After ``AcquireLease``."""
        self._lease_id, self._ttl_s = lease_id, ttl_s
        self._granted_until = self._asked_at + ttl_s * (1 - MARGIN)

    def campaigned(self, leader: LeaderKey, epoch: int) -> None:
        """After ``Campaign``: who leads now; and the new epoch, if we do."""
        if leader.lease_id == self._lease_id:
            assert epoch > self.epoch
            self.epoch = epoch
            self.until = self._granted_until
            self.leader = None
            return
        self._end()
        self.leader, self._revision = leader, leader.revision

    def on_lease_kept(self, ttl_s: float, leader: LeaderKey | None) -> None:
        """After ``KeepAlive``: how long the lease lives from then on, and the leader in etcd."""
        if ttl_s <= 0:
            self._why = "lease_gone"
        elif leader is None or leader.lease_id != self._lease_id:
            self._why = "removed_from_etcd"
        else:
            self._failures = 0
            self._ttl_s = ttl_s
            self.until = max(self.until, self._asked_at + ttl_s * (1 - MARGIN))
            self._not_before = self._asked_at + ttl_s * KEEP_SHARE

    def on_service_stopped(self) -> None:
        """After ``on_lease_kept``: the service had already stopped, because its time had passed."""
        self._why = "lease_not_kept"

    def on_epoch_superseded(self, epoch: int) -> None:
        """At any time: a node has joined a master of that epoch before. If this master leads under
        an epoch that is not above it, it steps down; it leads again only above it."""
        self.epoch_least = max(self.epoch_least, epoch + 1)
        if self._leading and self.epoch <= epoch:
            self._why = "outrun"

    def on_etcd_failed(self, now: float) -> None:
        """After any action: etcd did not answer. It may have executed the request."""
        self._failures += 1
        if self._leading:
            self._not_before = now + self._ttl_s * RETRY_SHARE
            return
        self._end()
        self._not_before = now + BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1]

    def resign(self) -> int:
        """Steps down for good; returns the lease to revoke, or 0. Call it after serving ends."""
        lease_id = self._lease_id
        self._end()
        return lease_id

    def _end(self) -> None:
        """Returns to following, without a lease."""
        if self._lease_id:
            self._stale.append(self._lease_id)
        self._leading = False
        self._lease_id = self._revision = 0
        self.until = 0.0
        self.leader = None
        self._not_before = 0.0
