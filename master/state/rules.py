"""Times and limits that the master's guarantees depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.repair_queue import RepairRules


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterRules:
    """See ``kvstore.config.MasterConfig`` for the reasons of the settings."""

    lease_ms: int = 10_000
    put_deadline_ms: int = 30_000
    quarantine_ms: int = 20_000
    put_wait_max_ms: int = 30_000
    """Maximum wait of a put for space: three default leases."""
    inventory_wait_ms: int = 0
    """Maximum wait of misses for inventories after the master's start."""
    node_patience_ms: int = 30_000
    """Limit of a live node for claims and wipes, on which removals wait; then it joins again."""
    pending_puts_max: int = 65_536
    """Objects between put_start and put_end: four full batches, about 300 bytes each."""
    waiting_puts_max: int = 256
    """Puts that wait for space, each with its complete batch in memory; further ones fail."""
    bring_ms_max: int = 2_000
    """Maximum wait of a query for objects that are brought from a disk; then they are misses."""
    pinned_max: float = 0.5
    """Share of the pool that the pins of one namespace may hold."""
    pinned_all_max: float = 0.75
    """Share of the pool for all pins, if more than ``pinned_max``."""
    heartbeat_ms: int = 500
    liveness: LivenessRules = field(
        default_factory=lambda: LivenessRules(suspect_ms=2_000, dead_ms=6_000)
    )
    repair: RepairRules = field(default_factory=RepairRules)

    def __post_init__(self) -> None:
        if self.quarantine_ms < self.liveness.dead_ms:
            raise ValueError("quarantine_ms must not be less than dead_ms")
