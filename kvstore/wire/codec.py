"""Conversion of ``kvstore.calls`` values to protobuf messages and back, by annotations.

``codec`` matches the fields of a NamedTuple and a message by name, and generates two Python
functions, as ``dataclasses`` does, to avoid work per call. For ``calls.Lookup``:

    def fill(m, value):
        namespace, keys, = value
        m.namespace = namespace
        pack_keys(m.keys, keys)

    def make(m):
        namespace = check_namespace(m.namespace)
        keys = unpack_keys(m.keys, distinct=False, keys_max=16384)
        return Lookup(namespace, keys)

The encoding of a field follows from its types on both sides, its constraints from its annotation
(``kvstore.calls.field_constraints``). ``BY_HAND`` lists classes with other messages.
"""

from __future__ import annotations

import enum
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from kvstore import calls
from kvstore.calls import field_constraints
from kvstore.errors import InvalidArgumentError, ProtocolError
from kvstore.limits import Key, Namespace, check_count, check_key, check_namespace
from kvstore.v1 import common_pb2
from kvstore.wire import columns, tables

ValueT = TypeVar("ValueT")

Kind: TypeAlias = Any
"""A class made by NamedTuple, which has no type of its own."""


class Codec(NamedTuple, Generic[ValueT]):
    """The two functions of one class."""

    fill: Callable[[Any, ValueT], None]
    """Raises one of ``columns.UNENCODABLE`` or a UsageError: a field cannot be sent."""
    make: Callable[[Any], ValueT]
    """Raises only UsageError or ProtocolError, for any message."""


def encoder(kind: Kind, message: type[Message]) -> Callable[[Any], bytes]:
    """Return a function from a value to the bytes of its message.

    Raises:
        As ``codec``; the function, as ``Codec.fill``.
    """
    keys = message.DESCRIPTOR.fields_by_name.get("keys")
    has_keys = kind not in BY_HAND and keys is not None and keys.number < 16
    fill = codec(kind, message.DESCRIPTOR, keys_apart=has_keys).fill

    def encode(value: Any) -> bytes:
        m = message()
        fill(m, value)
        return m.SerializeToString()

    def encode_keys_last(value: Any) -> bytes:
        m = cast(columns.WithKeys, message())
        fill(m, value)
        return columns.encode_with_keys(m, value.keys)

    return encode_keys_last if has_keys else encode


def decoder(kind: Kind, message: type[Message]) -> Callable[[bytes], Any]:
    """Return a function from the bytes that ``encoder`` makes to the value.

    Raises:
        As ``codec``; the function, DecodeError: no such message; and as ``Codec.make``.
    """
    parse = message.FromString
    make = codec(kind, message.DESCRIPTOR).make
    return lambda data: make(parse(data))


@functools.cache
def codec(kind: Kind, message: Descriptor, *, keys_apart: bool = False) -> Codec[Any]:
    """Return the functions of ``kind``, a NamedTuple of ``kvstore.calls``.

    Args:
        keys_apart: its field ``keys`` is left to the caller.

    Raises:
        TypeError: a field has no counterpart in the message, or no known encoding.
    """
    if kind in BY_HAND:
        return BY_HAND[kind]
    return _CodecGenerator(kind, message, keys_apart=keys_apart).codec()


