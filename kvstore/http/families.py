"""All metrics of masters, nodes and clients, from which docs/metrics.md is generated.

Names follow Prometheus: base units, ``_total`` for counters. Metrics of the store begin with
``kvstore_`` and are served by the leader; metrics of one process begin with ``kvstore_master_``,
``kvstore_node_`` or ``kvstore_client_``.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from kvstore.calls import DiskStatus, SegmentStatus
from kvstore.calls.described import field_texts, types_of


class Family(NamedTuple):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str
    unit_s: float = 1e-6
    """For a histogram: the unit of its values, in seconds."""


MASTER: Final = (
    Family("kvstore_master_info", "gauge", ("version", "cluster", "scheme"), "Always 1; the labels have the release, the cluster and the scheme of the HTTP port: http, https."),
    Family("kvstore_master_is_leader", "gauge", (), "1 if this master is the leader or the only master; 0 if it is a standby."),
    Family("kvstore_master_epoch", "gauge", (), "The current or last epoch; grows with each takeover."),
    Family("kvstore_master_calls_total", "counter", ("call", "outcome"), "Completed calls, by outcome: ok, error."),
    Family("kvstore_master_call_seconds", "histogram", ("call",), "Duration of calls in the master: decoding, processing, encoding, and waiting for space."),
    Family("kvstore_master_step_seconds", "histogram", (), "Duration of one step of the event loop: a call, or a slice of background work."),
    Family("kvstore_master_event_loop_lag_seconds", "histogram", (), "Delay of a timer that fires 20 times a second."),
    Family("kvstore_master_connections", "gauge", (), "Open connections of clients and nodes to the lane."),
    Family("kvstore_master_refused_total", "counter", (), "Connections and calls refused by authentication: no identity, a revoked one, or a missing permission."),
    Family("kvstore_master_auth_expiry_timestamp_seconds", "gauge", (), "Expiry of this master's certificate, in seconds since 1970; no row: no authentication."),
    Family("kvstore_master_file_refused", "gauge", ("setting",), "1 if what this process uses of the file that a setting names (auth, auth_revoked, tenants, http_cert) is not what the file says now: it cannot be used, lacks numbers of the revoked, or its disk hangs. The log says why (file_refused)."),
    Family("kvstore_master_connections_refused_total", "counter", (), "Refused connections to the lane: no lane token, too many, protocol error."),
    Family("kvstore_master_connections_stalled_total", "counter", (), "Connections to the lane closed because the client did not read."),
    Family("kvstore_master_events_total", "counter", (), "Object events of this epoch, if enabled: objects stored and removed."),
    Family("kvstore_master_events_dropped_total", "counter", (), "Events dropped because the HTTP process did not keep up."),
    Family("kvstore_master_elections_won_total", "counter", (), "Terms that this master started after an election."),
    Family("kvstore_master_leadership_lost_total", "counter", (), "Terms that ended because the etcd lease was lost."),
    Family("kvstore_master_etcd_failures_total", "counter", (), "Calls to etcd that failed."),
    Family("kvstore_master_log_lines_dropped_total", "counter", (), "Log lines that could not be written: a full disk, or a pipe that is closed or not read. Includes the HTTP process."),
    Family("kvstore_master_log_lines_suppressed_total", "counter", (), "Log lines suppressed by the rate limit. Includes the HTTP process."),
)  # fmt: skip

OF_SEGMENT: Final = {
    f"kvstore_segment_{name}_bytes".replace("_size_", "_"): name
    for name, kind in types_of(SegmentStatus).items()
    if kind is int and name not in ("segment_id", "ready_ms")
}
"""Byte metrics by field of a segment."""

OF_DISK: Final = {
    "size": "kvstore_disk_bytes",
    "used": "kvstore_disk_used_bytes",
    "objects": "kvstore_disk_objects",
    "written": "kvstore_disk_written_bytes_total",
    "brought": "kvstore_disk_brought_bytes_total",
    "budget": "kvstore_disk_budget_bytes",
    "failed": "kvstore_disk_failed",
}
"""Metrics by field of a disk."""

STORE: Final = (
    Family("kvstore_nodes", "gauge", ("state",), "Nodes by state: alive, suspect, dead, draining. Suspect nodes are alive or dead within seconds. Dead: died within six hours, as far as this leader knows, and no node of the name has joined since."),
    Family("kvstore_dead_nodes_total", "counter", (), "Nodes that were declared dead."),
    Family("kvstore_departed_nodes_total", "counter", (), "Departed nodes: stopped or drained."),
    *(Family(name, "gauge", ("node", "segment"), field_texts(SegmentStatus)[field]) for name, field in OF_SEGMENT.items()),
    *(
        Family(name, "counter" if name.endswith("_total") else "gauge", ("node", "disk"), field_texts(DiskStatus)[field])
        for field, name in OF_DISK.items()
    ),
    Family("kvstore_disk_evicted_objects_total", "counter", (), "Copies evicted from disks to free space."),
    Family("kvstore_disk_brought_objects_total", "counter", (), "Objects brought from disks into memory."),
    Family("kvstore_disk_refused_objects_total", "counter", (), "Objects evicted without a copy, because the budget for writes was too small or they had a TTL."),
    Family("kvstore_disk_bring_refused_objects_total", "counter", (), "Objects on disks that were misses, because too many others were on their way into memory."),
    Family("kvstore_disk_bring_timeouts_total", "counter", (), "Queries for objects on disks that were answered before all had been brought."),
    Family("kvstore_namespaces", "gauge", (), "Namespaces with objects."),
    Family("kvstore_namespace_objects", "gauge", ("namespace",), "Complete objects of a namespace; the largest 50 namespaces have a row."),
    Family("kvstore_namespace_bytes", "gauge", ("namespace",), "Bytes of a namespace's objects, one replica each; the largest 50 namespaces have a row."),
    Family("kvstore_other_namespaces_objects", "gauge", (), "Complete objects of all namespaces without a row."),
    Family("kvstore_other_namespaces_bytes", "gauge", (), "Bytes of all namespaces without a row."),
    Family("kvstore_under_replicated_objects", "gauge", (), "Objects with fewer replicas than requested by their put."),
    Family("kvstore_missing_objects", "gauge", (), "Objects whose last replica was on a node that departed in the last five minutes. They return with the node. Includes objects that were put again, removed or expired since."),
    Family("kvstore_pinned_objects", "gauge", (), "Pinned objects, ancestors included."),
    Family("kvstore_pinned_bytes", "gauge", (), "Bytes of pinned objects."),
    Family("kvstore_tenant_bytes", "gauge", ("tenant",), "Memory of a tenant, puts and allocations in progress included. Tenant \"\" has everything without a tenant; no rows without tenants."),
    Family("kvstore_tenant_guarantee_bytes", "gauge", ("tenant",), "Memory that puts of other tenants cannot evict."),
    Family("kvstore_tenant_limit_bytes", "gauge", ("tenant",), "Maximum memory; no row: no limit."),
    Family("kvstore_tenant_disk_bytes", "gauge", ("tenant",), "Its bytes on disks."),
    Family("kvstore_tenant_disk_limit_bytes", "gauge", ("tenant",), "Maximum bytes on disks; no row: no limit."),
    Family("kvstore_tenant_pinned_bytes", "gauge", ("tenant",), "Memory of its pinned objects."),
    Family("kvstore_tenant_objects", "gauge", ("tenant",), "Its complete objects."),
    Family("kvstore_tenant_evicted_objects_total", "counter", ("tenant", "by"), "Its objects that made room for puts of its own, or of others (drains and repairs included). Room that is made ahead of need counts for the tenants whose puts used it."),
    Family("kvstore_tenant_refused_total", "counter", ("tenant",), "Its puts, pins and writes to disks rejected by a quota."),
    Family("kvstore_stored_objects_total", "counter", (), "Stored objects."),
    Family("kvstore_stored_bytes_total", "counter", (), "Bytes of these objects."),
    Family("kvstore_matched_objects_total", "counter", (), "Requested blocks that matches found."),
    Family("kvstore_missed_objects_total", "counter", (), "Requested blocks that matches did not find."),
    Family("kvstore_evicted_objects_total", "counter", (), "Objects evicted to free space."),
    Family("kvstore_evicted_bytes_total", "counter", (), "Bytes of these objects."),
    Family("kvstore_hints_total", "counter", ("action", "outcome"), "Hints of clients: retain, release, demote, prefetch. clipped: retained for a shorter time than requested; missing: no such object; ignored: other chains continue it, or there is nothing to do."),
    Family("kvstore_hinted_found_total", "counter", ("hint",), "Objects found by their next use: retained ones, and released ones, whose hint was wrong."),
    Family("kvstore_retained_unused_total", "counter", (), "Objects of retained chains that expired or were evicted without a use."),
    Family("kvstore_eviction_age_seconds", "histogram", (), "Idle time of objects at their eviction: later reuse misses.", 1e-3),
    Family("kvstore_reuse_seconds", "histogram", (), "Idle time of objects when a call found and leased them. Of a matched chain the last block counts.", 1e-3),
    Family("kvstore_expired_objects_total", "counter", (), "Objects whose TTL expired."),
    Family("kvstore_expired_bytes_total", "counter", (), "Bytes of these objects."),
    Family("kvstore_removed_objects_total", "counter", (), "Objects removed by a call."),
    Family("kvstore_lost_objects_total", "counter", (), "Objects whose last replica was on a departed node, and that were not back five minutes later. Includes objects that were put again, removed or expired in that time."),
    Family("kvstore_corrupt_objects_total", "counter", (), "Objects removed because no replica was intact."),
    Family("kvstore_corrupt_replicas_total", "counter", (), "Replicas that clients reported as corrupt."),
    Family("kvstore_reported_failures_total", "counter", (), "Failed transfers that clients reported."),
    Family("kvstore_duplicate_puts_total", "counter", (), "Objects of puts that were already stored."),
    Family("kvstore_overlapping_puts_total", "counter", (), "Objects of puts that another put was writing."),
    Family("kvstore_revoked_puts_total", "counter", (), "Objects whose writers revoked the put."),
    Family("kvstore_expired_puts_total", "counter", (), "Objects whose writers did not end the put before its deadline."),
    Family("kvstore_queued_puts_total", "counter", (), "Puts that waited for space."),
    Family("kvstore_refused_puts_total", "counter", ("cause",), "Puts that found no space in time, by the cause that their error names."),
    Family("kvstore_refused_pins_total", "counter", (), "Pins above the limit of their namespace, or of all."),
    Family("kvstore_moved_objects_total", "counter", (), "Objects that draining moved to other nodes."),
    Family("kvstore_moved_bytes_total", "counter", (), "Bytes of these objects."),
    Family("kvstore_repaired_objects_total", "counter", (), "Replicas restored by repairs."),
    Family("kvstore_repaired_bytes_total", "counter", (), "Bytes of these replicas."),
    Family("kvstore_recovered_objects_total", "counter", (), "Objects reported by joining nodes and accepted."),
    Family("kvstore_refused_claims_total", "counter", (), "Objects reported by nodes and rejected: removed, replaced or incomplete."),
)  # fmt: skip

NODE: Final = (
    Family("kvstore_node_info", "gauge", ("version", "cluster", "node"), "Always 1; the labels have the release, the cluster and the node."),
    Family("kvstore_node_joined", "gauge", (), "1 while the node is joined to a master."),
    Family("kvstore_node_memory_bytes", "gauge", (), "Size of the node's segment."),
    Family("kvstore_node_connections", "gauge", (), "Open connections to the data port."),
    Family("kvstore_node_connections_total", "counter", (), "Connections that the data port accepted, refused ones included."),
    Family("kvstore_node_refused_connections_total", "counter", ("reason",), "Refused connections: busy (too many), hello (another protocol, token, segment or generation)."),
    Family("kvstore_node_bad_requests_total", "counter", (), "Requests outside the segment, of an older generation, or of another protocol."),
    Family("kvstore_node_refused_capabilities_total", "counter", (), "Requests with a range without a valid capability."),
    Family("kvstore_node_descriptors_sent_total", "counter", (), "File descriptors of the memory passed to clients of this host; no row: no authentication."),
    Family("kvstore_node_descriptor_requests_refused_total", "counter", (), "Refused requests of clients of this host for a file descriptor of the memory; no row: no authentication."),
    Family("kvstore_node_auth_expiry_timestamp_seconds", "gauge", (), "Expiry of this node's certificate, in seconds since 1970; no row: no authentication."),
    Family("kvstore_node_file_refused", "gauge", ("setting",), "As kvstore_master_file_refused."),
    Family("kvstore_node_stalls_total", "counter", (), "Connections closed because the peer stalled within a request."),
    Family("kvstore_node_requests_total", "counter", ("direction",), "Requests over tcp: read, write. Shared-memory transfers on this host involve no process of the node."),
    Family("kvstore_node_moved_bytes_total", "counter", ("direction",), "Bytes of these requests."),
    Family("kvstore_node_log_lines_dropped_total", "counter", (), "Log lines that could not be written: a full disk, or a pipe that is closed or not read."),
    Family("kvstore_node_log_lines_suppressed_total", "counter", (), "Log lines suppressed by the rate limit."),
)  # fmt: skip

CLIENT: Final = (
    Family("kvstore_client_events_total", "counter", ("client", "event"), "Events that a client counted: stale_reads, late_reads, avoided_reads, checksum_mismatches, corrupt_objects, unreadable_objects, failed_transfers, put_deadlines_passed, changed_epochs. The first one makes the row."),
    Family("kvstore_client_transfers_total", "counter", ("client", "transport"), "Transfers of a batch of objects, from or to one segment: shm, tcp, mooncake."),
    Family("kvstore_client_placements", "gauge", ("client",), "Leased objects in the location cache."),
    Family("kvstore_client_views", "gauge", ("client",), "Live views and allocations."),
    Family("kvstore_client_epoch", "gauge", ("client",), "The epoch of the last joined master; 0: none."),
)  # fmt: skip

OF_COUNTERS: Final = {
    "under_replicated_objects": "kvstore_under_replicated_objects",
    "missing_objects": "kvstore_missing_objects",
    "pinned_objects": "kvstore_pinned_objects",
    "pinned_bytes": "kvstore_pinned_bytes",
}
"""Families of status counters whose name is not ``kvstore_<counter>_total``."""
