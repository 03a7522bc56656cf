"""Fleet records (``kvstore.connectors.engine.fleet``) as the dashboard shows them: which engines
share blocks, and in which fields engines of one model differ that do not share blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from kvstore.calls import ObjectRow
from kvstore.client.aio import AsyncClient
from kvstore.fleet import ROWS_MAX, Record, fleets_of, parse, worth_reading
from kvstore.limits import Namespace, tenant_of

RECORDS_MAX: Final = 200
"""Records that the dashboard shows."""

RECORD_BYTES_MAX: Final = 1 << 16
NAMESPACES_MAX: Final = 64
"""Namespaces of one record that are shown."""

FIELDS_MAX: Final = 64
TEXT_MAX: Final = 200
"""Characters of a value that is shown."""


async def read_records(client: AsyncClient, records_max: int) -> list[Record]:
    """Up to ``records_max`` readable records, of all tenants. Raises KVStoreError: the store did
    not answer."""
    status = await client.status()
    spaces = fleets_of("", (row.name for row in status.namespaces))
    found: list[Record] = []
    for space in spaces:
        found += await read_in(client, space, records_max, len(spaces))
    return found[:records_max]


async def read_in(
    client: AsyncClient, space: Namespace, records_max: int, fleets: int = 1
) -> list[Record]:
    """The records in one of so many namespaces. Raises KVStoreError, as ``read_records``."""
    found: list[Record] = []
    share, tenant = -(-records_max // fleets), tenant_of(space)
    rows = await _rows_of(client, space, ROWS_MAX // fleets)
    for keys in worth_reading(rows, RECORD_BYTES_MAX, fleets=fleets):
        values = await client.get_many(keys, namespace=space, kind="bytes")
        parsed = [
            parse(value, tenant=tenant, partial=True)
            for value in values
            if isinstance(value, bytes)
        ]
        found += [record for record in parsed if record is not None]
        if len(found) >= share:
            break
    return found[:share]


async def _rows_of(client: AsyncClient, space: Namespace, rows_max: int) -> list[ObjectRow]:
    """Objects in a namespace of records, up to ``rows_max``; not all are records."""
    rows: list[ObjectRow] = []
    async for row in client.list_objects(namespace=space):
        rows.append(row)
        if len(rows) == rows_max:
            break
    return rows


def compared(records: Sequence[Record]) -> list[dict[str, Any]]:
    """By engine and model: the fields in which its records differ, and each record's values."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.engine, record.model), []).append(record)
    return [
        {"engine": engine, "model": model, **_compared(group)}
        for (engine, model), group in sorted(groups.items())
    ]


def _compared(group: Sequence[Record]) -> dict[str, Any]:
    told = [
        {name: json.dumps(value, sort_keys=True) for name, value in record.description.items()}
        for record in group
    ]
    names = sorted({name for each in told for name in each})
    differing = [name for name in names if len({each.get(name) for each in told}) > 1]
    return {
        "differing": differing[:FIELDS_MAX],
        "records": [
            {
                "fingerprint": record.fingerprint,
                "loaded": record.models[0][:TEXT_MAX],
                "namespaces": record.namespaces[:NAMESPACES_MAX],
                "differing": [each.get(name, "")[:TEXT_MAX] for name in differing[:FIELDS_MAX]],
            }
            for record, each in zip(group, told)
        ],
    }
