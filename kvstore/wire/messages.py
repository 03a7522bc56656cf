"""Calls and their protobuf form: the only place that knows both.

``CALLS`` has one row per call: its name, its service, and how its request and its reply are
encoded and decoded. Both carriers and both stubs work from this table, so a new call is added here
once. Decoders check everything that a stranger may send: what comes out of them keeps the bounds
of ``kvstore.limits``, its columns are equally long, and where a call needs distinct keys they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import DecodeError

from kvstore import calls
from kvstore.calls import PutOutcome, Reply, Request, Version
from kvstore.errors import (
    BatchTooLargeError,
    InvalidArgumentError,
    InvalidKeyError,
    ProtocolError,
    UsageError,
)
from kvstore.limits import (
    BATCH_KEYS_MAX,
    KEY_BYTES_MAX,
    NAMESPACES_MAX,
    REPLICAS_MAX,
    Key,
    check_key,
    check_namespace,
)
from kvstore.v1 import admin_pb2, client_pb2, common_pb2
from kvstore.wire.packed import (
    COLUMN_ROWS_MAX,
    encode_with_keys,
    pack_column,
    pack_engine,
    pack_keys,
    unpack_column,
    unpack_engine,
    unpack_keys,
    unpack_number,
    unpack_text,
)

SIZE_BYTES_MAX = 1 << 48
"""256 TiB: what no object, segment or sum of them has in earnest."""

JOIN_METADATA = "kvstore-join-bin"
"""Of a gRPC call: the token that its client got when it joined."""

WAIT_MS_MAX = 3_600_000
"""The longest a call may ask the master to hold its reply."""

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[RequestT, ReplyT]):
    """One row of the table. Use ``encode_request`` and its siblings below, which map errors."""

    name: str
    """Of the rpc, and of the request's class."""
    service: str
    """Full name of the gRPC service."""
    request: type[RequestT]
    reply: type[ReplyT]
    idempotent: bool
    """Whether doing it twice is the same as once, so that it may be sent again after no reply."""
    lane: bool = True
    """Whether stubs send it on the lane; the server takes every call on both carriers."""
    encode: Callable[[RequestT], bytes]
    decode: Callable[[bytes], RequestT]
    encode_reply: Callable[[ReplyT], bytes]
    decode_reply: Callable[[bytes], ReplyT]
    wire_name: bytes
    """The name as it stands in a lane frame."""
    path: str
    """The name as gRPC has it."""


def encode_request(request: Request) -> bytes:
    """Raises UsageError: the request holds a value that cannot be sent."""
    try:
        return CALLS[type(request)].encode(request)
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"{type(request).__name__}: {error}") from error


def decode_request(call: Call[Any, Any], data: bytes) -> Request:
    """Raises UsageError or ProtocolError: whatever ``data`` is, nothing else."""
    try:
        return cast(Request, call.decode(data))
    except DecodeError as error:
        raise ProtocolError(f"{call.name}: not a {call.name}Request message") from error


def encode_reply(call: Call[Any, Any], reply: Reply) -> bytes:
    """Raises whatever is wrong with ``reply``, which is our own."""
    return call.encode_reply(reply)


def decode_reply(call: Call[Any, Any], data: bytes) -> Reply:
    """Raises ProtocolError: not a reply to this call, or one that contradicts itself."""
    try:
        return cast(Reply, call.decode_reply(data))
    except DecodeError as error:
        raise ProtocolError(f"{call.name}: the reply is no {call.name}Reply message") from error
    except UsageError as error:
        raise ProtocolError(f"{call.name}: the reply is malformed: {error.message}") from error


UNENCODABLE = (TypeError, ValueError, OverflowError, struct.error)
"""What protobuf and ``struct`` raise for values that do not fit their field."""


# --- parts that several calls share ------------------------------------------------------------


def _parent(value: bytes) -> Key | None:
    if len(value) > KEY_BYTES_MAX:
        raise InvalidKeyError(f"a parent key has at most {KEY_BYTES_MAX} bytes")
    return Key(value) if value else None


def _any_namespace(value: str) -> str:
    return check_namespace(value) if value else value


def _segment_ids(values: Sequence[int]) -> list[int]:
    if len(values) > BATCH_KEYS_MAX:
        raise BatchTooLargeError(f"{len(values)} segments in one call", keys=len(values))
    return list(values)


