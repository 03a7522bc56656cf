"""Name, roles and namespaces of a process, as in its certificate.

They are one URI among the subject's alternative names, so any CA can issue such certificates
(``kvstore auth issue``, cert-manager, openssl):

    kvstore:engine/decode-7?id=3f0a&read=llama/*&write=llama/*

Several roles are joined by ``+``; ``read``, ``write`` and ``node`` may be repeated. A pattern is a
name, or a prefix of names and ``*``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from kvstore.errors import InvalidArgumentError
from kvstore.limits import NAMESPACE_BYTES_MAX

SCHEME: Final = "kvstore:"

ADMIN: Final = "admin"
MASTER: Final = "master"
NODE: Final = "node"
ENGINE: Final = "engine"
OBSERVER: Final = "observer"
ROLES: Final = (ADMIN, MASTER, NODE, ENGINE, OBSERVER)

URI_BYTES_MAX: Final = 4_096
PATTERNS_MAX: Final = 64

ALL: Final = ("*",)


class Identity(NamedTuple):
    """An authenticated identity. Hashable; equal if all fields are equal."""

    name: str
    roles: frozenset[str]
    reads: tuple[str, ...] = ()
    """Patterns of the namespaces that it may read."""
    writes: tuple[str, ...] = ()
    """Patterns of the namespaces that it may write, remove from and pin in."""
    nodes: tuple[str, ...] = ALL
    """Patterns of the names that it may use as a node."""
    number: str = ""
    """Number of the certificate, for its revocation; empty: unknown."""
    until: float = math.inf
    """Unix time at which the certificate ends."""

    @property
    def is_admin(self) -> bool:
        """Whether it has all permissions, as masters have."""
        return not self.roles.isdisjoint((ADMIN, MASTER))

    @property
    def display_name(self) -> str:
        """Name for logs and errors: ``engine decode-7``."""
        return f"{'+'.join(sorted(self.roles))} {self.name}"

    @property
    def certified(self) -> str:
        """The certified attributes, which reissued certificates share; empty: no certificate."""
        return self.name and f"{SCHEME}{self.name}"

    @property
    def uri(self) -> str:
        if not self.name:
            return ""
        fields = [("id", self.number)] if self.number else []
        fields += [("read", read) for read in self.reads]
        fields += [("write", write) for write in self.writes]
        if NODE in self.roles and self.nodes != ALL:
            fields += [("node", node) for node in self.nodes]
        query = urlencode(fields, safe="*/", quote_via=quote)
        roles = "+".join(sorted(self.roles))
        return f"{SCHEME}{roles}/{quote(self.name, safe='')}" + (f"?{query}" if query else "")

    def may_read(self, namespace: str) -> bool:
        return self.is_admin or NODE in self.roles or self._is_engine(self.reads, namespace)

    def may_read_prefix(self, beginning: str) -> bool:
        """Return whether it may read all namespaces with this prefix."""
        patterns = self.reads if ENGINE in self.roles else ()
        covers = any(
            pattern.endswith("*") and beginning.startswith(pattern[:-1]) for pattern in patterns
        )
        return self.is_admin or NODE in self.roles or covers

    def may_write(self, namespace: str) -> bool:
        return self.is_admin or self._is_engine(self.writes, namespace)

    def may_read_or_write(self, namespace: str) -> bool:
        return self.may_read(namespace) or self.may_write(namespace)

    def _is_engine(self, patterns: Sequence[str], namespace: str) -> bool:
        """Return whether it is an engine with a matching pattern; other roles get no permissions by
        patterns."""
        return ENGINE in self.roles and matches(patterns, namespace)

    def may_be_node(self, name: str) -> bool:
        """Return whether it may join under this node name. A master may: it starts its own node."""
        return MASTER in self.roles or (NODE in self.roles and matches(self.nodes, name))


UNAUTHENTICATED: Final = Identity("", frozenset())
"""The identity of a peer without a valid certificate: it has no name and no permissions."""


def validated_identity(
    name: str,
    roles: Iterable[str],
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    nodes: Sequence[str] = ALL,
    number: str = "",
) -> Identity:
    """Return a checked identity.

    Raises:
        InvalidArgumentError: an unknown role, an invalid name or pattern.
    """
    known = frozenset(roles)
    if not known or not known <= set(ROLES):
        wrong = ", ".join(sorted(known - set(ROLES))) or "none"
        raise InvalidArgumentError(
            f"{wrong}: no role of an identity", advice=f"The roles are {', '.join(ROLES)}."
        )
    if not name or len(name) > 64 or not name.isprintable() or " " in name:
        raise InvalidArgumentError(
            f"{name[:80]!r} is no name of an identity",
            advice="Use 1 to 64 printable characters without spaces.",
        )
    for pattern in (*reads, *writes, *nodes):
        check_pattern(pattern)
    if max(len(reads), len(writes), len(nodes)) > PATTERNS_MAX:
        raise InvalidArgumentError(f"an identity has at most {PATTERNS_MAX} patterns of a kind")
    return Identity(name, known, tuple(reads), tuple(writes), tuple(nodes), number)


def check_pattern(pattern: str) -> None:
    """Raise InvalidArgumentError if a star is not the last character, or the text is invalid."""
    if not pattern or "*" in pattern[:-1] or len(pattern.encode()) > NAMESPACE_BYTES_MAX:
        raise InvalidArgumentError(
            f"{pattern[:80]!r} is no pattern of names",
            advice="Give a name, or the beginning of names and a star: 'llama/*'.",
        )


def matches(patterns: Sequence[str], name: str) -> bool:
    for pattern in patterns:
        if name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern:
            return True
    return False


def parse(uri: str) -> Identity:
    """Parse the URI of a certificate.

    Raises:
        InvalidArgumentError: the URI is invalid.
    """
    if not uri.startswith(SCHEME) or len(uri) > URI_BYTES_MAX:
        raise InvalidArgumentError(f"{uri[:80]!r} names no identity")
    path, _, query = uri.removeprefix(SCHEME).partition("?")
    roles, _, name = path.partition("/")
    found: dict[str, list[str]] = {"id": [], "read": [], "write": [], "node": []}
    try:
        # Blank fields are errors: "node=" must not mean all nodes.
        for key, value in parse_qsl(
            query,
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="strict",
            max_num_fields=256,
        ):
            found[key].append(value)
        name = unquote(name, errors="strict")
        if len(found["id"]) > 1:
            raise ValueError("a certificate has one number")
    except (KeyError, ValueError):
        raise InvalidArgumentError(f"{uri[:80]!r} has fields that no identity has") from None
    return validated_identity(
        name,
        roles.split("+"),
        reads=found["read"],
        writes=found["write"],
        nodes=found["node"] or ALL,
        number=found["id"][-1] if found["id"] else "",
    )


def identity_of(names: Iterable[str]) -> Identity:
    """Return the identity among the alternative names of a certificate's subject.

    Raises:
        InvalidArgumentError: none, or several, name an identity.
    """
    ours = [name for name in names if name.startswith(SCHEME)]
    if len(ours) != 1:
        raise InvalidArgumentError(
            f"the certificate names {len(ours)} identities",
            advice="kvstore auth issue writes certificates that name one; a certificate of another "
            "authority needs a URI such as kvstore:engine/NAME?read=*&write=* among its names.",
        )
    return parse(ours[0])
