"""A tenant: namespaces by pattern, and how much of the store they may have.

A pattern is a name, or the beginning of names and ``*``, as for identities
(``kvstore.security.identity``). ``kvstore.config.tenants`` reads tenants from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvstore.errors import InvalidArgumentError

TENANTS_MAX: Final = 256
"""Tenants of one master: a put that evicts looks at the order of each."""

UNBOUNDED: Final = 1 << 62
"""Bytes that no pool has: the bound of a tenant that has none."""


class TenantRule(NamedTuple):
    """What a tenant may have; the quotas are bytes of memory, headers and replicas included."""

    name: str
    namespaces: tuple[str, ...] = ()
    """Patterns."""
    guarantee_bytes: int = 0
    """What the puts of other tenants cannot take from it."""
    limit_bytes: int = UNBOUNDED
    """What it can never exceed."""
    pin_limit_bytes: int = UNBOUNDED
    """What its pins may hold."""
    put_share: float = 1.0
    """Share of the puts that may be under way, and that may wait, at the same time."""


def tenant_text(name: str) -> str:
    """For errors and tables."""
    return f"tenant {name}" if name else "the tenant without a name"


def patterns_overlap(one: str, other: str) -> bool:
    """Whether a name may fit both patterns."""
    if one.endswith("*") and other.endswith("*"):
        return one.startswith(other[:-1]) or other.startswith(one[:-1])
    if one.endswith("*"):
        return other.startswith(one[:-1])
    return one.startswith(other[:-1]) if other.endswith("*") else one == other


class TenantMatcher:
    """Finds the tenant of a namespace: one look-up per length of a pattern, however many tenants
    there are."""

    def __init__(self, rules: Iterable[TenantRule]) -> None:
        """
        Raises:
            InvalidArgumentError: a namespace may fit two tenants, or there are too many.
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
        """The name of the namespace's tenant; empty: it fits none."""
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
