"""Prints replies as JSON."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstore.calls.described import properties


def plain(value: Any) -> Any:
    """A reply in types of JSON: named tuples as objects, with what they compute;
    bytes as hexadecimal text."""
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
    """Prints ``value`` on one line."""
    click.echo(json.dumps(plain(value)))
