"""Gathers the evidence for ``diagnosis.why``: the traffic that the master remembers, the fleet
records of engines, and the state of single objects."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.calls import (
    ClientTraffic,
    ClusterStatus,
    MissedKey,
    NamespaceTraffic,
    TrafficReport,
)
from kvstore.calls.fleet_records import RECORDS_MAX, FleetRecord, fleets_of, record_keys, records_of
from kvstore.console.diagnostics.why import (
    Cause,
    EngineGroup,
    Evidence,
    diagnose,
    expected_to_share,
    parties_of,
    select,
)
from kvstore.errors import KVStoreError, PermissionDeniedError
from kvstore.limits import Namespace, tenant_of
from kvstore.runtime.formatting import sanitize

if TYPE_CHECKING:
    from kvstore.client.client import Client

PARTIES_LOOKED_AT: Final = 8
"""Engine groups whose single objects are inspected."""

KEYS_LOOKED_FOR: Final = 2
"""Missed keys of a namespace that are looked up in others."""

NAMESPACES_LOOKED_IN: Final = 32
NAMESPACES_OF_TENANT: Final = 128
"""Namespaces that a client of one tenant requests, one call each."""

PARTIES_SHOWN: Final = 32
CAUSES_SHOWN: Final = 32
CLIENTS_SHOWN: Final = 3
"""Writers, and readers, of each engine group."""

OBJECTS_LOOKED_AT: Final = 1_000
"""Objects of a namespace that are checked for missing ancestors: one batch."""


class Explanation(NamedTuple):
    uptime_ms: int
    """Time since the master's start; it remembers nothing from before."""
    clients: list[EngineGroup]
    groups: list[EngineGroup]
    """The groups to explain, the last used first."""
    causes: list[Cause]
    notes: list[str]
    """What hints did, and evidence that was not available."""


class GroupReport(NamedTuple):
    """Engines that share blocks, or a namespace without a fleet record."""

    name: str
    engine: str
    """Empty: no fleet record."""
    model: str
    fingerprint: str
    namespaces: Sequence[str]
    objects: int
    size: int
    state_objects: int
    """Objects that are recurrent states."""
    state_size: int
    requested_keys: int
    found: int
    """Keys found, of ``requested_keys``."""
    evicted: int
    writers: Sequence[ClientTraffic]
    """The last clients that put."""
    readers: Sequence[ClientTraffic]
    """The last clients that looked up keys."""
    missed: MissedKey | None


class Report(NamedTuple):
    """The causes, problems first; and the engine groups, the last used first."""

    uptime_ms: int
    """Uptime of the master, which remembers nothing from before."""
    causes: Sequence[Cause]
    groups: Sequence[GroupReport]
    others: int
    """Number of further groups."""
    notes: Sequence[str]
    """What hints did, and evidence that was not available."""


def report_of(found: Explanation) -> Report:
    """Return the bounded report for programs: JSON of ``kvstore why`` and of HTTP."""
    parties, others = found.groups[:PARTIES_SHOWN], len(found.groups[PARTIES_SHOWN:])
    described = [_group_report(party) for party in parties]
    return Report(found.uptime_ms, found.causes[:CAUSES_SHOWN], described, others, found.notes)


def _group_report(party: EngineGroup) -> GroupReport:
    record, misses = party.record, party.misses
    return GroupReport(
        name=party.name,
        engine=record.engine if record else "",
        model=record.model if record else "",
        fingerprint=record.fingerprint if record else "",
        namespaces=party.namespaces,
        objects=party.objects,
        size=party.size,
        state_objects=sum(space.objects for space in party.states),
        state_size=sum(space.size for space in party.states),
        requested_keys=party.requested_keys,
        found=party.found,
        evicted=party.evicted,
        writers=party.writers[:CLIENTS_SHOWN],
        readers=party.readers[:CLIENTS_SHOWN],
        missed=misses[0] if misses else None,
    )


def explain(
    client: Client, status: ClusterStatus, *, namespace: str = "", model: str = ""
) -> Explanation:
    """Explain cache misses in a namespace, of a model, or (without both) of all.

    Args:
        status: of the store, as far as the caller may see it.

    Raises:
        PermissionDeniedError: the caller may see neither all namespaces nor the requested one.
        KVStoreError: the store did not answer.
    """
    notes = store_notes(status)
    records = _records(client, status, notes)
    report = _traffic(client, namespace, _of_tenant(client, status, records), notes)
    evidence = Evidence(
        uptime_ms=report.uptime_ms,
        nodes=sum(node.state in ("alive", "draining") for node in status.nodes),
        spaces=[*report.namespaces, *_silent(report, status)],
        records=records,
    )
    everyone = parties_of(evidence.spaces, evidence.records)
    chosen = select(everyone, namespace=namespace, model=model)
    chosen.sort(key=_last_used)
    _inspect_objects(client, evidence, chosen, everyone)
    return Explanation(
        evidence.uptime_ms, everyone, chosen, diagnose(evidence, chosen, everyone), notes
    )


def _traffic(
    client: Client, namespace: str, ours: Sequence[str], notes: list[str]
) -> TrafficReport:
    """Return the traffic of all namespaces, else of the requested one, else of the tenant's."""
    try:
        return client.traffic()
    except PermissionDeniedError:
        names = [namespace] if namespace else ours
        if not names:
            raise
        reports = [client.traffic(name) for name in names]
        notes.append("other namespaces are not looked at: that needs the role admin")
        return reports[0]._replace(
            namespaces=[row for report in reports for row in report.namespaces]
        )


