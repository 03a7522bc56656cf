"""The table of calls and their protobuf forms.

Both RPC servers and the stub use ``CALLS``, so a new call is a class in ``kvstore.calls`` and a row
here; its message (``proto/generate.py``) and codec (``kvstore.wire.codec``) are derived from the
class. Decoders check all input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from kvstore import calls
from kvstore.calls import Reply, Request
from kvstore.errors import InvalidArgumentError, ProtocolError, UsageError
from kvstore.v1 import admin_pb2, client_pb2, common_pb2
from kvstore.wire.codec import decoder, encoder
from kvstore.wire.columns import UNENCODABLE

JOIN_METADATA = "kvstore-join-bin"
"""Metadata of a gRPC call: the client's token from its join."""

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True)
class RpcMethod(Generic[RequestT, ReplyT]):
    """A row of the table. Use ``encode_request`` etc. below, which map errors."""

    request: type[RequestT]
    reply: type[ReplyT]
    idempotent: bool
    """Whether the call may be sent again if no reply came."""
    lane: bool = True
    """Whether stubs send it on the lane; servers accept every call on both protocols."""

    @cached_property
    def name(self) -> str:
        """The name of the rpc, and of the request's class."""
        return self.request.__name__

    @cached_property
    def service(self) -> str:
        """Full name of the gRPC service."""
        is_admin = f"{self.name}Request" in admin_pb2.DESCRIPTOR.message_types_by_name
        return f"kvstore.v1.{'Admin' if is_admin else 'Client'}Service"

    @cached_property
    def wire_name(self) -> bytes:
        """The name in a lane frame."""
        return self.name.encode()

    @cached_property
    def path(self) -> str:
        """The gRPC path."""
        return f"/{self.service}/{self.name}"

    @cached_property
    def encode(self) -> Callable[[RequestT], bytes]:
        return encoder(self.request, _message(f"{self.name}Request"))

    @cached_property
    def decode(self) -> Callable[[bytes], RequestT]:
        return decoder(self.request, _message(f"{self.name}Request"))

    @cached_property
    def encode_reply(self) -> Callable[[ReplyT], bytes]:
        return encoder(self.reply, _message(self.reply.__name__))

    @cached_property
    def decode_reply(self) -> Callable[[bytes], ReplyT]:
        return decoder(self.reply, _message(self.reply.__name__))


def _message(name: str) -> type[Message]:
    files = (admin_pb2, client_pb2, common_pb2)
    return next(cast(type[Message], vars(file)[name]) for file in files if name in vars(file))


def encode_request(request: Request) -> bytes:
    """Encode a request. Raises UsageError: a value cannot be sent."""
    try:
        return CALLS[type(request)].encode(request)
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"{type(request).__name__}: {error}") from error


def decode_request(call: RpcMethod[Any, Any], data: bytes) -> Request:
    """Decode a request. Raises only UsageError or ProtocolError."""
    try:
        return cast(Request, call.decode(data))
    except DecodeError as error:
        raise ProtocolError(f"{call.name}: not a {call.name}Request message") from error


def decode_reply(call: RpcMethod[Any, Any], data: bytes) -> Reply:
    """Decode a reply. Raises ProtocolError: not a reply to this call, or a contradictory one."""
    try:
        return cast(Reply, call.decode_reply(data))
    except DecodeError as error:
        raise ProtocolError(f"{call.name}: the reply is no {call.name}Reply message") from error
    except UsageError as error:
        raise ProtocolError(f"{call.name}: the reply is malformed: {error.message}") from error


_TABLE: tuple[RpcMethod[Any, Any], ...] = (
    RpcMethod(calls.Join, calls.JoinReply, idempotent=True, lane=False),  # it announces the lane
    RpcMethod(calls.MatchPrefix, calls.MatchPrefixReply, idempotent=True),
    RpcMethod(calls.Lookup, calls.LookupReply, idempotent=True),
    RpcMethod(calls.Exists, calls.ExistsReply, idempotent=True),
    RpcMethod(calls.PutStart, calls.Grants, idempotent=False),
    RpcMethod(calls.PutEnd, calls.PutEndReply, idempotent=False),
    RpcMethod(calls.PutRevoke, calls.PutRevokeReply, idempotent=False),
    RpcMethod(calls.Allocate, calls.Grants, idempotent=False),
    RpcMethod(calls.Commit, calls.CommitReply, idempotent=False),
    RpcMethod(calls.Renew, calls.RenewReply, idempotent=True),
    RpcMethod(calls.Release, calls.ReleaseReply, idempotent=True),
    RpcMethod(calls.Pin, calls.PinReply, idempotent=True),
    RpcMethod(calls.Unpin, calls.UnpinReply, idempotent=True),
    RpcMethod(calls.Hint, calls.HintReply, idempotent=True),
    RpcMethod(calls.Remove, calls.RemoveReply, idempotent=True),
    RpcMethod(calls.Clear, calls.ClearReply, idempotent=True),
    RpcMethod(calls.DescribeSegments, calls.DescribeSegmentsReply, idempotent=True),
    RpcMethod(calls.ReportFailure, calls.ReportFailureReply, idempotent=True),
    RpcMethod(calls.ReportCorrupt, calls.ReportCorruptReply, idempotent=True),
    # The requester gets capabilities, so it must be known as the client that reads and writes.
    RpcMethod(calls.StatObject, calls.ObjectDetail, idempotent=True),
    RpcMethod(calls.StartMoves, calls.StartMovesReply, idempotent=False),
    # Operators' calls are rare and need no lane, and therefore no join.
    RpcMethod(calls.Status, calls.ClusterStatus, idempotent=True, lane=False),
    RpcMethod(calls.ListObjects, calls.ListObjectsReply, idempotent=True, lane=False),
    RpcMethod(calls.Traffic, calls.TrafficReport, idempotent=True, lane=False),
    RpcMethod(calls.Chains, calls.ChainsReply, idempotent=True, lane=False),
    RpcMethod(calls.Blocks, calls.BlocksReply, idempotent=True, lane=False),
    RpcMethod(calls.Drain, calls.DrainReply, idempotent=True, lane=False),
)

CALLS: dict[type, RpcMethod[Any, Any]] = {call.request: call for call in _TABLE}
"""Calls by the type of their request."""

BY_WIRE_NAME: dict[bytes, RpcMethod[Any, Any]] = {call.wire_name: call for call in _TABLE}
"""Calls by their name in a lane frame."""
