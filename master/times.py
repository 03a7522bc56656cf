"""The times of a master that no setting names, and the reasons for them."""

from __future__ import annotations

PUT_DEADLINE_MS = 30_000
"""How long a writer has between put_start and put_end: enough for gigabytes over a slow network.
Memory of a writer that died is unused that long."""

LATE_WRITE_MS = 14_000
"""How much longer than ``dead_ms`` memory of an expired put stays unused after its deadline: a
socket may hold bytes for 10 s, which then reach a node that is stopped for less than ``dead_ms``.
They must not land in memory that belongs to another put by then."""

BEATS_UNTIL_DEAD = 12
"""Heartbeats that a node sends in ``dead_ms``, two a second by default: they cost nothing. A node
is suspect when four are lost, because a single late one is no sign."""

GATHER_MS = 3_000
"""How long after a restart a get that would be a miss waits for nodes to report their objects:
4 GiB in 100,000 objects take about two seconds."""

REPAIR_AFTER_MS = 30_000
"""How long after a node's death an object that was put with several replicas gets another one; a
lease at least. A node that is only started again comes back with its own."""

ETCD_LEASE_S = 3
"""How long etcd waits for a leader that is silent before another one may lead: longer than any
stall of a healthy host. etcd counts whole seconds, and takes no less than two."""
