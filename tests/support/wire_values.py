"""Hypothesis strategies for every message of ``kvstore.calls``, within the protocol's bounds.

They follow from the annotations of the messages, so that a new field or call has them at once.
``BY_HAND`` has those whose columns depend on each other.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any

from hypothesis import strategies as st

from kvstore import calls
from kvstore.calls import field_constraints
from kvstore.limits import KEY_BYTES_MAX, Key, Namespace
from kvstore.wire.messages import CALLS
from kvstore.wire.node_messages import OF_MASTER, OF_NODE

U64 = st.integers(0, 2**64 - 1)
FLAGS = st.booleans()
KEY = st.binary(min_size=1, max_size=KEY_BYTES_MAX).map(Key)
PARENT = st.none() | KEY
NAMESPACE = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).map(Namespace)
NAME = st.from_regex(r"[a-z0-9.:_-]{1,40}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
BYTES = st.binary(max_size=40)
ENTRY = st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True)
SIXTEEN = st.binary(min_size=16, max_size=16)
ROWS_MAX = 60
MESSAGES_MAX = 4
"""Rows that are messages themselves."""


def keys(
    *, distinct: bool = False, least: int = 0, most: int = ROWS_MAX
) -> st.SearchStrategy[list[Key]]:
    """Keys of one length or of several."""

    def batch(one: st.SearchStrategy[Key]) -> st.SearchStrategy[list[Key]]:
        return st.lists(one, min_size=least, max_size=most, unique=distinct)

    hashes = st.binary(min_size=32, max_size=32).map(Key)
    return batch(hashes) | batch(KEY)


def column(rows: int, values: st.SearchStrategy[int] = U64) -> st.SearchStrategy[list[int]]:
    """Numbers, often all the same."""
    same = values.map(lambda value: [value] * rows)
    return same | st.lists(values, min_size=rows, max_size=rows)


# --- by annotation -----------------------------------------------------------------------------


@functools.cache
def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of ``kind``, a NamedTuple."""
    if kind in BY_HAND:
        return BY_HAND[kind]
    hints = typing.get_type_hints(kind, include_extras=True)

    @st.composite
    def made(draw: st.DrawFn) -> Any:
        row: dict[str, Any] = {}
        for name in kind._fields:
            default = kind._field_defaults.get(name)
            values = _field(hints[name], row, default)
            if default not in (None, 0, "", ()):
                values = values.filter(bool)  # an empty one is left out, and is the default then
            row[name] = draw(values)
        return kind(**row)

    return made()


def _field(hint: Any, row: dict[str, Any], default: object = None) -> st.SearchStrategy[Any]:
    """``row``: the fields before this one."""
    rules: list[Any] = []
    if typing.get_origin(hint) is Annotated:
        hint, *rules = typing.get_args(hint)
    bounds = [rule for rule in rules if isinstance(rule, field_constraints.RowCount)]
    rule = next((rule for rule in rules if not isinstance(rule, field_constraints.RowCount)), None)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kind = next(each for each in typing.get_args(hint) if each is not types.NoneType)
        return st.none() | _field(kind, row)
    if typing.get_origin(hint) is not Sequence:
        return _one(hint, rule)
    (item,) = typing.get_args(hint)
    if item is int and not bounds:
        return BYTES
    bound = bounds[0] if bounds else field_constraints.RowCount()
    least, most = 0, min(bound.max, MESSAGES_MAX if hasattr(item, "_fields") else ROWS_MAX)
    if bound.like:
        least = most = len(row[bound.like])
    if item is Key:
        return keys(distinct=bound.distinct, least=least, most=most)
    if item is int and bound.like:
        return column(least, st.integers(0, bound.value_max or 2**64 - 1))
    rows = st.lists(_one(item, rule), min_size=least, max_size=most)
    if default == () and not hasattr(item, "_fields"):
        return rows.map(
            lambda rows: (
                tuple(rows) if isinstance(rule, field_constraints.SixteenBytes) else rows or ()
            )
        )
    return rows.map(tuple) if isinstance(rule, field_constraints.SixteenBytes) else rows


