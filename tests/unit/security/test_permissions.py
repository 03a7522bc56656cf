"""The table of rights, cell by cell: each call, each role, each kind of namespace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final, get_args

import pytest

from kvstore import calls
from kvstore.calls import MapRight, Request
from kvstore.errors import PermissionDeniedError
from kvstore.limits import Key, Namespace
from kvstore.security.identity import (
    ALL,
    ENGINE,
    NODE,
    ROLES,
    UNAUTHENTICATED,
    Identity,
    validated_identity,
)
from kvstore.security.permissions import (
    RULES,
    check,
    check_events,
    check_node,
    map_rights,
    visible_status,
)

OWN, READ_ONLY, WRITE_ONLY, FOREIGN, EMPTY = "mine/a", "shown/a", "log/a", "theirs/a", ""

WHO: Final[dict[str, Identity]] = {
    "admin": validated_identity("a", ["admin"]),
    "master": validated_identity("m", ["master"]),
    "node": validated_identity("n", ["node"], nodes=["host-7"]),
    "engine": validated_identity(
        "e", ["engine"], reads=["mine/*", "shown/*"], writes=["mine/*", "log/*"]
    ),
    # May read alone.
    "reader": validated_identity("r", ["engine"], reads=["mine/*"]),
    # Patterns give it nothing: it is no engine.
    "observer": validated_identity("o", ["observer"], reads=ALL, writes=ALL),
}

# Columns: own, read only, write only, foreign, empty namespace; of calls without a namespace one.
# y: may, n: may not. A call that names a node: the own name, another one.
ALWAYS: Final = {"admin": "yyyyy", "master": "yyyyy"}
READS: Final = ALWAYS | {
    "node": "yyyyn", "engine": "yynnn", "reader": "ynnnn", "observer": "nnnnn",
}  # fmt: skip
WRITES: Final = ALWAYS | {
    "node": "nnnnn", "engine": "ynynn", "reader": "nnnnn", "observer": "nnnnn",
}  # fmt: skip
KEEPS: Final = READS | {"engine": "yyynn"}
DOUBTS: Final = WRITES | {"node": "yyyyy"}
ENTERS: Final = dict.fromkeys(WHO, "y")
HOLDS: Final = ENTERS | {"observer": "n"}
PUTS: Final = ENTERS | {"reader": "n", "observer": "n"}
NODES: Final = {
    "admin": "yy", "master": "yy", "node": "yn", "engine": "nn", "reader": "nn", "observer": "nn",
}  # fmt: skip

EXPECTED: Final[dict[type, dict[str, str]]] = {
    calls.Join: ENTERS,
    calls.MatchPrefix: READS,
    calls.Lookup: READS,
    calls.Exists: READS,
    calls.PutStart: WRITES,
    calls.PutEnd: PUTS,
    calls.PutRevoke: PUTS,
    calls.Allocate: WRITES,
    calls.Commit: WRITES,
    calls.Renew: KEEPS,
    calls.Release: ENTERS,
    calls.Pin: WRITES,
    calls.Unpin: WRITES,
    calls.Hint: KEEPS,
    calls.Remove: WRITES,
    calls.Clear: WRITES,
    calls.DescribeSegments: HOLDS,
    calls.ReportFailure: HOLDS,
    calls.ReportCorrupt: DOUBTS,
    calls.Status: ENTERS,
    calls.ListObjects: READS,
    calls.StatObject: READS,
    calls.Traffic: READS,
    calls.Chains: READS,
    calls.Blocks: READS,
    calls.Drain: NODES,
    calls.StartMoves: NODES,
}

KEY = Key(b"k")


def request(kind: type, space: str) -> Request:
    """A call that names this namespace, or this node."""
    n = Namespace(space)
    made: dict[type, Request] = {
        calls.Join: calls.Join("c", "h", 1),
        calls.MatchPrefix: calls.MatchPrefix([n], [KEY], False),
        calls.Lookup: calls.Lookup(n, [KEY]),
        calls.Exists: calls.Exists(n, [KEY]),
        calls.PutStart: calls.PutStart(n, [KEY], [1], None, True, 1, False, 0, ""),
        calls.PutEnd: calls.PutEnd(1, [1]),
        calls.PutRevoke: calls.PutRevoke(1, [1], False),
        calls.Allocate: calls.Allocate(n, 1, 0, ""),
        calls.Commit: calls.Commit(1, 1, n, KEY, None, 1, False),
        calls.Renew: calls.Renew(n, [KEY], [1], [1], 1, [], [bytes(16)], [1]),
        calls.Release: calls.Release([1]),
        calls.Pin: calls.Pin(n, [KEY], 1),
        calls.Unpin: calls.Unpin(n, [KEY]),
        calls.Hint: calls.Hint(n, [KEY], [1], [1]),
        calls.Remove: calls.Remove(n, [KEY]),
        calls.Clear: calls.Clear(n, 1),
        calls.DescribeSegments: calls.DescribeSegments([1]),
        calls.ReportFailure: calls.ReportFailure([1]),
        calls.ReportCorrupt: calls.ReportCorrupt(n, [KEY], [1], [1], [bytes(16)]),
        calls.Status: calls.Status(),
        calls.ListObjects: calls.ListObjects(n, b"", 0, 1),
        calls.StatObject: calls.StatObject(n, KEY),
        calls.Traffic: calls.Traffic(n),
        calls.Chains: calls.Chains(n),
        calls.Blocks: calls.Blocks(n, [KEY]),
        calls.Drain: calls.Drain(space, calls.DrainStep.BEGIN),
        calls.StartMoves: calls.StartMoves(space, 0, 1, 1),
    }
    return made[kind]


def may(who: Identity, asked: Request) -> bool:
    try:
        check(who, asked)
    except PermissionDeniedError:
        return False
    return True


def test_every_call_and_every_role_is_in_the_table() -> None:
    assert EXPECTED.keys() == RULES.keys() == set(get_args(calls.Request))
    assert {role for who in WHO.values() for role in who.roles} == set(ROLES)
    assert all(row.keys() == WHO.keys() for row in EXPECTED.values())


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_each_cell(kind: type) -> None:
    spaces = {
        5: [OWN, READ_ONLY, WRITE_ONLY, FOREIGN, EMPTY],
        2: ["host-7", "host-8"],
        1: [OWN],
    }
    found = {
        role: "".join(
            "y" if may(who, request(kind, space)) else "n"
            for space in spaces[len(EXPECTED[kind][role])]
        )
        for role, who in WHO.items()
    }
    assert found == EXPECTED[kind]


def test_a_match_names_many_namespaces_and_needs_all() -> None:
    def match(spaces: list[str], states: list[str]) -> bool:
        names = [list(map(Namespace, each)) for each in (spaces, states)]
        return may(WHO["engine"], calls.MatchPrefix(names[0], [KEY], True, names[1]))

    assert match([OWN, READ_ONLY], [OWN])
    assert not match([OWN, FOREIGN], [])
    assert not match([FOREIGN, OWN], [])
    assert not match([OWN], [FOREIGN])
    assert not match([OWN], [EMPTY])


def test_roles_add_up() -> None:
    both = validated_identity("x", [NODE, ENGINE], writes=["a"], nodes=["host-7"])
    assert may(both, request(calls.Remove, "a"))
    assert not may(both, request(calls.Remove, "b"))
    assert may(both, request(calls.Drain, "host-7"))
    assert may(both, request(calls.Lookup, "b")), "as a node"


def test_who_may_join_as_which_node() -> None:
    check_node(WHO["node"], "host-7")
    check_node(WHO["master"], "host-7")  # whose own node has no identity of its own
    others = [WHO[role] for role in WHO if role not in ("node", "master")]
    for who, name in [(WHO["node"], "host-8"), *((who, "host-7") for who in others)]:
        with pytest.raises(PermissionDeniedError, match="may not join as node"):
            check_node(who, name)


def roles_for(check: Callable[[Identity], None]) -> set[str]:
    """Who may."""
    found = set()
    for role, who in WHO.items():
        with contextlib.suppress(PermissionDeniedError):
            check(who)
            found.add(role)
    return found


@pytest.mark.parametrize(
    ("namespace", "under", "also"),
    [
        (OWN, "", {"engine", "reader"}),
        (READ_ONLY, "", {"engine"}),
        (WRITE_ONLY, "", set()),
        (FOREIGN, "", set()),
        ("", "", set()),
        ("", "mine/", {"engine", "reader"}),
        ("", "mine/a", {"engine", "reader"}),
        ("", "mine", set()),
        ("", "theirs/", set()),
        ("", "log/", set()),
    ],
)
def test_who_may_follow_which_events(namespace: str, under: str, also: set[str]) -> None:
    found = roles_for(lambda who: check_events(who, namespace, under))
    assert found == {"admin", "master", "node"} | also


def test_an_engine_sees_its_own_namespaces_in_the_status() -> None:
    rows = [calls.NamespaceStatus(name, 1, 1) for name in (OWN, READ_ONLY, WRITE_ONLY, FOREIGN)]
    status = calls.ClusterStatus(1, "", 0, [], rows, [])
    seen = {
        role: [each.name for each in visible_status(who, status).namespaces]
        for role, who in WHO.items()
    }
    everything = [row.name for row in rows]
    assert seen == {
        "admin": everything,
        "master": everything,
        "node": everything,
        "engine": [OWN, READ_ONLY],
        "reader": [OWN],
        "observer": everything,
    }


def test_an_engine_sees_no_count_of_what_others_do() -> None:
    counters = [calls.Counter("stored_objects", 5)]
    status = calls.ClusterStatus(1, "", 0, [], [], counters)
    node = calls.NodeStatus("n", "h", "alive", "", 0, (), stored_bytes=1, read_bytes=2)
    status = status._replace(nodes=[node._replace(written_bytes=3)])
    for role, who in WHO.items():
        shown = visible_status(who, status)
        (its,) = shown.nodes
        seen = bool(shown.counters), (its.stored_bytes, its.read_bytes, its.written_bytes)
        is_engine = role in ("engine", "reader")
        assert seen == ((False, (0, 0, 0)) if is_engine else (True, (1, 2, 3))), role


def test_an_engine_sees_no_tenant_but_its_own() -> None:
    def row(name: str, *patterns: str) -> calls.TenantStatus:
        return calls.TenantStatus(name, 1, 0, 0, 0, 0, 1, 0, 0, 0, patterns)

    rows = [row("", "*"), row("mine", "mine/*"), row("theirs", "theirs/*")]
    rows[0] = rows[0]._replace(namespaces=())
    status = calls.ClusterStatus(1, "", 0, [], [], [], tenants=rows)
    seen = {
        role: [each.name for each in visible_status(who, status).tenants]
        for role, who in WHO.items()
    }
    everything = ["", "mine", "theirs"]
    assert seen == {
        "admin": everything,
        "master": everything,
        "node": everything,
        "engine": ["mine"],
        "reader": ["mine"],
        "observer": everything,
    }


@pytest.mark.parametrize(
    ("who", "rights"),
    [
        (UNAUTHENTICATED, 0),
        (WHO["admin"], 15),
        (WHO["master"], 15),
        (WHO["node"], MapRight.READ | MapRight.READ_ALL),
        (WHO["engine"], MapRight.READ | MapRight.WRITE),
        (WHO["reader"], MapRight.READ),
        (WHO["observer"], 0),
        (validated_identity("w", ["engine"], writes=["mine/*"]), MapRight.WRITE),
        (validated_identity("e", ["engine"], reads=["*"], writes=["a*"]), 7),
        (validated_identity("e", ["engine"], reads=["a", "*"], writes=["*"]), 15),
        (validated_identity("both", ["engine", "node"], writes=["a"]), 7),
    ],
)
def test_what_an_identity_may_do_with_memory_of_all_namespaces(who: Identity, rights: int) -> None:
    assert map_rights(who) == rights