_OUTCOMES = bytes(PutOutcome)
_NUMBER_BYTES = 8
_ROW = struct.Struct("<4Q")
_EXTENT = struct.Struct("<2Q")


def _numbers(data: bytes, what: str, width: int, rows_max: int) -> list[int]:
    """``width`` numbers of each row.

    Raises:
        InvalidArgumentError: no whole number of rows, or too many.
    """
    rows, rest = divmod(len(data), _NUMBER_BYTES * width)
    if rest or rows > rows_max:
        raise InvalidArgumentError(f"{what}: {len(data)} bytes", bytes=len(data))
    return list(struct.unpack(f"<{rows * width}Q", data))


def _pack_placements(target: common_pb2.Placements, placements: calls.Placements) -> None:
    sizes, epochs, counters, replicas, segments, offsets = placements
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


def _placements(packed: common_pb2.Placements) -> calls.Placements:
    rows = _numbers(packed.rows, "rows", 4, BATCH_KEYS_MAX)
    if not rows:
        return calls.NO_PLACEMENTS
    extents = _numbers(packed.extents, "extents", 2, COLUMN_ROWS_MAX)
    replicas = rows[3::4]
    if max(replicas) > REPLICAS_MAX or 2 * sum(replicas) != len(extents):
        raise InvalidArgumentError(f"{len(extents) // 2} extents do not belong to the rows")
    return calls.Placements(
        rows[0::4], rows[1::4], rows[2::4], replicas, extents[0::2], extents[1::2]
    )


def _pack_grants(target: client_pb2.PutStartReply, reply: calls.Grants) -> None:
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


def _grants(m: client_pb2.PutStartReply) -> calls.Grants:
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
    return calls.Grants(
        m.epoch, m.deadline_ms, outcomes, replicas, numbers[0::width], segments, offsets
    )


# --- ClientService -----------------------------------------------------------------------------


def _encode_join(r: calls.Join) -> bytes:
    return client_pb2.JoinRequest(
        client=r.client, host=r.host, protocol=r.protocol
    ).SerializeToString()


def _decode_join(data: bytes) -> calls.Join:
    m = client_pb2.JoinRequest.FromString(data)
    return calls.Join(unpack_text(m.client, "client"), unpack_text(m.host, "host"), m.protocol)


def _encode_joined(r: calls.Joined) -> bytes:
    return client_pb2.JoinReply(**r._asdict()).SerializeToString()


def _decode_joined(data: bytes) -> calls.Joined:
    m = client_pb2.JoinReply.FromString(data)
    return calls.Joined(
        m.epoch,
        unpack_number(m.lane_port, "lane_port", 0, 65535),
        m.lane_unix,
        m.lane_token,
        m.lease_ms,
        m.put_deadline_ms,
        m.version,
    )


def _encode_match_prefix(r: calls.MatchPrefix) -> bytes:
    m = client_pb2.MatchPrefixRequest(namespaces=r.namespaces, placements=r.placements)
    return encode_with_keys(m, r.keys)


def _decode_match_prefix(data: bytes) -> calls.MatchPrefix:
    m = client_pb2.MatchPrefixRequest.FromString(data)
    namespaces = m.namespaces
    if len(namespaces) > NAMESPACES_MAX:
        raise BatchTooLargeError(
            f"{len(namespaces)} namespaces in one call, at most {NAMESPACES_MAX} are allowed",
            namespaces=len(namespaces),
        )
    return calls.MatchPrefix(
        [check_namespace(namespace) for namespace in namespaces],
        unpack_keys(m.keys),
        m.placements,
    )


def _encode_matched(r: calls.Matched) -> bytes:
    m = client_pb2.MatchPrefixReply(epoch=r.epoch, lease_ms=r.lease_ms)
    for match in r.matches:
        row = m.matches.add(matched=match.matched, being_written=match.being_written)
        _pack_placements(row.placements, match.placements)
    return m.SerializeToString()


