"""Reads tenants and their quotas from a file of TOML, a table for each:

[acme]
namespaces = ["acme/*"]
guaranteed = "20GiB"   # what nobody else can take from it; 0 by default
at_most = "60GiB"      # what it can never exceed; no bound by default
pinned = "10GiB"       # what its pins may hold; no bound of its own by default
puts = 0.5             # share of the puts under way, and of those that wait; 1.0 by default
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Final

from kvstore.auth.identity import PATTERNS_MAX, check_pattern
from kvstore.config.values import parse_size
from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.process.watched_files import read_file
from kvstore.tenants import UNBOUNDED, TenantMatcher, TenantRule

FIELDS: Final = ("namespaces", "guaranteed", "at_most", "pinned", "puts")

NAME_CHARACTERS_MAX: Final = 64


def load_tenants(path: str) -> list[TenantRule]:
    """
    Raises:
        ConfigError: the file cannot be read, or what it says contradicts itself.
    """
    return parse_tenants(read_file(path, "tenants"), path)


def parse_tenants(text: bytes, path: str) -> list[TenantRule]:
    """As ``load_tenants``, of the text of the file."""
    try:
        given = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"tenants {path} is no TOML: {error}", key="tenants") from None
    rules: list[TenantRule] = []
    name = ""
    try:
        for name, fields in given.items():  # the error names it
            rules.append(_rule(name, fields))
        name = ""
        TenantMatcher(rules)
    except InvalidArgumentError as error:
        of = f" {name[:NAME_CHARACTERS_MAX]!r}:" if name else ""
        raise ConfigError(
            f"tenants {path}:{of} {error.message}",
            advice=error.advice or f"A tenant has {', '.join(FIELDS)}.",
            key="tenants",
        ) from None
    return rules


def _rule(name: str, fields: object) -> TenantRule:
    if not isinstance(fields, dict):
        raise InvalidArgumentError("it is no table", advice="A tenant begins with a line [NAME].")
    if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable() or " " in name:
        raise InvalidArgumentError("it is no name of 1 to 64 printable characters without spaces")
    unknown = sorted(fields.keys() - set(FIELDS))
    if unknown:
        raise InvalidArgumentError(f"unknown field {unknown[0]!r}")
    guaranteed = _size(fields, "guaranteed", 0)
    at_most = _size(fields, "at_most", UNBOUNDED)
    if guaranteed > at_most:
        raise InvalidArgumentError(f"guaranteed ({guaranteed}) is above at_most ({at_most})")
    return TenantRule(
        name,
        namespaces=_patterns(fields),
        guaranteed=guaranteed,
        # A bound of 0 is one of 1 byte, which nothing fits into: the status says 0 for no bound.
        at_most=max(1, at_most),
        pinned=max(1, _size(fields, "pinned", UNBOUNDED)),
        puts=_share(fields),
    )


def _patterns(fields: Mapping[str, object]) -> tuple[str, ...]:
    given = fields.get("namespaces")
    if not isinstance(given, list) or not given:
        raise InvalidArgumentError("it has no namespaces", advice='namespaces = ["acme/*"]')
    if len(given) > PATTERNS_MAX:
        raise InvalidArgumentError(f"it has more than {PATTERNS_MAX} patterns of namespaces")
    for pattern in given:
        if not isinstance(pattern, str):
            raise InvalidArgumentError(f"{pattern!r} is no pattern of names")
        check_pattern(pattern)
    return tuple(dict.fromkeys(given))


def _size(fields: Mapping[str, object], field: str, default: int) -> int:
    given = fields.get(field)
    if given is None:
        return default
    if not isinstance(given, int | str) or isinstance(given, bool):
        raise InvalidArgumentError(f"{field}: {given!r} is no size")
    try:
        size = parse_size(given)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{field}: {error.message}", advice=error.advice) from None
    if size >= UNBOUNDED:
        raise InvalidArgumentError(f"{field}: {given!r} is more than any pool has")
    return size


def _share(fields: Mapping[str, object]) -> float:
    given = fields.get("puts", 1.0)
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 < given <= 1:
        raise InvalidArgumentError(f"puts: {given!r} is no share", advice="Above 0, up to 1.0.")
    return float(given)
