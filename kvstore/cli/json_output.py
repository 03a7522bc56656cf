"""JSON output of replies."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstore.calls.described import properties


def plain(value: Any) -> Any:
    """Convert a reply to types of JSON: named tuples, with their properties, to objects; bytes to
    hexadecimal text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if hasattr(value, "_fields"):
        names = (*value._fields, *properties(type(value)))
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def print_json(value: Any) -> None:
    """Print ``value`` on one line."""
    click.echo(json.dumps(plain(value)))