def _decode_matched(data: bytes) -> calls.Matched:
    m = client_pb2.MatchPrefixReply.FromString(data)
    if len(m.matches) > NAMESPACES_MAX:
        raise ProtocolError(f"{len(m.matches)} matches in one reply")
    matches = []
    for row in m.matches:
        placements = _placements(row.placements)
        if placements.sizes and len(placements.sizes) != row.matched:
            raise ProtocolError(f"{len(placements.sizes)} places for {row.matched} matched keys")
        matches.append(calls.PrefixMatch(row.matched, row.being_written, placements))
    return calls.Matched(m.epoch, m.lease_ms, matches)


def _encode_lookup(r: calls.Lookup) -> bytes:
    m = client_pb2.LookupRequest(namespace=r.namespace)
    return encode_with_keys(m, r.keys)


def _decode_lookup(data: bytes) -> calls.Lookup:
    m = client_pb2.LookupRequest.FromString(data)
    return calls.Lookup(check_namespace(m.namespace), unpack_keys(m.keys))


def _encode_found(r: calls.Found) -> bytes:
    m = client_pb2.LookupReply(epoch=r.epoch, lease_ms=r.lease_ms)
    _pack_placements(m.placements, r.placements)
    return m.SerializeToString()


def _decode_found(data: bytes) -> calls.Found:
    m = client_pb2.LookupReply.FromString(data)
    return calls.Found(m.epoch, m.lease_ms, _placements(m.placements))


def _encode_exists(r: calls.Exists) -> bytes:
    m = client_pb2.ExistsRequest(namespace=r.namespace)
    return encode_with_keys(m, r.keys)


def _decode_exists(data: bytes) -> calls.Exists:
    m = client_pb2.ExistsRequest.FromString(data)
    return calls.Exists(check_namespace(m.namespace), unpack_keys(m.keys))


def _encode_existing(r: calls.Existing) -> bytes:
    return client_pb2.ExistsReply(presence=bytes(r.presence)).SerializeToString()


def _decode_existing(data: bytes) -> calls.Existing:
    return calls.Existing(client_pb2.ExistsReply.FromString(data).presence)


def _encode_put_start(r: calls.PutStart) -> bytes:
    m = client_pb2.PutStartRequest(
        namespace=r.namespace,
        parent=r.parent or b"",
        chain=r.chain,
        replicas=r.replicas,
        overwrite=r.overwrite,
        wait_ms=r.wait_ms,
        host=r.host,
    )
    pack_keys(m.keys, r.keys)
    pack_column(m.sizes, r.sizes)
    return m.SerializeToString()


def _decode_put_start(data: bytes) -> calls.PutStart:
    m = client_pb2.PutStartRequest.FromString(data)
    keys = unpack_keys(m.keys, distinct=True)
    return calls.PutStart(
        check_namespace(m.namespace),
        keys,
        unpack_column(m.sizes, "sizes", rows=len(keys), value_max=SIZE_BYTES_MAX),
        _parent(m.parent),
        m.chain,
        unpack_number(m.replicas, "replicas", 1, REPLICAS_MAX),
        m.overwrite,
        unpack_number(m.wait_ms, "wait_ms", 0, WAIT_MS_MAX),
        unpack_text(m.host, "host", empty=True),
    )


def _encode_put_started(r: calls.Grants) -> bytes:
    m = client_pb2.PutStartReply()
    _pack_grants(m, r)
    return m.SerializeToString()


def _decode_put_started(data: bytes) -> calls.Grants:
    return _grants(client_pb2.PutStartReply.FromString(data))


def _encode_put_end(r: calls.PutEnd) -> bytes:
    m = client_pb2.PutEndRequest(epoch=r.epoch)
    pack_column(m.tokens, r.tokens)
    return m.SerializeToString()


def _decode_put_end(data: bytes) -> calls.PutEnd:
    m = client_pb2.PutEndRequest.FromString(data)
    return calls.PutEnd(m.epoch, unpack_column(m.tokens, "tokens", rows_max=BATCH_KEYS_MAX))


def _encode_put_ended(r: calls.PutEnded) -> bytes:
    return client_pb2.PutEndReply(outcomes=bytes(r.outcomes)).SerializeToString()


def _decode_put_ended(data: bytes) -> calls.PutEnded:
    return calls.PutEnded(client_pb2.PutEndReply.FromString(data).outcomes)


