"""Times of a master that are not settings."""

from __future__ import annotations

PUT_DEADLINE_MS = 30_000
"""Time between put_start and put_end, enough for gigabytes over a slow network."""

LATE_WRITE_MS = 14_000
"""Quarantine of an expired put beyond ``dead_ms``: until then a socket (10 s) may deliver bytes to
a node that was stopped for less than ``dead_ms``."""

BEATS_UNTIL_DEAD = 12
"""Heartbeats per ``dead_ms``, by default two a second. A node is suspect after four are lost."""

GATHER_MS = 3_000
"""Wait of misses for inventories after a restart: 100,000 objects take about two seconds."""

REPAIR_AFTER_MS = 30_000
"""Delay of repairs after a node's death, at least one lease: it may be restarted."""

ETCD_LEASE_S = 3
"""TTL of the leader's etcd lease, longer than any stall of a healthy host; two at least."""
