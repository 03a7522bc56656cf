"""The times and bounds that the master's promises depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.repair_queue import RepairRules


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterRules:
    """See the module; ``kvstore.config.MasterConfig`` has the reasons for those that it names."""

    lease_ms: int = 10_000
    put_deadline_ms: int = 30_000
    quarantine_ms: int = 20_000
    put_wait_max_ms: int = 30_000
    """The longest that a put may wait for space: three default leases."""
    inventory_wait_ms: int = 0
    """How long after the master's start misses may wait for nodes to report their objects."""
    node_patience_ms: int = 30_000
    """A living node that for so long has sent no claims, or has not carried out an order to wipe,
    must join anew: removals wait for both."""
    pending_puts_max: int = 65_536
    """Objects between put_start and put_end at once: four full batches, some 300 bytes of memory
    each."""
    waiting_puts_max: int = 256
    """Puts that may wait for space at once; further ones fail at once. Each waits with its complete
    batch in memory."""
    pinned_max: float = 0.5
    """Share of the pool that the pins of one namespace may hold."""
    pinned_all_max: float = 0.75
    """Share of the pool that all pins may hold, if it is more than ``pinned_max``; the rest stays
    for puts."""
    heartbeat_ms: int = 500
    liveness: LivenessRules = field(
        default_factory=lambda: LivenessRules(suspect_ms=2_000, dead_ms=6_000)
    )
    repair: RepairRules = field(default_factory=RepairRules)

    def __post_init__(self) -> None:
        if self.quarantine_ms < self.liveness.dead_ms:
            raise ValueError("quarantine_ms must not be less than dead_ms")
