"""Gathers from a store what ``diagnosis.why`` judges: the master's memory of who put and who asked,
the fleet records of engines, and a look at single objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.calls import ClusterStatus, NamespaceTraffic, TrafficReport
from kvstore.diagnosis.why import (
    Cause,
    Evidence,
    Party,
    diagnose,
    may_share,
    parties_of,
    select,
)
from kvstore.errors import KVStoreError, PermissionDeniedError
from kvstore.fleet import RECORDS_MAX, Record, fleets_of, parse, worth_reading
from kvstore.limits import Namespace, tenant_of
from kvstore.texts import shown_text

if TYPE_CHECKING:
    from kvstore.client.sync import Client

PARTIES_LOOKED_AT: Final = 8
"""Parties whose single objects are looked at."""

KEYS_LOOKED_FOR: Final = 2
"""Keys that were not found in a namespace, and are looked for in others."""

NAMESPACES_LOOKED_IN: Final = 32
NAMESPACES_OF_TENANT: Final = 128
"""Namespaces that a client of one tenant asks about, a call each."""

OBJECTS_LOOKED_AT: Final = 1_000
"""Objects of a namespace that are checked for missing ancestors: one page."""


class Explained(NamedTuple):
    uptime_ms: int
    """Time since the master's start; it remembers nothing from before."""
    everyone: list[Party]
    parties: list[Party]
    """Those that were asked about, the last used first."""
    causes: list[Cause]
    notes: list[str]
    """What could not be seen."""


def explain(
    client: Client, status: ClusterStatus, *, namespace: str = "", model: str = ""
) -> Explained:
    """Why lookups find nothing: in a namespace, of a model, or (without both) anywhere.

    Args:
        status: of the store, as far as the caller may see it.

    Raises:
        PermissionDeniedError: the caller may not see all namespaces, nor the one that it names.
        KVStoreError: the store did not answer.
    """
    notes: list[str] = []
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
    _look_closer(client, evidence, chosen, everyone)
    return Explained(
        evidence.uptime_ms, everyone, chosen, diagnose(evidence, chosen, everyone), notes
    )


def _traffic(
    client: Client, namespace: str, ours: Sequence[str], notes: list[str]
) -> TrafficReport:
    """Of all namespaces, or else of the one asked about, or else of those of our tenant."""
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


def _of_tenant(client: Client, status: ClusterStatus, records: Sequence[Record]) -> list[str]:
    """Namespaces of the client's tenant, those that its engines name first."""
    tenant = client.config.tenant
    names = [name for record in records for name in record.namespaces]
    names += [row.name for row in status.namespaces if tenant_of(row.name) == tenant]
    return list(dict.fromkeys(names))[:NAMESPACES_OF_TENANT] if tenant else []


def _silent(report: TrafficReport, status: ClusterStatus) -> list[NamespaceTraffic]:
    """Namespaces that hold objects, and in which no client that is remembered put or asked."""
    seen = {space.name for space in report.namespaces}
    return [
        NamespaceTraffic(row.name, row.objects, row.size, (), (), (), 0, 0, 0, 0, 0, 0)
        for row in status.namespaces
        if row.name not in seen and row.objects
    ]


def _records(client: Client, status: ClusterStatus, notes: list[str]) -> list[Record]:
    spaces = fleets_of(client.config.tenant, (row.name for row in status.namespaces))
    found: list[Record] = []
    try:
        for space in spaces:
            found += _records_in(client, space, len(spaces))
    except KVStoreError as error:
        notes.append(shown_text(f"the records of engines could not be read: {error.message}", 200))
        return []
    return found


def _records_in(client: Client, space: Namespace, fleets: int) -> list[Record]:
    """The records in one of so many namespaces."""
    found: list[Record] = []
    share, tenant = -(-RECORDS_MAX // fleets), tenant_of(space)
    for keys in worth_reading(client.list_objects(namespace=space), fleets=fleets):
        values = client.get_many(keys, namespace=space, kind="bytes")
        parsed = [parse(value, tenant=tenant) for value in values if isinstance(value, bytes)]
        found += [record for record in parsed if record is not None]
        if len(found) >= share:
            break
    return found[:share]


def _look_closer(
    client: Client, evidence: Evidence, chosen: Sequence[Party], everyone: Sequence[Party]
) -> None:
    """Adds to the evidence what only a look at single objects shows, for parties that find
    nothing. These are operators' calls: they count as no traffic, and lease nothing."""
    for party in chosen[:PARTIES_LOOKED_AT]:
        if not party.asked or party.found:
            continue
        space = min(
            party.spaces, key=lambda space: min((m.idle_ms for m in space.misses), default=1e15)
        )
        keys = [miss.key for miss in space.misses[:KEYS_LOOKED_FOR]]
        others = [
            space.name
            for each in everyone
            for space in each.spaces
            if space.objects and each is not party and may_share(party, each)
        ]
        for key, name in itertools.product(keys, others[:NAMESPACES_LOOKED_IN]):
            if client.stat(key, namespace=name) is not None:
                evidence.elsewhere[space.name] = name
                break
        if space.objects:
            rows = itertools.islice(client.list_objects(namespace=space.name), OBJECTS_LOOKED_AT)
            states = [row.state for row in rows]
            evidence.detached[space.name] = states.count("detached"), len(states)


def _last_used(party: Party) -> int:
    return min((row.idle_ms for row in [*party.putters, *party.askers]), default=1 << 62)
