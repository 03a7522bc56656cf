"""The master's state and every decision it takes: a pure state machine, made of parts.

Each call takes the time (``now_ms``, any monotonic clock) and a request of ``kvstore.calls``, and
returns its reply, or ``DeferredReply`` if the reply must wait. ``effects`` collects the actions for
the shell, which takes them after each call: deferred replies, messages to nodes, cluster events.
Nothing here reads a clock, waits, logs or knows of sockets, so the same code runs in the master, in
property tests and in a simulated cluster.

The promises of the state, and the parts that keep them:

* Bytes are conserved and extents disjoint (``MemoryPool``). An extent is reused after its leases
  (``SpaceReclaimer``), its writer (``PendingGrants``) and its node (wiping) are done with it.
* A match is leased by its tip, and only unleased leaves are evicted (``CandidateQueue``).
* A grant token is valid once, until its deadline, in its epoch.
* Everything has a bound: ``MasterRules`` and ``kvstore.limits``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore import calls
from kvstore.calls.tenants import TenantMatcher, TenantRule
from kvstore.master.state import background_jobs
from kvstore.master.state.background_sweep import BackgroundSweeper
from kvstore.master.state.disk_tier import DiskTier
from kvstore.master.state.effects import Effect, LogClusterEvent
from kvstore.master.state.eviction import LruPolicy, NewPolicy
from kvstore.master.state.grant_manager import GrantManager
from kvstore.master.state.hints import HintHandler
from kvstore.master.state.inventory_loading import InventoryLoader
from kvstore.master.state.leases import ReaderLeases
from kvstore.master.state.nodes import NodeMessageHandler
from kvstore.master.state.object_events import Event
from kvstore.master.state.put_queue import WaitingPuts
from kvstore.master.state.puts import PutHandler
from kvstore.master.state.queries import QueryHandler
from kvstore.master.state.removal_watermarks import RemovalWatermarks
from kvstore.master.state.removals import RemovalHandler
from kvstore.master.state.repair_queue import RepairQueue
from kvstore.master.state.replication import ReplicationPlanner
from kvstore.master.state.retention import RetentionManager
from kvstore.master.state.rules import MasterRules
from kvstore.master.state.snapshot_scan import SnapshotScan
from kvstore.master.state.state_context import StateContext
from kvstore.master.state.views.chains import ChainQueries
from kvstore.master.state.views.operator_queries import OperatorQueries


class MasterState:
    """See the module. One thread at a time may use it; construct one per epoch."""

    def __init__(
        self,
        *,
        epoch: int,
        epoch_max: int = 1 << 63,
        version: str = "",
        cluster: str = "",
        rules: MasterRules | None = None,
        policy: NewPolicy = LruPolicy,
        started_ms: int = 0,
        events: bool = False,
        tenants: Sequence[TenantRule] | None = None,
    ) -> None:
        """
        Args:
            policy: makes an eviction policy, one per segment and tenant.
            tenants: their rules, which ``set_tenants`` may change; None: there are none.
            epoch_max: the highest epoch that is believed of a node.
            events: whether to collect events for ``take_events``.
        """
        self.epoch = epoch
        self.version = version
        self.cluster = cluster
        self.rules = rules = rules or MasterRules()
        self.common = common = StateContext(
            epoch=epoch,
            epoch_max=epoch_max,
            version=version,
            cluster=cluster,
            rules=rules,
            policy=policy,
            started_ms=started_ms,
            tenants=tenants,
        )
        self.pool = common.pool
        self.forest = common.forest
        if events:
            self.forest.collect_events()
        self.counters = common.counters
        self.traffic = common.traffic
        self.membership = common.membership
        self.pending = common.pending
        self.reclaim = common.reclaim
        self.repairs = RepairQueue(rules.repair, rules.lease_ms, started_ms)
        self.marks = RemovalWatermarks(common)
        self.sweeping = BackgroundSweeper(common)
        self.waiting = WaitingPuts(common)
        self.leases = ReaderLeases(common)
        self.granting = GrantManager(common, self.sweeping, self.repairs)
        self.tier = DiskTier(common, self.granting, self.sweeping)
        self.removing = RemovalHandler(common, self.marks, self.granting, self.tier)
        self.copying = ReplicationPlanner(common, self.granting, self.repairs)
        self.keeping = RetentionManager(common, self.granting)
        self.hints = HintHandler(common, self.tier)
        self.putting = PutHandler(
            common,
            self.leases,
            self.granting,
            self.waiting,
            self.removing,
            self.copying,
            self.keeping,
            self.hints,
            self.tier,
        )
        self.returning = InventoryLoader(common, self.marks, self.copying)
        self.asking = QueryHandler(
            common, self.leases, self.granting, self.returning, self.hints, self.tier
        )
        self.nodes = NodeMessageHandler(
            common, self.marks, self.returning, self.copying, self.sweeping, self.tier
        )
        self.report = OperatorQueries(common)
        self.chains = ChainQueries(common)
        self.steps: dict[type, Callable[[int, Any], Any]] = {
            calls.MatchPrefix: self.asking.find,
            calls.Lookup: self.asking.find,
            calls.Exists: self.asking.find,
            calls.Renew: self.asking.renew,
            calls.Release: self.asking.release,
            calls.PutStart: self.putting.put_start,
            calls.PutEnd: self.putting.put_end,
            calls.PutRevoke: self.putting.put_revoke,
            calls.Allocate: self.putting.allocate,
            calls.Commit: self.putting.commit,
            calls.Pin: self.keeping.pin,
            calls.Unpin: self.keeping.unpin,
            calls.Hint: self.hints.hint,
            calls.Remove: self.removing.remove,
            calls.Clear: self.removing.clear,
            calls.ReportCorrupt: self.removing.report_corrupt,
            calls.ReportFailure: self.nodes.report_failure,
            calls.Drain: self.nodes.drain,
            calls.StartMoves: self.copying.start_moves,
            calls.DescribeSegments: self.report.describe_segments,
            calls.Status: self.report.status,
            calls.ListObjects: self.report.list_objects,
            calls.StatObject: self.report.stat_object,
            calls.Traffic: self.report.traffic,
            calls.Chains: self.chains.find,
            calls.Blocks: self.chains.blocks,
        }
        """The step for each kind of request: takes (now_ms, request), returns the reply or
        ``DeferredReply``, and raises ``KVStoreError``."""
        self._jobs: dict[int, Callable[[int], None]] = {
            background_jobs.SERVE: self.putting.serve_waiting,
            background_jobs.FREE: self.removing.free,
            background_jobs.EXPIRE: self.keeping.expire,
            background_jobs.CLAIM: self.returning.take_claims,
            background_jobs.ANSWER: self.asking.reply,
            background_jobs.EVICT: self.sweeping.evict_ahead,
            background_jobs.DELETE_UNUSED: self.sweeping.delete_unused,
            background_jobs.SWEEP: self.sweeping.sweep,
            background_jobs.DRAW: self.chains.walk_on,
            background_jobs.SCAN: self.copying.scan,
            background_jobs.MOVE: self.sweeping.move_tables,
            background_jobs.RELEASE: self.leases.end_some,
            background_jobs.BRING: self.tier.begin_bringing,
            background_jobs.DISK: self.tier.work,
        }
        """The method that does a slice of each kind of background work."""

    # --- effects ------------------------------------------------------------------------------

    @property
    def effects(self) -> list[Effect]:
        return self.common.effects

    def take_effects(self) -> list[Effect]:
        effects, self.common.effects = self.common.effects, []
        return effects

    @property
    def waiting_events(self) -> int:
        """The number of events that were not taken yet."""
        events = self.forest.events
        return 0 if events is None else len(events)

    def take_events(self, count: int) -> list[Event]:
        """The first ``count`` events that have not been taken."""
        events = self.forest.events
        if events is None:
            return []
        taken = events[:count]
        del events[:count]
        return taken

    def snapshot(self, namespace: str) -> SnapshotScan:
        """A listing for readers of events; ``""``: of all namespaces."""
        return self.forest.scan(namespace)

    def cancel(self, ticket: int) -> None:
        """Called when the client of a waiting call has gone. A removal is carried out even so."""
        self.waiting.cancel(ticket)
        self.asking.cancel(ticket)
        self.chains.cancel(ticket)

    def set_tenants(
        self, rules: Sequence[TenantRule], matcher: TenantMatcher | None = None
    ) -> None:
        """Follows other rules; only for a master that was made with ``tenants``.

        Args:
            matcher: made of ``rules`` elsewhere, because thousands of patterns take a while.

        Raises:
            InvalidArgumentError: they contradict each other, or too many tenants have come and
                gone; nothing has changed.
        """
        tenants = self.pool.tenants
        tenants.change(rules, matcher or TenantMatcher(rules))
        self.common.jobs.note(background_jobs.MOVE, tenants.moving)
        self.common.space_freed()
        fields: dict[str, str | int] = {"tenants": len(rules), "guarantee": tenants.guarantee}
        self.common.effect(LogClusterEvent("tenants_changed", fields))

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Does all that is due. Calling it too often is harmless."""
        self.forest.begin_step()
        self.nodes.tick(now_ms)
        self.granting.expire(now_ms)
        self.removing.free(now_ms)
        self.keeping.expire(now_ms)
        self.tier.expire_waits(now_ms)
        self.asking.reply(now_ms)
        self.putting.serve_waiting(now_ms)
        self.copying.tick(now_ms)
        tenants = self.pool.tenants
        if tenants.is_short(now_ms):
            capacity = sum([segment.capacity for segment in self.pool.segments.values()])
            fields: dict[str, str | int] = {"guarantee": tenants.guarantee, "pool": capacity}
            self.common.effect(LogClusterEvent("guarantees_exceed_pool", fields))

    @property
    def has_work(self) -> bool:
        """Whether ``work`` should be called soon, between other calls."""
        return self.common.jobs.due != 0

    def work(self, now_ms: int) -> None:
        """Does one bounded slice of the background work."""
        self.forest.begin_step()
        due = self.common.jobs.due
        if due:
            self._jobs[due & -due](now_ms)
