"""Encoding of tables: locations of objects, grants of a put, inventory of a node.

They have handwritten codecs: locations and grants for the latency of gets and puts, as rows of
numbers in one bytes field; an inventory because its columns belong together. Errors as in
``kvstore.wire.columns``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvstore import calls
from kvstore.calls import CAPABILITY_BYTES, HEADER_MAC_BYTES, PutOutcome
from kvstore.errors import InvalidArgumentError
from kvstore.limits import (
    BATCH_KEYS_MAX,
    CLAIMS_PER_MESSAGE_MAX,
    NODE_SEGMENTS_MAX,
    REPLICAS_MAX,
    Key,
    check_namespace,
)
from kvstore.v1 import common_pb2
from kvstore.wire.columns import (
    COLUMN_ROWS_MAX,
    pack_column,
    pack_keys,
    unpack_column,
    unpack_keys,
    unpack_number,
)

_OUTCOMES = bytes(range(PutOutcome.WRITE, PutOutcome.NO_SPACE))
_NUMBER_BYTES = 8
_ROW = struct.Struct("<4Q")
_EXTENT = struct.Struct("<2Q")


def _numbers(data: bytes, what: str, width: int, rows_max: int) -> list[int]:
    """Return the numbers of all rows, ``width`` of each.

    Raises:
        InvalidArgumentError: an incomplete row, or too many rows.
    """
    rows, rest = divmod(len(data), _NUMBER_BYTES * width)
    if rest or rows > rows_max:
        raise InvalidArgumentError(f"{what}: {len(data)} bytes", bytes=len(data))
    return list(struct.unpack(f"<{rows * width}Q", data))


def pack_placements(target: common_pb2.Placements, placements: calls.Placements) -> None:
    sizes, epochs, counters, replicas, segments, offsets, capabilities = placements
    count = len(sizes)
    if count == 1:
        target.rows = _ROW.pack(sizes[0], epochs[0], counters[0], replicas[0])
    elif count:
        rows = [0] * (4 * count)
        rows[0::4], rows[1::4], rows[2::4], rows[3::4] = sizes, epochs, counters, replicas
        target.rows = struct.pack(f"<{4 * count}Q", *rows)
    if len(segments) == 1:
        target.extents = _EXTENT.pack(segments[0], offsets[0])
    elif segments:
        extents = [0] * (2 * len(segments))
        extents[0::2], extents[1::2] = segments, offsets
        target.extents = struct.pack(f"<{len(extents)}Q", *extents)
    if capabilities:
        target.capabilities = capabilities


def unpack_placements(packed: common_pb2.Placements) -> calls.Placements:
    rows = _numbers(packed.rows, "rows", 4, BATCH_KEYS_MAX)
    if not rows:
        return calls.NO_PLACEMENTS
    extents = _numbers(packed.extents, "extents", 2, COLUMN_ROWS_MAX)
    replicas = rows[3::4]
    if max(replicas) > REPLICAS_MAX or 2 * sum(replicas) != len(extents):
        raise InvalidArgumentError(f"{len(extents) // 2} extents do not belong to the rows")
    segments, offsets = extents[0::2], extents[1::2]
    capabilities = _macs(packed.capabilities, CAPABILITY_BYTES, len(segments))
    return calls.Placements(
        rows[0::4], rows[1::4], rows[2::4], replicas, segments, offsets, capabilities
    )


def _macs(column: bytes, width: int, extents: int) -> bytes:
    """Return the column. Raises InvalidArgumentError: neither empty nor one capability or header
    MAC, of ``width`` bytes, per extent."""
    if column and len(column) != width * extents:
        raise InvalidArgumentError(f"{len(column)} bytes of MACs for {extents} extents")
    return column


def pack_grants(target: common_pb2.Grants, reply: calls.Grants) -> None:
    target.epoch = reply.epoch
    target.deadline_ms = reply.deadline_ms
    target.outcomes = bytes(reply.outcomes)
    target.replicas = replicas = reply.replicas
    width = 1 + 2 * replicas
    numbers = [0] * (width * len(reply.tokens))
    numbers[0::width] = reply.tokens
    for index in range(replicas):
        numbers[1 + 2 * index :: width] = reply.segments[index::replicas]
        numbers[2 + 2 * index :: width] = reply.offsets[index::replicas]
    target.grants = struct.pack(f"<{len(numbers)}Q", *numbers)
    if reply.capabilities:
        target.capabilities = reply.capabilities
    if reply.header_macs:
        target.header_macs = reply.header_macs


def unpack_grants(m: common_pb2.Grants) -> calls.Grants:
    outcomes = m.outcomes
    replicas = unpack_number(m.replicas, "replicas", 0, REPLICAS_MAX)
    width = 1 + 2 * replicas
    numbers = _numbers(m.grants, "grants", width, BATCH_KEYS_MAX)
    if outcomes.strip(_OUTCOMES) or outcomes.count(PutOutcome.WRITE) * width != len(numbers):
        raise InvalidArgumentError("grants do not belong to the outcomes")
    if replicas == 1:
        segments: Sequence[int] = numbers[1::3]
        offsets: Sequence[int] = numbers[2::3]
    else:
        starts = range(0, len(numbers), width)
        segments = [number for at in starts for number in numbers[at + 1 : at + width : 2]]
        offsets = [number for at in starts for number in numbers[at + 2 : at + width : 2]]
    capabilities = _macs(m.capabilities, CAPABILITY_BYTES, len(segments))
    header_macs = _macs(m.header_macs, HEADER_MAC_BYTES, len(segments))
    return calls.Grants(
        m.epoch, m.deadline_ms, outcomes, replicas, numbers[0::width], segments, offsets,
        capabilities, header_macs,
    )  # fmt: skip


def pack_claims(m: common_pb2.NodeClaims, message: calls.NodeClaims) -> None:
    m.segment = message.segment
    m.first = message.first
    m.last = message.last
    m.namespaces.extend(message.namespaces)
    pack_column(m.namespace_of, message.namespace_of)
    pack_keys(m.keys, message.keys)
    m.has_parent = bytes(parent is not None for parent in message.parents)
    pack_keys(m.parents, [parent for parent in message.parents if parent is not None])
    pack_column(m.sizes, message.sizes)
    pack_column(m.epochs, message.epochs)
    pack_column(m.counters, message.counters)
    pack_column(m.offsets, message.offsets)


def unpack_claims(m: common_pb2.NodeClaims) -> calls.NodeClaims:
    keys = list(unpack_keys(m.keys, keys_max=CLAIMS_PER_MESSAGE_MAX))
    rows = len(keys)
    if len(m.namespaces) > rows or len(m.has_parent) != rows:
        raise InvalidArgumentError("an inventory's columns differ in length")
    if rows and not m.namespaces:
        raise InvalidArgumentError("an inventory names no namespace for its objects")
    namespaces = [check_namespace(name) for name in m.namespaces]
    parent_keys = unpack_keys(m.parents)
    if m.has_parent.count(0) != rows - len(parent_keys):
        raise InvalidArgumentError("an inventory names more parents than it says, or fewer")
    parents = iter(parent_keys)
    last_namespace = len(namespaces) - 1
    return calls.NodeClaims(
        unpack_number(m.segment, "segment", 0, NODE_SEGMENTS_MAX),
        m.first,
        m.last,
        namespaces,
        unpack_column(m.namespace_of, "namespaces", rows=rows, value_max=last_namespace),
        keys,
        [Key(next(parents)) if has_parent else None for has_parent in m.has_parent],
        unpack_column(m.sizes, "sizes", rows=rows),
        unpack_column(m.epochs, "epochs", rows=rows),
        unpack_column(m.counters, "counters", rows=rows),
        unpack_column(m.offsets, "offsets", rows=rows),
    )