def _encode_put_revoke(r: calls.PutRevoke) -> bytes:
    m = client_pb2.PutRevokeRequest(epoch=r.epoch, settled=r.settled)
    pack_column(m.tokens, r.tokens)
    return m.SerializeToString()


def _decode_put_revoke(data: bytes) -> calls.PutRevoke:
    m = client_pb2.PutRevokeRequest.FromString(data)
    tokens = unpack_column(m.tokens, "tokens", rows_max=BATCH_KEYS_MAX)
    return calls.PutRevoke(m.epoch, tokens, m.settled)


def _encode_revoked(r: calls.Revoked) -> bytes:
    return client_pb2.PutRevokeReply(revoked=r.revoked).SerializeToString()


def _decode_revoked(data: bytes) -> calls.Revoked:
    return calls.Revoked(client_pb2.PutRevokeReply.FromString(data).revoked)


def _encode_allocate(r: calls.Allocate) -> bytes:
    return client_pb2.AllocateRequest(
        size=r.size, wait_ms=r.wait_ms, host=r.host
    ).SerializeToString()


def _decode_allocate(data: bytes) -> calls.Allocate:
    m = client_pb2.AllocateRequest.FromString(data)
    return calls.Allocate(
        unpack_number(m.size, "size", 0, SIZE_BYTES_MAX),
        unpack_number(m.wait_ms, "wait_ms", 0, WAIT_MS_MAX),
        unpack_text(m.host, "host", empty=True),
    )


def _encode_allocated(r: calls.Grants) -> bytes:
    m = client_pb2.AllocateReply()
    _pack_grants(m.grant, r)
    return m.SerializeToString()


def _decode_allocated(data: bytes) -> calls.Grants:
    return _grants(client_pb2.AllocateReply.FromString(data).grant)


def _encode_commit(r: calls.Commit) -> bytes:
    return client_pb2.CommitRequest(
        epoch=r.epoch,
        token=r.token,
        namespace=r.namespace,
        key=r.key,
        parent=r.parent or b"",
        size=r.size,
        overwrite=r.overwrite,
    ).SerializeToString()


def _decode_commit(data: bytes) -> calls.Commit:
    m = client_pb2.CommitRequest.FromString(data)
    return calls.Commit(
        m.epoch,
        m.token,
        check_namespace(m.namespace),
        check_key(m.key),
        _parent(m.parent),
        unpack_number(m.size, "size", 0, SIZE_BYTES_MAX),
        m.overwrite,
    )


def _encode_committed(r: calls.Committed) -> bytes:
    outcome = cast(common_pb2.PutOutcome.ValueType, r.outcome)
    return client_pb2.CommitReply(outcome=outcome).SerializeToString()


def _decode_committed(data: bytes) -> calls.Committed:
    m = client_pb2.CommitReply.FromString(data)
    return calls.Committed(unpack_number(m.outcome, "outcome", 1, max(PutOutcome)))


def _encode_renew(r: calls.Renew) -> bytes:
    m = client_pb2.RenewRequest(namespace=r.namespace, epoch=r.epoch)
    pack_keys(m.keys, r.keys)
    pack_column(m.epochs, r.epochs)
    pack_column(m.counters, r.counters)
    pack_column(m.tokens, r.tokens)
    return m.SerializeToString()


def _decode_renew(data: bytes) -> calls.Renew:
    m = client_pb2.RenewRequest.FromString(data)
    keys = unpack_keys(m.keys)
    return calls.Renew(
        check_namespace(m.namespace),
        keys,
        unpack_column(m.epochs, "epochs", rows=len(keys)),
        unpack_column(m.counters, "counters", rows=len(keys)),
        m.epoch,
        unpack_column(m.tokens, "tokens", rows_max=BATCH_KEYS_MAX),
    )


def _encode_renewed(r: calls.Renewed) -> bytes:
    return client_pb2.RenewReply(
        lease_ms=r.lease_ms,
        deadline_ms=r.deadline_ms,
        keys_held=bytes(r.keys_held),
        tokens_held=bytes(r.tokens_held),
    ).SerializeToString()


def _decode_renewed(data: bytes) -> calls.Renewed:
    m = client_pb2.RenewReply.FromString(data)
    return calls.Renewed(m.lease_ms, m.deadline_ms, m.keys_held, m.tokens_held)


