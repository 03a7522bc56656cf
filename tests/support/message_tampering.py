"""A peer that speaks well and lies: what is wrong with a message is one field at a time.

The lies come from the annotations of ``kvstore.calls``, so that a new field or call has them as
soon as it exists: the values about a bound, numbers of 64 bits, text that is too long or of
another file, and what belongs to somebody else.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from kvstore import calls
from kvstore.calls import field_constraints
from kvstore.limits import (
    KEY_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    PROTOCOL_VERSION,
    Key,
    Namespace,
)

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
NUMBERS = (0, 1, 2, U32, U32 + 1, 1 << 62, (1 << 63) - 1, 1 << 63, U64)
TEXTS = (
    "", "x", "x" * 128, "x" * 129, "x" * 4096, "a b", "a\nb", "a\0b", "a=b c=d", "..", "../x",
    "kvstore.a/../../etc/passwd", "/dev/mem", "\u202etxt", "localhost:1", "127.0.0.1:1", "[::1]:1",
    ":1", "x:99999", "user@host:1",
)  # fmt: skip
BLOBS = (b"", b"\0", b"\0" * 16, b"\xff" * 16, b"x" * 15, b"x" * 17, b"x" * 4096)
ROWS = (0, 1, 2, 3)
"""How many rows a column is made to have; those about its bound follow, if it is no large one."""

ROWS_MAX = 1_100


@dataclasses.dataclass
class ForeignValues:
    """What belongs to an honest peer, by type; the liar claims all of it."""

    keys: Sequence[bytes] = ()
    namespaces: Sequence[str] = ()
    numbers: Sequence[int] = ()
    """Epochs, versions, segments, tokens."""
    texts: Sequence[str] = ()
    """Names, hosts, addresses, entries in ``/dev/shm``."""
    blobs: Sequence[bytes] = ()
    """uuids and tokens of segments."""


class TamperedMessage(NamedTuple):
    message: Any
    """As the true one, but for one field."""
    field: str
    """``segments.0.device.handle``"""
    value: Any

    def __str__(self) -> str:
        return f"{type(self.message).__name__}.{self.field} = {self.value!r:.60}"


def tampered_variants(true: Any, theirs: ForeignValues) -> Iterator[TamperedMessage]:
    """Every lie about ``true``, a message of ``kvstore.calls``."""
    hints = typing.get_type_hints(type(true), include_extras=True)
    for name in true._fields:
        value = getattr(true, name)
        for path, lie in _about(hints[name], value, theirs):
            if lie != value or type(lie) is not type(value):
                yield TamperedMessage(true._replace(**{name: lie}), ".".join((name, *path)), lie)


def _about(hint: Any, value: Any, theirs: ForeignValues) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What may stand for ``value``, and where in it the lie is."""
    rules: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *given = typing.get_args(hint)
        rules = tuple(given)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        yield (), None
        if value is not None or not hasattr(kinds[0], "_fields"):
            yield from _about(kinds[0], value, theirs)
    elif typing.get_origin(hint) is Sequence:
        yield from _about_rows(typing.get_args(hint)[0], value, rules, theirs)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for lie in tampered_variants(value, theirs):
            yield tuple(lie.field.split(".")), lie.message
    else:
        for lie in _scalars(hint, rules, theirs):
            yield (), lie


def _about_rows(
    item: Any, value: Sequence[Any], rules: tuple[Any, ...], theirs: ForeignValues
) -> Iterator[tuple[tuple[str, ...], Any]]:
    rows = list(value)
    most = next((rule.max for rule in rules if isinstance(rule, field_constraints.RowCount)), 0)
    sample = rows[:1] or [_sample(item)]
    for count in (*ROWS, *(n for n in (most - 1, most, most + 1) if n <= ROWS_MAX)):
        yield (f"rows={count}",), _many(sample[0], count)
    rule = tuple(rule for rule in rules if not isinstance(rule, field_constraints.RowCount))
    for path, lie in _about(Annotated[(item, *rule)] if rule else item, sample[0], theirs):
        yield ("0", *path), [lie, *rows[1:]]


def _many(sample: Any, count: int) -> list[Any]:
    """Rows that differ where they can: the same row many times is one lie among others."""
    if isinstance(sample, bytes) and len(sample) >= 4:
        return [sample[:-4] + number.to_bytes(4, "big") for number in range(count)]
    if isinstance(sample, str):
        return [f"{sample[:100]}{number}" for number in range(count)]
    return [sample] * count


def _sample(item: Any) -> Any:
    if item in (Key, Key | None):
        return b"liar"
    return {Namespace: "liar", int: 0, str: "liar", bytes: b"liar" * 4, bool: False}.get(item, 0)


