"""Prints replies as JSON."""

from __future__ import annotations

import json
from typing import Any

import click


def plain(value: Any) -> Any:
    """A reply in types of JSON: named tuples as objects, bytes as hexadecimal text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def print_json(value: Any) -> None:
    """Prints ``value`` on one line."""
    click.echo(json.dumps(plain(value)))