def _encode_remove(r: calls.Remove) -> bytes:
    m = client_pb2.RemoveRequest(namespace=r.namespace)
    return encode_with_keys(m, r.keys)


def _decode_remove(data: bytes) -> calls.Remove:
    m = client_pb2.RemoveRequest.FromString(data)
    return calls.Remove(check_namespace(m.namespace), unpack_keys(m.keys))


def _encode_removed(r: calls.Removed) -> bytes:
    return client_pb2.RemoveReply(removed=bytes(r.removed)).SerializeToString()


def _decode_removed(data: bytes) -> calls.Removed:
    return calls.Removed(client_pb2.RemoveReply.FromString(data).removed)


def _encode_clear(r: calls.Clear) -> bytes:
    return client_pb2.ClearRequest(namespace=r.namespace, limit=r.limit).SerializeToString()


def _decode_clear(data: bytes) -> calls.Clear:
    m = client_pb2.ClearRequest.FromString(data)
    return calls.Clear(
        _any_namespace(m.namespace), unpack_number(m.limit, "limit", 1, BATCH_KEYS_MAX)
    )


def _encode_cleared(r: calls.Cleared) -> bytes:
    return client_pb2.ClearReply(removed=r.removed, remaining=r.remaining).SerializeToString()


def _decode_cleared(data: bytes) -> calls.Cleared:
    m = client_pb2.ClearReply.FromString(data)
    return calls.Cleared(m.removed, m.remaining)


def _encode_describe_segments(r: calls.DescribeSegments) -> bytes:
    return client_pb2.DescribeSegmentsRequest(segment_ids=r.segment_ids).SerializeToString()


def _decode_describe_segments(data: bytes) -> calls.DescribeSegments:
    m = client_pb2.DescribeSegmentsRequest.FromString(data)
    return calls.DescribeSegments(_segment_ids(m.segment_ids))


def _encode_segments(r: calls.Segments) -> bytes:
    m = client_pb2.DescribeSegmentsReply(epoch=r.epoch)
    for segment in r.segments:
        m.segments.add(**segment._replace(engine=None)._asdict())
        pack_engine(m.segments[-1], segment.engine)
    return m.SerializeToString()


def _decode_segments(data: bytes) -> calls.Segments:
    m = client_pb2.DescribeSegmentsReply.FromString(data)
    return calls.Segments(
        m.epoch,
        [
            calls.SegmentInfo(
                s.segment_id,
                s.node,
                s.host,
                s.size,
                s.uuid,
                s.shm_name,
                s.address,
                s.token,
                s.seed,
                s.generation,
                unpack_engine(s),
            )
            for s in m.segments
        ],
    )


def _encode_report_failure(r: calls.ReportFailure) -> bytes:
    return client_pb2.ReportFailureRequest(segment_ids=r.segment_ids).SerializeToString()


def _decode_report_failure(data: bytes) -> calls.ReportFailure:
    m = client_pb2.ReportFailureRequest.FromString(data)
    return calls.ReportFailure(_segment_ids(m.segment_ids))


def _encode_reported(r: calls.Reported) -> bytes:
    return client_pb2.ReportFailureReply(suspects=r.suspects).SerializeToString()


def _decode_reported(data: bytes) -> calls.Reported:
    return calls.Reported(client_pb2.ReportFailureReply.FromString(data).suspects)


def _encode_report_corrupt(r: calls.ReportCorrupt) -> bytes:
    m = client_pb2.ReportCorruptRequest(namespace=r.namespace, uuids=r.uuids)
    pack_keys(m.keys, r.keys)
    pack_column(m.epochs, r.epochs)
    pack_column(m.counters, r.counters)
    return m.SerializeToString()


def _decode_report_corrupt(data: bytes) -> calls.ReportCorrupt:
    m = client_pb2.ReportCorruptRequest.FromString(data)
    keys = unpack_keys(m.keys)
    if len(m.uuids) != len(keys):
        raise InvalidArgumentError(f"uuids: {len(m.uuids)} rows, expected {len(keys)}")
    return calls.ReportCorrupt(
        check_namespace(m.namespace),
        keys,
        unpack_column(m.epochs, "epochs", rows=len(keys)),
        unpack_column(m.counters, "counters", rows=len(keys)),
        list(m.uuids),
    )


