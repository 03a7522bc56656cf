"""Protobuf forms of the messages of a node's stream (``kvstore/v1/node.proto``).

Decoders raise typed errors for any input.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast, get_args

from google.protobuf.message import DecodeError, Message

from kvstore.calls import MasterMessage, NodeMessage
from kvstore.errors import InvalidArgumentError, ProtocolError, UsageError
from kvstore.v1 import node_pb2
from kvstore.wire.codec import codec
from kvstore.wire.columns import UNENCODABLE


def _fields(kinds: object, prefix: str) -> dict[type, str]:
    """Return the field of each class: its name without ``prefix``, in snake case."""
    words = {
        kind: re.findall("[A-Z][a-z]+", kind.__name__.removeprefix(prefix))
        for kind in get_args(kinds)
    }
    return {kind: "_".join(words[kind]).lower() for kind in words}


OF_NODE: Final = _fields(NodeMessage, "Node")
OF_MASTER: Final = _fields(MasterMessage, "Master")
"""The field of ``MasterMessage`` for each class; ``OF_NODE`` for ``NodeMessage``."""


def encode_node_message(message: NodeMessage) -> bytes:
    """Encode a message. Raises UsageError: a value cannot be sent."""
    try:
        return _encoded(node_pb2.NodeMessage(), OF_NODE, message)
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"{type(message).__name__}: {error}") from error


def decode_node_message(data: bytes) -> NodeMessage:
    """Decode a message. Raises only UsageError or ProtocolError."""
    return cast(NodeMessage, _decoded(node_pb2.NodeMessage, OF_NODE, data))


def encode_master_message(message: MasterMessage) -> bytes:
    return _encoded(node_pb2.MasterMessage(), OF_MASTER, message)


def decode_master_message(data: bytes) -> MasterMessage:
    """Decode a message. Raises only ProtocolError."""
    try:
        return cast(MasterMessage, _decoded(node_pb2.MasterMessage, OF_MASTER, data))
    except UsageError as error:
        raise ProtocolError(f"the master's message is malformed: {error.message}") from error


def _encoded(envelope: Message, fields: dict[type, str], message: Any) -> bytes:
    kind: type = type(message)
    field = getattr(envelope, fields[kind])
    field.SetInParent()
    codec(kind, field.DESCRIPTOR).fill(field, message)
    return envelope.SerializeToString()


def _decoded(kind: type[Message], fields: dict[type, str], data: bytes) -> Any:
    try:
        envelope = kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not a {kind.__name__}") from error
    said = envelope.WhichOneof("message")
    for value, field in fields.items():
        if field == said:
            message = getattr(envelope, field)
            return codec(value, message.DESCRIPTOR).make(message)
    raise ProtocolError(f"a {kind.__name__} that says nothing, or something newer")
