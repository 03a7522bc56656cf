"""Tenants: namespaces by pattern, and their quotas.

A pattern is a name, or a prefix of names and ``*``, as for identities
(``kvstore.security.identity``). ``kvstore.config.tenants`` reads them from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvstore.errors import InvalidArgumentError

TENANTS_MAX: Final = 256
"""Maximum tenants of a master: a put that evicts looks at the LRU queue of each."""

UNBOUNDED: Final = 1 << 62
"""The limit of a tenant without one; more than any pool."""


class TenantRule(NamedTuple):
    """The quotas of a tenant, in bytes, headers and replicas included."""

    name: str
    namespaces: tuple[str, ...] = ()
    """Patterns."""
    guarantee_bytes: int = 0
    """Memory that puts of other tenants cannot evict."""
    limit_bytes: int = UNBOUNDED
    """Maximum memory."""
    pin_limit_bytes: int = UNBOUNDED
    """Maximum memory of pinned objects."""
    put_share: float = 1.0
    """Fraction of the puts that may be in progress, and that may wait, at the same time."""
    disk_limit_bytes: int = UNBOUNDED
    """Maximum bytes on disks."""


def tenant_text(name: str) -> str:
    """Return the name for errors and tables."""
    return f"tenant {name}" if name else "the tenant without a name"


def patterns_overlap(one: str, other: str) -> bool:
    """Return whether a name may match both patterns."""
    if one.endswith("*") and other.endswith("*"):
        return one.startswith(other[:-1]) or other.startswith(one[:-1])
    if one.endswith("*"):
        return other.startswith(one[:-1])
    return one.startswith(other[:-1]) if other.endswith("*") else one == other


class TenantMatcher:
    """Finds the tenant of a namespace with one lookup per length of a pattern."""

    def __init__(self, rules: Iterable[TenantRule]) -> None:
        """
        Raises:
            InvalidArgumentError: a namespace may match two tenants, or there are too many.
        """
        self._names: dict[str, str] = {}
        self._beginnings: dict[str, str] = {}
        count = 0
        for rule in rules:
            count += 1
            for pattern in rule.namespaces:
                of_kind = self._beginnings if pattern.endswith("*") else self._names
                text = pattern.removesuffix("*")
                if of_kind.setdefault(text, rule.name) != rule.name:
                    raise _twice(of_kind[text], rule.name, pattern, pattern)
        if count > TENANTS_MAX:
            raise InvalidArgumentError(f"{count} tenants, at most {TENANTS_MAX} are allowed")
        self._lengths: Sequence[int] = sorted({len(text) for text in self._beginnings})
        for text, name in self._names.items():
            self._check(text, text, name)
        for text, name in self._beginnings.items():
            self._check(text, text + "*", name)

    def _check(self, text: str, pattern: str, name: str) -> None:
        for length in self._lengths:
            other = self._beginnings.get(text[:length]) if length <= len(text) else None
            if other is not None and other != name:
                raise _twice(other, name, text[:length] + "*", pattern)

    def of(self, namespace: str) -> str:
        """Return the tenant of the namespace; empty: none."""
        name = self._names.get(namespace)
        if name is not None:
            return name
        for length in self._lengths:
            if length > len(namespace):
                break
            name = self._beginnings.get(namespace[:length])
            if name is not None:
                return name
        return ""


def _twice(one: str, other: str, of_one: str, of_other: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"tenants {one!r} and {other!r} have namespaces in common: {of_one!r} and {of_other!r}",
        advice="A namespace belongs to one tenant.",
    )