def _of_tenant(client: Client, status: ClusterStatus, records: Sequence[FleetRecord]) -> list[str]:
    """Return namespaces of the client's tenant, those that its engines name first."""
    tenant = client.config.tenant
    names = [name for record in records for name in record.namespaces]
    names += [row.name for row in status.namespaces if tenant_of(row.name) == tenant]
    return list(dict.fromkeys(names))[:NAMESPACES_OF_TENANT] if tenant else []


def _silent(report: TrafficReport, status: ClusterStatus) -> list[NamespaceTraffic]:
    """Return namespaces that hold objects, but have no remembered traffic."""
    seen = {space.name for space in report.namespaces}
    return [
        NamespaceTraffic(row.name, row.objects, row.size, (), (), (), 0, 0, 0, 0, 0, 0)
        for row in status.namespaces
        if row.name not in seen and row.objects
    ]


def store_notes(status: ClusterStatus) -> list[str]:
    """Return notes on the whole store, as far as there is something to note."""
    return [*_hint_notes(status), *_disk_notes(status)]


def _hint_notes(status: ClusterStatus) -> list[str]:
    """Return the note on the hints that the whole store got; none: no note."""
    counters = Counter(dict(status.counters))
    by_outcome: Counter[str] = Counter()
    for name, count in counters.items():
        if name.startswith("hints."):
            _, action, outcome = name.split(".")
            given = "retained" if action == "retain" else "dismissed"
            by_outcome[given if outcome in ("accepted", "clipped") else outcome] += count
    if not by_outcome.total():
        return []
    return [
        f"hints since the master's start: retained chains {by_outcome['retained']:,} (for a "
        f"shorter time {counters['hints.retain.clipped']:,}), their objects found again "
        f"{counters['hinted_found.retained']:,}, ended unused {counters['retained_unused']:,}; "
        f"released or demoted chains {by_outcome['dismissed']:,}, their objects found again "
        f"{counters['hinted_found.released']:,}; not stored {by_outcome['missing']:,}, ignored "
        f"{by_outcome['ignored']:,}"
    ]


def _disk_notes(status: ClusterStatus) -> list[str]:
    """Return the note on what disks did not keep, or not return in time; none: no note."""
    counters = Counter(dict(status.counters))
    texts = {
        "disk_refused_objects": "{:,} objects evicted without a copy, because the budget for "
        "writes was too small (--disk-writes-per-day) or they had a TTL",
        "disk_bring_refused_objects": "{:,} objects on disks were misses, because too many others "
        "were on their way into memory",
        "disk_bring_timeouts": "{:,} queries did not wait any longer for objects on disks",
    }
    found = [text.format(counters[name]) for name, text in texts.items() if counters[name]]
    return [f"disks since the master's start: {'; '.join(found)}"] if found else []


def _records(client: Client, status: ClusterStatus, notes: list[str]) -> list[FleetRecord]:
    spaces = fleets_of(client.config.tenant, (row.name for row in status.namespaces))
    try:
        return read_records(client, spaces)
    except KVStoreError as error:
        notes.append(sanitize(f"the records of engines could not be read: {error.message}", 200))
        return []


def read_records(client: Client, spaces: Collection[Namespace]) -> list[FleetRecord]:
    """Read up to ``RECORDS_MAX`` records in these namespaces. Blocks.

    Raises:
        KVStoreError: the store did not answer.
    """
    found: list[FleetRecord] = []
    share = -(-RECORDS_MAX // len(spaces))
    for space in spaces:
        keys = record_keys(client.list_objects(namespace=space), share)
        values = client.get_many(keys, namespace=space, kind="bytes")
        found += records_of(values, tenant_of(space))
    return found[:RECORDS_MAX]


def _inspect_objects(
    client: Client,
    evidence: Evidence,
    chosen: Sequence[EngineGroup],
    everyone: Sequence[EngineGroup],
) -> None:
    """Add to the evidence the state of single objects, for groups without hits. These are
    operators' calls: they do not count as traffic, and take no leases."""
    for party in chosen[:PARTIES_LOOKED_AT]:
        if not party.requested_keys or party.found:
            continue
        space = min(
            party.spaces, key=lambda space: min((m.idle_ms for m in space.misses), default=1e15)
        )
        keys = [miss.key for miss in space.misses[:KEYS_LOOKED_FOR]]
        others = [
            space.name
            for each in everyone
            for space in each.spaces
            if space.objects and each is not party and expected_to_share(party, each)
        ]
        for key, name in itertools.product(keys, others[:NAMESPACES_LOOKED_IN]):
            if client.stat(key, namespace=name) is not None:
                evidence.elsewhere[space.name] = name
                break
        if space.objects:
            rows = itertools.islice(client.list_objects(namespace=space.name), OBJECTS_LOOKED_AT)
            states = [row.state for row in rows]
            evidence.detached[space.name] = states.count("detached"), len(states)


def _last_used(party: EngineGroup) -> int:
    return min((row.idle_ms for row in [*party.writers, *party.readers]), default=1 << 62)