def _encode_dropped(r: calls.Dropped) -> bytes:
    return client_pb2.ReportCorruptReply(dropped=r.dropped).SerializeToString()


def _decode_dropped(data: bytes) -> calls.Dropped:
    return calls.Dropped(client_pb2.ReportCorruptReply.FromString(data).dropped)


# --- AdminService ------------------------------------------------------------------------------


def _encode_status(r: calls.Status) -> bytes:
    return admin_pb2.StatusRequest().SerializeToString()


def _decode_status(data: bytes) -> calls.Status:
    admin_pb2.StatusRequest.FromString(data)
    return calls.Status()


def _encode_cluster_status(r: calls.ClusterStatus) -> bytes:
    m = admin_pb2.StatusReply(
        epoch=r.epoch, version=r.version, uptime_ms=r.uptime_ms, role=r.role, leader=r.leader
    )
    for node in r.nodes:
        row = m.nodes.add(
            name=node.name,
            host=node.host,
            state=node.state,
            address=node.address,
            silent_ms=node.silent_ms,
        )
        for segment in node.segments:
            row.segments.add(**segment._asdict())
    for namespace in r.namespaces:
        m.namespaces.add(**namespace._asdict())
    for name, value in r.counters:
        m.counters.add(name=name, value=value)
    return m.SerializeToString()


def _decode_cluster_status(data: bytes) -> calls.ClusterStatus:
    m = admin_pb2.StatusReply.FromString(data)
    nodes = [
        calls.NodeStatus(
            n.name,
            n.host,
            n.state,
            n.address,
            n.silent_ms,
            [
                calls.SegmentStatus(s.segment_id, s.size, s.used, s.largest_free, s.shm_name)
                for s in n.segments
            ],
        )
        for n in m.nodes
    ]
    namespaces = [calls.NamespaceStatus(n.name, n.objects, n.size) for n in m.namespaces]
    counters = [(c.name, c.value) for c in m.counters]
    return calls.ClusterStatus(
        m.epoch, m.version, m.uptime_ms, nodes, namespaces, counters, m.role, m.leader
    )


def _encode_list_objects(r: calls.ListObjects) -> bytes:
    return admin_pb2.ListObjectsRequest(
        namespace=r.namespace, prefix=r.prefix, cursor=r.cursor, limit=r.limit
    ).SerializeToString()


def _decode_list_objects(data: bytes) -> calls.ListObjects:
    m = admin_pb2.ListObjectsRequest.FromString(data)
    if len(m.prefix) > KEY_BYTES_MAX:
        raise InvalidKeyError(f"a prefix has at most {KEY_BYTES_MAX} bytes")
    return calls.ListObjects(
        _any_namespace(m.namespace),
        m.prefix,
        m.cursor,
        unpack_number(m.limit, "limit", 1, BATCH_KEYS_MAX),
    )


def _row(m: admin_pb2.ObjectRow) -> calls.ObjectRow:
    return calls.ObjectRow(
        m.namespace, Key(m.key), m.size, m.replicas, m.depth, m.leased_ms, m.state
    )


def _encode_listed(r: calls.Listed) -> bytes:
    m = admin_pb2.ListObjectsReply(next_cursor=r.next_cursor)
    for row in r.objects:
        m.objects.add(**row._asdict())
    return m.SerializeToString()


def _decode_listed(data: bytes) -> calls.Listed:
    m = admin_pb2.ListObjectsReply.FromString(data)
    return calls.Listed([_row(row) for row in m.objects], m.next_cursor)


def _encode_stat_object(r: calls.StatObject) -> bytes:
    return admin_pb2.StatObjectRequest(namespace=r.namespace, key=r.key).SerializeToString()


def _decode_stat_object(data: bytes) -> calls.StatObject:
    m = admin_pb2.StatObjectRequest.FromString(data)
    return calls.StatObject(check_namespace(m.namespace), check_key(m.key))


def _encode_object_detail(r: calls.ObjectDetail) -> bytes:
    m = admin_pb2.StatObjectReply(parent=r.parent, children=r.children, idle_ms=r.idle_ms)
    if r.row is not None:
        m.row.CopyFrom(admin_pb2.ObjectRow(**r.row._asdict()))
    m.version.epoch, m.version.counter = r.version
    _pack_placements(m.placements, r.placements)
    return m.SerializeToString()


