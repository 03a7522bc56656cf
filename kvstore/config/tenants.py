"""Reads tenants and their quotas from a TOML file, one table per tenant:

[acme]
namespaces = ["acme/*"]
guarantee = "20GiB"   # what nobody else can take from it; 0 by default
limit = "60GiB"      # what it can never exceed; no bound by default
pin_limit = "10GiB"       # what its pins may hold; no bound of its own by default
put_share = 0.5             # share of the puts under way, and of those that wait; 1.0 by default
disk_limit = "2TiB"         # what it may hold on disks; no bound by default
"""

from __future__ import annotations

import re
import tomllib

from pydantic import Field, field_validator

from kvstore.calls.tenants import UNBOUNDED, TenantMatcher, TenantRule
from kvstore.config.base import Config
from kvstore.config.setting_types import Limit
from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.runtime.watched_files import read_file
from kvstore.security.identity import PATTERNS_MAX, check_pattern


class _Tenant(Config):
    """One table."""

    section = "tenants"

    namespaces: tuple[str, ...] = Field(min_length=1, max_length=PATTERNS_MAX)
    guarantee: Limit = Field(default=0, lt=UNBOUNDED)
    limit: Limit = Field(default=UNBOUNDED, lt=UNBOUNDED)
    pin_limit: Limit = Field(default=UNBOUNDED, lt=UNBOUNDED)
    disk_limit: Limit = Field(default=UNBOUNDED, lt=UNBOUNDED)
    put_share: float = Field(default=1.0, gt=0, le=1)

    @field_validator("namespaces")
    @classmethod
    def _patterns(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in given:
            check_pattern(pattern)
        return given


def load_tenants(path: str) -> list[TenantRule]:
    """
    Raises:
        ConfigError: the file cannot be read, or what it says contradicts itself.
    """
    return parse_tenants(read_file(path, "tenants"), path)


def parse_tenants(text: bytes, path: str) -> list[TenantRule]:
    """As ``load_tenants``, from the text of the file."""
    of = ""
    try:
        rules: list[TenantRule] = []
        for name, fields in tomllib.loads(text.decode()).items():
            of = f" {name[:64]!r}:"
            rules.append(_rule(name, fields))
        of = ""
        TenantMatcher(rules)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"tenants {path} is no TOML: {error}", key="tenants") from None
    except (ConfigError, InvalidArgumentError) as error:
        what = f"tenants {path}:{of} {error.message}"
        raise ConfigError(what, advice=error.advice, key="tenants") from None
    return rules


def _rule(name: str, fields: object) -> TenantRule:
    if not isinstance(fields, dict):
        raise InvalidArgumentError("it is no table", advice="A tenant begins with a line [NAME].")
    if not re.fullmatch(r"\S{1,64}", name) or not name.isprintable():
        raise InvalidArgumentError("it is no name of 1 to 64 printable characters without spaces")
    given = _Tenant(**fields)
    if given.guarantee > given.limit:
        raise InvalidArgumentError(f"guarantee ({given.guarantee}) is above limit ({given.limit})")
    # A limit of 0 becomes 1 byte, because 0 means no limit in the status.
    limit, pin_limit, disk_limit = (
        max(1, each) for each in (given.limit, given.pin_limit, given.disk_limit)
    )
    return TenantRule(
        name, given.namespaces, given.guarantee, limit, pin_limit, given.put_share, disk_limit
    )
