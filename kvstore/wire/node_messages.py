"""The messages of a node's stream and their protobuf form (``proto/kvstore/v1/node.proto``).

As ``kvstore.wire.messages``: decoders raise typed errors for whatever a stranger may send.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvstore import calls
from kvstore.calls import MasterMessage, NodeMessage
from kvstore.errors import BatchTooLargeError, InvalidArgumentError, ProtocolError, UsageError
from kvstore.limits import BATCH_KEYS_MAX, CLAIMS_PER_MESSAGE_MAX, Key, check_namespace
from kvstore.v1 import common_pb2, node_pb2
from kvstore.wire.messages import SIZE_BYTES_MAX, UNENCODABLE
from kvstore.wire.packed import (
    pack_column,
    pack_engine,
    pack_keys,
    unpack_column,
    unpack_engine,
    unpack_keys,
    unpack_number,
    unpack_shm_name,
    unpack_sixteen,
    unpack_text,
)

NODE_SERVICE = node_pb2.DESCRIPTOR.services_by_name["NodeService"].full_name
SESSION_PATH = f"/{NODE_SERVICE}/Session"

NODE_SEGMENTS_MAX = 1024
"""Segments that one node offers."""


def encode_node_message(message: NodeMessage) -> bytes:
    """Raises UsageError: the message holds a value that cannot be sent."""
    try:
        return _packed(message).SerializeToString()
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"{type(message).__name__}: {error}") from error


def _packed(message: NodeMessage) -> node_pb2.NodeMessage:
    m = node_pb2.NodeMessage()
    match message:
        case calls.NodeBeat():
            m.beat.number = message.number
        case calls.NodeWiped():
            m.wiped.order = message.order
        case calls.NodeLeave():
            m.leave.SetInParent()
        case calls.NodeJoin():
            m.join.name = message.name
            m.join.host = message.host
            m.join.protocol = message.protocol
            m.join.resume_epoch = message.resume_epoch
            m.join.SetInParent()
            for offer in message.segments:
                fields = offer._replace(engine=None)._asdict()
                mark = common_pb2.Version(**fields.pop("mark")._asdict())
                m.join.segments.add(**fields, mark=mark)
                pack_engine(m.join.segments[-1], offer.engine)
        case calls.NodeClaims():
            _pack_claims(m.claims, message)
    return m


def _pack_claims(m: node_pb2.NodeClaims, message: calls.NodeClaims) -> None:
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
    m.SetInParent()


def decode_node_message(data: bytes) -> NodeMessage:
    """Raises UsageError or ProtocolError: whatever ``data`` is, nothing else."""
    try:
        m = node_pb2.NodeMessage.FromString(data)
    except DecodeError as error:
        raise ProtocolError("not a NodeMessage") from error
    match m.WhichOneof("message"):
        case "beat":
            return calls.NodeBeat(m.beat.number)
        case "wiped":
            return calls.NodeWiped(m.wiped.order)
        case "leave":
            return calls.NodeLeave()
        case "join":
            return _node_join(m.join)
        case "claims":
            return _node_claims(m.claims)
        case _:
            raise ProtocolError("a NodeMessage that says nothing, or something newer")


def _node_join(m: node_pb2.NodeJoin) -> calls.NodeJoin:
    if len(m.segments) > NODE_SEGMENTS_MAX:
        raise BatchTooLargeError(
            f"{len(m.segments)} segments of one node, at most {NODE_SEGMENTS_MAX} are allowed"
        )
    return calls.NodeJoin(
        unpack_text(m.name, "name"),
        unpack_text(m.host, "host"),
        m.protocol,
        m.resume_epoch,
        [
            calls.SegmentOffer(
                unpack_number(offer.size, "size", 1, SIZE_BYTES_MAX),
                unpack_sixteen(offer.uuid, "uuid"),
                unpack_shm_name(offer.shm_name),
                unpack_text(offer.address, "address", empty=True),
                unpack_sixteen(offer.token, "token"),
                offer.seed,
                offer.generation,
                offer.fresh,
                calls.Version(offer.mark.epoch, offer.mark.counter),
                unpack_engine(offer),
            )
            for offer in m.segments
        ],
    )


def _node_claims(m: node_pb2.NodeClaims) -> calls.NodeClaims:
    keys = list(unpack_keys(m.keys))
    rows = len(keys)
    if rows > CLAIMS_PER_MESSAGE_MAX:
        raise BatchTooLargeError(
            f"{rows} objects in one message, at most {CLAIMS_PER_MESSAGE_MAX} are allowed"
        )
    if len(m.namespaces) > rows or len(m.has_parent) != rows:
        raise InvalidArgumentError("an inventory's columns differ in length")
    namespaces = [check_namespace(name) for name in m.namespaces]
    parent_keys = unpack_keys(m.parents)
    if m.has_parent.count(0) != rows - len(parent_keys):
        raise InvalidArgumentError("an inventory names more parents than it says, or fewer")
    parents = iter(parent_keys)
    last_namespace = max(0, len(namespaces) - 1)
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


def encode_master_message(message: MasterMessage) -> bytes:
    m = node_pb2.MasterMessage()
    match message:
        case calls.MasterBeat():
            m.beat.number = message.number
        case calls.MasterAccepted():
            m.accepted.epoch = message.epoch
            m.accepted.beat_ms = message.beat_ms
            m.accepted.dead_ms = message.dead_ms
            m.accepted.segment_ids.extend(message.segment_ids)
            m.accepted.SetInParent()
        case calls.MasterWipe():
            m.wipe.order = message.order
            m.wipe.uuid = message.uuid
            pack_column(m.wipe.offsets, message.offsets)
            pack_column(m.wipe.epochs, message.epochs)
            pack_column(m.wipe.counters, message.counters)
            if message.mark != calls.NO_MARK:
                m.wipe.mark.epoch, m.wipe.mark.counter = message.mark
        case calls.MasterClaimed():
            m.claimed.segment = message.segment
            m.claimed.SetInParent()
    return m.SerializeToString()


def decode_master_message(data: bytes) -> MasterMessage:
    """Raises ProtocolError: whatever ``data`` is, nothing else."""
    try:
        m = node_pb2.MasterMessage.FromString(data)
        match m.WhichOneof("message"):
            case "beat":
                return calls.MasterBeat(m.beat.number)
            case "accepted":
                return _accepted(m.accepted)
            case "wipe":
                return _wipe(m.wipe)
            case "claimed":
                return calls.MasterClaimed(m.claimed.segment)
            case _:
                raise ProtocolError("a MasterMessage that says nothing, or something newer")
    except DecodeError as error:
        raise ProtocolError("not a MasterMessage") from error
    except UsageError as error:
        raise ProtocolError(f"the master's message is malformed: {error.message}") from error


def _accepted(m: node_pb2.MasterAccepted) -> calls.MasterAccepted:
    if len(m.segment_ids) > NODE_SEGMENTS_MAX:
        raise ProtocolError(f"{len(m.segment_ids)} segment numbers")
    return calls.MasterAccepted(
        m.epoch,
        unpack_number(m.beat_ms, "beat_ms", 1, 3_600_000),
        unpack_number(m.dead_ms, "dead_ms", 1, 86_400_000),
        list(m.segment_ids),
    )


def _wipe(m: node_pb2.MasterWipe) -> calls.MasterWipe:
    offsets = unpack_column(m.offsets, "offsets", rows_max=BATCH_KEYS_MAX)
    return calls.MasterWipe(
        m.order,
        unpack_sixteen(m.uuid, "uuid"),
        offsets,
        unpack_column(m.epochs, "epochs", rows=len(offsets)),
        unpack_column(m.counters, "counters", rows=len(offsets)),
        calls.Version(m.mark.epoch, m.mark.counter),
    )
