"""Fleet records (``kvstore.connectors.engine.fleet``) as the dashboard shows them: which engines
share blocks, and in which fields engines of one model differ that do not share blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from kvstore.fleet import Record

NAMESPACES_MAX: Final = 64
"""Namespaces of one record that are shown."""

FIELDS_MAX: Final = 64
TEXT_MAX: Final = 200
"""Characters of a value that is shown."""


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
