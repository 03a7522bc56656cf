"""All metrics of masters, nodes and clients, from which docs/metrics.md is generated.

Names follow Prometheus: base units, ``_total`` for counters. Metrics of the store begin with
``kvstore_`` and are served by the leader; metrics of one process begin with ``kvstore_master_``,
``kvstore_node_`` or ``kvstore_client_``.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from kvstore.calls import SegmentStatus
from kvstore.calls.described import field_texts, types_of


class Family(NamedTuple):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str
    unit_s: float = 1e-6
    """For a histogram: the unit of its values, in seconds."""


MASTER: Final = (
    Family("kvstore_master_info", "gauge", ("version", "cluster", "scheme"), "Always 1; the labels say what runs, and how its HTTP port is reached: http, https."),
    Family("kvstore_master_is_leader", "gauge", (), "1 if this master leads, or is the only one; 0 if it stands by."),
    Family("kvstore_master_epoch", "gauge", (), "The present or last epoch; grows each time a master takes over."),
    Family("kvstore_master_calls_total", "counter", ("call", "outcome"), "Calls that were answered, by outcome: ok, error."),
    Family("kvstore_master_call_seconds", "histogram", ("call",), "Duration of calls in the master: decoding, answering, encoding, and waiting for room."),
    Family("kvstore_master_step_seconds", "histogram", (), "For how long the loop did one thing: a call, or a slice of background work."),
    Family("kvstore_master_event_loop_lag_seconds", "histogram", (), "How long the loop lets things wait: how much later than planned its timer runs, 20 times a second."),
    Family("kvstore_master_connections", "gauge", ("protocol",), "Open connections of clients and nodes: lane, grpc."),
    Family("kvstore_master_refused_total", "counter", (), "Connections and calls that authentication refused: no identity, a revoked one, or one without the right."),
    Family("kvstore_master_identity_limit_rejections_total", "counter", ("endpoint", "identity"), "Connections to the lane, and calls and requests by gRPC and HTTP, that were refused because the identity held as many as were free. The first one makes the row; of more than 64 identities, the later ones have one without a name."),
    Family("kvstore_master_auth_expiry_timestamp_seconds", "gauge", (), "When this master's certificate ends, in seconds since 1970; no row: without authentication."),
    Family("kvstore_master_file_refused", "gauge", ("setting",), "1 if what this process uses of the file that a setting names (auth, auth_revoked, tenants, http_cert) is not what the file says now: it cannot be used, lacks numbers of the revoked, or its disk hangs. The log says why (file_refused)."),
    Family("kvstore_master_connections_refused_total", "counter", (), "Connections to the lane that were refused: no token, too many, broken protocol."),
    Family("kvstore_master_connections_stalled_total", "counter", (), "Connections to the lane that were cut because the client did not read."),
    Family("kvstore_master_events_total", "counter", (), "Events of this epoch, if asked for: objects that became visible, or are gone."),
    Family("kvstore_master_events_dropped_total", "counter", (), "Of those, the ones that the child for HTTP was too slow for."),
    Family("kvstore_master_elections_won_total", "counter", (), "Terms that this master began as one of several."),
    Family("kvstore_master_leadership_lost_total", "counter", (), "Terms that ended because its lease in etcd was lost."),
    Family("kvstore_master_etcd_failures_total", "counter", (), "Calls to etcd that failed."),
    Family("kvstore_master_log_lines_dropped_total", "counter", (), "Lines of the log that could not be written: a full disk, or a pipe that is closed or not read. Those of the child for HTTP included."),
    Family("kvstore_master_log_lines_suppressed_total", "counter", (), "Lines of the log that were left out because there were too many of one kind. Those of the child for HTTP included."),
)  # fmt: skip

OF_SEGMENT: Final = {
    f"kvstore_segment_{name}_bytes".replace("_size_", "_"): name
    for name, kind in types_of(SegmentStatus).items()
    if kind is int and name not in ("segment_id", "ready_ms")
}
"""Byte metrics by field of a segment."""

STORE: Final = (
    Family("kvstore_nodes", "gauge", ("state",), "Nodes by state: alive, suspect, dead, draining. A dead node disappears at once, a suspect one is alive or dead within seconds."),
    Family("kvstore_dead_nodes_total", "counter", (), "Nodes that were declared dead."),
    Family("kvstore_departed_nodes_total", "counter", (), "Nodes that left: stopped, or drained."),
    *(Family(name, "gauge", ("node", "segment"), field_texts(SegmentStatus)[field]) for name, field in OF_SEGMENT.items()),
    Family("kvstore_namespaces", "gauge", (), "Namespaces that hold objects."),
    Family("kvstore_namespace_objects", "gauge", ("namespace",), "Complete objects of a namespace; the largest 50 namespaces have a row."),
    Family("kvstore_namespace_bytes", "gauge", ("namespace",), "Bytes of a namespace's objects, one replica each; the largest 50 namespaces have a row."),
    Family("kvstore_other_namespaces_objects", "gauge", (), "Complete objects of all namespaces without a row."),
    Family("kvstore_other_namespaces_bytes", "gauge", (), "Bytes of all namespaces without a row."),
    Family("kvstore_under_replicated_objects", "gauge", (), "Objects that have fewer replicas than they were put with."),
    Family("kvstore_missing_objects", "gauge", (), "Objects whose last replica went with its node in the last five minutes: back once it is. An object whose key is put again or removed meanwhile is not missing."),
    Family("kvstore_pinned_objects", "gauge", (), "Objects that pins keep, ancestors included."),
    Family("kvstore_pinned_bytes", "gauge", (), "Bytes of objects that pins keep."),
    Family("kvstore_tenant_bytes", "gauge", ("tenant",), "Bytes of memory that a tenant holds, puts and allocations under way included. Tenant \"\" has what belongs to no other one; without tenants there are no rows."),
    Family("kvstore_tenant_guarantee_bytes", "gauge", ("tenant",), "What the puts of others cannot take from it."),
    Family("kvstore_tenant_limit_bytes", "gauge", ("tenant",), "What it can never exceed; no row: no bound."),
    Family("kvstore_tenant_pinned_bytes", "gauge", ("tenant",), "Bytes of memory that its pins hold."),
    Family("kvstore_tenant_objects", "gauge", ("tenant",), "Its complete objects."),
    Family("kvstore_tenant_evicted_objects_total", "counter", ("tenant", "by"), "Its objects that made room for puts of its own, or of others (drains and repairs included). Room that is made ahead of need counts for the tenants whose puts used it."),
    Family("kvstore_tenant_refused_total", "counter", ("tenant",), "Its puts and pins that a quota refused."),
    Family("kvstore_stored_objects_total", "counter", (), "Objects that were put and became visible."),
    Family("kvstore_stored_bytes_total", "counter", (), "Bytes of these objects."),
    Family("kvstore_matched_objects_total", "counter", (), "Blocks that a match found, of those that were asked for."),
    Family("kvstore_missed_objects_total", "counter", (), "Blocks that a match did not find."),
    Family("kvstore_evicted_objects_total", "counter", (), "Objects that made room for others."),
    Family("kvstore_evicted_bytes_total", "counter", (), "Bytes of these objects."),
    Family("kvstore_eviction_age_seconds", "histogram", (), "How long evicted objects had not been used: what is used again later than that is not found.", 1e-3),
    Family("kvstore_reuse_seconds", "histogram", (), "How long objects had not been used when a call found and leased them. Of a matched chain the last block counts.", 1e-3),
    Family("kvstore_expired_objects_total", "counter", (), "Objects whose time to live ended."),
    Family("kvstore_expired_bytes_total", "counter", (), "Bytes of these objects."),
    Family("kvstore_removed_objects_total", "counter", (), "Objects that were removed by a call."),
    Family("kvstore_lost_objects_total", "counter", (), "Objects whose last replica went with its node, and that were not back, put again, removed or at the end of their lifetime five minutes later."),
    Family("kvstore_corrupt_objects_total", "counter", (), "Objects removed because no replica had good bytes."),
    Family("kvstore_corrupt_replicas_total", "counter", (), "Replicas that clients reported as bad."),
    Family("kvstore_reported_failures_total", "counter", (), "Failed transfers that clients reported."),
    Family("kvstore_duplicate_puts_total", "counter", (), "Objects of puts that were there already."),
    Family("kvstore_overlapping_puts_total", "counter", (), "Objects of puts that another put was writing."),
    Family("kvstore_revoked_puts_total", "counter", (), "Objects that their writers gave up."),
    Family("kvstore_expired_puts_total", "counter", (), "Objects whose writers did not end the put before its deadline."),
    Family("kvstore_queued_puts_total", "counter", (), "Puts that had to wait for room."),
    Family("kvstore_refused_puts_total", "counter", (), "Puts that found no room in time."),
    Family("kvstore_refused_pins_total", "counter", (), "Pins that were above the bound of their namespace, or of all."),
    Family("kvstore_moved_objects_total", "counter", (), "Objects that draining moved to other nodes."),
    Family("kvstore_moved_bytes_total", "counter", (), "Bytes of these objects."),
    Family("kvstore_repaired_objects_total", "counter", (), "Replicas that were made again."),
    Family("kvstore_repaired_bytes_total", "counter", (), "Bytes of these replicas."),
    Family("kvstore_recovered_objects_total", "counter", (), "Objects that nodes reported when they joined and that were taken up."),
    Family("kvstore_refused_claims_total", "counter", (), "Objects that nodes reported and that were refused: removed, replaced, or not whole."),
)  # fmt: skip

NODE: Final = (
    Family("kvstore_node_info", "gauge", ("version", "cluster", "node"), "Always 1; the labels say what runs."),
    Family("kvstore_node_joined", "gauge", (), "1 if a master has this node, 0 while it looks for one."),
    Family("kvstore_node_memory_bytes", "gauge", (), "Size of the node's segment."),
    Family("kvstore_node_connections", "gauge", (), "Open connections to the data port."),
    Family("kvstore_node_connections_total", "counter", (), "Connections that the data port accepted, refused ones included."),
    Family("kvstore_node_refused_connections_total", "counter", ("reason",), "Connections that were refused: busy (too many), hello (another protocol, token, segment or generation)."),
    Family("kvstore_node_bad_requests_total", "counter", (), "Requests outside the segment, of an older generation, or of another protocol."),
    Family("kvstore_node_refused_capabilities_total", "counter", (), "Requests with a range for which the client had no valid capability."),
    Family("kvstore_node_descriptors_sent_total", "counter", (), "Descriptors of the memory that clients of this host got; no row: without authentication."),
    Family("kvstore_node_descriptor_requests_refused_total", "counter", (), "Clients of this host that asked for a descriptor of the memory and got none; no row: without authentication."),
    Family("kvstore_node_identity_limit_rejections_total", "counter", ("endpoint", "identity"), "Data connections and requests by HTTP that were refused because the identity held as many as were free. On the data port it is named by its holder, which kvstore auth show tells. Rows as above."),
    Family("kvstore_node_auth_expiry_timestamp_seconds", "gauge", (), "When this node's certificate ends, in seconds since 1970; no row: without authentication."),
    Family("kvstore_node_file_refused", "gauge", ("setting",), "As kvstore_master_file_refused."),
    Family("kvstore_node_stalls_total", "counter", (), "Connections that were cut because the peer stalled within a request."),
    Family("kvstore_node_requests_total", "counter", ("direction",), "Requests over tcp: read, write. What clients of this host move through shared memory passes no process of the node."),
    Family("kvstore_node_moved_bytes_total", "counter", ("direction",), "Bytes of these requests."),
    Family("kvstore_node_log_lines_dropped_total", "counter", (), "Lines of the log that could not be written: a full disk, or a pipe that is closed or not read."),
    Family("kvstore_node_log_lines_suppressed_total", "counter", (), "Lines of the log that were left out because there were too many of one kind."),
)  # fmt: skip

CLIENT: Final = (
    Family("kvstore_client_events_total", "counter", ("client", "event"), "Events that a client counted: stale_reads, late_reads, avoided_reads, checksum_mismatches, corrupt_objects, unreadable_objects, failed_transfers, put_deadlines_passed, changed_epochs. The first one makes the row."),
    Family("kvstore_client_transfers_total", "counter", ("client", "transport"), "Transfers of a batch of objects, from or to one segment: shm, tcp, mooncake."),
    Family("kvstore_client_placements", "gauge", ("client",), "Leased objects whose place is remembered."),
    Family("kvstore_client_views", "gauge", ("client",), "Views and allocations alive."),
    Family("kvstore_client_epoch", "gauge", ("client",), "The epoch of the master that was last joined; 0 before."),
)  # fmt: skip

OF_COUNTERS: Final = {
    "refused_no_space": "kvstore_refused_puts_total",
    "under_replicated_objects": "kvstore_under_replicated_objects",
    "missing_objects": "kvstore_missing_objects",
    "pinned_objects": "kvstore_pinned_objects",
    "pinned_bytes": "kvstore_pinned_bytes",
}
"""Families of status counters whose name is not ``kvstore_<counter>_total``."""