def _one(hint: Any, rule: Any) -> st.SearchStrategy[Any]:
    if hasattr(hint, "_fields"):
        return of(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    match rule:
        case field_constraints.IntRange(least, most):
            return st.integers(least, most)
        case field_constraints.Text(empty):
            return st.just("") | NAME if empty else NAME
        case field_constraints.FileName():
            return st.just("") | ENTRY
        case field_constraints.SixteenBytes(empty):
            return st.just(b"") | SIXTEEN if empty else SIXTEEN
        case field_constraints.KeyPrefix():
            return st.binary(max_size=KEY_BYTES_MAX)
        case field_constraints.AnyNamespace():
            return st.just("") | NAMESPACE
    return {int: U64, bool: FLAGS, str: TEXT, bytes: BYTES, Key: KEY, Namespace: NAMESPACE}[hint]


# --- by hand -----------------------------------------------------------------------------------


@st.composite
def placements(draw: st.DrawFn, rows: int | None = None) -> calls.Placements:
    rows = draw(st.integers(0, 40)) if rows is None else rows
    if not rows:
        return calls.NO_PLACEMENTS
    replicas = draw(column(rows, st.integers(0, 8)))
    extents = sum(replicas)
    sizes, epochs, counters = (draw(column(rows)) for _ in range(3))
    segments, offsets = (draw(column(extents)) for _ in range(2))
    made = draw(macs(extents))
    return calls.Placements(sizes, epochs, counters, replicas, segments, offsets, made)


@st.composite
def macs(draw: st.DrawFn, extents: int, width: int = calls.CAPABILITY_BYTES) -> bytes:
    """One of ``width`` bytes for each, or none at all."""
    size = width * extents
    return draw(st.just(b"") | st.binary(min_size=size, max_size=size))


@st.composite
def prefix_matches(draw: st.DrawFn) -> calls.PrefixMatch:
    matched = draw(st.integers(0, 40))
    places = draw(st.just(calls.NO_PLACEMENTS) | placements(matched))
    return calls.PrefixMatch(matched, draw(st.integers(0, 2**32 - 1)), places)


@st.composite
def grants(draw: st.DrawFn) -> calls.Grants:
    outcomes = bytes(draw(st.lists(st.sampled_from((1, 2, 3)), max_size=40)))
    granted = outcomes.count(1)
    replicas = draw(st.integers(0, 8))
    segments, offsets = (draw(column(granted * replicas)) for _ in range(2))
    made = draw(macs(granted * replicas))
    stamps = draw(macs(granted * replicas, calls.HEADER_MAC_BYTES))
    tokens = draw(column(granted))
    places = tokens, segments, offsets
    return calls.Grants(draw(U64), draw(U64), outcomes, replicas, *places, made, stamps)


@st.composite
def renewed(draw: st.DrawFn) -> calls.RenewReply:
    keys_held, tokens_held = (bytes(draw(st.lists(FLAGS, max_size=40))) for _ in range(2))
    made = draw(macs(len(tokens_held)))
    return calls.RenewReply(draw(U64), draw(U64), keys_held, tokens_held, made)


@st.composite
def renews(draw: st.DrawFn) -> calls.Renew:
    batch = draw(keys())
    return calls.Renew(
        draw(NAMESPACE), batch, draw(column(len(batch))), draw(column(len(batch))), draw(U64),
        draw(st.lists(U64, max_size=40)),
        tuple(draw(st.lists(SIXTEEN, min_size=len(batch), max_size=len(batch)))),
        draw(column(len(batch))),
    )  # fmt: skip


@st.composite
def moves_started(draw: st.DrawFn) -> calls.StartMovesReply:
    found = draw(grants())
    rows = len(found.tokens)
    return calls.StartMovesReply(
        draw(U64), draw(U64), draw(U64), draw(U64), draw(U64),
        draw(st.lists(NAMESPACE, min_size=rows, max_size=rows)),
        draw(keys(least=rows, most=rows)), draw(placements(rows)), found, draw(FLAGS),
    )  # fmt: skip


@st.composite
def claims(draw: st.DrawFn) -> calls.NodeClaims:
    found = draw(keys())
    rows = len(found)
    namespaces = draw(
        st.lists(NAMESPACE, unique=True, min_size=min(1, rows), max_size=min(3, rows))
    )
    places = st.integers(0, max(0, len(namespaces) - 1))

    def columns(*values: st.SearchStrategy[Any]) -> list[Any]:
        return [draw(st.lists(each, min_size=rows, max_size=rows)) for each in values]

    (of_rows,) = columns(places)
    return calls.NodeClaims(
        draw(st.integers(0, 63)), draw(FLAGS), draw(FLAGS), namespaces, of_rows, found,
        *columns(PARENT, U64, U64, U64, U64),
    )  # fmt: skip


BY_HAND: dict[type, st.SearchStrategy[Any]] = {
    calls.Placements: placements(),
    calls.PrefixMatch: prefix_matches(),
    calls.Grants: grants(),
    calls.Renew: renews(),
    calls.RenewReply: renewed(),
    calls.StartMovesReply: moves_started(),
    calls.NodeClaims: claims(),
}

# --- all messages ------------------------------------------------------------------------------


_ROWS: list[Any] = list(CALLS.values())
REQUESTS: dict[type, st.SearchStrategy[Any]] = {row.request: of(row.request) for row in _ROWS}
REPLIES: dict[type, st.SearchStrategy[Any]] = {row.reply: of(row.reply) for row in _ROWS}
NODE_MESSAGES: dict[type, st.SearchStrategy[Any]] = {kind: of(kind) for kind in OF_NODE}
MASTER_MESSAGES: dict[type, st.SearchStrategy[Any]] = {kind: of(kind) for kind in OF_MASTER}
MASTER_MESSAGES[calls.MasterWipe] = MASTER_MESSAGES[calls.MasterWipe].map(
    lambda order: order._replace(lengths=(order.lengths and order.epochs) or ())
)