def _scalars(hint: Any, rules: tuple[Any, ...], theirs: ForeignValues) -> Sequence[Any]:
    bounds = [
        number
        for rule in rules
        if isinstance(rule, field_constraints.IntRange)
        for number in (rule.min - 1, rule.min, rule.max - 1, rule.max, rule.max + 1)
        if number >= 0
    ]
    if hint is Key:
        long = b"k" * KEY_BYTES_MAX
        return [b"", b"\0", long, long + b"k", *theirs.keys]
    if hint is Namespace or any(isinstance(rule, field_constraints.AnyNamespace) for rule in rules):
        long_name = "n" * NAMESPACE_BYTES_MAX
        return ["", "a\nb", "\0", long_name, long_name + "n", *theirs.namespaces]
    if hint is bool:
        return [False, True]
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return [*hint, 0, max(hint) + 1, U32]
    if hint is int:
        return [*dict.fromkeys((*bounds, *NUMBERS, *theirs.numbers))]
    if hint is str:
        return [*TEXTS, *theirs.texts]
    if hint is bytes:
        return [*BLOBS, *theirs.blobs]
    raise TypeError(f"no lies about {hint}")


# --- what is true --------------------------------------------------------------------------------

MINE = "liar"
KEY = b"liar's key, 16 b"
FIRST = calls.Version(1, 1)


def true_calls(
    node: str = "liar-node", segment: bytes = b"l" * 16, put: calls.Version = FIRST
) -> list[calls.Request]:
    """One true request of every call, about what the liar has put itself, by ``put``."""
    epoch, token = put
    keys = [Key(KEY)]
    namespace = Namespace(MINE)
    return [
        calls.Join(MINE, "host", PROTOCOL_VERSION),
        calls.MatchPrefix([namespace], keys, True, [namespace]),
        calls.Lookup(namespace, keys),
        calls.Exists(namespace, keys, lease=True),
        calls.PutStart(
            namespace, keys, [100], None, chain=False, replicas=1, overwrite=False, wait_ms=0,
            host="host", avoid_segments=[segment], client_number=7, ttl_ms=60_000,
        ),
        calls.PutEnd(epoch, [token]),
        calls.PutRevoke(epoch, [token], quiesced=True, connections=[1]),
        calls.Allocate(namespace, 100, 0, "host", [segment], client_number=7),
        calls.Commit(
            epoch, token, namespace, Key(KEY), None, 100, overwrite=False, ttl_ms=60_000,
            quiesced=True, next_size=100, host="host",
        ),
        calls.Renew(namespace, keys, [epoch], [token], epoch, [token], [segment], [4096]),
        calls.Release([1]),
        calls.Pin(namespace, keys, 1_000),
        calls.Unpin(namespace, keys),
        calls.Hint(namespace, keys, [1], [1_000]),
        calls.Remove(namespace, keys),
        calls.Clear(namespace, 10),
        calls.DescribeSegments([1]),
        calls.ReportFailure([1], MINE, "host", "no reason", epoch),
        calls.ReportCorrupt(namespace, keys, [epoch], [token], [segment]),
        calls.Status(),
        calls.ListObjects(namespace, b"", 0, 10),
        calls.StatObject(namespace, Key(KEY)),
        calls.Traffic(namespace),
        calls.Chains(namespace, keys, 1),
        calls.Blocks(namespace, keys, 1),
        calls.Drain(node, calls.DrainStep.UNDO),
        calls.StartMoves(node, 0, 10, 1 << 20, [segment], 7),
    ]  # fmt: skip


def true_join(
    name: str, host: str, *, device: calls.DeviceLocation | None = None, fresh: bool = True
) -> calls.NodeJoin:
    """The join of a node that has one segment, which it does not serve."""
    offer = calls.SegmentOffer(
        size=1 << 20, uuid=b"liar's segment..", shm_name="", address="127.0.0.1:9",
        token=b"liar's token....", seed=1, generation=1, fresh=fresh,
        engine=calls.EngineAddress("127.0.0.1:9", 0, "tcp", "P2PHANDSHAKE"), device=device,
    )  # fmt: skip
    return calls.NodeJoin(name, host, PROTOCOL_VERSION, 0, [offer], version="1")


def true_messages(put: calls.Version = FIRST) -> list[calls.NodeMessage]:
    """What a node says after its join, about what was put by ``put``."""
    claims = calls.NodeClaims(
        segment=0, first=True, last=True, namespaces=[Namespace(MINE)], namespace_of=[0],
        keys=[Key(KEY)], parents=[None], sizes=[100], epochs=[put.epoch],
        counters=[put.counter], offsets=[4096],
    )  # fmt: skip
    return [calls.NodeHeartbeat(1), calls.NodeWipeDone(1), claims, calls.NodeLeave()]