def _decode_object_detail(data: bytes) -> calls.ObjectDetail:
    m = admin_pb2.StatObjectReply.FromString(data)
    return calls.ObjectDetail(
        _row(m.row) if m.HasField("row") else None,
        m.parent,
        m.children,
        Version(m.version.epoch, m.version.counter),
        m.idle_ms,
        _placements(m.placements),
    )


def _encode_drain(r: calls.Drain) -> bytes:
    step = cast("admin_pb2.DrainStep.ValueType", int(r.step))
    return admin_pb2.DrainRequest(node=r.node, step=step).SerializeToString()


def _decode_drain(data: bytes) -> calls.Drain:
    m = admin_pb2.DrainRequest.FromString(data)
    try:
        step = calls.DrainStep(m.step)
    except ValueError:
        raise InvalidArgumentError(f"a drain has no step {m.step}") from None
    return calls.Drain(unpack_text(m.node, "node"), step)


def _encode_drained(r: calls.Drained) -> bytes:
    return admin_pb2.DrainReply(**r._asdict()).SerializeToString()


def _decode_drained(data: bytes) -> calls.Drained:
    m = admin_pb2.DrainReply.FromString(data)
    return calls.Drained(m.epoch, m.used, m.pending)


def _encode_start_moves(r: calls.StartMoves) -> bytes:
    return admin_pb2.StartMovesRequest(**r._asdict()).SerializeToString()


def _decode_start_moves(data: bytes) -> calls.StartMoves:
    m = admin_pb2.StartMovesRequest.FromString(data)
    return calls.StartMoves(
        unpack_text(m.node, "node"),
        m.cursor,
        unpack_number(m.limit, "limit", 1, BATCH_KEYS_MAX),
        unpack_number(m.bytes_max, "bytes_max", 0, SIZE_BYTES_MAX),
    )


def _encode_moves_started(r: calls.MovesStarted) -> bytes:
    m = admin_pb2.StartMovesReply(
        next_cursor=r.next_cursor,
        skipped=r.skipped,
        left=r.left,
        left_bytes=r.left_bytes,
        evicted=r.evicted,
        namespaces=r.namespaces,
    )
    pack_keys(m.keys, r.keys)
    _pack_placements(m.sources, r.sources)
    _pack_grants(m.grants, r.grants)
    return m.SerializeToString()


def _decode_moves_started(data: bytes) -> calls.MovesStarted:
    m = admin_pb2.StartMovesReply.FromString(data)
    keys = unpack_keys(m.keys)
    sources, grants = _placements(m.sources), _grants(m.grants)
    if not len(keys) == len(m.namespaces) == len(sources.sizes) == len(grants.tokens):
        raise ProtocolError("columns of different length")
    namespaces = [check_namespace(namespace) for namespace in m.namespaces]
    return calls.MovesStarted(
        m.next_cursor,
        m.skipped,
        m.left,
        m.left_bytes,
        m.evicted,
        namespaces,
        keys,
        sources,
        grants,
    )


# --- the table ---------------------------------------------------------------------------------