class _CodecGenerator:
    """Generates the two functions of one class."""

    def __init__(self, kind: Kind, message: Descriptor, *, keys_apart: bool) -> None:
        self._kind = kind
        self._keys_apart = keys_apart
        self._message = message
        self._used: dict[str, Any] = {**_HELPERS, kind.__name__: kind}
        self._fill: list[str] = []
        self._make: list[str] = []

    def codec(self) -> Codec[Any]:
        kind, names = self._kind, ", ".join(self._kind._fields)
        hints = typing.get_type_hints(kind, include_extras=True)
        if missing := set(kind._fields) - set(self._message.fields_by_name):
            raise TypeError(f"{kind.__name__}: {self._message.full_name} has no {sorted(missing)}")
        for name in kind._fields:
            base, rules = _split_annotated(hints[name])
            self._field(name, base, rules, self._message.fields_by_name[name])
        if names:
            self._fill.insert(0, f"{names}, = value")
        made = f"{kind.__name__}({names})"
        if kind in CHECKS:
            self._used["check"], made = CHECKS[kind], f"check({made})"
        self._make.append(f"return {made}")
        source = "\n    ".join(["def fill(m, value):", *(self._fill or ["pass"])])
        source += "\n" + "\n    ".join(["def make(m):", *self._make])
        exec(compile(source, f"<codec of {kind.__name__}>", "exec"), self._used)  # noqa: S102
        return Codec(self._used["fill"], self._used["make"])

    def _field(self, name: str, base: Any, rules: tuple[Any, ...], field: FieldDescriptor) -> None:
        """Add the lines of one field."""
        item = typing.get_args(base)[0] if typing.get_origin(base) is Sequence else None
        rows = next((rule for rule in rules if isinstance(rule, field_constraints.RowCount)), None)
        rule = next(
            (rule for rule in rules if not isinstance(rule, field_constraints.RowCount)), None
        )
        if field.message_type is common_pb2.Keys.DESCRIPTOR:
            fill, made = self._keys(name, rows)
        elif field.message_type is common_pb2.Column.DESCRIPTOR:
            fill = f"pack_column(m.{name}, {name})"
            made = f"unpack_column(m.{name}, {name!r}{_bounds(rows)})"
        elif field.message_type is not None:
            fill, made = self._message_field(name, base, item, rows, field.message_type)
        elif item is int and field.type == FieldDescriptor.TYPE_BYTES:
            fill, made = f"m.{name} = bytes({name})", f"m.{name}"
        elif item is not None:
            fill, made = self._repeated(name, item, rows, rule)
        else:
            fill, made = self._scalar(name, base, rule)
        self._fill.append(fill)
        self._make.append(f"{name} = {made}")

    def _keys(self, name: str, rows: field_constraints.RowCount | None) -> tuple[str, str]:
        rows = rows or field_constraints.RowCount()
        made = f"unpack_keys(m.{name}, distinct={rows.distinct}, keys_max={rows.max})"
        return "pass" if self._keys_apart else f"pack_keys(m.{name}, {name})", made

    def _message_field(
        self,
        name: str,
        base: Any,
        item: Any,
        rows: field_constraints.RowCount | None,
        message: Descriptor,
    ) -> tuple[str, str]:
        optional = type(None) in typing.get_args(base)
        kind = item or (typing.get_args(base)[0] if optional else base)
        fill, make = f"fill_{name}", f"make_{name}"
        self._used[fill], self._used[make] = codec(kind, message)
        if item is not None:
            return (
                f"for _item in {name}: {fill}(m.{name}.add(), _item)",
                f"[{make}(_item) for _item in {_within(name, rows)}]",
            )
        if optional:
            return (
                f"if {name} is not None: {fill}(m.{name}, {name})",
                f"{make}(m.{name}) if m.HasField({name!r}) else None",
            )
        return f"{fill}(m.{name}, {name})", f"{make}(m.{name})"

    def _repeated(
        self, name: str, item: Any, rows: field_constraints.RowCount | None, rule: Any
    ) -> tuple[str, str]:
        within = _within(name, rows)
        if isinstance(rule, field_constraints.SixteenBytes):
            made = f"tuple([unpack_sixteen(_item, {name!r}) for _item in {within}])"
        elif item is Namespace:
            made = f"[check_namespace(_item) for _item in {within}]"
        else:
            made = f"list({within})"
        if self._kind._field_defaults.get(name) == ():  # most often empty
            return f"if {name}: m.{name}.extend({name})", f"{made} if m.{name} else ()"
        return f"m.{name}.extend({name})", made

    def _scalar(self, name: str, base: Any, rule: Any) -> tuple[str, str]:
        fill, taken = f"m.{name} = {name}", f"m.{name}"
        if base == Key | None:
            return f"m.{name} = {name} or b''", f"parent_key({taken})"
        if base in _CHECKED:
            return fill, f"{_CHECKED[base]}({taken})"
        if isinstance(base, type) and issubclass(base, enum.Enum):
            self._used[base.__name__] = base
            return f"m.{name} = int({name})", f"member({base.__name__}, {taken})"
        match rule:
            case field_constraints.IntRange(least, most):
                return fill, f"unpack_number({taken}, {name!r}, {least}, {most})"
            case field_constraints.Text(empty):
                return fill, f"unpack_text({taken}, {name!r}, empty={empty})"
            case field_constraints.FileName():
                return fill, f"unpack_shm_name({taken})"
            case field_constraints.SixteenBytes(empty):
                made = f"unpack_sixteen({taken}, {name!r})"
                return fill, f"{taken} and {made}" if empty else made
            case field_constraints.KeyPrefix():
                return fill, f"unpack_prefix({taken})"
            case field_constraints.AnyNamespace():
                return fill, f"any_namespace({taken})"
            case None if base in (int, bool, str, bytes):
                return fill, taken
        raise TypeError(f"{self._kind.__name__}.{name}: no way to send {base} with {rule}")


