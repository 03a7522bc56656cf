"""The permission table: the permission and namespaces that each call requires.

``RULES`` has one row per call; a missing row fails the import. ``docs/security.md`` shows the
table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple, get_args

from kvstore import calls
from kvstore.calls import MapRight, Request
from kvstore.calls.tenants import patterns_overlap
from kvstore.errors import PermissionDeniedError
from kvstore.limits import Namespace
from kvstore.security.identity import ADMIN, ALL, ENGINE, MASTER, NODE, OBSERVER, Identity


class Right(enum.Enum):
    """The permission that a call requires."""

    ENTER = "enter"
    """An identity, whatever its role."""
    HOLD = "hold"
    """A role that transfers bytes: admin, node or engine."""
    READ = "read"
    """To read each namespace of the call; a node may, since it stores the bytes."""
    WRITE = "write"
    """To write each namespace of the call."""
    KEEP = "keep"
    """To read or write each namespace of the call that contains keys; tokens belong to their
    puts."""
    DOUBT = "doubt"
    """To write each namespace of the call, or to be a node: a read-only identity must not have
    objects removed by reporting them as damaged."""
    PUT = "put"
    """To write some namespace, or to copy objects as a node: the call names a token, which belongs
    to its put."""
    NODE = "node"
    """To be the node of the call, or an admin."""


class Rule(NamedTuple):
    right: Right
    fields: tuple[str, ...] = ()
    """The fields of the request with namespaces. An empty namespace means all of them, which
    requires an admin."""


_SPACE: Final = ("namespace",)

RULES: Final[dict[type, Rule]] = {
    calls.Join: Rule(Right.ENTER),
    calls.MatchPrefix: Rule(Right.READ, ("namespaces", "states")),
    calls.Lookup: Rule(Right.READ, _SPACE),
    calls.Exists: Rule(Right.READ, _SPACE),
    calls.PutStart: Rule(Right.WRITE, _SPACE),
    calls.PutEnd: Rule(Right.PUT),
    calls.PutRevoke: Rule(Right.PUT),
    calls.Allocate: Rule(Right.WRITE, _SPACE),
    calls.Commit: Rule(Right.WRITE, _SPACE),
    calls.Renew: Rule(Right.KEEP, _SPACE),
    calls.Release: Rule(Right.ENTER),  # only the client that chose the number knows it
    calls.Pin: Rule(Right.WRITE, _SPACE),
    calls.Unpin: Rule(Right.WRITE, _SPACE),
    calls.Hint: Rule(Right.KEEP, _SPACE),
    calls.Remove: Rule(Right.WRITE, _SPACE),
    calls.Clear: Rule(Right.WRITE, _SPACE),
    calls.DescribeSegments: Rule(Right.HOLD),
    calls.ReportFailure: Rule(Right.HOLD),
    calls.ReportCorrupt: Rule(Right.DOUBT, _SPACE),
    calls.Status: Rule(Right.ENTER),
    calls.ListObjects: Rule(Right.READ, _SPACE),
    calls.StatObject: Rule(Right.READ, _SPACE),
    calls.Traffic: Rule(Right.READ, _SPACE),
    calls.Chains: Rule(Right.READ, _SPACE),
    calls.Blocks: Rule(Right.READ, _SPACE),
    calls.Drain: Rule(Right.NODE),
    calls.StartMoves: Rule(Right.NODE),
}

_WITHOUT: Final = set(get_args(calls.Request)) - RULES.keys()
if _WITHOUT:
    raise RuntimeError(f"calls without a row in the table of rights: {_WITHOUT}")

_HOLDERS: Final = frozenset((ADMIN, MASTER, NODE, ENGINE))


def check(who: Identity, request: Request) -> None:
    """
    Raises:
        PermissionDeniedError: this identity may not make this call.
    """
    if who.is_admin:
        return
    rule = RULES[type(request)]
    match rule.right:
        case Right.READ:
            verb, may = "read", who.may_read
        case Right.KEEP:
            if not getattr(request, "keys", ()):
                return
            verb, may = "read", who.may_read_or_write
        case Right.DOUBT if NODE in who.roles:
            return
        case Right.WRITE | Right.DOUBT:
            verb, may = "write", who.may_write
        case right:
            if not _has(who, right, request):
                raise permission_error(who, request, "may not make this call")
            return
    for namespace in _spaces(rule, request):
        if not namespace or not may(namespace):
            raise permission_error(who, request, f"may not {verb} namespace {namespace or '*'!r}")


def _has(who: Identity, right: Right, request: Request) -> bool:
    match right:
        case Right.ENTER:
            return True
        case Right.HOLD:
            return not who.roles.isdisjoint(_HOLDERS)
        case Right.PUT:
            return NODE in who.roles or (ENGINE in who.roles and bool(who.writes))
        case Right.NODE:
            return who.may_be_node(str(getattr(request, "node", "")))
        case _:
            return False


def _spaces(rule: Rule, request: Request) -> Iterable[Namespace]:
    for field in rule.fields:
        value = getattr(request, field)
        if isinstance(value, str):
            yield Namespace(value)
        else:
            yield from value


def permission_error(who: Identity, request: Request, why: str) -> PermissionDeniedError:
    call = type(request).__name__
    return PermissionDeniedError(
        f"{call}: {who.display_name} {why}",
        advice="kvstore auth show FILE says which roles and namespaces an identity has.",
        call=call,
        identity=who.name,
    )


def check_node(who: Identity, name: str) -> None:
    """
    Raises:
        PermissionDeniedError: this identity may not join as the node of this name.
    """
    if not who.may_be_node(name):
        raise PermissionDeniedError(
            f"{who.display_name} may not join as node {name}",
            advice="A node's identity has the role node, and a pattern that its name fits: "
            "kvstore auth issue --role node --node 'PATTERN' NAME.",
            identity=who.name,
        )


def map_rights(who: Identity) -> MapRight:
    """Return the rights of an identity to memory with all namespaces. A node may read everything,
    but writes copies with capabilities, like any client."""
    reads, writes = (ALL, ALL) if who.is_admin else (ALL if NODE in who.roles else (), ())
    if ENGINE in who.roles:
        reads, writes = (*reads, *who.reads), (*writes, *who.writes)
    return (
        (MapRight.READ if reads else MapRight(0))
        | (MapRight.READ_ALL if "*" in reads else MapRight(0))
        | (MapRight.WRITE if writes else MapRight(0))
        | (MapRight.WRITE_ALL if "*" in writes else MapRight(0))
    )


def check_numbers(who: Identity) -> None:
    """
    Raises:
        PermissionDeniedError: this identity may not see numbers of all namespaces.
    """
    if not (who.is_admin or NODE in who.roles or OBSERVER in who.roles):
        raise PermissionDeniedError(
            f"{who.display_name} may not see numbers of all namespaces",
            advice="The role observer may: kvstore auth issue --role observer NAME.",
            identity=who.name,
        )


def check_events(who: Identity, namespace: str, under: str) -> None:
    """Check access to the events of one namespace, of a prefix of names, or (both empty) of all.

    Raises:
        PermissionDeniedError
    """
    may = who.may_read(namespace) if namespace else who.may_read_prefix(under)
    if not may:
        raise PermissionDeniedError(
            f"{who.display_name} may not read events of {namespace or under + '*'!r}",
            advice="Ask for a namespace that it may read.",
            identity=who.name,
        )


def visible_status(who: Identity, status: calls.ClusterStatus) -> calls.ClusterStatus:
    """Return the part of the status visible to this identity: an engine sees its own namespaces and
    the usage of nodes, but no counters of others."""
    if who.is_admin or NODE in who.roles or OBSERVER in who.roles:
        return status
    mine = [namespace for namespace in status.namespaces if who.may_read(namespace.name)]
    tenants = [tenant for tenant in status.tenants if _is_of(who, tenant)]
    nodes = [node._replace(stored_bytes=0, read_bytes=0, written_bytes=0) for node in status.nodes]
    return status._replace(nodes=nodes, namespaces=mine, tenants=tenants, counters=(), departed=())


def _is_of(who: Identity, tenant: calls.TenantStatus) -> bool:
    """Return whether this engine may use a namespace of the tenant. The unnamed tenant also has
    namespaces of others."""
    own = (*who.reads, *who.writes) if ENGINE in who.roles else ()
    return any(
        patterns_overlap(pattern, namespace) for pattern in own for namespace in tenant.namespaces
    )
