"""State machine of a master's role, leader or standby: pure, time is an argument.

    following ── no leader ────► grant a lease, campaign ── won ──► leading
        ▲                                │ another one was faster       │ lease not renewed in time,
        └────────────────────────────────┴──────────────────────────────┘ or lost

One rule excludes a second leader: a leader acts only while ``now < until``, which is the TTL of the
etcd lease from *before* its grant or renewal was requested, less a margin for clock speeds. So the
leader has stopped before etcd lets another master win.

A lease serves one campaign, and each election has a higher epoch. A master that may have lost its
lease leads again only with a new lease and epoch.

Times are seconds of ``kvstore.runtime.clock.uptime``. After every ``next_action`` the caller makes
the report that the action names.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MARGIN: Final = 0.1
"""Unused share of a lease; clock speeds differ by far less than 1 %."""

KEEP_SHARE: Final = 1 / 3
"""Share of a lease after which the leader renews it: two attempts may be lost."""

RETRY_SHARE: Final = 1 / 15
"""Share of a lease after which a failed renewal is repeated."""

BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0)
"""Pauses of a standby that cannot reach etcd; the last one repeats."""


class ReadLeader(NamedTuple):
    """Read the leader's key. Report: ``on_leader_read`` or ``on_etcd_failed``."""


class WatchLeader(NamedTuple):
    """Watch the leader's key. Report: ``on_leader_changed`` or ``on_etcd_failed``."""

    revision: int


class AcquireLease(NamedTuple):
    """Get a lease. Report: ``on_lease_granted`` or ``on_etcd_failed``."""


class Campaign(NamedTuple):
    """Become leader in etcd, with an epoch. Report: ``campaigned`` or ``on_etcd_failed``."""

    lease_id: int


class KeepAlive(NamedTuple):
    """Renew the lease, check the leader. Report: ``on_lease_kept`` or ``on_etcd_failed``."""

    lease_id: int
    deadline: float


class ReleaseLease(NamedTuple):
    """End an unused lease, if possible. No report."""

    lease_id: int


class BecomeLeader(NamedTuple):
    """Begin to serve under this epoch. No report."""

    epoch: int


class StepDown(NamedTuple):
    """Stop serving immediately. No report."""

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
    address: str
    lease_id: int
    revision: int
    """The revision at which the key was written."""


class ElectionStateMachine:
    def __init__(self) -> None:
        self.epoch = 0
        self.until = 0.0
        """This master may act as the leader only before this time; 0: it does not lead."""
        self.epoch_least = 0
        """Lowest epoch of the next term; nodes know a master of the previous one."""
        self.leader: LeaderKey | None = None
        self._leading = False
        self._why = ""
        """Reason for stepping down, until ``StepDown`` is returned."""
        self._revision = 0
        """The etcd revision at which ``leader`` is known; 0: ``ReadLeader`` first."""
        self._lease_id = 0
        self._stale: list[int] = []
        self._ttl_s = 0.0
        self._requested_at = 0.0
        """Time of the last ``next_action``; its request is sent later."""
        self._granted_until = 0.0
        self._not_before = 0.0
        self._failures = 0

    @property
    def is_leading(self) -> bool:
        """Whether ``BecomeLeader`` has been returned, and ``StepDown`` has not."""
        return self._leading

    def next_action(self, now: float, *, may_lead: bool = True) -> Action:
        """``may_lead``: whether peers accept this master; it leads only then."""
        self._requested_at = now
        if self._leading:
            if not self._why and not may_lead:
                self._why = "certificate_invalid"
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
            return self.next_action(now, may_lead=may_lead)
        if now < self._not_before:
            return WaitUntil(self._not_before)
        if not self._revision:
            return ReadLeader()
        if self.leader is not None or not may_lead:
            return WatchLeader(self._revision)
        return Campaign(self._lease_id) if self._lease_id else AcquireLease()

    def on_leader_read(self, leader: LeaderKey | None, revision: int) -> None:
        """Report ``ReadLeader``: the leader at that revision."""
        self._failures = 0
        self.leader, self._revision = leader, revision

    def on_leader_changed(self) -> None:
        """Report ``WatchLeader``: the leader changed, or the watch ended."""
        self._revision = 0

    def on_lease_granted(self, lease_id: int, ttl_s: float) -> None:
        """Report ``AcquireLease``."""
        self._lease_id, self._ttl_s = lease_id, ttl_s
        self._granted_until = self._requested_at + ttl_s * (1 - MARGIN)

    def campaigned(self, leader: LeaderKey, epoch: int) -> None:
        """Report ``Campaign``: the leader, and the new epoch if it is this master."""
        if leader.lease_id == self._lease_id:
            assert epoch > self.epoch
            self.epoch = epoch
            self.until = self._granted_until
            self.leader = None
            return
        self._end()
        self.leader, self._revision = leader, leader.revision

    def on_lease_kept(self, ttl_s: float, leader: LeaderKey | None) -> None:
        """Report ``KeepAlive``: the remaining TTL, and the leader in etcd."""
        if ttl_s <= 0:
            self._why = "lease_gone"
        elif leader is None or leader.lease_id != self._lease_id:
            self._why = "removed_from_etcd"
        else:
            self._failures = 0
            self._ttl_s = ttl_s
            self.until = max(self.until, self._requested_at + ttl_s * (1 - MARGIN))
            self._not_before = self._requested_at + ttl_s * KEEP_SHARE

    def on_service_stopped(self) -> None:
        """After ``on_lease_kept``: the service had already stopped at its deadline."""
        self._why = "lease_not_kept"

    def on_epoch_superseded(self, epoch: int) -> None:
        """Report, at any time, that a node knows that epoch. Later terms are above it."""
        self.epoch_least = max(self.epoch_least, epoch + 1)
        if self._leading and self.epoch <= epoch:
            self._why = "outrun"

    def on_etcd_failed(self, now: float) -> None:
        """Report that etcd did not reply to any action; it may have executed the request."""
        self._failures += 1
        if self._leading:
            self._not_before = now + self._ttl_s * RETRY_SHARE
            return
        self._end()
        self._not_before = now + BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1]

    def resign(self) -> int:
        """Step down permanently, after serving has ended. Return the lease to revoke, or 0."""
        lease_id = self._lease_id
        self._end()
        return lease_id

    def _end(self) -> None:
        if self._lease_id:
            self._stale.append(self._lease_id)
        self._leading = False
        self._lease_id = self._revision = 0
        self.until = 0.0
        self.leader = None
        self._not_before = 0.0