CLIENT_SERVICE = client_pb2.DESCRIPTOR.services_by_name["ClientService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


def _row_of(
    request: type[RequestT],
    encode: Callable[[RequestT], bytes],
    decode: Callable[[bytes], RequestT],
    reply: type[ReplyT],
    encode_reply: Callable[[ReplyT], bytes],
    decode_reply: Callable[[bytes], ReplyT],
    *,
    idempotent: bool,
    service: str = CLIENT_SERVICE,
    lane: bool = True,
) -> Call[RequestT, ReplyT]:
    name = request.__name__
    return Call(
        name=name,
        service=service,
        request=request,
        reply=reply,
        idempotent=idempotent,
        lane=lane,
        encode=encode,
        decode=decode,
        encode_reply=encode_reply,
        decode_reply=decode_reply,
        wire_name=name.encode(),
        path=f"/{service}/{name}",
    )


# fmt: off
_TABLE: tuple[Call[Any, Any], ...] = (
    _row_of(
        calls.Join, _encode_join, _decode_join,
        calls.Joined, _encode_joined, _decode_joined,
        idempotent=True, lane=False,  # it announces the lane
    ),
    _row_of(
        calls.MatchPrefix, _encode_match_prefix, _decode_match_prefix,
        calls.Matched, _encode_matched, _decode_matched,
        idempotent=True,
    ),
    _row_of(
        calls.Lookup, _encode_lookup, _decode_lookup,
        calls.Found, _encode_found, _decode_found,
        idempotent=True,
    ),
    _row_of(
        calls.Exists, _encode_exists, _decode_exists,
        calls.Existing, _encode_existing, _decode_existing,
        idempotent=True,
    ),
    _row_of(
        calls.PutStart, _encode_put_start, _decode_put_start,
        calls.Grants, _encode_put_started, _decode_put_started,
        idempotent=False,
    ),
    _row_of(
        calls.PutEnd, _encode_put_end, _decode_put_end,
        calls.PutEnded, _encode_put_ended, _decode_put_ended,
        idempotent=False,
    ),
    _row_of(
        calls.PutRevoke, _encode_put_revoke, _decode_put_revoke,
        calls.Revoked, _encode_revoked, _decode_revoked,
        idempotent=False,
    ),
    _row_of(
        calls.Allocate, _encode_allocate, _decode_allocate,
        calls.Grants, _encode_allocated, _decode_allocated,
        idempotent=False,
    ),
    _row_of(
        calls.Commit, _encode_commit, _decode_commit,
        calls.Committed, _encode_committed, _decode_committed,
        idempotent=False,
    ),
    _row_of(
        calls.Renew, _encode_renew, _decode_renew,
        calls.Renewed, _encode_renewed, _decode_renewed,
        idempotent=True,
    ),
    _row_of(
        calls.Remove, _encode_remove, _decode_remove,
        calls.Removed, _encode_removed, _decode_removed,
        idempotent=True,
    ),
    _row_of(
        calls.Clear, _encode_clear, _decode_clear,
        calls.Cleared, _encode_cleared, _decode_cleared,
        idempotent=True,
    ),
    _row_of(
        calls.DescribeSegments, _encode_describe_segments, _decode_describe_segments,
        calls.Segments, _encode_segments, _decode_segments,
        idempotent=True,
    ),
    _row_of(
        calls.ReportFailure, _encode_report_failure, _decode_report_failure,
        calls.Reported, _encode_reported, _decode_reported,
        idempotent=True,
    ),
    _row_of(
        calls.ReportCorrupt, _encode_report_corrupt, _decode_report_corrupt,
        calls.Dropped, _encode_dropped, _decode_dropped,
        idempotent=True,
    ),
    # Operators ask rarely and need no lane, so they need not join either.
    _row_of(
        calls.Status, _encode_status, _decode_status,
        calls.ClusterStatus, _encode_cluster_status, _decode_cluster_status,
        idempotent=True, service=ADMIN_SERVICE, lane=False,
    ),
    _row_of(
        calls.ListObjects, _encode_list_objects, _decode_list_objects,
        calls.Listed, _encode_listed, _decode_listed,
        idempotent=True, service=ADMIN_SERVICE, lane=False,
    ),
    _row_of(
        calls.StatObject, _encode_stat_object, _decode_stat_object,
        calls.ObjectDetail, _encode_object_detail, _decode_object_detail,
        idempotent=True, service=ADMIN_SERVICE, lane=False,
    ),
    _row_of(
        calls.Drain, _encode_drain, _decode_drain,
        calls.Drained, _encode_drained, _decode_drained,
        idempotent=True, service=ADMIN_SERVICE, lane=False,
    ),
    _row_of(
        calls.StartMoves, _encode_start_moves, _decode_start_moves,
        calls.MovesStarted, _encode_moves_started, _decode_moves_started,
        idempotent=False, service=ADMIN_SERVICE, lane=False,
    ),
)
# fmt: on

CALLS: dict[type, Call[Any, Any]] = {call.request: call for call in _TABLE}
"""Every call by the type of its request."""

BY_WIRE_NAME: dict[bytes, Call[Any, Any]] = {call.wire_name: call for call in _TABLE}
"""Every call by its name in a lane frame."""
