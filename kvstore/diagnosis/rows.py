"""What can be wrong with a store: one row for each problem.

From these rows come the advice of ``kvstore status``, ``kvstore doctor`` and the dashboard, the
alerts of Prometheus (``deploy/generate.py``), and the runbook, which masters serve and
``docs/runbook.md`` contains. ``diagnosis.problems`` has the conditions in a master's status.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple


class Alert(NamedTuple):
    """An alert of Prometheus, by job: one job is one cluster."""

    severity: str
    """critical, warning or info."""
    expr: str
    summary: str
    """A template of Prometheus."""
    lasts: str = ""
    """How long ``expr`` must hold."""


class Row(NamedTuple):
    name: str
    """Of the alert and of the section of the runbook."""
    means: str
    look_at: str
    advice: str
    """What to do, on one line. Code is between backticks."""
    alert: Alert | None = None
    more: str = ""
    """Further advice, for the runbook alone."""

    @property
    def anchor(self) -> str:
        return self.name.lower()

    @property
    def parts(self) -> Iterator[tuple[str, str]]:
        """The paragraphs of the section of the runbook, with their headings."""
        yield "Means", self.means
        yield "Look at", self.look_at
        yield "Do", f"{self.advice} {self.more}".rstrip()


RECORDS: Final = {
    "kvstore:hit_ratio:30m":
        "sum by (job) (rate(kvstore_matched_objects_total[30m])) / "
        "(sum by (job) (rate(kvstore_matched_objects_total[30m])) + "
        "sum by (job) (rate(kvstore_missed_objects_total[30m])))",
    "kvstore:hit_ratio:1d":
        "sum by (job) (rate(kvstore_matched_objects_total[1d])) / "
        "(sum by (job) (rate(kvstore_matched_objects_total[1d])) + "
        "sum by (job) (rate(kvstore_missed_objects_total[1d])))",
    "kvstore:nodes": 'sum by (job) (kvstore_nodes{state!="dead"})',
    "kvstore:eviction_age_seconds:p50":
        "histogram_quantile(0.5, "
        "sum by (job, le) (rate(kvstore_eviction_age_seconds_bucket[30m])))",
    "kvstore:reuse_seconds:p90":
        "histogram_quantile(0.9, sum by (job, le) (rate(kvstore_reuse_seconds_bucket[30m])))",
}  # fmt: skip
"""Recording rules that the alerts use, by name."""

ROWS: Final = (
    Row(
        "KvstoreNoLeader",
        "No master serves the store. Puts and matches fail after their timeout; reads with a lease "
        "go on. Engines compute what they would have loaded.",
        "Whether the masters run (`up` of their targets). With several masters `kvstore doctor "
        "--master etcd://...` tests each member of the etcd. The masters' logs: "
        "`etcd_unreachable`, `stepped_down why=`, `standing_by leader=`.",
        "Start a master, or repair etcd.",
        Alert(
            "critical",
            # Without any master there is no series at all.
            "max by (job) (kvstore_master_leads) == 0 or absent(kvstore_master_leads)",
            "No master of {{ $labels.job }} leads.", "30s",
        ),
        "Do not restart nodes: they keep their memory and report their objects to the next leader.",
    ),
    Row(
        "KvstoreLeaderChanges",
        "Leaders lose their lease in etcd again and again. Each change interrupts puts for one "
        "lease of objects (10 s by default).",
        "`kvstore_master_etcd_failures_total`; `kvstore_master_loop_late_seconds` of the masters: "
        "one that stalls for longer than `--etcd-lease-ms` loses its lease; the latency of etcd's "
        "disk; processor time that the hypervisor takes away.",
        "Give etcd a disk of its own, and masters a processor of their own.",
        Alert(
            "warning", "sum by (job) (increase(kvstore_master_leads_lost_total[1h])) >= 2.5",
            "Masters of {{ $labels.job }} lost their lease {{ $value | humanize }} times within an "
            "hour.",
        ),
        "If stalls of the host are longer than the lease, raise `--etcd-lease-ms`.",
    ),
    Row(
        "KvstoreNodeDead",
        "A node was silent for 6 s, or its connection broke and clients could not reach it either. "
        "Objects without a replica on another node are not found until it returns.",
        "The master's log, `node_dead node= why=`: `silent` (host or network down, process "
        "stopped), `broken` (process ended), `replaced` (another process joined under its name). "
        "On its host: the node's last log lines and the kernel's log (out of memory).",
        "Start the node again on its host, with the same --name and memory. If the host is gone, "
        "start one elsewhere.",
        Alert(
            "critical",
            # A dead node disappears from kvstore_nodes: the number is compared with that before.
            "kvstore:nodes < max_over_time(kvstore:nodes[6h]) "
            "and sum by (job) (increase(kvstore_dead_nodes_total[6h])) > 0.5",
            "{{ $labels.job }} has {{ $value }} nodes: a node died and has not come back.", "1m",
        ),
        "If its log has `entry_gone`, another program removed its memory (systemd's `RemoveIPC`): "
        "the objects are lost. The alert ends when there are as many nodes as before, or in 6 h.",
    ),
    Row(
        "KvstoreNodeSuspect",
        "A node does not answer for more than 2 s at a time, or clients report failed transfers. "
        "Reads from it are slow or fail; new objects go to other nodes.",
        "`kvstore status`, which shows how long each node has been silent; `kvstore doctor` on a "
        "client's host, which tests the data port of every node; `kvstore_node_stalls_total`; "
        "load, swapping and network of the host.",
        "Open the node's data port between all hosts, and look at its host's load and network. To "
        "take it out without a loss: `kvstore drain NODE`",
        Alert(
            "warning",
            # A node is suspect for seconds; a scrape may miss that, so reports count, too.
            'sum by (job) (max_over_time(kvstore_nodes{state="suspect"}[5m])) > 0 '
            "or sum by (job) (increase(kvstore_reported_failures_total[5m])) > 10",
            "A node of {{ $labels.job }} is silent, or clients cannot reach it.", "2m",
        ),
    ),
    Row(
        "KvstoreNodeAlone",
        "The process of a node runs, but no master has accepted it. Its memory is not used.",
        "The node's log: `waiting_for_master address= reason=`. A node that a master refuses "
        "(another cluster or release, a name in use) ends with that error.",
        "`kvstore-node --master HOST:PORT --memory 4GiB`",
        Alert(
            "warning", "kvstore_node_joined == 0",
            "The node at {{ $labels.instance }} finds no master.", "2m",
        ),
        "Correct `--master` or `--cluster` and start the node again. Its memory stays.",
    ),
    Row(
        "KvstoreCorruptMemory",
        "Clients found bytes that do not match their checksum. No client returned them: another "
        "replica was used, or the object was removed.",
        "The master's log, `corrupt_object ... nodes=`: is it always the same node? Which programs "
        "use the store on its host?",
        "Look for memory errors on the node's host: `dmesg`, `ras-mc-ctl --errors`",
        Alert(
            "critical", "sum by (job) (increase(kvstore_corrupt_replicas_total[1h])) > 0",
            "Clients of {{ $labels.job }} found {{ $value | humanize }} replicas with wrong bytes.",
        ),
        "If there are errors, drain the node and have the memory module replaced. If not, a "
        "program of that host wrote to the pool: into memory from `allocate` after the put, "
        "through a tensor of `get(device=…, copy=False)`, or to `/dev/shm` itself.",
    ),
    Row(
        "KvstoreUnderReplicated",
        "Objects have fewer replicas than were requested. If their nodes die now, they are lost.",
        "Free memory by node: repair evicts nothing, and leaves a 16th of each segment free; "
        "`kvstore_repaired_objects_total`; the number of nodes: each replica needs one of its own.",
        "Start the missing node again, or add one.",
        Alert(
            "warning", "max by (job) (kvstore_under_replicated_objects) > 0",
            "{{ $value }} objects of {{ $labels.job }} lack a replica for half an hour.", "30m",
        ),
    ),
    Row(
        "KvstorePutsRefused",
        "Puts waited for memory and got none: all of it is leased, pinned or not free yet. Engines "
        "compute these blocks again later.",
        "Pins (`kvstore_pinned_bytes`); memory that is pending, quarantined or awaits its reclaim "
        "(dashboard, *Memory by use*); the largest free extent, if single objects are large.",
        "Add memory (a node), remove pins (`kvstore unpin`), or raise at_most of the tenant whose "
        "puts are refused.",
        Alert(
            "warning", "sum by (job) (rate(kvstore_refused_puts_total[10m])) > 0.01",
            "Puts into {{ $labels.job }} find no memory ({{ $value | humanize }} a second).", "5m",
        ),
        "If readers are short, lower `--lease-ms`. If guarantees of tenants are more than the "
        "pool, lower them.",
    ),
    Row(
        "KvstoreMemoryHeld",
        "Memory is neither free nor holds an object. Pending: writers do not finish their puts. "
        "Quarantined: writers died and may still write. Awaiting reclaim: readers may have leases, "
        "or a node does not wipe headers in time.",
        "Which part is large; `kvstore_expired_puts_total`; suspect nodes.",
        "Find the writers that die: the engines' logs.",
        Alert(
            "warning",
            "(sum by (job) (kvstore_segment_pending_bytes) "
            "+ sum by (job) (kvstore_segment_quarantined_bytes) "
            "+ sum by (job) (kvstore_segment_reclaim_bytes)) "
            "/ sum by (job) (kvstore_segment_bytes) > 0.25",
            "{{ $value | humanizePercentage }} of the memory of {{ $labels.job }} holds no object "
            "and is not free.", "10m",
        ),
        "Memory in quarantine is free 20 s after the put's deadline (`--quarantine-ms`).",
    ),
    Row(
        "KvstoreMemoryPinned",
        "Pins hold more than half of the memory. Only the rest can be evicted.",
        "`kvstore status`: pinned bytes by namespace.",
        "`kvstore unpin KEY`, or add memory.",
        Alert(
            "warning",
            "max by (job) (kvstore_pinned_bytes) / sum by (job) (kvstore_segment_bytes) > 0.5",
            "Pins hold {{ $value | humanizePercentage }} of the memory of {{ $labels.job }}.",
            "10m",
        ),
        "Let programs pin for a shorter time.",
    ),
    Row(
        "KvstoreHitRatioLow",
        "The hit ratio of half an hour is less than half of the last day's, or an engine finds "
        "nothing. Engines compute what they loaded before.",
        "Did a node die, or was the store cleared (`kvstore_removed_objects_total`)? Do engines "
        "have another model, page size or precision? They then use other namespaces "
        "(`kvstore_namespaces` grows). Are evictions younger than before?",
        "`kvstore why`",
        Alert(
            "warning",
            # Of a busy store only: at least 10 blocks a second.
            "kvstore:hit_ratio:30m < 0.5 * kvstore:hit_ratio:1d "
            "and (sum by (job) (rate(kvstore_matched_objects_total[30m])) "
            "+ sum by (job) (rate(kvstore_missed_objects_total[30m]))) > 10",
            "{{ $labels.job }} finds {{ $value | humanizePercentage }} of the blocks: less than "
            "half of the last day's ratio.", "15m",
        ),
        "After a loss wait until the store is full again.",
    ),
    Row(
        "KvstoreEvictionsTooYoung",
        "Objects are evicted soon after their last use. Conversations that pause for longer are "
        "computed again.",
        "*Age at eviction* and *Time between uses* in the dashboard; `kvstore_stored_bytes_total`: "
        "did an engine or a benchmark begin to put?",
        "Add memory: a node.",
        Alert(
            "warning", "kvstore:eviction_age_seconds:p50 < 300",
            "{{ $labels.job }} evicts half of the objects within {{ $value | humanizeDuration }} "
            "of their last use.", "15m",
        ),
        "Twice the memory evicts at about twice the age. Change the bound in `alerts.yml` to the "
        "pauses of your traffic.",
    ),
    Row(
        "KvstoreCacheTooSmall",
        "A tenth of the uses come after more than half of the age at which objects are evicted. "
        "Uses a little later than that miss, and are not counted.",
        "*Time between uses*: if its 90th percentile is close to the age at eviction, more memory "
        "brings much.",
        "Plan memory for the age at eviction that you want: bytes stored a second times that age.",
        Alert(
            "info", "kvstore:reuse_seconds:p90 > 0.5 * kvstore:eviction_age_seconds:p50",
            "More memory would raise the hit ratio of {{ $labels.job }}.", "1h",
        ),
    ),
    Row(
        "KvstoreLoopSlow",
        "One call in a hundred waits more than 50 ms before the master processes it. From 2 s on, "
        "nodes count as silent.",
        "`kvstore_master_step_seconds`, `kvstore_master_call_seconds` by call, calls per second; "
        "processor time of the master; whether its memory is swapped out.",
        "Give the master a processor of its own.",
        Alert(
            "warning",
            "histogram_quantile(0.99, sum by (job, instance, le) "
            "(rate(kvstore_master_loop_late_seconds_bucket[5m]))) > 0.05",
            "Calls wait {{ $value | humanizeDuration }} for the loop of the master at "
            "{{ $labels.instance }}.", "10m",
        ),
        "If there are many calls, let clients put and match in larger batches.",
    ),
    Row(
        "KvstoreConnectionsRefused",
        "A master or node refuses connections. At the lane: too many, a wrong token, another "
        "protocol. At a node, by `reason`: `busy` (too many), `hello` (another protocol, token or "
        "segment). An identity may also hold too many: `kvstore_master_share_refused_total`.",
        "The limit of open files; port scanners and health checks of that port.",
        "The log of the process names the peers. Raise `ulimit -n`, or point health checks at "
        "/healthz of the HTTP port.",
        Alert(
            "warning",
            "sum by (job, instance) (rate(kvstore_master_connections_refused_total[10m])) > 0.1 "
            "or sum by (job, instance) (rate(kvstore_node_refused_connections_total[10m])) > 0.1",
            "The process at {{ $labels.instance }} refuses {{ $value | humanize }} connections a "
            "second.", "10m",
        ),
    ),
    Row(
        "KvstoreRefusals",
        "A master refuses peers without an identity or with a revoked one, or calls without the "
        "right. Engines count such calls as misses. Failed TLS handshakes are not in this number.",
        "The engine's log, `refused_by_the_store`; `kvstore doctor` with the engine's file, which "
        "shows its rights.",
        "The master's log names them (refused count= reason=): issue a file with the right "
        "(`kvstore auth issue`), or stop the process.",
        Alert(
            "warning", "sum by (job, instance) (rate(kvstore_master_refused_total[10m])) > 0.1",
            "The master at {{ $labels.instance }} refuses {{ $value | humanize }} peers or calls a "
            "second.", "5m",
        ),
        "If the process is unknown, revoke the identity (`kvstore auth revoke NAME`).",
    ),
    Row(
        "KvstoreIdentityEnds",
        "The certificate of a master or node ends within 14 days. Then its peers refuse it, and "
        "engines compute. No metric shows the certificates of engines.",
        "The logs of engines for `auth_ends_soon`; `kvstore doctor` with a file; `file_refused` in "
        "the log, where something renews the file.",
        "Issue the file anew (`kvstore auth issue`), and copy it over the old one.",
        Alert(
            "warning",
            "min by (job, instance) (kvstore_master_auth_expiry_timestamp_seconds "
            "or kvstore_node_auth_expiry_timestamp_seconds) - time() < 14 * 86400",
            "The certificate of the process at {{ $labels.instance }} ends in "
            "{{ $value | humanizeDuration }}.", "10m",
        ),
        "No process needs a restart.",
    ),
    Row(
        "KvstoreBreakerOpen",
        "In the proxy, an engine failed several requests in a row and gets none for a while. In "
        "vLLM, lookups in the store failed, and requests are computed without it.",
        "In the proxy: the engine's log and `/health`. In vLLM: `lookups_failed` and "
        "`lookups_late`; whether the store has a leader, and a slow loop.",
        "Repair what is behind the breaker. It closes with the first request that succeeds.",
        Alert(
            "warning", "kvstore_proxy_instance_breaker == 2 or vllm:kvstore_breaker_open == 1",
            "A breaker at {{ $labels.instance }} ({{ $labels.job }}) is open.", "1m",
        ),
    ),
    Row(
        "Draining",
        "A node gets no new objects, and its objects are copied to other nodes.",
        "`kvstore status`: how much is left on it. `kept`: other nodes have no space for the rest.",
        "Wait until it has left, or: `kvstore drain NODE --undo`",
    ),
    Row(
        "EventsDropped",
        "A subscriber of events read too slowly, and begins again with a snapshot. Blocks are not "
        "affected.",
        "Which processes follow events (a router, a proxy), and their processor time.",
        "Let subscribers read faster, or subscribe to fewer streams.",
    ),
)  # fmt: skip

ADVICE: Final = {row.name: row.advice.replace("`", "") for row in ROWS}