def _split_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split a type from its annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        base, *rules = typing.get_args(hint)
        return base, tuple(rules)
    return hint, ()


def _within(name: str, rows: field_constraints.RowCount | None) -> str:
    """Return the expression of a repeated field whose number of rows is checked."""
    if rows is None:
        return f"m.{name}"
    if rows.like:
        return f"as_many(m.{name}, {name!r}, len({rows.like}))"
    return f"bounded(m.{name}, {name!r}, {rows.max})"


def _bounds(rows: field_constraints.RowCount | None) -> str:
    """Return the bounds as arguments of ``columns.unpack_column``, which has defaults."""
    if rows is None:
        return ""
    bound = f", rows=len({rows.like})" if rows.like else f", rows_max={rows.max}"
    return bound if rows.value_max is None else f"{bound}, value_max={rows.value_max}"


# --- what the written functions call ------------------------------------------------------------


def _bounded(rows: Sequence[Any], what: str, most: int) -> Sequence[Any]:
    check_count(len(rows), most, what)
    return rows


def _as_many(rows: Sequence[Any], what: str, count: int) -> Sequence[Any]:
    if len(rows) != count:
        raise InvalidArgumentError(f"{what}: {len(rows)} rows, expected {count}", rows=len(rows))
    return rows


def _parent_key(value: bytes) -> Key | None:
    return check_key(value) if value else None


def _any_namespace(value: str) -> str:
    return check_namespace(value) if value else value


def _member(kind: type[enum.IntEnum], value: int) -> enum.IntEnum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(f"there is no {kind.__name__} {value}") from None


_CHECKED: Final[dict[Any, str]] = {Key: "check_key", Namespace: "check_namespace"}

_HELPERS: Final[dict[str, Any]] = {
    "any_namespace": _any_namespace,
    "as_many": _as_many,
    "bounded": _bounded,
    "check_key": check_key,
    "check_namespace": check_namespace,
    "member": _member,
    "parent_key": _parent_key,
    **{
        function.__name__: function
        for function in (
            columns.pack_column, columns.pack_keys, columns.unpack_column, columns.unpack_keys,
            columns.unpack_number, columns.unpack_prefix, columns.unpack_shm_name,
            columns.unpack_sixteen, columns.unpack_text,
        )
    },
}  # fmt: skip


# --- classes with something of their own --------------------------------------------------------


def _check_match(match: calls.PrefixMatch) -> calls.PrefixMatch:
    places = len(match.placements.sizes)
    if places and places != match.matched:
        raise ProtocolError(f"{places} places for {match.matched} matched keys")
    return match


def _check_renewed(renewed: calls.RenewReply) -> calls.RenewReply:
    wanted = calls.CAPABILITY_BYTES * len(renewed.tokens_leased)
    if len(renewed.capabilities) not in (0, wanted):
        raise ProtocolError("columns of different length")
    return renewed


def _check_moves(moves: calls.StartMovesReply) -> calls.StartMovesReply:
    lists = (moves.keys, moves.namespaces, moves.sources.sizes, moves.grants.tokens)
    if len(set(map(len, lists))) > 1:
        raise ProtocolError("columns of different length")
    return moves


def _check_wipe(order: calls.MasterWipe) -> calls.MasterWipe:
    if len(order.lengths) not in (0, len(order.offsets)):
        raise ProtocolError("columns of different length")
    return order


CHECKS: Final[dict[type, Callable[[Any], Any]]] = {
    calls.PrefixMatch: _check_match,
    calls.StartMovesReply: _check_moves,
    calls.RenewReply: _check_renewed,
    calls.MasterWipe: _check_wipe,
}
"""Checks across the fields of a value, by class; each returns its argument."""

BY_HAND: Final[dict[type, Codec[Any]]] = {
    calls.Placements: Codec(tables.pack_placements, tables.unpack_placements),
    calls.Grants: Codec(tables.pack_grants, tables.unpack_grants),
    calls.NodeClaims: Codec(tables.pack_claims, tables.unpack_claims),
}
"""Classes encoded by ``kvstore.wire.tables``."""
